"""The engine of all prologs: one layer as it was matched, and the plan that replaces its query and its caches."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch.fx import Graph, Node

from mla_fx.rule import Match, NoMatch, Plan, Rule
from mla_fx.rule.caches import CacheRoles, replacing_cache
from mla_fx.rule.operands import ATTENTION, Call, Cast, Expression, Replacement, has_heads, result, tables, tensor
from mla_fx.rule.readings import (
    Axes,
    Element,
    OperandAxes,
    QuantisedTiles,
    QuantisedTokens,
    RmsNorm,
    Rope,
    check_codes,
)

from .scales import V3, check_query, factor_of_keys, query_factor, query_scale, scales_of, with_divided_tables
from .weights import Caches, Weights, query_norm

aten = torch.ops.aten
OPERANDS = ("kv_cache", "query", "query_rope", "kr_cache")
QUERIES = ("query", "query_rope")
RESULTS = {  # of each operator, by number
    torch.ops.mla_fx.mla_prolog.default: {"query": 0, "query_rope": 1, "kv_cache": 2, "kr_cache": 3},
    torch.ops.mla_fx.mla_prolog_v3.default: {"query": 0, "query_rope": 1, "kv_cache": 5, "kr_cache": 6},
    torch.ops.mla_fx.mla_prolog_quant.default: {
        "query": 2,
        "query_rope": 3,
        "kv_cache": 4,
        "kr_cache": 5,
        "k_scale_cache": 6,
    },
}


@dataclass(frozen=True)
class MatchedLayer:
    """`rows` are batch and tokens, or tokens alone, in the operator's form; `dtype` is that of what is not quantised;
    `scale` multiplies the query."""

    match: Match
    mode: int
    dtype: torch.dtype
    caches: Caches
    rows: tuple[Axes, ...]
    weights: Weights
    scale: Element | None

    @classmethod
    def of(
        cls, match: Match, mode: int, dtype: torch.dtype, caches: Caches, *, is_batched: bool = True
    ) -> MatchedLayer:
        """Weights are parts of one matrix each; query and key come from the same tokens, and are rotated and written
        alike."""
        rows = _rows(match, caches)
        weights = Weights.of(match, caches)
        match.reading(RmsNorm, "ckv").check_rows(weights.columns["weight_dkv"])
        b, s, n = match.dims("b s n")
        scale = query_scale(match, {*b, *s, *n})
        return cls(match, mode, dtype, caches, rows if is_batched else rows[1:], weights, scale)

    def tokens(self) -> Expression:
        """token_x; codes stay codes."""
        dtype = torch.int8 if self.mode == 2 else self.dtype
        return tensor(replace(self.match["token_x"], scales=None), (*self.rows, self.match.axes("h")), dtype=dtype)

    def rotation(self, operator: str) -> Rope:
        found = self.match.get(Rope, "kr_cache.rope")
        if found is None:
            raise NoMatch(f"query and key are not rotated; {operator} always rotates", self.match["token_x"].origin)
        return found

    def tables(self, rotation: Rope | None, *names: str, expand: bool = True) -> list[Expression | None]:
        """The rotary tables of the key, which are those of the query, too."""
        return tables(rotation, names, self.rows, equal=self.match.get(Rope, "query_rope.rope"), expand=expand)


class Prolog(Rule):
    """A form of caches: what it reads, and the operator that writes it."""

    stage = "prolog"
    targets = (ATTENTION,)

    def anchors(self, graph: Graph) -> Iterator[Node]:
        """Attention of absorbed queries."""
        return (call for call in super().anchors(graph) if not has_heads(call))

    def rewrite(self, match: Match) -> Plan:
        layer = self.layer(match)
        out = self.call(layer)
        new = {name: Call(operator.getitem, out, place) for name, place in RESULTS[out.target].items()}
        tokens, tiles = match.get(QuantisedTokens, "cq.codes"), match.get(QuantisedTiles, "tiles")
        codes = [found for found in (tokens, tiles) if found is not None]
        differences = dict.fromkeys(difference for found in codes for difference in found.differences)
        differences |= dict.fromkeys(self.differences(layer))
        changed = (part for name, value in new.items() for part in self.replacing(layer, name, value))
        return Plan(*changed, differences=[*differences], exact=(call for found in codes for call in found.whole))

    def layer(self, match: Match) -> MatchedLayer:
        raise NotImplementedError

    def call(self, layer: MatchedLayer) -> Call:
        """Raises NoMatch unless the operator computes what the program does."""
        raise NotImplementedError

    def differences(self, layer: MatchedLayer) -> Iterator[str]:
        """Where the program's codes and scales may differ from the operator's, besides those of the readings."""
        return iter(())

    def replacing(self, layer: MatchedLayer, name: str, new: Expression) -> Iterator[Replacement]:
        """A part of the query, a cache, or the rows that are used directly."""
        old, cache = given(layer.match).get(name), layer.caches.get(name)
        if cache is not None:
            yield replacing_cache(cache, new, self.heads_at(layer, cache))
        elif old is not None and name in QUERIES:
            yield _replacing_query(layer, name, old, new)
        elif old is not None:
            yield Replacement(old, Call(aten.squeeze.dim, new, self.heads_at(layer)))

    def heads_at(self, layer: MatchedLayer, cache: CacheRoles | None = None) -> int:
        """The dimension of the one head in the operator's cache, or in its rows that are used directly."""
        return 1


def _replacing_query(layer: MatchedLayer, name: str, old: Node, new: Expression) -> Replacement:
    dims, n = layer.match.roles(name), layer.match.axes("n")
    if layer.scale is not None:
        new = Call(aten.mul.Tensor, new, tensor(layer.scale, (*layer.rows, n, ())))
    part = tensor(result(new, (*layer.rows, n, dims[-1])), dims)
    return Replacement(old, Cast(part, old.meta["val"].dtype))


def given(match: Match) -> dict[str, Node]:
    """The operands of attention, by name; those of a rotary part may be missing."""
    found = {name: match.get(OperandAxes, f"{name}.axes") for name in OPERANDS}
    return {name: axes.node for name, axes in found.items() if axes is not None}


def _rows(match: Match, caches: Caches) -> tuple[Axes, Axes]:
    """Batch and tokens in the operator's form: a cache without a batch is written by all tokens as one sequence.

    Raises NoMatch unless query and rows are computed from the same hidden states, token by token."""
    b, s = match.dims("b s")
    latent = caches["kv_cache"]
    tokens = ((), (*b, *s)) if latent is not None and not latent.batch else (b, s)
    made = ((name, cache) for name, cache in caches.items() if name in given(match))
    if any((cache.row if cache else match.dims("a t")) != tokens for name, cache in made):
        raise NoMatch("query and cached rows are not computed from the same tokens", match["token_x"].origin)
    return tokens


# --- the calls of mla_prolog and of mla_prolog_v3, which have all but scales and modes in common ----------------------


@dataclass(frozen=True)
class CacheOperands:
    """Positions [B or 1,S], and both caches before the write."""

    index: Expression | None
    kv_cache: Expression
    kr_cache: Expression
    mode: str = "Norm"


def call(layer: MatchedLayer, caches: CacheOperands, **modes: object) -> Call:
    """Raises NoMatch unless the operator multiplies and rounds as the program does."""
    match, mode, dtype = layer.match, layer.mode, layer.dtype
    x, rotation, of_keys = match["token_x"], match.get(Rope, "kr_cache.rope"), factor_of_keys(match, mode)
    if mode:
        check_query(match, dtype, V3)
    if mode == 2:
        check_codes(x)
    elif x.dtype != dtype:
        raise NoMatch(f"token_x is {x.dtype}, the cache {dtype}", x.origin)
    if mode:
        rotation = with_divided_tables(layer.rotation(V3), of_keys)
    shared = (
        layer.tokens(),
        *layer.weights.operands(dtype),
        *layer.tables(rotation, "sin", "cos", expand=bool(mode) or not layer.rows[0]),
    )
    options = {**_options(match, of_keys), **modes, "cache_mode": caches.mode}
    if not mode:
        target = torch.ops.mla_fx.mla_prolog.default
        return Call(target, *shared, caches.index, caches.kv_cache, caches.kr_cache, **options)
    scales = scales_of(match, layer.weights, mode, (*layer.rows[0], *layer.rows[1]), of_keys)
    operands = (*shared, caches.kv_cache, caches.kr_cache, caches.index, *scales)
    return Call(torch.ops.mla_fx.mla_prolog_v3.default, *operands, **options, weight_quant_mode=mode)


def _options(match: Match, of_keys: float) -> dict[str, object]:
    """The numbers and forms of a call in which `of_keys` multiplies k_rope, and the latent, whose norm has no scale but
    that of its epsilon."""
    norm, rotation, of_query = match.reading(RmsNorm, "ckv"), match.get(Rope, "kr_cache.rope"), query_norm(match)
    found: dict[str, object] = {
        "rmsnorm_epsilon_ckv": norm.epsilon * of_keys**2,
        "gamma_after_cast": norm.gamma_after_cast,
    }
    scales = {"qc_qr_scale": query_factor(match, of_keys), "kc_scale": norm.factor}
    found |= {name: scale for name, scale in scales.items() if scale != 1.0}
    if of_query is not None:
        found["rmsnorm_epsilon_cq"] = of_query.epsilon
    if rotation is not None:
        found["rope_layout"] = rotation.layout
    return found
