"""Modules compiled for the reference target, and comparisons of compiled code with eager mode."""

import copy

import torch
from torch import nn

import mla_fx
from lib.zoo.entries import DEFAULT, Entry
from lib.zoo.sizes import PREFILL

EXACT = {"rtol": 1e-4, "atol": 1e-5}
ALL = {"mla_prolog": 1, "latent_attention": 1}


class Stack(nn.Module):
    """Layers, one after another; each adds to what it is given."""

    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x, *rest):
        for layer in self.layers:
            x = x + layer(x, *rest)
        return x


def compiled(module, **options):
    return torch.compile(module, backend=mla_fx.mla_backend, options={"target": "reference", **options})


def with_backend(module, **options):
    """The same with a backend from `get_backend`, which checks its options at once."""
    return torch.compile(module, backend=mla_fx.get_backend(**{"target": "reference", **options}))


def check_same(module, arguments, run, **close):
    """`run` returns what the module does, and leaves the same in its arguments: the caches."""
    theirs, ours = copy.deepcopy(arguments), copy.deepcopy(arguments)
    expected = module(*theirs)
    torch.testing.assert_close((run(*ours), ours), (expected, theirs), **{**EXACT, **close})


def check_runs_unfused(module, arguments, run):
    """The same bits as AOTAutograd without any pass, and no fused operator."""
    theirs, ours = copy.deepcopy(arguments), copy.deepcopy(arguments)
    expected = torch.compile(module, backend="aot_eager")(*theirs)
    torch._dynamo.reset()
    torch.testing.assert_close((run(*ours), ours), (expected, theirs), rtol=0, atol=0)
    assert mla_fx.last_report().fused == {}


def mla_warnings(caught):
    return [str(warning.message) for warning in caught if issubclass(warning.category, mla_fx.MlaWarning)]


def gradients(module, run):
    out, *_ = run(*Entry(DEFAULT).arguments(PREFILL))
    out.square().sum().backward()
    return [weight.grad for weight in module.parameters()]
