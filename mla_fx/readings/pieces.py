"""Neighbouring pieces of one value along a dimension: slices of a cache, or of a block table."""

from __future__ import annotations

from torch.fx import Node

from .axes import Index, fresh, of_axis
from .element import Element, resolve
from .same_value import same_value
from .sizes import plain
from .views import fresh_index, shape_of

Place = tuple[Element, tuple[Index, ...]]


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
