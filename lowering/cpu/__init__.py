"""Kernels for CPUs, which Inductor's compiler of C++ builds when one is first called.

A file that lowers an operator names it, `OPERATOR`, and has a function `lower(a)`, as in `loops`. Where it raises
NoMatch, the lowering of that folder is used. All files are imported at once: they declare the operators that compiled
code from a cache calls."""

from __future__ import annotations

from collections.abc import Mapping

from mla_fx.graph.torch_private import OpOverload
from mla_fx.target import Lowering, first_of, modules_of_operators

LOWERINGS = {entry.overload: module for entry, module in modules_of_operators(__name__)}


def lowerings(others: Mapping[OpOverload, Lowering]) -> Mapping[OpOverload, Lowering]:
    """The lowering of each operator: to a kernel if there is one for a call, else that of `others`."""
    return {**others, **{name: first_of(module, others[name]) for name, module in LOWERINGS.items()}}
