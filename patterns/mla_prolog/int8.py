"""The prolog of a layer whose projections are int8, as one call of mla_prolog_v3.

    weight mode 1: weight_uq_qr is int8, and the program quantises the normalised latent of the query
    weight mode 2: token_x, weight_dq and weight_dkv_kr are int8, too; the program quantises token_x before

The program's own codes of token_x enter the operator, with their scales. Those of the latent are computed inside.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch.fx import Node

from mla_fx.rule import Match, NoMatch
from mla_fx.rule.caches import new_cache, positions_and_caches
from mla_fx.rule.codes import QuantisedTokens, check_codes
from mla_fx.rule.indices import Axes, Axis, axes, product
from mla_fx.rule.operands import Call, Expression, joined_parts, tables, tensor
from mla_fx.rule.readings import Contraction, Element, Rope, element_of, is_coarser, operands_of, shape_of

from .calls import key_rotation, options
from .factors import because_of_keys, factor_of_keys, with_divided_tables
from .weights import PARTS, Caches, Weights

RESULTS = {"query": 0, "query_rope": 1, "kv_cache": 5, "kr_cache": 6}
OF_TOKENS = frozenset({"weight_dq", "weight_dkv", "weight_kr"})  # the weights that multiply token_x
OPERATOR = "mla_prolog_v3"


@dataclass(frozen=True)
class CacheOperands:
    """Positions [B or 1,S] and both caches before the write; `dtype` is that of what is not quantised."""

    dtype: torch.dtype
    index: Expression
    kv_cache: Expression
    kr_cache: Expression


def weight_mode(match: Match) -> int:
    """0 if no projection is quantised. Raises NoMatch if the operator has no mode for what is."""
    named = {name for name in PARTS if name in match.elements and name != "weight_uk"}
    quantised = {name for name in named if match[name].scales is not None}
    x, latent = match["token_x"], match.get(QuantisedTokens, "cq.codes")
    if not quantised and x.scales is None and latent is None:
        return 0
    for name in sorted(quantised):
        are_codes = x.scales is not None if name in OF_TOKENS else latent is not None
        stored = match[name].origin.meta["val"].dtype
        if not are_codes or stored != torch.int8:
            multiplied = "quantised" if are_codes else "plain"
            raise NoMatch(f"{name} is stored in {stored} and multiplied by {multiplied} tokens", match[name].origin)
    if quantised == named and x.scales is not None and latent is not None:
        return 2
    if quantised == named - OF_TOKENS and x.scales is None and latent is not None:
        return 1
    plain = ", ".join(sorted(named - quantised))
    raise NoMatch(f"{OPERATOR} takes int8 weights of q_b or of all projections; {plain} are not int8", x.origin)


def call(
    match: Match,
    mode: int,
    rows: tuple[Axes, Axes],
    weights: Weights,
    caches: CacheOperands,
    **modes: object,
) -> Call:
    """The call whose results are numbered in `RESULTS`."""
    dtype, of_keys = caches.dtype, factor_of_keys(match, mode)
    _check(match, mode, dtype)
    rotation = with_divided_tables(key_rotation(match, OPERATOR), of_keys)
    codes = replace(match["token_x"], scales=None)
    operands = (
        tensor(codes, (*rows, weights.columns["he"]), dtype=dtype if mode == 1 else torch.int8),
        *weights.operands(dtype),
        *tables(rotation, ("sin", "cos"), rows, equal=match.get(Rope, "query_rope.rope"), expand=True),
        *(caches.kv_cache, caches.kr_cache, caches.index),
        *_scales(match, mode, rows, weights, of_keys),
    )
    target = torch.ops.mla_fx.mla_prolog_v3.default
    return Call(target, *operands, **options(match, of_keys), **modes, cache_mode="Norm", weight_quant_mode=mode)


def _check(match: Match, mode: int, dtype: torch.dtype) -> None:
    """Raises NoMatch unless the operator multiplies and rounds as the program does."""
    check_query(match, dtype, OPERATOR)
    if mode == 2:
        check_codes(match["token_x"])
    elif match["token_x"].dtype != dtype:
        raise NoMatch(f"token_x is {match['token_x'].dtype}, the cache {dtype}", match["token_x"].origin)


def check_query(match: Match, dtype: torch.dtype, operator: str) -> None:
    """Raises NoMatch unless the query is computed from the codes of one token, and rounded no further by the
    operator."""
    if match.choices["query_rank"] == "full" or "weight_qr" not in match.elements:
        source = match["token_x"].origin
        raise NoMatch(f"{operator} computes a query with a rotary part from a normalised latent", source)
    codes, up = match.reading(QuantisedTokens, "cq.codes"), match.reading(Contraction, "uq")
    if [axis for part in codes.over for axis in axes(part, "a quantised token", codes.node)] != list(up.axes):
        raise NoMatch("the scale of the query's latent is not that of one token", codes.node)
    scales = match["weight_uq"].scales
    if scales is not None and is_coarser(dtype, scales.dtype):
        raise NoMatch(f"q_nope is in {scales.dtype}, {operator} rounds it to {dtype}", up.node)


def check_products(match: Match, dtype: torch.dtype, operator: str) -> None:
    """Raises NoMatch unless token_x, which is not quantised, is multiplied in its dtype."""
    for name in ("dq", "dkv", "kr"):
        node = match.reading(Contraction, name).node
        if (multiplied := node.meta["val"].dtype) != dtype:
            raise NoMatch(f"token_x is {dtype} and multiplied in {multiplied}; {operator} has one dtype", node)


def factors_of(node: Node) -> list[Node]:
    """What computes the factors of a product; empty if this is none."""
    return [element_of(value).origin for value in operands_of(node)] if node.target is torch.ops.aten.mul.Tensor else []


def plain_caches(match: Match, caches: Caches, rows: tuple[Axes, Axes]) -> CacheOperands:
    """Both caches. Rows that are appended, or used directly, are written into new ones."""
    dtype = match.readings["kv_cache.axes"].node.meta["val"].dtype
    latent, keys = caches["kv_cache"], caches["kr_cache"]
    if latent is not None and not latent.update.is_appended:
        return CacheOperands(dtype, *positions_and_caches(latent, keys))
    batch, tokens = (product(axis.size for axis in role) for role in rows)
    x = match["token_x"].origin
    new = (
        new_cache(x, dtype, batch, 1, tokens, shape_of(match.readings[f"{name}.axes"].node)[-1])
        for name in ("kv_cache", "kr_cache")
    )
    options = {"start": 0, "step": 1, "dtype": torch.int64, "device": x.meta["val"].device, "requires_grad": False}
    counted = Call(torch.ops.prims.iota.default, tokens, **options)
    return CacheOperands(dtype, Call(torch.ops.aten.unsqueeze.default, counted, 0), *new)


# --- scales ----------------------------------------------------------------------------------------------------------


class _Scales(NamedTuple):
    """The operator's scales, in its order. Those of caches are none."""

    dequant_scale_x: Expression | None = None
    dequant_scale_w_dq: Expression | None = None
    dequant_scale_w_uq_qr: Expression | None = None
    dequant_scale_w_dkv_kr: Expression | None = None
    quant_scale_ckv: None = None
    quant_scale_ckr: None = None
    smooth_scales_cq: Expression | None = None


def _scales(match: Match, mode: int, rows: tuple[Axes, Axes], weights: Weights, of_keys: float) -> _Scales:
    uq_qr, smooth = of_query(match, weights)
    if mode == 1:
        return _Scales(dequant_scale_w_uq_qr=uq_qr, smooth_scales_cq=smooth)
    return _Scales(
        dequant_scale_x=_wide(_scale(match, "token_x"), (*rows[0], *rows[1]), ()),
        dequant_scale_w_dq=_of_columns(match, ("weight_dq",), weights, ()),
        dequant_scale_w_uq_qr=uq_qr,
        dequant_scale_w_dkv_kr=_of_columns(match, ("weight_dkv", "weight_kr"), weights, (), of_keys),
        smooth_scales_cq=smooth,
    )


def _wide(scale: Element, *dims: Axes) -> Expression:
    """In float32, or float64 for float64."""
    return tensor(scale, dims, dtype=torch.promote_types(torch.float32, scale.dtype), expand=True)


def _of_columns(
    match: Match, names: tuple[str, ...], weights: Weights, heads: Axes, factor: float = 1.0
) -> Expression:
    """The scales of a weight, or of two adjacent parts of it, times a factor, [1, Columns]."""
    found, widths = [_scale(match, name) for name in names], [weights.columns[name] for name in names]
    whole, columns = found[0], widths[0]
    if not whole.axes and all(scale == whole for scale in found):  # one for the whole weight
        columns = (Axis(sum(product(axis.size for axis in part) for part in widths)),)
    elif len(names) == 2:
        what = f"the scales of {' and '.join(names)}"
        whole, columns = joined_parts(whole, columns, found[1], widths[1], what)
    return _wide(whole.times(factor), (), (*heads, *columns))


def _scale(match: Match, name: str) -> Element:
    codes = match[name]
    by = () if codes.scales is None else codes.scales.by
    if len(by) != 1:
        raise NoMatch(f"{name} has {len(by)} scales, {OPERATOR} takes one{because_of_keys(match)}", codes.origin)
    return by[0]


def _smooth(match: Match, weights: Weights) -> Expression | None:
    """smooth_scales_cq, [1, Hcq]."""
    if match.choices["query_rank"] != "smoothed":
        return None
    smooth, columns = match["smooth_scales_cq"], weights.columns["hcq"]
    if not smooth.axes <= {*columns}:
        raise NoMatch("the query's latent is multiplied by a tensor that differs from token to token", smooth.origin)
    return _wide(smooth, (), columns)


def of_query(match: Match, weights: Weights) -> tuple[Expression, Expression | None]:
    """The scales of weight_uq_qr, [1, Columns], and smooth_scales_cq."""
    uq_qr = _of_columns(match, ("weight_uq", "weight_qr"), weights, weights.columns["heads"])
    return uq_qr, _smooth(match, weights)
