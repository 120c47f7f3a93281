"""Differences that say nothing: a mutant that computes with NaN or infinity, at the edge of its dtype's range, or with
garbage that it does not hide."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .bench import InvalidError
from .capture import Captured, copies
from .compare import NEAR
from .draw import Mutation, mutate
from .program import Program, Seen, plainly, widened

aten = torch.ops.aten

ROOM = 16.0  # this far below the largest number of a dtype, no order of additions leaves its range
SHORT = (torch.bfloat16, torch.float16)
EDGE = "at the edge of the range the order of additions decides"

OWN_ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu.default

# A softmax, as one call or by hand, may give NaN for a row that sees nothing; that is judged.
MAY_BLIND = frozenset({aten._softmax.default, aten._safe_softmax.default, aten.sub.Tensor, aten.div.Tensor})


def excuse(captured: Captured, mutations: list[Mutation]) -> str:
    """Why a difference says nothing about the rewrite; empty if it does."""
    program = mutate(captured, mutations)
    if program.way.flaw and any(node.kwargs.get("dtype") in SHORT for node in program.gm.graph.nodes):
        return "in few digits many codes are open, and so are two steps of one"
    if program.way.has_garbage:
        return "" if _is_hidden(captured, mutations, program) else "the garbage is not hidden"
    exact = widened(program) if program.is_rounded else program
    # float16 is added up in float32, where no order of additions leaves its range
    at_most = torch.inf if captured.dtype == torch.float16 else torch.finfo(captured.dtype).max / ROOM
    try:
        with torch.no_grad():
            _Numbers(exact.gm, at_most if program.is_rounded else torch.inf).run(*copies(exact.inputs))
    except InvalidError as error:
        return str(error).splitlines()[0]  # behind it the interpreter says where
    return ""


class _Numbers(torch.fx.Interpreter):
    """Run a graph, and refuse one that multiplies infinities or makes NaN of numbers: the result depends on the order
    of additions, and on kernels. The same holds for PyTorch's own CPU attention, called by name, on columns that are
    not contiguous, and for numbers larger than `at_most`."""

    def __init__(self, gm: torch.fx.GraphModule, at_most: float) -> None:
        super().__init__(gm)
        self.at_most = at_most

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        given = [value for value in args if isinstance(value, Tensor)]
        if target is OWN_ATTENTION and any(value.stride(-1) != 1 for value in given):
            raise InvalidError("PyTorch's own attention reads other columns than it is given")
        result = super().call_function(target, args, kwargs)
        if target is OWN_ATTENTION and _largest(target, result[0], given) > self.at_most:
            raise InvalidError(EDGE)
        if not isinstance(result, Tensor):
            return result
        is_product = target in (aten.mm.default, aten.bmm.default)
        makes_nan = result.isnan().any() and not any(v.isnan().any() for v in given)
        if (is_product and any(value.isinf().any() for value in given)) or (makes_nan and target not in MAY_BLIND):
            raise InvalidError("what is computed with is not a number")
        if _largest(target, result, given) > self.at_most:
            raise InvalidError(EDGE)
        return result


def _largest(target: Any, result: Tensor, given: list[Tensor]) -> float:
    """The largest intermediate number of a product. Sums do not count: a mask may hold the lowest number."""
    if target is aten.mul.Tensor:
        return _most(result)
    if target in (aten.mm.default, aten.bmm.default):
        return _most(given[0].abs() @ given[1].abs())
    return _most(given[0].abs() @ given[1].abs().mT) if target is OWN_ATTENTION else 0.0


def _most(value: Tensor) -> float:
    return float(value.abs().max()) if value.numel() and value.is_floating_point() else 0.0


def _is_hidden(captured: Captured, mutations: list[Mutation], program: Program) -> bool:
    """What is finite is the same with other garbage."""
    others = [_other_garbage(mutation) for mutation in mutations]
    return not _is_apart(plainly(program), plainly(mutate(captured, others)))


def _other_garbage(mutation: Mutation) -> Mutation:
    if mutation[0] != "garbage":
        return mutation
    *slots, number = mutation
    return (*slots, "1" if number == "nan" else str(-float(number)))


def _is_apart(one: Seen, other: Seen) -> bool:
    """A result that is finite in `one` is not near to that in `other`."""
    for mine, theirs in zip(one.outputs, other.outputs, strict=True):
        if not isinstance(mine, Tensor) or not mine.is_floating_point():
            continue
        compared = mine.isfinite()
        mine, theirs = mine[compared].double(), theirs[compared].double()
        if mine.numel() and not float((mine - theirs).abs().max()) <= NEAR * float(mine.abs().max()):
            return True
    return False
