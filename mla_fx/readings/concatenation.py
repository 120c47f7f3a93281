"""A value joined from adjacent parts of another is that other: split and joined, chunked and stacked. Also values that
the processes of a group gather: each process computes a part, and attention takes all parts."""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch.fx import Node

from mla_fx.graph.torch_private import OpOverload

from .axes import Index, combine, fresh
from .calls import args_of, argument, operands_of
from .sizes import Size, plain, ratio
from .views import MOVERS, Place, cat_dim, move, pieces

aten = torch.ops.aten
SPLITS = frozenset({operator.getitem, aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default})
JOINS = frozenset({*MOVERS, *SPLITS, aten.cat.default})
GATHERS = ("wait_tensor", "all_gather_into_tensor")  # by name: not every build of PyTorch has collectives
MOST_STEPS = 20


@dataclass(frozen=True)
class _Piece:
    """One of the joined values: where it begins in the whole, its index along it, and what it was cut from."""

    start: Size
    run: Index
    source: Node
    index: tuple[Index, ...]


def rejoined(node: Node, index: tuple[Index, ...]) -> Place | None:
    """Where a cat or stack at `index` reads the value whose adjacent parts it joins; None if it joins anything else."""
    dim, parts = _parts(node, index)
    if len(parts) < 2 or any(part.source is not parts[0].source for part in parts):
        return None
    apart = [at for at, (mine, other) in enumerate(zip(parts[0].index, parts[1].index, strict=True)) if mine != other]
    if len(apart) != 1:
        return None
    at = apart[0]
    first = _without_run(parts[0], at)
    step = ratio(_without_run(parts[1], at).offset - first.offset, parts[1].start - parts[0].start)
    if step is None or step == 0:
        return None
    if any(part.index != _expected(part, parts[0], at, first, step) for part in parts):
        return None
    whole = _moved(first, index[dim], step, 0)
    return parts[0].source, (*parts[0].index[:at], whole, *parts[0].index[at + 1 :])


def _parts(node: Node, index: tuple[Index, ...]) -> tuple[int, list[_Piece]]:
    if node.target is aten.cat.default:
        dim = cat_dim(node)
        found = [(piece, start, fresh(plain(stop - start))) for piece, start, stop in pieces(node)]
        return dim, [_part(piece, start, run, (*index[:dim], run, *index[dim + 1 :])) for piece, start, run in found]
    if node.target is aten.stack.default:
        dim = argument(node, 1, "dim", 0) % len(index)
        rest = (*index[:dim], *index[dim + 1 :])
        return dim, [_part(piece, start, Index(), rest) for start, piece in enumerate(args_of(node)[0])]
    return 0, []


def _part(piece: Node, start: Size, run: Index, index: tuple[Index, ...]) -> _Piece:
    place: Place | None = (piece, index)
    while place is not None:
        piece, index = place
        place = move(piece, index)
    return _Piece(start, run, piece, index)


def _without_run(part: _Piece, at: int) -> Index:
    """Where the part begins in the dimension that was cut."""
    rest = [term for term in part.index[at].terms if term[0] not in part.run.digits]
    return Index(part.index[at].offset, tuple(rest))


def _expected(part: _Piece, first: _Piece, at: int, begin: Index, step: Size) -> tuple[Index, ...]:
    """The index of a part that continues where the ones before it end."""
    return (*first.index[:at], _moved(begin, part.run, step, part.start - first.start), *first.index[at + 1 :])


def _moved(begin: Index, run: Index, step: Size, by: Size) -> Index:
    terms = [(digit, plain(stride * step)) for digit, stride in run.terms]
    return combine(begin.offset + step * (run.offset + by), [*begin.terms, *terms])


def own_part(value: Node) -> Node:
    """The part of this process if `value` has those of a group, else the value itself.

    This finds where the part is computed, and not how the parts are joined. To replace it by an equal value, no more is
    needed."""
    node = value
    for _ in range(MOST_STEPS):
        if node.target not in JOINS or not (operands := operands_of(node)):
            break
        node = operands[0]
    for name in GATHERS:
        if not isinstance(node.target, OpOverload) or node.target._opname != name:
            return value
        node = operands_of(node)[0]
    return node
