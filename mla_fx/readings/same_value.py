"""Whether two elements are one number because equal calls compute them from equal operands, whether two values are
neighbouring pieces of one, and where a value is read if another reading of it runs over some of its dimensions.

Model code often looks up its rotary tables inside the rotation, once for the query and once for the key: two values of
the graph, which are equal. Only calls that always give the same result for the same operands count. Random and
uninitialised values equal only themselves. Graphs are functional here, so nothing is written between two calls."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Node

from mla_fx.graph.torch_private import OpOverload

from .axes import Axis, Index, combine, digits_of, extent, fresh, of_axis, subtract
from .calls import args_of, options_of
from .element import Element, resolve
from .sizes import plain, ratio
from .views import fresh_index, shape_of

MOST_CALLS = 50  # compared for one pair of values
REPEATABLE = frozenset({"npu.npu_dynamic_quant.default"})  # of other libraries
UNLIKE = frozenset({torch.Tag.nondeterministic_seeded, torch.Tag.nondeterministic_bitwise})

_Pairs = set[tuple[Node, Node]]
Place = tuple[Element, tuple[Index, ...]]


def same_value(one: Element, other: Element) -> bool:
    """Whether both elements have the same factor, casts and index, and come from one value or from two equal ones."""
    if (one.factor, one.index, one.roundings) != (other.factor, other.index, other.roundings):
        return False
    return equal_calls(one.origin, other.origin)


def equal_calls(one: Node, other: Node) -> bool:
    """Whether two nodes have equal values: they are one node, or equal calls."""
    return _same(one, other, set())


def _same(one: Any, other: Any, compared: _Pairs) -> bool:
    """Whether two arguments are equal. `compared` are the pairs of calls met before: a difference ends it all."""
    if isinstance(one, Node):
        return one is other or (isinstance(other, Node) and _same_call(one, other, compared))
    if type(one) is not type(other):
        return False
    if isinstance(one, (list, tuple)):
        pairs = zip(one, other, strict=False)
        return len(one) == len(other) and all(_same(mine, theirs, compared) for mine, theirs in pairs)
    return repr(one) == repr(other)  # 0.0 and -0.0 are not the same number, NaN and NaN are


def _same_call(one: Node, other: Node, compared: _Pairs) -> bool:
    if (one, other) in compared:
        return True
    if one.op != "call_function" or other.op != "call_function" or one.target is not other.target:
        return False
    if len(compared) == MOST_CALLS or not _is_repeatable(one.target):
        return False
    compared.add((one, other))
    mine, theirs = options_of(one), options_of(other)
    if list(mine) != list(theirs) or not _same(list(mine.values()), list(theirs.values()), compared):
        return False
    return _same(args_of(one), args_of(other), compared)


def _is_repeatable(target: Any) -> bool:
    """Whether equal operands always give equal results. Little is known about operators that are not PyTorch's."""
    if not isinstance(target, OpOverload):
        return target is operator.getitem
    if target.namespace not in ("aten", "prims"):
        return str(target) in REPEATABLE
    is_empty = "empty" in target._schema.name
    return not is_empty and not target._schema.is_mutable and UNLIKE.isdisjoint(target.tags)


def are_neighbours(one: Node, other: Node, dim: int) -> bool:
    """Whether the other piece begins where the one ends."""
    index = fresh_index(one)
    axis = index[dim].axis
    sizes, others = list(shape_of(one)), list(shape_of(other))
    own = fresh(others.pop(dim))
    if axis is None or sizes.pop(dim) != axis.size or sizes != others:
        return False
    behind = Index(axis.size) if own.axis is None else of_axis(own.axis, offset=axis.size)
    next_one = resolve(other, (*index[:dim], own, *index[dim + 1 :]))
    return same_value(resolve(one, index).renamed({axis: behind}), next_one)


def joined(pieces: list[Node], dim: int) -> Place:
    """The element of all of them, at an index of the whole. Each is the neighbour of the one before it."""
    index = fresh_index(pieces[0])
    if len(pieces) == 1:
        return resolve(pieces[0], index), index
    axis, total = index[dim].axis, fresh(plain(sum(shape_of(piece)[dim] for piece in pieces)))
    assert axis is not None, "a piece that has a neighbour has several positions"
    return resolve(pieces[0], index).renamed({axis: total}), (*index[:dim], total, *index[dim + 1 :])


def is_same(one: Node | None, other: Node | None) -> bool:
    """Whether two operands are one value, read alike."""
    if one is None or other is None or shape_of(one) != shape_of(other):
        return one is other
    index = fresh_index(one)
    return same_value(resolve(one, index), resolve(other, index))


def read_along(outside: Element, inside: Element, over: tuple[Index, ...]) -> tuple[Index, ...] | None:
    """The indices of `outside` where `inside` runs over those of `over`, if both read one value and are otherwise
    equal; else None."""
    if outside.node is not inside.node or outside.roundings != inside.roundings:
        return None
    runs = [part.axis for part in over if part.axis is not None]
    read: dict[Axis, Index] = {}
    for mine, theirs in zip(outside.index, inside.index, strict=True):
        here = [axis for axis in runs if axis in theirs.axes]
        run = _solved(mine, theirs, here[0]) if len(here) == 1 and here[0] not in read else None
        if run is not None:
            read[here[0]] = run
        elif mine != theirs:
            return None
    fixed = [digit for part in inside.index for digit in part.digits if digit.axis not in runs]
    moving = [digit for run in read.values() for digit in run.digits]
    if len(read) != len(runs) or any(digit.overlaps(other) for digit in moving for other in fixed):
        return None
    return tuple(read[axis] for axis in runs)


def _solved(mine: Index, theirs: Index, axis: Axis) -> Index | None:
    """The part of `mine` at the place of `axis` in `theirs`, if it counts in the same way; else None."""
    terms = [(digit, stride) for digit, stride in theirs.terms if digit.axis is axis]
    rest = combine(theirs.offset, [term for term in theirs.terms if term not in terms])
    left = subtract(mine, rest)
    if left is None or len(terms) != 1 or not terms[0][0].is_whole:
        return None
    strides = [ratio(stride, terms[0][1]) for _, stride in left.terms]
    if left.offset != 0 or None in strides:
        return None
    run = combine(0, [(digit, stride) for (digit, _), stride in zip(left.terms, strides, strict=True)])
    return run if digits_of(run) is not None and extent(run) == axis.size else None
