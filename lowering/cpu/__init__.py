"""Kernels for CPUs, which Inductor's compiler of C++ builds when one is first called.

A file that lowers an operator names it, `OPERATOR`, and has a function `lower(a)`, as in `loops`. Where it raises
NoMatch, the lowering of that folder is used. All files are imported at once: they declare the operators that compiled
code from a cache calls."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from mla_fx.errors import NoMatch
from mla_fx.graph.torch_private import OpOverload
from mla_fx.ops.common.define import on_arguments
from mla_fx.target import Compiled, Lowering, modules_of_operators

LOWERINGS = {entry.overload: module for entry, module in modules_of_operators(__name__)}


def lowerings(others: Mapping[OpOverload, Lowering]) -> Mapping[OpOverload, Lowering]:
    """The lowering of each operator: to a kernel if there is one for a call, else that of `others`."""
    own = {name: functools.partial(_lower, module, others[name]) for name, module in LOWERINGS.items()}
    return {**others, **own}


def _lower(module: ModuleType, other: Lowering, *args: Any, **kwargs: Any) -> Compiled:
    try:
        return on_arguments(module.lower(module.Arguments(*args, **kwargs)), module.Arguments)
    except NoMatch:
        return other(*args, **kwargs)
