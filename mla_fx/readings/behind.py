"""What is behind a value: the nearest products, the caches that it is read from, and whether its rows are new.

Quantised weights are known here by their products alone, for messages: these are found but not read."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch.fx import Node

from mla_fx.errors import NoMatch, attempt
from mla_fx.graph.provenance import fused_name, label_of
from mla_fx.graph.torch_private import OpOverload
from mla_fx.graph.walk import nearest_first

from .algebra import as_product
from .cache_update import WRITES, cache_update, is_written_where
from .calls import args_of, operands_of
from .element import Element, before_cast, computed_from, element_of, has_8_bits, is_parameter
from .views import shape_of

aten = torch.ops.aten
STORES = WRITES | {aten.cat.default}
# By name, because the operators that multiply stored weights differ between libraries.
ADDING = frozenset({"addmm", "baddbmm"})
PRODUCTS = ADDING | {"mm", "bmm", "matmul", "linear", "_int_mm", "_scaled_mm", "_weight_int8pack_mm"}
NEAR = 200  # values; tokens that are quantised before a product take about thirty
MOST_CALLS = 60  # between a cache and what is read of it; quantising tokens takes about thirty


def is_product(node: Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target._opname in PRODUCTS


# --- products --------------------------------------------------------------------------------------------------------


def quantised_up_projection(value: Node) -> torch.dtype | None:
    """The dtype of the stored weight by which a value is projected up from latents, if that is quantised.

    Latents are narrow, and a product computes them from something wider. The nearest product counts."""
    up = _nearest_product(value)
    down = None if up is None else _nearest_product(_operands(up)[0])
    if up is None or down is None:
        return None
    wide, narrow, expanded = (shape_of(node)[-1] for node in (_operands(down)[0], _operands(up)[0], up))
    is_up = all(isinstance(size, int) for size in (wide, narrow, expanded)) and wide > narrow < expanded
    return _packed_in(_operands(up)[1]) if is_up else None


def quantised_projection(value: Node) -> torch.dtype | None:
    """The dtype of the weight in the nearest product that computes a value, if that is quantised."""
    product = _nearest_product(value)
    return None if product is None else _packed_in(_operands(product)[1])


def _nearest_product(value: Node) -> Node | None:
    return next(filter(is_product, itertools.islice(computed_from(value), NEAR)), None)


def _packed_in(weight: Node) -> torch.dtype | None:
    """The dtype of an 8-bit graph input that a factor is computed from, if there is no product in between."""
    near = itertools.islice(computed_from(weight), NEAR)
    before = itertools.takewhile(lambda node: not is_product(node), near)
    return next((node.meta["val"].dtype for node in before if is_parameter(node) and has_8_bits(node)), None)


def _operands(product: Node) -> tuple[Node, Node]:
    first = 1 if product.target._opname in ADDING else 0  # type: ignore[union-attr]  # an overload, as all products are
    left, right = args_of(product)[first : first + 2]
    return left, right


# --- caches ----------------------------------------------------------------------------------------------------------


def cache_behind(value: Node) -> Node | None:
    """The only written cache that a value is computed from; None if there are several, or none is near."""
    codes = _int8_cache(element_of(value))
    if codes is not None and codes.target is aten.cat.default:
        return codes
    found = caches_behind(value)
    return found[0] if len(found) == 1 else None


def caches_behind(value: Node) -> tuple[Node, ...]:
    """The written caches that a value is computed from; none if one may be far."""
    return tuple(node for node in _near(value) if node.target in WRITES and node is not value)


def packed_cache(latents: Node, keys: Node) -> Node | None:
    """The only written cache that latents and keys are computed from, if keys are read from bytes."""
    caches = {*caches_behind(latents), *caches_behind(keys)}
    are_bytes = any(node.target is aten.view.dtype for node in _near(keys))
    return caches.pop() if are_bytes and len(caches) == 1 else None


def _near(value: Node) -> list[Node]:
    """A value and what it is computed from, back to written caches and products; nothing if one may be far."""
    behind = computed_from(value, lambda node: node.target in WRITES or is_product(node))
    found = [*itertools.islice(behind, MOST_CALLS + 1)]
    return found if len(found) <= MOST_CALLS else []


def _int8_cache(element: Element) -> Node | None:
    """The codes in int8 that an element is dequantised from: a written cache, or a graph input; None if there are
    none."""
    return next((node for node in _factors(element) if node.meta["val"].dtype == torch.int8), None)


def check_int8_cache(element: Element) -> None:
    """Raises NoMatch if latents are dequantised from a cache as it was before the write, or with scales of tokens."""
    codes = _int8_cache(element)
    if codes is None:
        return
    if codes.op == "placeholder":
        because = f"attention reads {label_of(codes)} as it is before new rows are written"
        raise NoMatch(because, codes)
    scales = next((node for node in _factors(element) if node is not codes and node.target in WRITES), None)
    if scales is not None:
        raise NoMatch("the scales of an int8 cache are written with its rows, expected scales that are given", scales)


def _factors(element: Element) -> Iterator[Node]:
    """The caches and graph inputs among the factors of a product, before casts."""
    product = attempt(as_product, element)
    factors = () if product is None else product.factors
    for node in (before_cast(factor).origin for factor, _ in factors):
        if node.op == "placeholder" or node.target in STORES:
            yield node


# --- new rows --------------------------------------------------------------------------------------------------------


def has_new_rows(latents: Element) -> bool:
    """Whether rows are computed here, or written into a cache, and no operator does so already."""
    cache = _cache(latents)
    rows = operands_of(cache)[1:] if cache.target in WRITES else [cache]
    sources = [source for row in rows for source in _sources(row)]
    return not any(map(fused_name, sources)) and (bool(sources) or is_cached(latents))


def is_cached(latents: Element) -> bool:
    """Whether rows are written into a cache: a graph input, or new memory. Other values are only changed in parts."""
    cache = _cache(latents)
    try:
        old = cache_update(element_of(cache)).old
    except NoMatch:  # in a spelling that is not read
        if cache.target not in WRITES:
            return is_written_where(cache) or _int8_cache(latents) is not None
        old = args_of(cache)[0]
    while (origin := element_of(old).origin).target in WRITES:
        old = args_of(origin)[0]
    return not any(fused_name(source) is None for source in _sources(origin))


def is_new(value: Element) -> bool:
    """Whether a value is computed by a product, and is not read from a cache after that."""
    behind = _behind(value.origin)
    return any(map(_is_source, behind)) and not any(node.target in STORES for node in behind)


def _cache(latents: Element) -> Node:
    """The written cache that latents are computed from, or what computes them."""
    written = None if latents.origin.target in WRITES else cache_behind(latents.origin)
    return latents.origin if written is None else written


def _sources(value: Node) -> list[Node]:
    """The nearest matrix products and fused operators that a value is computed from; itself, if it is one."""
    return list(filter(_is_source, _behind(value)))


def _behind(value: Node) -> list[Node]:
    """A value and what it is computed from, back to matrix products and fused operators."""
    return [*nearest_first([value], operands_of, _is_source)]


def _is_source(node: Node) -> bool:
    return is_product(node) or fused_name(node) is not None
