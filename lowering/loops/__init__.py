"""Lowers each operator to plain functions for a compiler that fuses loops: to its body, or as its file here says.

Such a file names the operator that it lowers, `OPERATOR`, and has a function `lower(a)`, which gets what is known about
a call's `Arguments`. It returns the function of these arguments that is traced in place of the call, or raises NoMatch
with a sentence that says why the call stays; or it has this sentence, `STAYS`. It may have a function `from_copies`,
which takes more memory than a call."""

import functools
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from mla_fx.errors import NoMatch
from mla_fx.graph.torch_private import OpOverload
from mla_fx.ops import catalogue
from mla_fx.ops.common.define import on_arguments
from mla_fx.target import Compiled, Lowering, modules_of_operators, to_body


def lowerings(*, alone: bool) -> Mapping[OpOverload, Lowering]:
    """The lowering of each operator. With `alone`, the graph runs where there are no operators, so few calls stay."""
    own = {entry.name: functools.partial(_lower, module, alone) for entry, module in modules_of_operators(__name__)}
    return {entry.overload: own.get(name, functools.partial(to_body, entry)) for name, entry in catalogue().items()}


def _lower(module: ModuleType, alone: bool, *args: Any, **kwargs: Any) -> Compiled:
    try:
        if hasattr(module, "STAYS"):
            raise NoMatch(module.STAYS)
        found = module.lower(module.Arguments(*args, **kwargs))
    except NoMatch:
        if not alone or not hasattr(module, "from_copies"):
            raise
        found = module.from_copies
    return on_arguments(found, module.Arguments)
