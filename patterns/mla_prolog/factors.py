"""The numbers and tensors that multiply the query of a prolog."""

from __future__ import annotations

import math

from mla_fx.rule import Match, NoMatch
from mla_fx.rule.codes import codes_behind
from mla_fx.rule.indices import Axis, axes_of, of_axis, renamed
from mla_fx.rule.readings import Contraction, Element, RmsNorm, Rope, computed_from, same_value


def query_factor(match: Match) -> float:
    """The number that multiplies all parts of the query."""
    uq, uk, qr = match.reading(Contraction, "uq"), match.reading(Contraction, "uk"), match.get(Contraction, "qr")
    turned = _rotation_factor(match.get(Rope, "query_rope.rope"), match.get(Rope, "kr_cache.rope"))
    nope = uq.factor * uk.factor
    if qr is not None and not _is_same_number(nope, qr.factor * turned):
        numbers = f"q_nope is multiplied by {nope:.6g}, q_rope relative to k_rope by {qr.factor * turned:.6g}"
        raise NoMatch(f"{numbers}; the prolog takes one number", qr.node)
    norm = match.get(RmsNorm, "cq")
    return nope if norm is None else nope * norm.factor


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
        raise NoMatch(f"only {part} is multiplied by a tensor{of_keys(match)}", found.origin)
    if not (nope.axes | rope.axes) <= allowed:
        raise NoMatch("the query is multiplied by a tensor that differs from column to column", nope.origin)
    if nope != rope:
        raise NoMatch("q_nope and q_rope are multiplied by different tensors", rope.origin)
    sources = {match.readings[name].node for name in parts}
    if not sources.isdisjoint(computed_from(nope.origin, lambda node: node < min(sources))):  # not behind earlier ones
        raise NoMatch("the query is multiplied by a tensor computed from it", nope.origin)
    return nope


def of_keys(match: Match) -> str:
    """Why the query may have one scale more than the program gives it."""
    because = ": the scales of weight_uk multiply the query, unless a target keeps a copy of weights"
    return "" if codes_behind(match["weight_uk"], near=1) is None else because
