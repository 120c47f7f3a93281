"""Attention over latents that the program dequantises before, as attention over the codes themselves.

    attention(query, query_rope, codes.to(dtype) * scales, kr_cache)
        -> attention(query, query_rope, codes, kr_cache, kv_scales=scales)

Spellings: int8 or float8 in a cache of their own, or in the bytes of packed rows; one scale for all, for each column,
token, or tile of columns; pages that are dequantised before they are looked up, or after. Rotary keys may be codes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Graph, Node

from mla_fx.cases import HCKV, B, Case, Layer, T
from mla_fx.ops.emitted.attention.codes import CODES
from mla_fx.rule import CallPattern, Match, NoMatch, Plan, Rule, attempt
from mla_fx.rule.operands import ATTENTION, Call, Expression, Replacement, call_with, has_heads, tensor, times
from mla_fx.rule.readings import (
    Axes,
    Element,
    Reading,
    axes_of,
    codes_behind,
    dequantised,
    element_of,
    fresh_index,
    is_coarser,
    leaves,
    named_argument,
    options_of,
    renamed,
    resolve,
    without_digits,
)

aten = torch.ops.aten
TILES = 4


class _Tiles(Layer):
    """Latents in int8, with a scale for each token and tile."""

    def __init__(self) -> None:
        super().__init__()
        self.codes: Tensor
        self.scales: Tensor
        self.register_buffer("codes", torch.zeros(B, 1, T, HCKV, dtype=torch.int8))
        self.register_buffer("scales", torch.ones(B, 1, T, TILES))

    def store(self, latent: Tensor, k_rope: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        _, keys = super().store(latent, k_rope, position)
        tiles = latent.view(*latent.shape[:-1], TILES, -1)
        scales = tiles.abs().amax(-1) / 127
        codes = (tiles / scales.unsqueeze(-1)).round().clamp(-128, 127).to(torch.int8)
        self.codes.index_copy_(2, position, codes.flatten(-2))
        self.scales.index_copy_(2, position, scales)
        numbers = self.numbers(latent.dtype).view(*tiles.shape[:2], T, TILES, -1) * self.scales.unsqueeze(-1)
        return numbers.flatten(-2), keys

    def numbers(self, dtype: torch.dtype) -> Tensor:
        return self.codes.to(dtype)


class _WithOffset(_Tiles):
    def numbers(self, dtype: torch.dtype) -> Tensor:
        return super().numbers(dtype) + self.scales[0, 0, 0, 0]


class CodedLatents(Rule):
    stage = "cache"
    after = ("kv_rmsnorm_rope_cache",)  # rules that quantise latents read what the program computes from codes
    targets = (ATTENTION,)
    pattern = CallPattern()
    accepts = (Case("a scale for each tile", _Tiles, {"latent_attention": 1}),)
    rejects = (Case("codes with an offset", _WithOffset, because="codes have an offset"),)

    def anchors(self, graph: Graph) -> Iterator[Node]:
        caches = ((call, element_of(named_argument(call, "kv_cache"))) for call in super().anchors(graph))
        coded = (call for call, cache in caches if codes_behind(cache) is not None)
        return (call for call in coded if named_argument(call, "kv_scales") is None and _may_be_absorbed(call))

    def rewrite(self, match: Match) -> Plan:
        call = match.reading(Reading, "call").node
        latents = _coded(call, "kv_cache")
        keys = _rotary(call, latents)
        given = {"kv_cache": latents.codes, "kv_scales": latents.scales}
        given |= {} if keys is None else {"kr_cache": keys.codes, "kr_scales": keys.scales}
        exact = (one for coded in (latents, keys) if coded is not None for one in coded.calls)
        return Plan(Replacement(call, call_with(call, **given)), exact=exact)


def _may_be_absorbed(call: Node) -> bool:
    """Keys and values are expanded from numbers."""
    return not has_heads(call) or options_of(call).get("max_absorbed_tokens", 0) != 0


@dataclass(frozen=True)
class _Coded:
    """Codes and scales of a cache, and the calls of the program that round no further."""

    codes: Expression
    scales: Expression
    dtype: torch.dtype
    calls: tuple[Node, ...]


def _rotary(call: Node, latents: _Coded) -> _Coded | None:
    """The rotary keys, if they are codes of the same kind; others stay numbers."""
    if named_argument(call, "kr_cache") is None:
        return None
    found = attempt(_coded, call, "kr_cache")
    return found if found is not None and found.dtype == latents.dtype else None


def _coded(call: Node, name: str) -> _Coded:
    """Read a cache [B, T, columns], or pages of it, as codes times scales."""
    node = named_argument(call, name)
    fresh = fresh_index(node)
    element = resolve(node, fresh)
    factor, number = element.apart()
    found = dequantised(number, CODES)
    if found.offset is not None:
        raise NoMatch("codes have an offset, attention takes none", found.offset.origin)
    if is_coarser(found.dtype, element.dtype):
        raise NoMatch(f"numbers are rounded to {found.dtype}, attention to {element.dtype}", element.origin)
    if (query := named_argument(call, "query").meta["val"].dtype) != element.dtype:
        raise NoMatch(f"numbers are in {element.dtype}, and the absorbed query in {query}", element.origin)
    parts = [found.codes, *([] if found.scale is None else [found.scale])]
    parted = without_digits(index for part in parts for index in part.index)
    if parted is None:
        raise NoMatch("codes and their scales are read in parts of other sizes", element.origin)
    whole = [axes_of(index) or () for index in fresh]
    codes, dims = tensor(found.codes.stored, whole), [leaves(dim, parted) for dim in whole]
    scale = None if found.scale is None else renamed(found.scale, parted)
    return _Coded(codes, _scales(scale, factor, dims, element), found.codes.stored.dtype, found.calls)


def _scales(scale: Element | None, factor: float, dims: Sequence[Axes], numbers: Element) -> Expression:
    """[B or 1, T or 1, C], or of pages: those of adjacent columns differ only between tiles of them."""
    if scale is None:
        device = numbers.origin.meta["val"].device
        return Call(aten.full.default, [1, 1, 1], factor, dtype=torch.float32, device=device, pin_memory=False)
    *rows, columns = dims
    tiles = tuple(axis for axis in columns if axis in scale.axes)
    if tiles != columns[: len(tiles)]:
        raise NoMatch("the scales of codes are not those of adjacent columns", scale.origin)
    if tiles == columns and not scale.axes.isdisjoint({axis for dim in rows for axis in dim}):
        raise NoMatch("each code has a scale of its own", scale.origin)
    is_partly = any(set(dim) - scale.axes and set(dim) & scale.axes for dim in rows)
    wide = None if factor == 1.0 else torch.promote_types(torch.float32, numbers.dtype)
    return times(tensor(scale, (*rows, tiles), dtype=wide, expand=is_partly), factor)
