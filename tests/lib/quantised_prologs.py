"""Layers whose projections are multiplied by int8 codes, with tokens quantised as tests say."""

import torch
from mla_fx.lowering.reference import Reference
from torch.nn.functional import linear

from lib.quantised import Quantised, by_rows
from mla_fx.cases import HCQ, inputs
from mla_fx.debug.report import Report
from mla_fx.driver.compilation import Compilation
from mla_fx.options import Options

PROLOG, KEY_SIDE, ATTENTION = "mla_prolog_v3", "kv_rmsnorm_rope_cache", "latent_attention"
DOWN = ("q_a", "q_b", "kv_a")


def divided(x):
    scales = x.float().abs().amax(-1, keepdim=True) / 127
    return (x / scales).round().clamp(-128, 127).to(torch.int8), scales


def multiply_by(quantise):
    """A spelling of a product with int8 weights."""

    def multiply(x, w):
        codes, scales = quantise(x)
        return (linear(codes.float(), w.codes.float()) * scales * w.scales).to(x.dtype)

    return multiply


def layer_of(quantise, *names, dtype=torch.float32, kind=Quantised):
    layer = kind(multiply_by(quantise), by_rows, *names)
    for value in (*layer.parameters(), *layer.buffers()):
        value.data = value.data.to(dtype) if value.is_floating_point() else value.data
    return layer


def given(dtype=torch.float32):
    *floats, position = inputs()
    return [*(value.to(dtype) for value in floats), position]


class Hoisting(Reference):
    name = "hoisting"
    writes_in_place = False
    prepares = True


class Compiled:
    """A module compiled for the target above, called as the module."""

    def __init__(self, module, **options):
        torch._dynamo.reset()
        self.report, self.options = Report(target="hoisting"), Options(**options)
        self.run = torch.compile(module, backend=self, dynamic=False)

    def __call__(self, gm, inputs):
        compilation = Compilation(self.options, Hoisting(), self.report)
        return compilation.compile(gm, inputs)


def in_floats(x):
    """Codes are never stored as integers."""
    scales = x.float().abs().amax(-1, keepdim=True) / 127
    return (x / scales).round().clamp(-127, 127), scales


class SmoothedScales(Quantised):
    """Scales come from the latent before it is smoothed: the codes are not those of what is smoothed."""

    def query(self, x):
        latent = self.norm(self.project(x, "q_a"), self.q_gamma)
        scales = latent.abs().amax(-1, keepdim=True) / 127
        codes = (latent * torch.linspace(0.5, 1.5, HCQ) / scales).round().clamp(-128, 127)
        return linear(codes, self.q_b_codes.float()) * scales * self.q_b_scales
