"""Matrix products in any spelling: mm, bmm, linear, a product summed up; with bias named, splits made explicit."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import torch
from torch._ops import OpOverload
from torch.fx import Node

from mla_fx.errors import NoMatch

from .algebra import as_sum
from .axes import Axis, Index, fresh, leaves
from .element import Element, operand, resolve
from .views import args_of, argument, cuts, pads_with_zero, shape_of

aten = torch.ops.aten


@dataclass(frozen=True)
class Contraction:
    """`scale * sum over axes of left * right`; the operands carry no scale."""

    left: Element
    right: Element
    over: tuple[Axis, ...]
    scale: float
    node: Node

    @property
    def axes(self) -> tuple[Axis, ...]:
        return leaves(self.over)


def contraction(element: Element) -> Contraction:
    """Reads `element` as one contraction of two values. Raises NoMatch if it is computed otherwise."""
    node, index = element.node, element.index
    target = node.target
    if target in (aten.mm.default, aten.bmm.default, aten.matmul.default) and len(index) >= 2:
        return _matmul(element, args_of(node)[0], args_of(node)[1])
    if target in (aten.mv.default, aten.dot.default):
        return _vector(element)
    if target is aten.linear.default and argument(node, 2, "bias") is None:
        return _linear(element)
    if target in (aten.addmm.default, aten.baddbmm.default, aten.linear.default):
        raise NoMatch("the projection has a bias, which the fused operators do not take", node)
    if target in (aten.sum.dim_IntList, aten.mul.Tensor):
        return _product_summed(element)
    raise NoMatch(f"expected a matrix product, found {name_of(node)}", node)


def segments(found: Contraction) -> tuple[Contraction, ...]:
    """The contraction as a sum of contractions over the ranges from which its operands were put together.

    One level only: the parts of a part, such as the halves of a rotation, belong to whoever reads that part. A sum of
    padded operands is another way to put them together; ranges of zeros drop out."""
    return tuple(part for term in _padded_terms(found) for part in _ranges(term) if not _is_zero(part))


def _ranges(found: Contraction) -> tuple[Contraction, ...]:
    for axis in found.axes:
        where = sorted({cut for side in (found.left, found.right) for at, cut in cuts_of(side) if at is axis})
        if not where:
            continue
        bounds = [0, *where, axis.size]
        return tuple(_range(found, axis, start, stop) for start, stop in itertools.pairwise(bounds))
    return (found,)


def _padded_terms(found: Contraction) -> tuple[Contraction, ...]:
    """The contraction multiplied out, if its right or left side is a sum of padded values."""
    for side, other in ((found.left, found.right), (found.right, found.left)):
        terms = as_sum(side)
        if not terms.constant and all(term.node.target is aten.constant_pad_nd.default for term in terms.terms):
            return tuple(
                replace(found, left=term.unscaled(), right=other, scale=found.scale * term.scale)
                for term in terms.terms
            )
    return (found,)


def _is_zero(found: Contraction) -> bool:
    sides = (side.settled() for side in (found.left, found.right))
    return any(pads_with_zero(side.node, side.index) for side in sides)


def _range(found: Contraction, axis: Axis, start: int, stop: int) -> Contraction:
    part = fresh(stop - start)
    moved = {axis: Index(start, part.terms)}
    left, right = found.left.at(moved), found.right.at(moved)
    rest = tuple(other for other in found.axes if other is not axis)
    scale = found.scale * left.scale * right.scale
    return Contraction(left.unscaled(), right.unscaled(), rest + part.axes, scale, found.node)


def cuts_of(element: Element) -> list[tuple[Axis, int]]:
    element = element.settled()
    return cuts(element.node, element.index)


def _contraction(element: Element, left: Element, right: Element, over: tuple[Index, ...]) -> Contraction:
    axes = tuple(axis for part in over for axis in part.axes)
    scale = element.scale * left.scale * right.scale
    return Contraction(left.unscaled(), right.unscaled(), leaves(axes), scale, element.node)


def _matmul(element: Element, left: Node, right: Node) -> Contraction:
    *batch, row, column = element.index
    inner = fresh(shape_of(left)[-1])
    rows, columns = operand(left, (*batch, row, inner)), operand(right, (*batch, inner, column))
    return _contraction(element, rows, columns, (inner,))


def _vector(element: Element) -> Contraction:
    left, right = args_of(element.node)[:2]
    inner = fresh(shape_of(right)[0])
    return _contraction(element, resolve(left, (*element.index, inner)), resolve(right, (inner,)), (inner,))


def _linear(element: Element) -> Contraction:
    value, weight = args_of(element.node)[:2]
    inner = fresh(shape_of(weight)[-1])
    *rows, column = element.index
    return _contraction(element, resolve(value, (*rows, inner)), resolve(weight, (column, inner)), (inner,))


def _product_summed(element: Element) -> Contraction:
    """`(a * b).sum(dims)`: Inductor's and some authors' way to write a thin product."""
    node = element.node
    if node.target is aten.mul.Tensor:
        raise NoMatch("expected a matrix product, found an elementwise mul", node)
    inner, over = summed(element)
    product = inner.node
    if product.target is not aten.mul.Tensor:
        raise NoMatch(f"expected a matrix product, found a sum of {name_of(product)}", node)
    left, right = (operand(value, inner.index) for value in args_of(product)[:2])
    scaled = Element(node, element.index, element.scale * inner.scale)
    return _contraction(scaled, left, right, over)


def summed(element: Element, dim_at: int = 1) -> tuple[Element, tuple[Index, ...]]:
    """The summand of a sum or mean over dimensions, and the indices summed over; the scale holds 1/n of a mean.

    The dimensions are argument number `dim_at` of the reduction, `keepdim` the next."""
    node = element.node
    source = args_of(node)[0]
    sizes = shape_of(source)
    named = argument(node, dim_at, "dim") or range(len(sizes))
    dims = {dim % len(sizes) for dim in ([named] if isinstance(named, int) else named)}
    keep = bool(argument(node, dim_at + 1, "keepdim", False))
    rest = iter(element.index)
    index: list[Index] = []
    over: list[Index] = []
    for dim, size in enumerate(sizes):
        if dim not in dims:
            index.append(next(rest))
            continue
        if keep:
            next(rest)
        over.append(fresh(size))
        index.append(over[-1])
    scale = 1.0
    if node.target is aten.mean.dim:
        for dim in dims:
            if not isinstance(sizes[dim], int):
                raise NoMatch("the mean is taken over a dimension of unknown size", node)
            scale /= sizes[dim]
    return resolve(source, tuple(index), element.scale * scale), tuple(over)


def name_of(node: Node) -> str:
    """How a message names the operation of a node."""
    if node.op in ("placeholder", "get_attr"):
        return f"the graph input {node.name}" if node.op == "placeholder" else f"the attribute {node.target}"
    if isinstance(node.target, OpOverload):
        return str(node.target._opname)
    return str(getattr(node.target, "__name__", node.target))
