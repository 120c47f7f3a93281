"""A complete pattern and the operator that it fuses to: the output side of absorbed attention.

    out = (latents weight_uv) weight_o           from attention over latents to each head's values, and to the output

`python -m mla_fx.driver.try_cases examples/add_a_pattern.py` tries it on its cases. Copied into `patterns/`, this file
is part of the compiler: it is found there, applied to every graph, and tested on its cases with all others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from mla_fx.ops import Sample, check_letters, check_tensors, define
from mla_fx.rule import Case, Layer, Match, Plan, Rule, ValuePattern, contract, var

# --- the operator ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Arguments:
    latents: Tensor
    weight_uv: Tensor
    weight_o: Tensor


def body(a: Arguments) -> Tensor:
    """latents [T, N, Hckv], weight_uv [N, Dv, Hckv], weight_o [N, Dv, He], all of one dtype, to [T, He].

    Raises ValueError for arguments that do not fit. Inference only."""
    values = torch.einsum("tnc,nvc->tnv", a.latents, a.weight_uv)
    return values.flatten(1) @ a.weight_o.flatten(0, 1)


def check(a: Arguments) -> None:
    check_tensors(vars(a))
    check_letters(a, {}, latents="T, N, Hckv", weight_uv="N, Dv, Hckv", weight_o="N, Dv, He")


def fake(a: Arguments) -> Tensor:
    return a.latents.new_empty(a.latents.shape[0], a.weight_o.shape[2])


def samples(dtype: torch.dtype) -> Iterator[Sample]:
    generator = torch.Generator().manual_seed(0)
    shapes = (4, 3, 8), (3, 5, 8), (3, 5, 6)
    latents, *weights = (torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes)
    yield Sample("plain", (latents, *(weight / 3 for weight in weights)), {})


operator = define("latent_output", Arguments, body, returns=("out",), check=check, fake=fake, samples=samples)

# --- the pattern -----------------------------------------------------------------------------------------------------

# t are tokens, n heads, c, v and e columns of latents, values and output
UP = contract(var("latents", "t n c"), var("weight_uv", "n v c", is_parameter=True), over="c")
OUT = contract(UP, var("weight_o", "n v e", is_parameter=True))


class _ScaledOutput(Layer):
    """The values are multiplied by a number per column before they are projected."""

    def attend(self, *operands: Tensor) -> Tensor:
        values = super().attend(*operands)
        return values * torch.arange(1.0, values.shape[-1] + 1)


class LatentOutput(Rule):
    stage = "cache"
    targets = (torch.ops.aten.mm.default,)
    pattern = ValuePattern(OUT, "t e")
    accepts = (Case("plain", Layer, {"mla_prolog": 1, "latent_attention": 1, "latent_output": 1}),)
    rejects = (Case("scaled values", _ScaledOutput, because="a matrix product is multiplied by another value"),)

    def rewrite(self, match: Match) -> Plan:
        return match.plan(operator.overload, "t e", latents="t n c", weight_uv="n v c", weight_o="n v e")
