"""RMSNorm in any spelling: `factor * gamma * x / sqrt(mean(x^2) + eps)`."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch.fx import Node

from mla_fx.errors import NoMatch
from mla_fx.graph.provenance import name_of

from .algebra import as_product, as_sum
from .axes import Axes, Digit, Index, axes, extent
from .cache_update import WRITES
from .calls import CASTS, args_of, argument, operands_of
from .contraction import summed
from .element import Element, resolve
from .reading import Reading
from .same_value import read_along
from .sizes import product

aten = torch.ops.aten
LAYER_NORMS = {aten.native_layer_norm.default, aten.layer_norm.default}
HALF_TYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class RmsNorm(Reading):
    """What is normalised and along which indices, the weight, whether the value was rounded to 16 bits before the
    weight was multiplied, and the number that multiplies it all."""

    value: Element
    gamma: Element
    over: tuple[Index, ...]
    epsilon: float
    gamma_after_cast: bool
    factor: float = 1.0

    @property
    def constants(self) -> tuple[float, bool, float]:
        return self.epsilon, self.gamma_after_cast, self.factor

    def check_rows(self, width: Axes) -> None:
        """Raises NoMatch unless the norm is taken over all columns of one row."""
        over = [axis for part in self.over for axis in axes(part, "the normalised dimension", self.node)]
        if over != list(width):
            raise NoMatch("the norm is not over the columns of a row", self.node)


def rms_norm(element: Element) -> RmsNorm:
    """Read `element` as an RMSNorm with a weight. Raises NoMatch if it is not one."""
    node = element.origin
    if LAYER_NORMS & {node.target, *(source.target for source in operands_of(node))}:
        raise NoMatch("expected an RMSNorm, found a LayerNorm", node)
    roots = [factor for factor, power in as_product(element).factors if power == -0.5]
    if not roots:
        what = f"a value that {name_of(node)} writes in parts" if node.target in WRITES else name_of(node)
        raise NoMatch(f"expected an RMSNorm, found {what}", node)
    mean = _mean_square(roots[0])
    whole = as_product(element, kept=mean.value.node)
    root = next(factor for factor in whole.factors if factor == (roots[0], -0.5))
    rest = [factor for factor in whole.factors if factor is not root]

    values = [factor for factor, power in rest if power == 1.0]
    found = [(value, over) for value in values if (over := read_along(value, mean.value, mean.over)) is not None]
    if not found:
        raise NoMatch("the normalised value is not the value whose mean square is computed", node)
    value, over = found[0]
    weights = [(factor, power) for factor, power in rest if factor is not value]
    if len(weights) != 1 or weights[0][1] != 1.0:
        names = ", ".join(name_of(factor.node) for factor, _ in weights) or "nothing"
        raise NoMatch(f"an RMSNorm is multiplied by one weight, found {names}", node)
    gamma = weights[0][0]

    if _digits(gamma.index) != _digits(over):
        raise NoMatch("the norm's weight is not along the normalised dimension", gamma.node)
    length = product(extent(part) for part in over)
    if not isinstance(length, int):
        raise NoMatch("the norm is over a dimension of unknown size", node)
    if whole.number < 0:
        raise NoMatch("the norm is multiplied by a negative number", node)
    factor = whole.number / math.sqrt(mean.number * length)
    if not 0 < factor < math.inf:
        raise NoMatch(f"the norm is multiplied by a number, {factor:.6g}", node)
    factor = 1.0 if math.isclose(factor, 1.0, rel_tol=5e-7) else factor
    epsilon = mean.epsilon / (mean.number * length)
    return RmsNorm(node, value, gamma, over, epsilon, _rounds_first(gamma, element), factor)


@dataclass(frozen=True)
class _MeanSquare:
    """`number * sum of value^2 over the indices of over, plus epsilon`."""

    value: Element
    number: float
    over: tuple[Index, ...]
    epsilon: float = 0.0


def _digits(indices: tuple[Index, ...]) -> frozenset[Digit]:
    return frozenset().union(*(index.digits for index in indices))


def _mean_square(root: Element) -> _MeanSquare:
    radicand = as_sum(root)
    if len(radicand.terms) != 1 or not 0 <= radicand.constant < math.inf:
        raise NoMatch("the norm's epsilon is not a compile-time number", root.node)
    mean = _sum_of_squares(radicand.terms[0])
    if not 0 < mean.number < math.inf:
        raise NoMatch(f"the squares under the norm's root are multiplied by {mean.number:.6g}", root.node)
    return replace(mean, epsilon=radicand.constant)


def _sum_of_squares(mean: Element) -> _MeanSquare:
    """Read a sum or mean of squares, or the square of a vector norm, which may itself be decomposed."""
    whole = as_product(mean)
    if [power for _, power in whole.factors] == [0.5, 0.5] and len({factor for factor, _ in whole.factors}) == 1:
        under = _sum_of_squares(whole.factors[0][0])
        if under.number > 0:  # a root times itself is its radicand, unless that is negative
            return replace(under, number=under.number * whole.number)
    if len(whole.factors) == 1 and whole.factors[0][0].node.target is aten.linalg_vector_norm.default:
        norm, power = whole.factors[0]
        if power != 2.0 or argument(norm.node, 1, "ord", 2) != 2:
            raise NoMatch("expected the square of a Euclidean norm under the root", norm.node)
        value, over = summed(norm, dim_at=2)
        factor, value = value.apart()
        return _MeanSquare(value, whole.number * factor**2, over)
    if mean.origin.target not in (aten.mean.dim, aten.sum.dim_IntList):
        raise NoMatch(f"expected a mean of squares under the root, found {name_of(mean.origin)}", mean.origin)
    square, over = summed(mean)
    squared = _squared(square)
    inner = as_product(square, kept=squared)
    if [power for _, power in inner.factors] != [2.0]:
        raise NoMatch("expected the mean of one value squared under the root", mean.origin)
    return _MeanSquare(inner.factors[0][0], inner.number, over)


def _squared(square: Element) -> Node | None:
    """What is squared, if one operation does it: it may be a product, which is also one value."""
    node = square.origin
    is_power = node.target in (aten.pow.Tensor_Scalar, aten.square.default)
    if not is_power and not (node.target is aten.mul.Tensor and args_of(node)[0] is args_of(node)[1]):
        return None
    return resolve(args_of(node)[0], square.index).origin


def _rounds_first(gamma: Element, element: Element) -> bool:
    """Whether gamma is multiplied in a 16-bit dtype: then the other factor was rounded before."""
    product_node = _multiplying(element.origin, gamma.origin)
    return product_node is not None and product_node.meta["val"].dtype in HALF_TYPES


def _multiplying(node: Node, gamma: Node) -> Node | None:
    """The multiplication by `gamma`, through casts and views."""
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
        if not isinstance(source, Node) or len(operands_of(node)) != 1:
            return False
        node = source
    return True
