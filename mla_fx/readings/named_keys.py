"""Values that are made by numbers of keys: one number at all keys but those that are named.

    base.scatter(-1, numbers, value), scatter_add, index_fill, index_put
    (numbers.unsqueeze(-1) == arange(T)).any(-2), and sums of one_hot

Counts become conditions by a comparison with a number.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node

from mla_fx.errors import NoMatch
from mla_fx.graph.provenance import name_of

from .axes import Index, extent, fresh
from .bounds import Bounds, bounded
from .calls import CASTS, args_of, argument
from .causal import always
from .conditions import NOT, conditionals
from .constant import constant, rounded
from .contraction import reduced
from .element import Element, before_cast, element_of, operand, resolve
from .integers import INTEGERS, IntegerSum, integer_sum
from .reading import Reading
from .same_value import same_value
from .sizes import at_most
from .views import shape_of

aten = torch.ops.aten
COMPARES: dict[Any, Callable[[float, float], bool]] = {
    getattr(aten, name).Scalar: getattr(operator, name) for name in ("eq", "ne", "gt", "ge", "lt", "le")
}


@dataclass(frozen=True)
class Named(Reading):
    """`node` is the number `outside` at all keys but those that `numbers` name, which run along `named`. If each is
    named once, it is `inside` there; None if that is no fixed number. With `counts`, a number names a key only where
    that condition holds."""

    numbers: Element
    named: Index
    inside: float | None
    outside: float
    counts: Element | None = None


def names_keys(element: Element) -> bool:
    """Whether numbers of keys may make a value, as far as its operation says."""
    while _of_number(element.origin) is not None:
        element = operand(args_of(element.origin)[0], element.index)
    return element.origin.target in READERS


def named(element: Element, keys: Index) -> Named:
    """Read which keys are named. Raises NoMatch with the reason if that is not known."""
    node, convert = element.node, _of_number(element.node)
    if convert is None:
        return READERS[node.target](element, keys)
    found = named(operand(args_of(node)[0], element.index), keys)
    inside = None if found.inside is None else convert(found.inside)
    return replace(found, node=node, inside=inside, outside=convert(found.outside))


def own_numbers(found: Named, keys: Index) -> Element:
    """The numbers before steps that change no number of a key: casts, bounds, and other numbers for what names none."""
    number = _uncast(found.numbers)
    while (before := _before(number, found.counts, keys)) is not None:
        number = _uncast(before)
    return number


def _uncast(number: Element) -> Element:
    """A number before it became an integer of another size; both hold all numbers of keys."""
    while number.node.target in CASTS and number.node.meta["val"].dtype in INTEGERS:
        number = operand(args_of(number.node)[0], number.index)
    return number


def _of_number(node: Node) -> Callable[[float], float] | None:
    """How a call computes its value from its operand alone, if it compares that with a number or casts it."""
    if node.target in COMPARES and (given := constant(args_of(node)[1])) is not None:
        compare, limit = COMPARES[node.target], _in_type_of(args_of(node)[0], given)
        return lambda number: float(compare(number, limit))
    if node.target in CASTS:
        dtype = node.meta["val"].dtype
        return lambda number: rounded(number, dtype)
    if node.target in NOT and args_of(node)[0].meta["val"].dtype != torch.bool:
        return lambda number: float(number == 0)
    return None


def _in_type_of(value: Node, limit: float) -> float:
    """A number as it is compared with a tensor; one of integers or flags becomes a float."""
    dtype = value.meta["val"].dtype
    return rounded(limit, dtype) if dtype.is_floating_point else limit


def _before(number: Element, counts: Element | None, keys: Index) -> Element | None:
    bounds = bounded(number.node) if number.node.meta["val"].dtype in INTEGERS else None
    if bounds is not None and _holds_all(bounds[1], keys):
        return operand(bounds[0], number.index)
    return None if counts is None else _replaced(number, counts)


def _holds_all(bounds: Bounds, keys: Index) -> bool:
    """Whether no number of a key is out of bounds."""
    return bounds.low <= 0 and (bounds.high == torch.inf or at_most(extent(keys), int(bounds.high) + 1))


def _replaced(number: Element, counts: Element) -> Element | None:
    """What a number is wherever it counts, if it is a fixed one elsewhere: `where(valid, numbers, -1)`."""
    node, compare = number.node, _of_number(counts.node)
    if compare is None or not same_value(_uncast(operand(args_of(counts.node)[0], counts.index)), number):
        return None
    for _, kept, replaced, _ in conditionals(node):
        elsewhere = constant(replaced)
        if elsewhere is not None and not compare(elsewhere) and isinstance(kept, Node):
            return operand(kept, number.index)
    return None


# --- numbers that are written -------------------------------------------------------------------------------------


def _scattered(element: Element, keys: Index) -> Named:
    base, dim, places, source = args_of(element.node)
    return _written(element, keys, dim, base, _of_queries(element, dim, places), _number(source))


def _added(element: Element, keys: Index) -> Named:
    """Read `scatter_add`: a key to which nothing but zeros is added is not named."""
    base, dim, places, source = args_of(element.node)
    index = _of_queries(element, dim, places)
    start, more = _number(base), _number(source)
    inside = None if start is None or more is None else start + more
    flags = before_cast(resolve(source, index[1]))
    is_condition = flags.origin.meta["val"].dtype == torch.bool
    return replace(_written(element, keys, dim, base, index, inside), counts=flags if is_condition else None)


def _filled(element: Element, keys: Index) -> Named:
    base, dim, places, source = args_of(element.node)
    return _written(element, keys, dim, base, _of_all(places, element.node), _number(source))


def _put(element: Element, keys: Index) -> Named:
    """Read `base[..., numbers] = value`."""
    node = element.node
    base, indices, source = args_of(node)[:3]
    dims = [dim for dim, places in enumerate(indices) if places is not None]
    if len(dims) != 1 or argument(node, 3, "accumulate", False):
        raise NoMatch("index_put writes by several indices, or adds to what is there", node)
    return _written(element, keys, dims[0], base, _of_all(indices[dims[0]], node), _number(source))


_Read = tuple[Node, tuple[Index, ...], Index]  # numbers, where they are read, and what they run along


def _of_queries(element: Element, dim: int, places: Node) -> _Read:
    """Numbers that each query has of its own."""
    dim, sizes, own = dim % len(element.index), shape_of(places), shape_of(element.node)
    if any(size != other for at, (size, other) in enumerate(zip(sizes, own, strict=True)) if at != dim):
        raise NoMatch(f"{name_of(element.node)} writes for some of the queries", element.node)
    along = fresh(sizes[dim])
    return places, (*element.index[:dim], along, *element.index[dim + 1 :]), along


def _of_all(places: Node, node: Node) -> _Read:
    """Numbers that all queries share."""
    if len(shape_of(places)) != 1 or places.meta["val"].dtype not in INTEGERS:
        raise NoMatch(f"{name_of(node)} writes by flags or by more than one dimension of numbers", node)
    along = fresh(shape_of(places)[0])
    return places, (along,), along


def _written(element: Element, keys: Index, dim: int, base: Node, read: _Read, inside: float | None) -> Named:
    node, (places, index, along), outside = element.node, read, _number(base)
    if element.index[dim] != keys or keys.axis is None:
        raise NoMatch(f"{name_of(node)} does not write along the keys", node)
    if outside is None:
        raise NoMatch(f"{name_of(node)} does not hide the keys that were not chosen", node)
    if keys.axis in {axis for part in index for axis in part.axes}:
        raise NoMatch("which keys are chosen depends on the key", node)
    stored = None if inside is None else rounded(inside, node.meta["val"].dtype)
    return Named(node, resolve(places, index), along, stored, outside)


def _number(value: Any) -> float | None:
    """The number that a value is everywhere, if there is one; flags count as numbers."""
    if not isinstance(value, Node):
        return float(value)
    if getattr(value.meta["val"], "dtype", None) != torch.bool:
        return constant(value)
    flag = always(element_of(value).node)
    return None if flag is None else float(flag)


# --- numbers that are compared with those of keys -----------------------------------------------------------------


def _reduced(element: Element, keys: Index) -> Named:
    """Read `any`, `sum` or `amax` over flags of the numbers that are a key's own."""
    node = element.node
    source, index, over = reduced(node, element.index)
    flags = resolve(source, index)
    while flags.node.target in CASTS:
        flags = before_cast(flags)
    if flags.node.target is not aten.eq.Tensor or len(over) != 1:
        raise NoMatch(f"{name_of(node)} is not over comparisons of chosen keys with all keys", node)
    sides = [operand(value, flags.index) for value in args_of(flags.node)]
    for numbers, own in (sides, reversed(sides)):
        if not keys.axes & numbers.axes and integer_sum(own) == IntegerSum(keys):
            return Named(node, numbers, over[0], 1.0, 0.0)
    raise NoMatch("chosen keys are compared with other numbers than those of all keys", node)


READERS: dict[Any, Callable[[Element, Index], Named]] = {
    **dict.fromkeys((aten.scatter.value, aten.scatter.src), _scattered),
    aten.scatter_add.default: _added,
    **dict.fromkeys((aten.index_fill.int_Scalar, aten.index_fill.int_Tensor), _filled),
    aten.index_put.default: _put,
    **dict.fromkeys((aten.any.dim, aten.any.dims, aten.sum.dim_IntList, aten.amax.default), _reduced),
}
