"""The scales of a prolog's int8 weights and tokens, what operators that multiply codes do not do, and what multiplies
the query.

    weight mode 0: no projection is int8
    weight mode 1: weight_uq_qr is int8, and the program quantises the normalised latent of the query
    weight mode 2: token_x, weight_dq and weight_dkv_kr are int8, too; the program quantises token_x before

The program's own codes of token_x enter an operator, with their scales. Those of the latent are computed inside.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch.fx import Node

from mla_fx.rule import Match, NoMatch
from mla_fx.rule.operands import Expression, joined_parts, tensor
from mla_fx.rule.readings import (
    Axes,
    Axis,
    Contraction,
    Element,
    QuantisedTokens,
    RmsNorm,
    Rope,
    Table,
    axes,
    axes_of,
    codes_behind,
    computed_from,
    element_of,
    is_coarser,
    of_axis,
    operands_of,
    product,
    renamed,
    same_value,
)

from .weights import DKV_KR, PROJECTIONS, UQ_QR, Weights

V3 = "mla_prolog_v3"
OF_TOKENS = frozenset({"weight_dq", *DKV_KR})  # the weights that multiply token_x


def weight_mode(match: Match) -> int:
    """Raises NoMatch if mla_prolog_v3 has no mode for what is quantised."""
    named = {name for name in PROJECTIONS if name in match.elements}
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
    raise NoMatch(f"{V3} takes int8 weights of q_b or of all projections; {plain} are not int8", x.origin)


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


def scales_of(match: Match, weights: Weights, mode: int, rows: Axes, of_keys: float) -> list[Expression | None]:
    """The scales of mla_prolog_v3 in its order: token_x, weight_dq, weight_uq_qr, weight_dkv_kr, times `of_keys`, both
    caches, which have none, and the query's latent."""
    uq_qr, smooth = scales_of_query(match, weights)
    x = dq = dkv_kr = None
    if mode == 2:
        x, dq = _wide(_scale(match, "token_x"), rows, ()), _wide(_scale(match, "weight_dq"), (), match.axes("q"))
        dkv_kr = _of_columns(match, DKV_KR, weights, (), of_keys)
    return [x, dq, uq_qr, dkv_kr, None, None, smooth]


def scales_of_query(match: Match, weights: Weights) -> tuple[Expression, Expression | None]:
    """The scales of weight_uq_qr, [1, Columns], and smooth_scales_cq, [1, Hcq]."""
    uq_qr = _of_columns(match, UQ_QR, weights, match.axes("n"))
    if match.choices["query_rank"] != "smoothed":
        return uq_qr, None
    smooth, columns = match["smooth_scales_cq"], match.axes("q")
    if not smooth.axes <= {*columns}:
        raise NoMatch("the query's latent is multiplied by a tensor that differs from token to token", smooth.origin)
    return uq_qr, _wide(smooth, (), columns)


def _wide(scale: Element, *dims: Axes) -> Expression:
    """In float32, or float64 for float64."""
    return tensor(scale, dims, dtype=torch.promote_types(torch.float32, scale.dtype), expand=True)


def _of_columns(match: Match, names: tuple[str, str], weights: Weights, heads: Axes, factor: float = 1.0) -> Expression:
    """The scales of two adjacent parts of a weight, times a factor, [1, Columns]."""
    one, other = (_scale(match, name) for name in names)
    columns, others = (weights.columns[name] for name in names)
    if not one.axes and one == other:  # one for the whole weight
        columns = (Axis(product(axis.size for axis in columns) + product(axis.size for axis in others)),)
    else:
        one, columns = joined_parts(one, columns, other, others, f"the scales of {' and '.join(names)}")
    return _wide(one.times(factor), (), (*heads, *columns))


def _scale(match: Match, name: str) -> Element:
    codes = match[name]
    by = () if codes.scales is None else codes.scales.by
    if len(by) != 1:
        raise NoMatch(f"{name} has {len(by)} scales, {V3} takes one{because_of_keys(match)}", codes.origin)
    return by[0]


# --- the numbers and tensors that multiply the query ------------------------------------------------------------------


def query_factor(match: Match, of_keys: float = 1.0) -> float:
    """The number that multiplies all parts of the query, where `of_keys` is one of k_rope and none of its tables."""
    nope, rope = _factors(match)
    if not _is_same_number(nope, rope * of_keys):
        numbers = f"q_nope is multiplied by {nope:.6g}, q_rope relative to k_rope by {rope:.6g}"
        raise NoMatch(f"{numbers}; the prolog takes one number", match.reading(Contraction, "qr").node)
    norm = match.get(RmsNorm, "cq")
    return nope if norm is None else nope * norm.factor


def factor_of_keys(match: Match, mode: int) -> float:
    """The number that multiplies k_rope if one number is to multiply the query: rotary tables are read with all numbers
    before them. Weights that are codes have it in their scales; it is 1 for others."""
    nope, rope = _factors(match)
    return 1.0 if mode != 2 or nope * rope <= 0 or _is_same_number(nope, rope) else nope / rope


def with_divided_tables(rotation: Rope, by: float) -> Rope:
    def divided(element: Element) -> Element:
        number, plain = element.apart()
        return plain.times(number / by)

    cos, sin = (Table(one.node, divided(one.first), divided(one.second)) for one in (rotation.cos, rotation.sin))
    return replace(rotation, cos=cos, sin=sin)


def _factors(match: Match) -> tuple[float, float]:
    """The number that multiplies q_nope, and that of q_rope relative to k_rope."""
    uq, uk, qr = match.reading(Contraction, "uq"), match.reading(Contraction, "uk"), match.get(Contraction, "qr")
    turned = _rotation_factor(match.get(Rope, "query_rope.rope"), match.get(Rope, "kr_cache.rope"))
    nope = uq.factor * uk.factor
    return nope, nope if qr is None else qr.factor * turned


def _rotation_factor(query: Rope | None, keys: Rope | None) -> float:
    """The number that multiplies the query's tables relative to the key's. Both are rotated by the same tables in the
    same layout, or neither is."""
    if query is None and keys is None:
        return 1.0
    if query is None or keys is None:
        rotated = query or keys
        raise NoMatch("only one of query and key is rotated", rotated.node if rotated else None)
    if query.layout != keys.layout:
        raise NoMatch(f"the query is rotated in layout {query.layout}, the key in {keys.layout}", keys.node)
    pairs = axes_of(keys.pair) or (), axes_of(query.pair) or ()
    if len(pairs[0]) != len(pairs[1]):
        raise NoMatch("the rotary tables of query and key are read in different parts", keys.node)
    pair = dict(zip(pairs[0], map(of_axis, pairs[1]), strict=True))
    factor: float | None = None
    for name, mine, theirs in (("cos", query.cos, keys.cos), ("sin", query.sin, keys.sin)):
        for own, other in ((mine.first, theirs.first), (mine.second, theirs.second)):
            (number, table), (divisor, same) = own.apart(), renamed(other, pair).apart()
            factor = number / divisor if factor is None else factor
            if not same_value(table, same) or not _is_same_number(number, factor * divisor):
                raise NoMatch(f"{name} of the query and {name} of the key are different tensors", other.origin)
    assert factor is not None, "a rotation has tables"
    return factor


def _is_same_number(one: float, other: float) -> bool:
    """Equal except for float64 rounding."""
    return math.isclose(one, other, rel_tol=1e-12)


def query_scale(match: Match, allowed: set[Axis]) -> Element | None:
    """The tensor that multiplies all parts of the query, if there is one; it may have the `allowed` axes."""
    nope, rope = (match.elements.get(f"{part}.scale") for part in ("query", "query_rope"))
    parts = [name for name in ("uq", "qr") if name in match.readings]
    rope = rope if "qr" in parts else nope
    found = nope or rope
    if found is None:
        return None
    if nope is None or rope is None:
        part = "q_nope" if rope is None else "q_rope"
        raise NoMatch(f"only {part} is multiplied by a tensor{because_of_keys(match)}", found.origin)
    if not (nope.axes | rope.axes) <= allowed:
        raise NoMatch("the query is multiplied by a tensor that differs from column to column", nope.origin)
    if nope != rope:
        raise NoMatch("q_nope and q_rope are multiplied by different tensors", rope.origin)
    sources = {match.readings[name].node for name in parts}
    if not sources.isdisjoint(computed_from(nope.origin, lambda node: node < min(sources))):  # not behind earlier ones
        raise NoMatch("the query is multiplied by a tensor computed from it", nope.origin)
    return nope


def because_of_keys(match: Match) -> str:
    """Why the query may have one scale more than the program gives it."""
    because = ": the scales of weight_uk multiply the query, unless a target keeps a copy of weights"
    return "" if codes_behind(match["weight_uk"], near=1) is None else because
