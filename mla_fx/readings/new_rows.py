"""Rows of the context that attention reads: whether a graph computes them, and whether they enter a cache."""

from __future__ import annotations

import torch
from torch.fx import Node

from mla_fx.errors import NoMatch
from mla_fx.graph.provenance import fused_name

from .cache_update import WRITES, cache_update, is_written_where
from .calls import args_of, operands_of
from .element import Element, computed_from, element_of
from .quantised import is_product
from .quantised_cache import cache_behind, int8_cache

aten = torch.ops.aten
STORES = WRITES | {aten.cat.default}


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
            return is_written_where(cache) or int8_cache(latents) is not None
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
    return [value] if _is_source(value) else [*computed_from(value, _is_source)]


def _is_source(node: Node) -> bool:
    return is_product(node) or fused_name(node) is not None
