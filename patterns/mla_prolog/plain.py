"""A prolog whose rows have the dtype of attention: written into caches, appended to them, or used directly. Its
operator is mla_prolog, or mla_prolog_v3 if projections are int8."""

from __future__ import annotations

import operator
from collections.abc import Iterator

import torch
from torch.fx import Node

from mla_fx.rule import Match, NearestMiss, NoMatch, behind, either, stored
from mla_fx.rule.caches import CacheRoles, CacheUpdate, cache_roles, check_same_write, new_cache, positions_and_caches
from mla_fx.rule.operands import Call
from mla_fx.rule.readings import element_of, named_argument, own_part, product, shape_of

from .dataflow import KV_LATENT, over
from .prolog import CacheOperands, MatchedLayer, Prolog, call, given
from .scales import weight_mode
from .weights import Caches

aten = torch.ops.aten

WRITTEN = stored(KV_LATENT, name="kv_cache.write")


class Plain(Prolog):
    pattern = over(either("kv_cache.read", plain=WRITTEN, quantised=behind(WRITTEN)))

    def bindings(self, anchor: Node, nearest: NearestMiss) -> Iterator[Match]:
        """Nothing where an operator has computed the query: parts of a context have one query, whose prolog fused."""
        return iter(()) if _is_fused(anchor) else super().bindings(anchor, nearest)

    def layer(self, match: Match) -> MatchedLayer:
        mode, dtype = weight_mode(match), given(match)["kv_cache"].meta["val"].dtype
        return MatchedLayer.of(match, mode, dtype, _caches(match, may_be_nz=not mode))

    def call(self, layer: MatchedLayer) -> Call:
        return call(layer, _operands(layer))

    def heads_at(self, layer: MatchedLayer, cache: CacheRoles | None = None) -> int:
        """mla_prolog returns new rows [B, S, 1, width]."""
        return 1 if layer.mode or (cache and not cache.update.is_appended) else 2


def _is_fused(anchor: Node) -> bool:
    """Whether an operator has computed the query already."""
    return element_of(own_part(named_argument(anchor, "query"))).origin.target is operator.getitem


def _caches(match: Match, *, may_be_nz: bool) -> Caches:
    """How latent and rotary key are cached: alike, or not at all."""
    latent, keys = match.get(CacheUpdate, "kv_cache.write"), match.get(CacheUpdate, "kr_cache.write")
    if "kr_cache" not in given(match):
        roles_of_latent = None if latent is None else cache_roles(latent, may_be_nz=may_be_nz)
        return {"kv_cache": roles_of_latent, "kr_cache": None}
    if match.choices["kv_cache.write"] != match.choices["kr_cache.write"]:
        raise NoMatch("latent and rotary key are not cached in the same way", match.readings["kr_cache.axes"].node)
    if latent is None or keys is None:
        return {"kv_cache": None, "kr_cache": None}
    found = cache_roles(latent, may_be_nz=may_be_nz), cache_roles(keys, may_be_nz=may_be_nz)
    check_same_write(*found)
    return dict(zip(("kv_cache", "kr_cache"), found, strict=True))


def _operands(layer: MatchedLayer) -> CacheOperands:
    """Both caches. Rows that are appended, or used directly, are written into new ones."""
    latent, keys = layer.caches["kv_cache"], layer.caches["kr_cache"]
    if latent is not None and not latent.update.is_appended:
        return CacheOperands(*positions_and_caches(latent, keys), latent.mode)
    made, x = given(layer.match), layer.match["token_x"].origin
    batch, tokens = (product(axis.size for axis in role) for role in layer.rows)
    lead = (batch, 1, tokens) if layer.mode else (batch, tokens, 1)
    widths = (shape_of(made[name])[-1] if name in made else 0 for name in ("kv_cache", "kr_cache"))
    kv_cache, kr_cache = (new_cache(x, layer.dtype, *lead, width) for width in widths)
    if not layer.mode:
        return CacheOperands(None, kv_cache, kr_cache, "BSND")
    options = {"start": 0, "step": 1, "dtype": torch.int64, "device": x.meta["val"].device, "requires_grad": False}
    counted = Call(torch.ops.prims.iota.default, tokens, **options)
    return CacheOperands(Call(aten.unsqueeze.default, counted, 0), kv_cache, kr_cache)
