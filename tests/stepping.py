"""What tests of the backend share: a module compiled for the reference target, and comparisons with it as it came."""

from __future__ import annotations

import copy

import torch

import mla_fx

EXACT = {"rtol": 1e-4, "atol": 1e-5}
ALL = {"mla_prolog": 1, "latent_attention": 1}


def compiled(module, **options):
    return torch.compile(module, backend=mla_fx.mla_backend, options={"target": "reference", **options})


def with_backend(module, **options):
    """The same by a backend from `get_backend`, which checks its options when it is made."""
    return torch.compile(module, backend=mla_fx.get_backend(**{"target": "reference", **options}))


def check_same(module, arguments, run):
    """What `run` returns, and what it leaves in the caches, is what the module does."""
    theirs, ours = copy.deepcopy(arguments), copy.deepcopy(arguments)
    expected = module(*theirs)
    torch.testing.assert_close((run(*ours), ours), (expected, theirs), **EXACT)


def check_runs_as_it_came(module, arguments, run):
    """Not only the same answer: bit for bit, with no fused operator."""
    theirs, ours = copy.deepcopy(arguments), copy.deepcopy(arguments)
    expected = torch.compile(module, backend="aot_eager")(*theirs)
    torch._dynamo.reset()
    torch.testing.assert_close((run(*ours), ours), (expected, theirs), rtol=0, atol=0)
    assert mla_fx.last_report().fused == {}


def mla_warnings(caught):
    return [str(warning.message) for warning in caught if issubclass(warning.category, mla_fx.MlaWarning)]
