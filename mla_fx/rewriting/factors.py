"""The numbers and tensors by which operands of the prolog and of attention are multiplied."""

from __future__ import annotations

import math

import torch

from mla_fx.errors import NoMatch
from mla_fx.matching.match import Match
from mla_fx.readings.attention import Attention
from mla_fx.readings.axes import Axis, axes_of, of_axis
from mla_fx.readings.contraction import Contraction
from mla_fx.readings.element import Element, computed_from
from mla_fx.readings.reading import renamed
from mla_fx.readings.rms_norm import RmsNorm
from mla_fx.readings.rope import Rope


def query_factor(match: Match) -> float:
    """The number by which the query is multiplied, in all its parts."""
    uq, uk, qr = match.reading(Contraction, "uq"), match.reading(Contraction, "uk"), match.get(Contraction, "qr")
    turned = rotation_factor(match.get(Rope, "query_rope.rope"), match.get(Rope, "kr_cache.rope"))
    nope = uq.factor * uk.factor
    if qr is not None and not is_same_number(nope, qr.factor * turned):
        numbers = f"q_nope is multiplied by {nope:.6g}, q_rope beside k_rope by {qr.factor * turned:.6g}"
        raise NoMatch(f"{numbers}, the prolog by one number", qr.node)
    norm = match.get(RmsNorm, "cq")
    return nope if norm is None else nope * norm.factor


def rotation_factor(query: Rope | None, keys: Rope | None) -> float:
    """By which number the query's tables are multiplied beside the key's: both are rotated by the same tables in the
    same layout, or neither is."""
    if query is None and keys is None:
        return 1.0
    if query is None or keys is None:
        rotated = query or keys
        raise NoMatch("only one of query and key is rotated", rotated.node if rotated else None)
    if query.layout != keys.layout:
        raise NoMatch(f"the query is rotated in layout {query.layout}, the key in {keys.layout}", keys.node)
    pair = dict(zip(axes_of(keys.pair) or (), map(of_axis, axes_of(query.pair) or ()), strict=True))
    factor: float | None = None
    for name, mine, theirs in (("cos", query.cos, keys.cos), ("sin", query.sin, keys.sin)):
        for own, other in ((mine.first, theirs.first), (mine.second, theirs.second)):
            (number, table), (divisor, same) = own.apart(), renamed(other, pair).apart()
            factor = number / divisor if factor is None else factor
            if table != same or not is_same_number(number, factor * divisor):
                raise NoMatch(f"{name} of the query and {name} of the key are different tensors", other.origin)
    assert factor is not None, "a rotation has tables"
    return factor


def is_same_number(one: float, other: float) -> bool:
    """The same but for what float64 loses on the way."""
    return math.isclose(one, other, rel_tol=1e-12)


def query_scale(match: Match, allowed: set[Axis]) -> Element | None:
    """The tensor by which all parts of the query are multiplied, if there is one; it may run along `allowed` axes."""
    nope, rope = (match.elements.get(f"{part}.scale") for part in ("query", "query_rope"))
    parts = [name for name in ("uq", "qr") if name in match.readings]
    rope = rope if "qr" in parts else nope
    found = nope or rope
    if found is None:
        return None
    if nope is None or rope is None:
        part = "q_nope" if rope is None else "q_rope"
        raise NoMatch(f"of the query only {part} is multiplied by a tensor", found.origin)
    if not (nope.axes | rope.axes) <= allowed:
        raise NoMatch("the query is multiplied by a tensor that differs from column to column", nope.origin)
    if nope != rope:
        raise NoMatch("q_nope and q_rope are multiplied by different tensors", rope.origin)
    sources = (match.readings[name].node for name in parts)
    if any(nope.origin is source or source in computed_from(nope.origin, since=source) for source in sources):
        raise NoMatch("the query is multiplied by a tensor that is computed from it", nope.origin)
    return nope


def attention_factors(match: Match, keys: str, dtype: torch.dtype) -> tuple[float, dict[str, float]]:
    """The softmax scale, and by which numbers operands and the result are multiplied besides: nope and rotary scores
    have one scale, and what the program scales down before a product is not left larger in float16."""
    found = match.reading(Attention, "attention")
    nope, up, rotary, down = (match.get(Contraction, name) for name in ("nope", "up", "rope", "down"))
    assert nope is not None, "every pattern has it"
    # an absorbed query is taken as it is, and its factor is part of it
    expanded = 1.0 if up is None or keys == "absorbed" else up.factor
    values = found.value_factor * (1.0 if down is None else down.factor)
    factors: dict[str, float] = {}
    if dtype == torch.float16 and abs(expanded) < 1 and keys == "expanded":
        factors["weight_uk"], expanded = expanded, 1.0
    if dtype == torch.float16 and abs(values) < 1 and down is not None:
        factors["weight_uv"], values = values, 1.0
    factors["out"], query = values, "query" if keys == "absorbed" else "q_nope"
    scale = own = nope.factor * expanded
    if rotary is not None and rotary.factor != own:
        # a query of float16 is only made smaller, of another type not much larger
        most = 1.0 if dtype == torch.float16 else torch.finfo(dtype).max ** 0.25
        if abs(own) > most * abs(rotary.factor):
            factors["q_rope"] = rotary.factor / own
        else:
            scale, factors[query] = rotary.factor, own / rotary.factor
    for name, factor in factors.items():
        if not 16 * torch.finfo(dtype).tiny <= abs(factor) <= torch.finfo(dtype).max:
            raise NoMatch(f"{name} would be multiplied by {factor:.6g}, and {dtype} has no room for that", found.node)
    return scale, factors
