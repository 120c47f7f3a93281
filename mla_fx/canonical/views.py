"""How each operation that only moves data around moves an index: from its result to one of its operands.

A mover takes `(node, index)` and returns the operand and where to read it, or None when the element is not to be found
in a single operand (a read that straddles the pieces of a cat). To teach the compiler a new view, add one function.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from .axes import ZERO, Index, Size, at_most, extent, fresh, ratio, reshape, shifted, size_of

aten = torch.ops.aten

Place = tuple[Node, tuple[Index, ...]]
Mover = Callable[[Node, tuple[Index, ...]], "Place | None"]


def args_of(node: Node) -> tuple[Any, ...]:
    """The arguments of a node; torch types them as anything that a graph may hold."""
    return node.args


def shape_of(node: Node) -> tuple[Size, ...]:
    value = node.meta["val"]
    if not value._has_symbolic_sizes_strides:
        return tuple(value.shape)
    return tuple(size_of(size) for size in value.shape)


def fresh_index(node: Node) -> tuple[Index, ...]:
    """A new axis for every dimension of `node`."""
    return tuple(fresh(size) for size in shape_of(node))


def number(value: Any) -> Size | None:
    """An integer argument: a literal, or a node that holds a size."""
    if isinstance(value, Node):
        return size_of(value.meta["val"]) if isinstance(value.meta.get("val"), (int, torch.SymInt)) else None
    return value if value is None or isinstance(value, int) else None


def argument(node: Node, position: int, name: str, default: Any = None) -> Any:
    return args_of(node)[position] if len(args_of(node)) > position else node.kwargs.get(name, default)


def slice_bounds(node: Node, first: int, size: Size) -> tuple[int, Size, Size, int] | None:
    """(dim, start, end, step) of a slice whose `dim` argument is number `first`, negatives and overflow resolved."""
    dim = argument(node, first, "dim", 0) % len(shape_of(args_of(node)[0]))
    start_argument, end_argument = argument(node, first + 1, "start"), argument(node, first + 2, "end")
    start = 0 if start_argument is None else number(start_argument)
    end = size if end_argument is None else number(end_argument)
    if start is None or end is None:
        return None
    start, end = _wrapped(start, size), _wrapped(end, size)
    return dim, start, end, argument(node, first + 3, "step", 1)


def _wrapped(position: Size, size: Size) -> Size:
    if isinstance(position, int) and position < 0:
        return position + size
    if isinstance(position, int) and isinstance(size, int):
        return min(position, size)
    return size if isinstance(position, int) and position > 2**62 else position


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
    bounds = slice_bounds(node, 1, shape_of(args_of(node)[0])[dim])
    if bounds is None:
        return None
    _, start, _, step = bounds
    return args_of(node)[0], _replaced(index, dim, shifted(index[dim], start, step))


def _select(node: Node, index: tuple[Index, ...]) -> Place | None:
    sizes = shape_of(args_of(node)[0])
    dim, position = args_of(node)[1] % len(sizes), number(args_of(node)[2])
    if position is None:
        return None
    return args_of(node)[0], (*index[:dim], Index(_wrapped(position, sizes[dim])), *index[dim:])


def _piece(node: Node, index: tuple[Index, ...]) -> Place | None:
    """Item of a split, chunk or unbind."""
    whole = args_of(node)[0]
    if not isinstance(whole, Node) or whole.target not in _SPLITS:
        return None
    source = args_of(whole)[0]
    position = _SPLITS[whole.target]
    dim = argument(whole, position, "dim", 0) % len(shape_of(source))
    if whole.target is aten.unbind.int:
        return source, (*index[:dim], Index(args_of(node)[1]), *index[dim:])
    start = sum((size_of(piece.shape[dim]) for piece in whole.meta["val"][: args_of(node)[1]]), 0)
    return source, _replaced(index, dim, shifted(index[dim], start))


_SPLITS = {
    aten.split.Tensor: 2,
    aten.split_with_sizes.default: 2,
    aten.chunk.default: 2,
    aten.unbind.int: 1,
}


def _cat(node: Node, index: tuple[Index, ...]) -> Place | None:
    dim, start = cat_dim(node), 0
    for piece in args_of(node)[0]:
        size = shape_of(piece)[dim] if len(shape_of(piece)) == len(index) else 0
        if covers(index[dim], start, start + size):
            return piece, _replaced(index, dim, shifted(index[dim], -start))
        start = start + size
    return None


def cat_dim(node: Node) -> int:
    return int(argument(node, 1, "dim", 0)) % len(shape_of(node))


def _stack(node: Node, index: tuple[Index, ...]) -> Place | None:
    dim = argument(node, 1, "dim", 0) % len(index)
    which = index[dim]
    if which.terms or not isinstance(which.offset, int):
        return None
    return args_of(node)[0][which.offset], index[:dim] + index[dim + 1 :]


def _slice_scatter(node: Node, index: tuple[Index, ...]) -> Place | None:
    base, source = args_of(node)[:2]
    dim = argument(node, 2, "dim", 0) % len(index)
    bounds = slice_bounds(node, 2, shape_of(base)[dim])
    if bounds is None:
        return None
    _, start, end, step = bounds
    if step != 1:
        return _every(node, index, dim, start, step)
    if covers(index[dim], start, end):
        return source, _replaced(index, dim, shifted(index[dim], -start))
    return (base, index) if misses(index[dim], start, end) else None


def _every(node: Node, index: tuple[Index, ...], dim: int, start: Size, step: int) -> Place | None:
    """Every `step`th position was written over: an index in steps of it meets all of them or none."""
    base, source = args_of(node)[:2]
    where = index[dim]
    numbers = (start, where.offset, *(stride for _, stride in where.terms))
    if not all(isinstance(number, int) for number in numbers) or any(stride % step for _, stride in where.terms):
        return None
    if (where.offset - start) % step:
        return base, index
    if where.offset < start:
        return None
    terms = tuple((axis, stride // step) for axis, stride in where.terms)
    return source, _replaced(index, dim, Index((where.offset - start) // step, terms))


def _select_scatter(node: Node, index: tuple[Index, ...]) -> Place | None:
    base, source, dim, position = args_of(node)[:4]
    dim, position = dim % len(index), number(position)
    if position is None:
        return None
    position = _wrapped(position, shape_of(base)[dim])
    if index[dim] == Index(position):
        return source, index[:dim] + index[dim + 1 :]
    return (base, index) if misses(index[dim], position, position + 1) else None


def _copy(node: Node, index: tuple[Index, ...]) -> Place:
    return args_of(node)[1], broadcast(args_of(node)[1], index)


def _pad(node: Node, index: tuple[Index, ...]) -> Place | None:
    """Inside the padding there is nothing to follow; elsewhere the element is the operand's."""
    sizes, moved = shape_of(args_of(node)[0]), list(index)
    for position in range(len(args_of(node)[1]) // 2):
        dim, before = len(sizes) - 1 - position, args_of(node)[1][2 * position]
        if not covers(index[dim], before, before + sizes[dim]):
            return None
        moved[dim] = shifted(index[dim], -before)
    return args_of(node)[0], tuple(moved)


def pads_with_zero(node: Node, index: tuple[Index, ...]) -> bool:
    """True if the element lies in the zeros around a padded value."""
    if node.target is not aten.constant_pad_nd.default or argument(node, 2, "value", 0) != 0:
        return False
    sizes = shape_of(args_of(node)[0])
    for position in range(len(args_of(node)[1]) // 2):
        dim, before = len(sizes) - 1 - position, args_of(node)[1][2 * position]
        if misses(index[dim], before, before + sizes[dim]):
            return True
    return False


def covers(index: Index, start: Size, stop: Size) -> bool:
    """Provably every position of `index` lies in [start, stop)."""
    first, last = index.offset, index.offset + extent(index)
    if all(isinstance(bound, int) for bound in (first, last, start, stop)):
        return bool(start <= first and last <= stop)
    return bool(first == start and (last == stop or (ratio(stop - start, extent(index)) is not None)))


def misses(index: Index, start: Size, stop: Size) -> bool:
    """Provably no position of `index` lies in [start, stop)."""
    return at_most(index.offset + extent(index), start) or (
        isinstance(stop, int) and isinstance(index.offset, int) and stop <= index.offset
    )


def _replaced(index: tuple[Index, ...], dim: int, part: Index) -> tuple[Index, ...]:
    return (*index[:dim], part, *index[dim + 1 :])


MOVERS: dict[Any, Mover] = {
    aten.alias.default: _same,
    aten.clone.default: _same,
    aten.contiguous.default: _same,
    aten.detach.default: _same,
    aten.lift_fresh_copy.default: _same,
    aten.permute.default: _permute,
    aten.transpose.int: _transpose,
    aten.t.default: _t,
    aten.view.default: _reshape,
    aten.reshape.default: _reshape,
    aten._unsafe_view.default: _reshape,
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
    """One step through a view, or None where the element is computed."""
    mover = MOVERS.get(node.target)
    return None if mover is None else mover(node, index)


def cuts(node: Node, index: tuple[Index, ...]) -> list[tuple[Any, Size]]:
    """Where the axes that read a cat or a partly overwritten tensor would have to be cut: (axis, position) pairs."""
    if node.target is aten.cat.default:
        dim, bounds = cat_dim(node), [0]
        for piece in args_of(node)[0]:
            bounds.append(bounds[-1] + shape_of(piece)[dim])
    elif node.target is aten.slice_scatter.default:
        dim = argument(node, 2, "dim", 0) % len(index)
        found = slice_bounds(node, 2, shape_of(args_of(node)[0])[dim])
        bounds = [] if found is None else [found[1], found[2]]
    elif node.target is aten.constant_pad_nd.default:
        dim, before = len(index) - 1, args_of(node)[1][0]
        bounds = [before, before + shape_of(args_of(node)[0])[dim]]
    else:
        return []
    where = index[dim]
    if len(where.terms) != 1 or where.terms[0][1] != 1 or not isinstance(where.offset, int):
        return []
    axis = where.terms[0][0]
    inside = [bound - where.offset for bound in bounds if isinstance(bound, int)]
    return [(axis, cut) for cut in inside if isinstance(axis.size, int) and 0 < cut < axis.size]
