"""RMSNorm in any spelling: `gamma * x / sqrt(mean(x^2) + eps)`."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch.fx import Node

from mla_fx.errors import NoMatch

from .algebra import as_product, as_sum
from .axes import Index, leaves, product
from .contraction import name_of, summed
from .element import CASTS, Element
from .views import args_of, argument

aten = torch.ops.aten
LAYER_NORMS = {aten.native_layer_norm.default, aten.layer_norm.default}
HALF_TYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class RmsNorm:
    """What is normalised, by what, and whether it was rounded to 16 bits before gamma was multiplied in."""

    value: Element
    gamma: Element
    epsilon: float
    gamma_after_cast: bool


def rms_norm(element: Element) -> RmsNorm:
    """Reads `element` as an RMSNorm with a weight. Raises NoMatch if it is none."""
    if LAYER_NORMS & {element.node.target, *(source.target for source in element.node.all_input_nodes)}:
        raise NoMatch("a LayerNorm stands where an RMSNorm is expected", element.node)
    whole = as_product(element)
    roots = [factor for factor, power in whole.factors if power == -0.5]
    if not roots:
        raise NoMatch(f"expected an RMSNorm, found {name_of(element.node)}", element.node)
    root = roots[0]
    value, mean_scale, epsilon, over = _mean_square(root)
    rest = [(factor, power) for factor, power in whole.factors if factor is not root]

    normalised = [factor for factor, power in rest if power == 1.0 and _same_but(factor, value, over)]
    if not normalised:
        raise NoMatch("the value that is normalised is not the one whose mean square is taken", element.node)
    value = normalised[0]
    weights = [(factor, power) for factor, power in rest if factor is not value]
    if len(weights) != 1 or weights[0][1] != 1.0:
        found = ", ".join(name_of(factor.node) for factor, _ in weights) or "nothing"
        raise NoMatch(f"an RMSNorm is multiplied by one weight, found {found}", element.node)
    gamma = weights[0][0]

    axes = value.settled().axes - root.settled().axes
    length = product(axis.size for axis in axes)
    if gamma.settled().axes != axes or not axes:
        raise NoMatch("the norm's weight does not run along the normalised dimension", gamma.node)
    if whole.number < 0:
        raise NoMatch("the norm is multiplied by a negative number", element.node)
    if not math.isclose(whole.number**2, mean_scale * float(length), rel_tol=1e-6):
        factor = whole.number / math.sqrt(mean_scale * float(length))
        raise NoMatch(f"the norm is multiplied by a number, {factor:.6g}", element.node)
    return RmsNorm(value, gamma, epsilon / (mean_scale * float(length)), _rounds_first(gamma, element))


def _mean_square(root: Element) -> tuple[Element, float, float, tuple[Index, ...]]:
    """`scale * sum(x^2) + epsilon`: x under the sum, scale, epsilon and the indices summed over."""
    radicand = as_sum(root)
    if len(radicand.terms) != 1 or radicand.constant < 0:
        raise NoMatch("the norm's epsilon is not a compile-time number", root.node)
    mean = radicand.terms[0]
    value, number, over = _sum_of_squares(mean)
    return value, number, radicand.constant, over


def _sum_of_squares(mean: Element) -> tuple[Element, float, tuple[Index, ...]]:
    """`number * sum(value^2)`, spelled as a sum or mean of squares or as the square of a vector norm."""
    whole = as_product(mean)
    if len(whole.factors) == 1 and whole.factors[0][0].node.target is aten.linalg_vector_norm.default:
        norm, power = whole.factors[0]
        if power != 2.0 or argument(norm.node, 1, "ord", 2) != 2:
            raise NoMatch("expected the square of a Euclidean norm under the root", norm.node)
        value, over = summed(norm, dim_at=2)
        return value, whole.number, over
    if mean.node.target not in (aten.mean.dim, aten.sum.dim_IntList):
        raise NoMatch(f"expected a mean of squares under the root, found {name_of(mean.node)}", mean.node)
    square, over = summed(mean)
    inner = as_product(square)
    if [power for _, power in inner.factors] != [2.0]:
        raise NoMatch("expected the mean of one value squared under the root", mean.node)
    return inner.factors[0][0], inner.number, over


def _same_but(outside: Element, inside: Element, over: tuple[Index, ...]) -> bool:
    """`outside` is `inside` with the summed axes read by axes of its own."""
    outside, inside = outside.settled(), inside.settled()
    if outside.node is not inside.node:
        return False
    summed_axes = set(leaves(axis for part in over for axis in part.axes))
    for mine, theirs in zip(outside.index, inside.index, strict=True):
        if mine == theirs:
            continue
        shape = [(axis.size, stride) for axis, stride in mine.terms]
        if shape != [(axis.size, stride) for axis, stride in theirs.terms] or mine.offset != theirs.offset:
            return False
        pairs = zip(mine.axes, theirs.axes, strict=True)
        if not all(own is other or other in summed_axes for own, other in pairs):
            return False
    return True


def _rounds_first(gamma: Element, element: Element) -> bool:
    """Gamma is multiplied in by an operation of a 16-bit type: what it multiplies was rounded before."""
    product_node = _multiplying(element.node, gamma.node)
    return product_node is not None and product_node.meta["val"].dtype in HALF_TYPES


def _multiplying(node: Node, gamma: Node) -> Node | None:
    """The multiplication of which `gamma`, through casts and views, is an operand."""
    if node.target is not aten.mul.Tensor:
        source = args_of(node)[0] if node.target in CASTS and args_of(node) else None
        return _multiplying(source, gamma) if isinstance(source, Node) else None
    for value in args_of(node)[:2]:
        if isinstance(value, Node) and _comes_from(value, gamma):
            return node
    inner = (_multiplying(value, gamma) for value in args_of(node)[:2] if isinstance(value, Node))
    return next((found for found in inner if found is not None), None)


def _comes_from(node: Node, origin: Node) -> bool:
    while node is not origin:
        source = args_of(node)[0] if args_of(node) else None
        if not isinstance(source, Node) or len(node.all_input_nodes) != 1:
            return False
        node = source
    return True
