"""The numbers and tensors that multiply the query of a prolog."""

from __future__ import annotations

import math
from dataclasses import replace

from mla_fx.rule import Match, NoMatch
from mla_fx.rule.readings import (
    Axis,
    Contraction,
    Element,
    RmsNorm,
    Rope,
    Table,
    axes_of,
    codes_behind,
    computed_from,
    of_axis,
    renamed,
    same_value,
)


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
