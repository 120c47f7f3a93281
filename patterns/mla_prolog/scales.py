"""The scales of a prolog's int8 weights and tokens, and what operators that multiply codes do not do.

    weight mode 0: no projection is int8
    weight mode 1: weight_uq_qr is int8, and the program quantises the normalised latent of the query
    weight mode 2: token_x, weight_dq and weight_dkv_kr are int8, too; the program quantises token_x before

The program's own codes of token_x enter an operator, with their scales. Those of the latent are computed inside.
"""

from __future__ import annotations

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
    axes,
    element_of,
    is_coarser,
    operands_of,
    product,
)

from .factors import because_of_keys
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
