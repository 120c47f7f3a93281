"""Caches in 8 bits, and latents that a program quantises again whenever it reads its cache: the caches behind them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch.fx import Node

from mla_fx.errors import NoMatch
from mla_fx.graph.provenance import label_of

from .algebra import as_product
from .cache_update import WRITES
from .element import Element, before_cast, computed_from, element_of
from .quantised import is_product

aten = torch.ops.aten
MOST_CALLS = 60  # between a cache and what is read of it; quantising tokens takes about thirty


def cache_behind(value: Node) -> Node | None:
    """The only written cache that a value is computed from; None if there are several, or none is near."""
    codes = int8_cache(element_of(value))
    if codes is not None and codes.target is aten.cat.default:
        return codes
    found = caches_behind(value)
    return found[0] if len(found) == 1 else None


def caches_behind(value: Node) -> tuple[Node, ...]:
    """The written caches that a value is computed from; none if one may be far."""
    return tuple(node for node in _behind(value) if node.target in WRITES and node is not value)


def packed_cache(latents: Node, keys: Node) -> Node | None:
    """The only written cache that latents and keys are computed from, if keys are read from bytes."""
    caches = {*caches_behind(latents), *caches_behind(keys)}
    are_bytes = any(node.target is aten.view.dtype for node in _behind(keys))
    return caches.pop() if are_bytes and len(caches) == 1 else None


def _behind(value: Node) -> list[Node]:
    """A value and what it is computed from, back to written caches and products; nothing if one may be far."""
    behind = computed_from(value, lambda node: node.target in WRITES or is_product(node))
    found = [*itertools.islice(behind, MOST_CALLS + 1)]
    return found if len(found) <= MOST_CALLS else []


def int8_cache(element: Element) -> Node | None:
    """The codes in int8 that an element is dequantised from: a written cache, or a graph input; None if there are
    none."""
    return next((node for node in _factors(element) if node.meta["val"].dtype == torch.int8), None)


def check_int8_cache(element: Element) -> None:
    """Raises NoMatch if latents are dequantised from a cache as it was before the write, or with scales of tokens."""
    codes = int8_cache(element)
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
    try:
        factors = [factor for factor, _ in as_product(element).factors]
    except NoMatch:
        return
    for node in (before_cast(factor).origin for factor in factors):
        if node.op == "placeholder" or node.target in WRITES | {aten.cat.default}:
            yield node
