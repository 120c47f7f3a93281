"""How each operation that only moves data moves an index: from its result to one of its operands.

A mover takes `(node, index)` and returns the operand and its index, or None if the element is not in a single operand
(a read across the pieces of a cat). To add a view, add one function.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from mla_fx.errors import NoMatch
from mla_fx.graph.torch_private import has_symbolic_sizes

from .axes import ZERO, Axis, Index, extent, fresh, reshape, shifted
from .calls import args_of, argument
from .sizes import Size, at_most, plain, size_of

aten = torch.ops.aten

RESHAPES = frozenset({aten.view.default, aten.reshape.default, aten._unsafe_view.default})

Place = tuple[Node, tuple[Index, ...]]
Mover = Callable[[Node, tuple[Index, ...]], "Place | None"]


def shape_of(node: Node) -> tuple[Size, ...]:
    value = node.meta["val"]
    if not has_symbolic_sizes(value):
        return tuple(value.shape)
    return tuple(size_of(size) for size in value.shape)


def fresh_index(node: Node) -> tuple[Index, ...]:
    """A new axis for every dimension of `node`."""
    return tuple(fresh(size) for size in shape_of(node))


def number(value: Any) -> Size | None:
    """An integer argument: a literal, or a node that holds a size; None if it is omitted."""
    return None if value is None else integer(value)


def integer(value: Any) -> Size:
    """The same for an argument that is not omitted."""
    return size_of(value.meta["val"] if isinstance(value, Node) else value)


def slice_bounds(node: Node, first: int, length: Size, size: Size) -> tuple[Size, Size, int] | None:
    """(start, stop, step) of a slice that reads or writes `length` of `size` positions; `start` is argument number
    `first`. None if its start is unknown."""
    start_argument, end_argument = argument(node, first), argument(node, first + 1)
    step = argument(node, first + 2, default=1)
    if not isinstance(step, int):
        return None
    start = 0 if start_argument is None else _wrapped(number(start_argument), size)
    is_open = end_argument is None or (isinstance(end_argument, int) and end_argument > 2**62)
    if start is None and is_open and step == 1:
        start = size - length
    return None if start is None else (plain(start), plain(start + step * (length - 1) + 1), step)


def _wrapped(position: Size | None, size: Size) -> Size | None:
    """A position counted from the start; None if it is unknown whether it counts from the end.

    Past the end there is nothing to read, so positions are not compared with it."""
    if position is None or at_most(0, position):
        return position
    if isinstance(position, int) and isinstance(size, int):
        return max(position + size, 0)
    return plain(position + size) if at_most(position, -1) and at_most(0, position + size) else None


def _same(node: Node, index: tuple[Index, ...]) -> Place:
    return args_of(node)[0], index


def _permute(node: Node, index: tuple[Index, ...]) -> Place:
    order = [dim % len(index) for dim in args_of(node)[1]]
    return args_of(node)[0], tuple(index[order.index(dim)] for dim in range(len(index)))


def _transpose(node: Node, index: tuple[Index, ...]) -> Place:
    first, second = (dim % len(index) for dim in args_of(node)[1:3])
    moved = list(index)
    moved[first], moved[second] = moved[second], moved[first]
    return args_of(node)[0], tuple(moved)


def _t(node: Node, index: tuple[Index, ...]) -> Place:
    return args_of(node)[0], index[::-1]


def _reshape(node: Node, index: tuple[Index, ...]) -> Place | None:
    moved = reshape(index, shape_of(node), shape_of(args_of(node)[0]))
    return None if moved is None else (args_of(node)[0], moved)


def _unsqueeze(node: Node, index: tuple[Index, ...]) -> Place:
    dim = args_of(node)[1] % len(index)
    return args_of(node)[0], index[:dim] + index[dim + 1 :]


def _squeeze(node: Node, index: tuple[Index, ...]) -> Place:
    before = shape_of(args_of(node)[0])
    dims = argument(node, 1, "dim", tuple(range(len(before))))
    named = {dim % len(before) for dim in ([dims] if isinstance(dims, int) else dims)}
    rest = iter(index)
    gone = [dim in named and size == 1 for dim, size in enumerate(before)]
    return args_of(node)[0], tuple(ZERO if is_gone else next(rest) for is_gone in gone)


def _expand(node: Node, index: tuple[Index, ...]) -> Place:
    return args_of(node)[0], broadcast(args_of(node)[0], index)


def broadcast(operand: Node, index: tuple[Index, ...]) -> tuple[Index, ...]:
    """Where a result read at `index` reads an operand that was broadcast to it."""
    sizes = shape_of(operand)
    if len(sizes) > len(index):
        raise NoMatch(f"{operand.name} has more dimensions than the result", operand)
    aligned = index[len(index) - len(sizes) :]
    return tuple(ZERO if size == 1 else part for size, part in zip(sizes, aligned, strict=True))


def _repeat(node: Node, index: tuple[Index, ...]) -> Place | None:
    sizes = shape_of(args_of(node)[0])
    repeats = args_of(node)[1][-len(sizes) :] if sizes else ()
    if any(times != 1 and size != 1 for size, times in zip(sizes, repeats, strict=True)):
        return None
    return _expand(node, index)


def _slice(node: Node, index: tuple[Index, ...]) -> Place | None:
    dim = argument(node, 1, "dim", 0) % len(index)
    bounds = slice_bounds(node, 2, shape_of(node)[dim], shape_of(args_of(node)[0])[dim])
    if bounds is None:
        return None
    start, _, step = bounds
    return args_of(node)[0], _replaced(index, dim, shifted(index[dim], start, step))


def _select(node: Node, index: tuple[Index, ...]) -> Place | None:
    sizes = shape_of(args_of(node)[0])
    dim, position = args_of(node)[1] % len(sizes), number(args_of(node)[2])
    position = _wrapped(position, sizes[dim])
    return None if position is None else (args_of(node)[0], (*index[:dim], Index(position), *index[dim:]))


def _piece(node: Node, index: tuple[Index, ...]) -> Place | None:
    """Read an item of a split, chunk or unbind."""
    whole = args_of(node)[0]
    if not isinstance(whole, Node) or whole.target not in SPLITS:
        return None
    source = args_of(whole)[0]
    position = SPLITS[whole.target]
    dim = argument(whole, position, "dim", 0) % len(shape_of(source))
    if whole.target is aten.unbind.int:
        number = args_of(node)[1] % len(whole.meta["val"])
        return source, (*index[:dim], Index(number), *index[dim:])
    number = args_of(node)[1] % len(whole.meta["val"])
    start = plain(sum((size_of(piece.shape[dim]) for piece in whole.meta["val"][:number]), 0))
    return source, _replaced(index, dim, shifted(index[dim], start))


SPLITS = {
    aten.split.Tensor: 2,
    aten.split_with_sizes.default: 2,
    aten.chunk.default: 2,
    aten.unbind.int: 1,
}


def _cat(node: Node, index: tuple[Index, ...]) -> Place | None:
    dim = cat_dim(node)
    for piece, start, stop in pieces(node):
        if covers(index[dim], start, stop):
            return piece, _replaced(index, dim, shifted(index[dim], -start))
    return None


def pieces(node: Node) -> list[tuple[Node, Size, Size]]:
    """The operands of a cat, with where each begins and ends; empty operands are skipped."""
    dim, stop = cat_dim(node), 0
    out: list[tuple[Node, Size, Size]] = []
    for piece in args_of(node)[0]:
        if 0 in shape_of(piece):
            continue
        start, stop = stop, plain(stop + shape_of(piece)[dim])
        out.append((piece, start, stop))
    return out


def cat_dim(node: Node) -> int:
    """The dimension along which a cat joins its operands."""
    return int(argument(node, 1, "dim", 0)) % len(shape_of(node))


def _stack(node: Node, index: tuple[Index, ...]) -> Place | None:
    dim = argument(node, 1, "dim", 0) % len(index)
    which = index[dim]
    if which.terms or not isinstance(which.offset, int):
        return None
    return args_of(node)[0][which.offset], index[:dim] + index[dim + 1 :]


def _slice_scatter(node: Node, index: tuple[Index, ...]) -> Place | None:
    base, source = args_of(node)[:2]
    dim, bounds = written_slice(node)
    if bounds is None:
        return None
    start, stop, step = bounds
    if step != 1:
        return _every(node, index, dim, start, step)
    if covers(index[dim], start, stop):
        return source, _replaced(index, dim, shifted(index[dim], -start))
    return (base, index) if misses(index[dim], start, stop) else None


def written_slice(node: Node) -> tuple[int, tuple[Size, Size, int] | None]:
    """The dimension along which a slice_scatter writes, and its (start, stop, step) if they are known."""
    base, source = args_of(node)[:2]
    given, rank = argument(node, 2, "dim", 0), len(shape_of(base))
    dim = given % rank
    if not has_dim(rank, given) or len(shape_of(source)) != rank:
        return dim, None  # raises when it runs
    return dim, slice_bounds(node, 3, shape_of(source)[dim], shape_of(base)[dim])


def has_dim(rank: int, dim: int) -> bool:
    """Whether there is such a dimension. Some operators are traced with any number, and raise when they run."""
    return -rank <= dim < rank


def _every(node: Node, index: tuple[Index, ...], dim: int, start: Size, step: int) -> Place | None:
    """Every `step`th position was overwritten: an index in steps of it meets all of them or none."""
    base, source = args_of(node)[:2]
    where = index[dim]
    numbers = (start, where.offset, *(stride for _, stride in where.terms))
    if not all(isinstance(number, int) for number in numbers) or any(stride % step for _, stride in where.terms):
        return None
    if (where.offset - start) % step:
        return base, index
    terms = tuple((digit, stride // step) for digit, stride in where.terms)
    written = Index((where.offset - start) // step, terms)
    return (source, _replaced(index, dim, written)) if covers(written, 0, shape_of(source)[dim]) else None


def _select_scatter(node: Node, index: tuple[Index, ...]) -> Place | None:
    base, source = args_of(node)[:2]
    dim, position = written_position(node)
    if position is None:
        return None
    if index[dim] == Index(position):
        return source, index[:dim] + index[dim + 1 :]
    return (base, index) if misses(index[dim], position, position + 1) else None


def written_position(node: Node) -> tuple[int, Size | None]:
    """The dimension along which a select_scatter writes, and its one position if that is known."""
    sizes, given = shape_of(args_of(node)[0]), argument(node, 2, "dim")
    dim, position = given % len(sizes), number(argument(node, 3, "index"))
    return dim, _wrapped(position, sizes[dim]) if has_dim(len(sizes), given) else None


def _copy(node: Node, index: tuple[Index, ...]) -> Place:
    return args_of(node)[1], broadcast(args_of(node)[1], index)


def _pad(node: Node, index: tuple[Index, ...]) -> Place | None:
    """Elements in the padding cannot be followed; the others belong to the operand."""
    sizes, moved = shape_of(args_of(node)[0]), list(index)
    for dim, before in _padded(node):
        if not covers(index[dim], before, before + sizes[dim]):
            return None
        moved[dim] = shifted(index[dim], -before)
    return args_of(node)[0], tuple(moved)


def _padded(node: Node) -> list[tuple[int, Size]]:
    """The padded dimensions, the last first, and how much padding comes first."""
    last, amounts = len(shape_of(node)) - 1, args_of(node)[1]
    return [(last - number, integer(before)) for number, before in enumerate(amounts[::2])]


def pads_with_zero(node: Node, index: tuple[Index, ...]) -> bool:
    """Whether the element is in the zeros around a padded value."""
    if node.target is not aten.constant_pad_nd.default or argument(node, 2, "value", 0) != 0:
        return False
    sizes = shape_of(args_of(node)[0])
    return any(misses(index[dim], before, before + sizes[dim]) for dim, before in _padded(node))


def covers(index: Index, start: Size, stop: Size) -> bool:
    """Whether provably every position of `index` is in [start, stop)."""
    return at_most(start, index.offset) and at_most(index.offset + extent(index), stop)


def misses(index: Index, start: Size, stop: Size) -> bool:
    """Whether provably no position of `index` is in [start, stop)."""
    return at_most(index.offset + extent(index), start) or at_most(stop, index.offset)


def _replaced(index: tuple[Index, ...], dim: int, part: Index) -> tuple[Index, ...]:
    return (*index[:dim], part, *index[dim + 1 :])


# How each view moves an index: to its first argument, except for `copy`, which reads its second.
MOVERS: dict[Any, Mover] = {
    aten.alias.default: _same,
    aten.clone.default: _same,
    aten.contiguous.default: _same,
    aten.detach.default: _same,
    aten.lift_fresh_copy.default: _same,
    aten.permute.default: _permute,
    aten.transpose.int: _transpose,
    aten.t.default: _t,
    **dict.fromkeys(RESHAPES, _reshape),
    aten.unsqueeze.default: _unsqueeze,
    aten.squeeze.default: _squeeze,
    aten.squeeze.dim: _squeeze,
    aten.squeeze.dims: _squeeze,
    aten.expand.default: _expand,
    aten.repeat.default: _repeat,
    aten.slice.Tensor: _slice,
    aten.select.int: _select,
    operator.getitem: _piece,
    aten.cat.default: _cat,
    aten.stack.default: _stack,
    aten.slice_scatter.default: _slice_scatter,
    aten.select_scatter.default: _select_scatter,
    aten.copy.default: _copy,
    aten.constant_pad_nd.default: _pad,
}


def move(node: Node, index: tuple[Index, ...]) -> Place | None:
    """One step through a view; None if the element is computed, which includes a change of dtype."""
    mover = MOVERS.get(node.target)
    place = None if mover is None else mover(node, index)
    return place if place is None or place[0].meta["val"].dtype == node.meta["val"].dtype else None


def seams(node: Node, index: tuple[Index, ...]) -> list[tuple[Axis, int]]:
    """Where the axes that read a cat or a partly overwritten tensor have to be cut: (axis, position) pairs."""
    dim, bounds = _seams(node)
    where = index[dim] if bounds else ZERO
    if len(where.terms) != 1 or where.terms[0][1] != 1 or not isinstance(where.offset, int):
        return []
    digit = where.terms[0][0]
    inside = [bound - where.offset for bound in bounds if isinstance(bound, int)]
    is_known = digit.is_whole and isinstance(digit.size, int)
    return [(digit.axis, cut) for cut in inside if is_known and 0 < cut < digit.size]


def _seams(node: Node) -> tuple[int, list[Size]]:
    """The dimension along which a value was joined, and the positions where its parts meet."""
    if node.target is aten.cat.default:
        return cat_dim(node), [stop for _, _, stop in pieces(node)]
    if node.target is aten.slice_scatter.default:
        dim, bounds = written_slice(node)
        return dim, [] if bounds is None or bounds[2] != 1 else list(bounds[:2])
    if node.target is aten.constant_pad_nd.default:
        dim, before = _padded(node)[0]
        return dim, [before, before + shape_of(args_of(node)[0])[dim]]
    return 0, []
