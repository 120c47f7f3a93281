"""The fused operators of Multi-head Latent Attention, `torch.ops.mla_fx.<name>`, one file or folder each.

Every operator runs eagerly on any device, has a fake kernel that is exact for symbolic shapes, and refuses bad
arguments with a `ValueError` before anything is written. Operators are for inference: none has an autograd formula.
A new operator is a new file or folder here; no code lists them. An operator defined elsewhere, next to the pattern that
fuses to it, uses what this module exports: `define`, `Sample`, `Sampler` and the checks.
"""

import importlib
import pkgutil
from collections.abc import Mapping
from typing import Any

from .common.check import check_dtype, check_letters, check_rank, check_shape, check_tensors, check_values
from .common.collector import collector_paused
from .common.define import Operator, Sample, define
from .common.sample import Sampler

__all__ = [
    "ATTENTION", "Operator", "Sample", "Sampler", "catalogue", "check_dtype", "check_letters", "check_rank",
    "check_shape", "check_tensors", "check_values", "define", "form", "forms", "names",
]  # fmt: skip

ATTENTION = "attention"
ROWS = {"indices": "sparse", "lens": "packed"}  # arguments of attention that give a call another name

with collector_paused():
    _MODULES = [importlib.import_module(found.name) for found in pkgutil.walk_packages(__path__, f"{__name__}.")]


def catalogue() -> dict[str, Operator]:
    """Return every operator of this package by name, without its in-place form (see `Operator.inplace`)."""
    values = (value for module in _MODULES for value in vars(module).values())
    return {value.name: value for value in values if isinstance(value, Operator)}


def form(given: Mapping[str, Any]) -> str:
    """The name that people know for a call of attention with these arguments. Attention of absorbed queries is
    `latent_attention`, and that of heads, which has weights, `mla_attention`. To chosen keys, either is sparse; that of
    several sequences in one row is packed."""
    heads = "latent_attention" if given.get("weight_uk") is None else "mla_attention"
    return next((f"{word}_{heads}" for argument, word in ROWS.items() if given.get(argument) is not None), heads)


def forms() -> set[str]:
    """The names of all forms of attention."""
    given = ({}, {"indices": True}, {"weight_uk": True}, *({"weight_uk": True, rows: True} for rows in ROWS))
    return set(map(form, given))


def names() -> list[str]:
    """The names of all operators and of their forms."""
    known = {name.partition(".")[0] for name in catalogue()}
    return sorted((known - {ATTENTION}) | forms())
