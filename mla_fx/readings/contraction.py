"""Matrix products in any spelling: mm, bmm, linear, a product summed up. A bias is named, splits are explicit."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch
from torch.fx import Node

from mla_fx.errors import NoMatch
from mla_fx.graph.provenance import name_of

from .algebra import as_product, as_sum
from .axes import Axis, Index, axes_of, extent, fresh, shifted
from .behind import quantised_projection
from .calls import CASTS, args_of, argument
from .element import Element, is_coarser, is_parameter, operand, resolve
from .reading import Reading
from .sizes import plain, product
from .views import pads_with_zero, seams, shape_of

aten = torch.ops.aten
PRODUCTS = frozenset({aten.mm.default, aten.bmm.default, aten.matmul.default})
SUMS = PRODUCTS | {aten.sum.dim_IntList}
ADDED_PRODUCTS = frozenset({aten.addmm.default, aten.baddbmm.default})
BIAS = "the projection has a bias, which the fused operators do not support"

SECOND_PRODUCT = "a second product is added to the projection (a LoRA branch, or columns that are not quantised?)"


@dataclass(frozen=True)
class Contraction(Reading):
    """`factor * sum of left * right over the axes of over`; the operands carry no factor."""

    left: Element
    right: Element
    over: tuple[Index, ...]
    factor: float

    @property
    def constants(self) -> tuple[float, ...]:
        return (self.factor,)

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The axes summed over."""
        return tuple(axis for part in self.over for axis in axes_of(part) or ())

    @property
    def swapped(self) -> Contraction:
        return Contraction(self.node, self.right, self.left, self.over, self.factor)


def contraction(element: Element) -> Contraction:
    """Read `element` as one contraction of two values. Raises NoMatch if it is computed differently."""
    node = element.origin
    target = node.target
    if target in PRODUCTS and all(len(shape_of(factor)) >= 2 for factor in args_of(node)[:2]):
        return matmul(element, args_of(node)[0], args_of(node)[1])
    if target in (aten.mv.default, aten.dot.default):
        return _vector(element)
    if target is aten.linear.default and argument(node, 2, "bias") is None:
        return _linear(element)
    if target in ADDED_PRODUCTS and argument(node, 3, "beta", 1) == 0:  # the added operand is ignored, even NaN
        alpha = argument(node, 4, "alpha", 1)
        if not isinstance(alpha, (int, float)):
            raise NoMatch("a matrix product is multiplied by a number known at run time", node)
        return matmul(element.times(alpha), *args_of(node)[1:3])
    if target in ADDED_PRODUCTS and _is_projection(operand(args_of(node)[0], element.index).origin):
        raise NoMatch(SECOND_PRODUCT, node)
    if target in ADDED_PRODUCTS or target is aten.linear.default:
        raise NoMatch(BIAS, node)
    if target is aten.add.Tensor:
        raise NoMatch(_why_added(element), node)
    if target in (aten.sum.dim_IntList, aten.mul.Tensor):
        return _product_summed(element)
    raise NoMatch(f"expected a matrix product, found {name_of(node)}", node)


def _why_added(element: Element) -> str:
    """Say what a sum is where one product is expected."""
    terms = [term.origin for term in as_sum(element).terms]
    products = [term for term in terms if _is_projection(term)]
    if len(products) > 1:
        return SECOND_PRODUCT
    is_biased = products and all(term in products or is_parameter(term) for term in terms)
    return BIAS if is_biased else f"expected a matrix product, found {name_of(element.origin)}"


def check_one_product(element: Element) -> None:
    """Raises NoMatch if a value is a projection to which a second product is added."""
    if element.origin.target is aten.add.Tensor and _why_added(element) == SECOND_PRODUCT:
        raise NoMatch(SECOND_PRODUCT, element.origin)


def _is_projection(node: Node) -> bool:
    is_scaled = node.target is aten.mul.Tensor and quantised_projection(node) is not None
    return is_scaled or node.target in (*PRODUCTS, aten.linear.default, aten.addmm.default)


def segments(found: Contraction) -> tuple[Contraction, ...]:
    """The contraction as a sum of contractions over the ranges from which its operands were concatenated.

    One level only: the parts of a part, such as the halves of a rotation, belong to the reader of that part. A sum of
    padded operands is another way to concatenate them; ranges of zeros are dropped."""
    return tuple(part for term in _padded_terms(found) for part in _ranges(term) if not _is_zero(part))


def _ranges(found: Contraction) -> tuple[Contraction, ...]:
    for axis in found.axes:
        where = sorted({cut for side in (found.left, found.right) for at, cut in cuts_of(side) if at is axis})
        if not where:
            continue
        bounds = [0, *where, axis.size]
        return tuple(_range(found, axis, start, stop) for start, stop in itertools.pairwise(bounds))
    return (found,)


def parted_at(found: Contraction, value: Element) -> tuple[Contraction, ...]:
    """The contraction split where the columns that `value` reads of one of its operands begin and end."""
    for side in (found.left, found.right):
        if side.origin is not value.origin:
            continue
        for mine, theirs in zip(side.index, value.index, strict=True):
            axis, start = shifted(mine, -mine.offset).axis, plain(theirs.offset - mine.offset)
            bounds = start, plain(start + extent(theirs))
            if axis not in found.axes or not all(isinstance(bound, int) for bound in (*bounds, axis.size)):
                continue
            inside = sorted({0, axis.size, *(bound for bound in bounds if 0 < bound < axis.size)})
            return tuple(_range(found, axis, *pair) for pair in itertools.pairwise(inside))
    return (found,)


def _padded_terms(found: Contraction) -> tuple[Contraction, ...]:
    """The contraction multiplied out, if one side is a sum of padded values."""
    for side, other in ((found.left, found.right), (found.right, found.left)):
        total = as_sum(side)
        if total.constant or any(term.origin.target is not aten.constant_pad_nd.default for term in total.terms):
            continue
        return tuple(scaled_product(found.node, found.factor, term, other, found.over) for term in total.terms)
    return (found,)


def _is_zero(found: Contraction) -> bool:
    return any(pads_with_zero(side.node, side.index) for side in (found.left, found.right))


def _range(found: Contraction, axis: Axis, start: int, stop: int) -> Contraction:
    part = fresh(stop - start)
    moved = {axis: shifted(part, start)}
    rest = tuple(other for other in found.over if other.axis is not axis)
    return scaled_product(found.node, found.factor, found.left.at(moved), found.right.at(moved), (*rest, part))


def cuts_of(element: Element) -> list[tuple[Axis, int]]:
    return seams(element.origin, element.index)


def scaled_product(node: Node, factor: float, left: Element, right: Element, over: tuple[Index, ...]) -> Contraction:
    """The contraction with its operands' factors moved into its own."""
    (left_factor, left), (right_factor, right) = left.apart(), right.apart()
    factor = factor * left_factor * right_factor
    if factor == 0 or not math.isfinite(factor):
        raise NoMatch(f"a matrix product is multiplied by {factor:.6g}", node)
    return Contraction(node, left, right, over, factor)


def matmul(element: Element, left: Node, right: Node) -> Contraction:
    """`left @ right`, where the program reads the product at `element`."""
    *batch, row, column = element.index
    inner = fresh(shape_of(left)[-1])
    rows, columns = operand(left, (*batch, row, inner)), operand(right, (*batch, inner, column))
    return scaled_product(element.origin, element.factor, rows, columns, (inner,))


def _vector(element: Element) -> Contraction:
    left, right = args_of(element.origin)[:2]
    inner = fresh(shape_of(right)[0])
    rows = resolve(left, (*element.index, inner))
    return scaled_product(element.origin, element.factor, rows, resolve(right, (inner,)), (inner,))


def _linear(element: Element) -> Contraction:
    value, weight = args_of(element.origin)[:2]
    inner = fresh(shape_of(weight)[-1])
    *rows, column = element.index
    row = resolve(value, (*rows, inner))
    return scaled_product(element.origin, element.factor, row, resolve(weight, (column, inner)), (inner,))


def _product_summed(element: Element) -> Contraction:
    """Read `(a * b).sum(dims)`, which Inductor and some authors use for thin products."""
    node = element.origin
    if node.target is aten.mul.Tensor:
        raise NoMatch(_why_multiplied(element), node)
    inner, over = summed(element)
    multiplied = inner.origin
    if multiplied.target is not aten.mul.Tensor:
        raise NoMatch(f"expected a matrix product, found a sum of {name_of(multiplied)}", node)
    left, right = (operand(value, inner.index) for value in args_of(multiplied)[:2])
    left, right = _in_16_bits(element, left, right) or (left, right)
    return scaled_product(node, inner.factor, left, right, over)


def _in_16_bits(element: Element, left: Element, right: Element) -> tuple[Element, Element] | None:
    """The operands before they were widened, if their product is rounded back at once. So is any product of 16 bits."""
    if not element.roundings or element.factor != 1.0:
        return None
    stored = [_before_widening(side, element.roundings[-1]) for side in (left, right)]
    return None if stored[0] is None or stored[1] is None else (stored[0], stored[1])


def _before_widening(element: Element, dtype: torch.dtype) -> Element | None:
    """The element in `dtype`, if the program reads it through a cast from there to a finer one."""
    node, index = element.seen
    if node.target not in CASTS:
        return None
    source = args_of(node)[0]
    is_widened = source.meta["val"].dtype == dtype and is_coarser(dtype, node.meta["val"].dtype)
    return resolve(source, index, element.top_factor) if is_widened else None


def _why_multiplied(element: Element) -> str:
    """Say what an elementwise product is where a matrix product is expected."""
    factors = [factor.origin for factor, _ in as_product(element).factors]
    if not any(factor.target in PRODUCTS for factor in factors):
        stored = quantised_projection(element.origin)
        if stored is not None and any(factor.target in CASTS for factor in factors):
            return f"a matrix product with a weight that is stored in {stored} is multiplied by scales"
        return "expected a matrix product, found an elementwise mul"
    if any(is_parameter(factor) for factor in factors):
        return "a matrix product is multiplied by a parameter, as by the scales of a quantised weight"
    others = ", ".join(name_of(factor) for factor in factors if factor.target not in PRODUCTS)
    return f"a matrix product is multiplied by another value, found {others}"


def summed(element: Element, dim_at: int = 1) -> tuple[Element, tuple[Index, ...]]:
    """The summand of a sum or mean over dimensions, and the indices summed over; the factor holds 1/n of a mean.

    The dimensions are argument number `dim_at` of the reduction, `keepdim` is the next."""
    factor, element = element.apart()
    source, index, over = reduced(element.node, element.index, dim_at)
    if element.node.target is aten.mean.dim:
        length = product(extent(part) for part in over)
        if not isinstance(length, int):
            raise NoMatch("the mean is over a dimension of unknown size", element.node)
        factor /= length
    return resolve(source, index, factor), over


def reduced(node: Node, index: tuple[Index, ...], dim_at: int = 1) -> tuple[Node, tuple[Index, ...], tuple[Index, ...]]:
    """What a reduction reduces, where it reads it, and the new indices that it reduces over."""
    source = args_of(node)[0]
    sizes = shape_of(source)
    named = argument(node, dim_at, "dim")
    named = range(len(sizes)) if named is None or named == [] else named
    dims = {dim % len(sizes) for dim in ([named] if isinstance(named, int) else named)}
    keep = bool(argument(node, dim_at + 1, "keepdim", False))
    rest = iter(index)
    read: list[Index] = []
    over: list[Index] = []
    for dim, size in enumerate(sizes):
        if dim not in dims:
            read.append(next(rest))
            continue
        if keep:
            next(rest)
        over.append(fresh(size))
        read.append(over[-1])
    return source, tuple(read), tuple(over)
