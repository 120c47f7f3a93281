"""Products of quantised operands: codes are multiplied, and the result is multiplied by the scales of both.

    y[r,c] = row_scale[r] * column_scale[c] * sum over k of codes[r,k] * codes[c,k]

Weights are stored as 8-bit codes. The other operand may be plain (weight-only quantisation), or codes with a scale per
row (dynamic quantisation). A product of integers is exact, so every spelling of it is the same. Any other value may be
multiplied by a smaller tensor, too, for example by one number per token or per head.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import torch
from torch.fx import Node

from mla_fx.errors import NoMatch, attempt
from mla_fx.graph.provenance import name_of
from mla_fx.graph.torch_private import OpOverload
from mla_fx.readings.algebra import SUBTRACTS, as_product
from mla_fx.readings.calls import CASTS, args_of, argument, options_of
from mla_fx.readings.constant import constant
from mla_fx.readings.contraction import PRODUCTS, Contraction, contraction, matmul, scaled_product, summed
from mla_fx.readings.element import (
    Element,
    Scales,
    before_cast,
    computed_from,
    has_8_bits,
    is_parameter,
    operand,
    operands,
    resolve,
)
from mla_fx.readings.reading import Reading
from mla_fx.readings.sizes import at_most, product
from mla_fx.readings.views import shape_of

from .vendor_calls import is_quant_matmul, quant_matmul

aten = torch.ops.aten
out_dtype = torch.ops.higher_order.out_dtype
CODES = (torch.int8, torch.uint8)
WIDE = (torch.int32, torch.int64)
LONGEST = 2**16  # terms: so many products of 8-bit codes fit in int32


def quantised_product(element: Element) -> Contraction:
    """Read `element` as a matrix product whose operands may be codes with scales. Raises NoMatch if it is none."""
    if element.origin.target is aten._scaled_mm.default:
        return _with_its_scales(element)
    if is_quant_matmul(element.origin):
        return quant_matmul(element)
    if element.origin.target not in (aten.mul.Tensor, aten.div.Tensor):
        return contraction(element)
    number, products, scales = _parts(element)
    if len(products) != 1:
        return contraction(element)
    found = _of_codes(products[0])
    if not any(_are_codes(side) for side in (found.left, found.right)):
        return contraction(element)
    if torch.float16 in (element.coarsest, element.dtype, products[0].origin.meta["val"].dtype):
        raise NoMatch("codes are multiplied in torch.float16, whose range they may leave", element.origin)
    for scale, power in scales:
        if power != 1.0:
            raise NoMatch(f"a product of codes is multiplied by a power of {name_of(scale.origin)}", scale.origin)
        if products[0].origin in computed_from(scale.origin, _multiplies):
            raise NoMatch("a product of codes is multiplied by what is computed from it, as in a norm", scale.origin)
    return _scaled(element, found, number, [scale for scale, _ in scales])


def _parts(element: Element) -> tuple[float, list[Element], list[tuple[Element, float]]]:
    """A number, matrix products and powers of scales whose product is the element. A scale that the program computes as
    a product is one scale, with its roundings."""
    number, element = element.apart()
    node = element.node
    if _is_product(element):
        return number, [element], []
    if node.target not in (aten.mul.Tensor, aten.div.Tensor) or options_of(node):
        return number, [], [(element, 1.0)]
    products, scales = list[Element](), list[tuple[Element, float]]()
    sign = -1.0 if node.target is aten.div.Tensor else 1.0
    for value, power in zip(args_of(node)[:2], (1.0, sign), strict=True):
        side = operand(value, element.index)
        if power != 1.0 or not _holds_product(side):
            scales.append((side, power))
            continue
        further, inner, outer = _parts(side)
        number *= further
        products += inner
        scales += outer
    return number, products, scales


def holds_codes(element: Element) -> bool:
    """Whether an element is a product of codes, multiplied by scales or not."""
    if _integers(element) is not None:
        return _is_product(element)
    found = attempt(quantised_product, element)
    return found is not None and any(_are_codes(side) for side in (found.left, found.right))


@dataclass(frozen=True)
class Scaling(Reading):
    """`value * scale`, where the scale is the same along some axes of the value."""

    value: Element
    scale: Element


def scaling(element: Element) -> Scaling:
    """Read `element` as a scaled value. Raises NoMatch if it is not one."""
    factor, element = element.apart()
    node = element.node
    if node.target is not aten.mul.Tensor:
        raise NoMatch(f"expected a value multiplied by a scale, found {name_of(node)}", node)
    for value, scale in itertools.permutations(operands(element), 2):
        if scale.axes < value.axes:
            if holds_codes(value):
                raise NoMatch("a product of codes is multiplied by their scales", node)
            return Scaling(node, value.times(factor), scale)
    raise NoMatch("expected a value multiplied by a scale, found the product of two values", node)


def _holds_product(element: Element) -> bool:
    return any(_is_product(factor) for factor, _ in as_product(element).factors)


def _scaled(element: Element, found: Contraction, number: float, scales: list[Element]) -> Contraction:
    """A product of codes with its scales, each on the side to which it belongs."""
    sides = {side: list[Element]() for side in ("left", "right")}
    for scale in scales:
        if scale.axes <= found.left.axes or scale.axes <= found.right.axes:
            sides[_scaled_side(found, scale)].append(scale)
            continue
        whole = as_product(scale)  # the scales of both sides, multiplied first
        for factor, power in whole.factors:
            if power != 1.0:
                raise NoMatch(f"a product of codes is multiplied by a power of {name_of(factor.origin)}", factor.origin)
        first, *others = sorted((factor for factor, _ in whole.factors), key=lambda factor: is_parameter(factor.origin))
        for factor in (first.times(whole.number), *others):  # a number belongs to scales that are computed, if any is
            sides[_scaled_side(found, factor)].append(factor)
    dtype = element.coarsest or element.dtype
    left, right = (_with_scales(_stored(getattr(found, side)), sides[side], dtype) for side in ("left", "right"))
    return scaled_product(element.origin, found.factor * number, left, right, found.over)


def _with_its_scales(element: Element) -> Contraction:
    """Read `_scaled_mm`, a product of float8 codes that takes their scales: one each, or one per row and column."""
    node = element.origin
    left, right, *scales = args_of(node)[:4]
    if argument(node, 4, "bias") is not None or argument(node, 5, "scale_result") is not None:
        raise NoMatch("a product of codes with a bias, or with a scale for its result", node)
    wanted = (shape_of(left)[0], 1), (1, shape_of(right)[1])
    for scale, whole in zip(scales, wanted, strict=True):
        if product(shape_of(scale)) != 1 and shape_of(scale) != whole:
            raise NoMatch(f"codes have scales {list(shape_of(scale))}; one or {list(whole)} are read", scale)
    found = matmul(element, left, right)
    return _scaled(element, found, 1.0, [operand(scale, element.index) for scale in scales])


def _stored(side: Element) -> Element:
    """Codes before the cast to the dtype in which they are multiplied, which holds every integer of 8 bits."""
    found = before_cast(side)
    return found if found.origin.meta["val"].dtype in CODES and not side.roundings else side


def _with_scales(side: Element, scales: list[Element], dtype: torch.dtype) -> Element:
    """Plain values have no scales. Codes may have none either, but a dtype in which they are multiplied."""
    is_plain = not scales and side.dtype.is_floating_point
    return side if is_plain else replace(side, scales=Scales(tuple(scales), dtype))


def _scaled_side(found: Contraction, scale: Element) -> str:
    """The operand along whose outer dimensions a scale runs. One number belongs to the weight if it is a parameter, and
    else to the operand that the program computes."""
    sides = [side for side in ("right", "left") if scale.axes <= getattr(found, side).axes]
    if not sides:
        raise NoMatch("the scales of a product belong to neither operand", scale.origin)
    is_given = is_parameter(scale.origin)
    alike = [side for side in sides if is_parameter(_stored(getattr(found, side)).origin) == is_given] or sides
    return next((side for side in alike if _are_codes(getattr(found, side))), alike[0])


def _are_codes(value: Element) -> bool:
    """Whether a value has 8 bits, or had them before the cast to the dtype in which it is multiplied."""
    return has_8_bits(value.origin) or has_8_bits(before_cast(value).origin)


def _is_product(element: Element) -> bool:
    whole = _integers(element)
    if whole is None:
        return element.origin.target in (*PRODUCTS, aten.linear.default)
    is_cast = whole.origin.target in CASTS and _is_product(before_cast(whole))
    return is_cast or whole.origin.target in SUBTRACTS or _multiplies(whole.origin) or _biased(whole) is not None


def _multiplies(node: Node) -> bool:
    return node.target in (*PRODUCTS, aten.linear.default, aten._int_mm.default, out_dtype)


def _biased(element: Element) -> Element | None:
    """What is added to a product of integers, if something is."""
    if element.origin.target is not aten.add.Tensor:
        return None
    terms = operands(element)
    others = [term for term in terms if not _multiplies(term.origin)]
    return others[0] if len(terms) == 2 and len(others) == 1 else None


def _of_codes(element: Element) -> Contraction:
    whole = _integers(element)
    return contraction(element) if whole is None else _exact(whole)


# --- products of integers --------------------------------------------------------------------------------------------


def _integers(element: Element) -> Element | None:
    """The integers that a value is, or was cast from."""
    parts = (element, before_cast(element))
    return next((part for part in parts if part.origin.meta["val"].dtype in (*CODES, *WIDE)), None)


def _exact(element: Element) -> Contraction:
    """Read `element` as a product of 8-bit codes, in a dtype that holds it. Raises NoMatch if it is none."""
    found = _shifted_back(element) if element.origin.target in SUBTRACTS else _multiplied(element)
    if not all(_are_codes(side) for side in (found.left, found.right)):
        raise NoMatch("expected a product of 8-bit integers, found one of others", found.node)
    if not at_most(product(axis.size for axis in found.axes), LONGEST):
        raise NoMatch("a product of codes may overflow: it has too many terms", found.node)
    return found


def _multiplied(element: Element) -> Contraction:
    node = element.node
    if node.meta["val"].dtype not in WIDE:
        raise NoMatch(f"a product of integers in {node.meta['val'].dtype} may overflow", node)
    if (bias := _biased(element)) is not None:
        added = bias.origin.meta["val"].dtype
        raise NoMatch(f"a product of codes has a bias in {added}, which the fused operators do not support", node)
    if node.target in CASTS:
        return _in_floats(before_cast(element))
    if node.target is aten._int_mm.default:
        return matmul(element, *args_of(node)[:2])
    if node.target is out_dtype and args_of(node)[:2] == (aten.mm.default, torch.int32):
        return matmul(element, *args_of(node)[2:4])
    return contraction(element)


def _in_floats(element: Element) -> Contraction:
    """A product of codes in a dtype that holds every sum of it, so that a cast to integers drops nothing."""
    node, dtype = element.node, element.coarsest or element.dtype
    found = contraction(element)
    terms, most = product(axis.size for axis in found.axes), 2 // torch.finfo(dtype).eps // 128**2
    if not at_most(terms, most):
        raise NoMatch(f"a product of {terms} codes is rounded to {dtype}, exact for up to {most:.0f}", node)
    return found


def _shifted_back(element: Element) -> Contraction:
    """Read `(codes + 128) @ weight - 128 * weight.sum(0)` as `codes @ weight`. Some kernels take unsigned codes."""
    node = element.node
    shifted, correction = (operand(value, element.index) for value in args_of(node)[:2])
    found = _multiplied(shifted)
    total = _half_range(correction, aten.mul.Tensor)
    if total.node.target is not aten.sum.dim_IntList or argument(node, 2, "alpha", 1) != 1:
        raise NoMatch(f"expected 128 times the sum of a weight, found {name_of(total.node)}", node)
    column, over = summed(total)
    if len(over) != 1 or len(found.axes) != 1:
        raise NoMatch("a product of integers is corrected by a sum over other dimensions", node)
    weight = found.right.at({found.axes[0]: over[0]})
    if (column.node, column.index) != (weight.node, weight.index):
        raise NoMatch("a product of integers is corrected by the sum of another weight", node)
    return replace(found, node=node, left=_signed(found.left))


def _signed(codes: Element) -> Element:
    """The int8 codes, to which 128 was added to make them uint8."""
    node = codes.node
    if node.target not in CASTS or node.meta["val"].dtype != torch.uint8:
        raise NoMatch(f"expected signed codes plus 128, found {name_of(node)}", node)
    found = _half_range(resolve(args_of(node)[0], codes.index), aten.add.Tensor)
    source = args_of(found.node)[0] if found.node.target in CASTS else found.node
    if source.meta["val"].dtype != torch.int8:
        raise NoMatch("expected codes in int8 plus 128", node)
    return found


def _half_range(element: Element, operation: OpOverload) -> Element:
    """What 128 is added to, or what it multiplies, in a dtype that holds the result."""
    node = element.node
    if node.target is not operation or constant(args_of(node)[1]) != 128 or options_of(node):
        raise NoMatch(f"a product of integers is corrected, expected by 128, found {name_of(node)}", node)
    found = operand(args_of(node)[0], element.index)
    if found.node.meta["val"].dtype not in WIDE:
        raise NoMatch("integers of 8 bits are computed with, which may overflow", node)
    return found
