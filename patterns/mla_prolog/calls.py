"""What the calls of a prolog have in common: the tokens, the options, and the values that their results replace."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping

import torch
from torch.fx import Node

from mla_fx.rule import Match, NoMatch
from mla_fx.rule.caches import replaced_cache, replaced_rows
from mla_fx.rule.indices import Axes
from mla_fx.rule.operands import Call, Cast, Expression, Replaced, result, tensor
from mla_fx.rule.readings import Element, OperandAxes, RmsNorm, Rope

from .factors import query_factor
from .weights import Caches, query_norm

aten = torch.ops.aten
OPERANDS = ("kv_cache", "query", "query_rope", "kr_cache")


def given(match: Match) -> dict[str, Node]:
    """The operands of attention, by name; those of a rotary part may be missing."""
    found = {name: match.get(OperandAxes, f"{name}.axes") for name in OPERANDS}
    return {name: axes.node for name, axes in found.items() if axes is not None}


def row_axes(match: Match, caches: Caches) -> tuple[Axes, Axes]:
    """Batch and tokens in the operator's form: a cache without a batch is written by all tokens as one sequence.

    Raises NoMatch unless query and rows are computed from the same hidden states, token by token."""
    b, s = match.dims("b s")
    latent = caches["kv_cache"]
    tokens = ((), (*b, *s)) if latent is not None and not latent.batch else (b, s)
    made = ((name, cache) for name, cache in caches.items() if name in given(match))
    if any((cache.row if cache else match.dims("a t")) != tokens for name, cache in made):
        raise NoMatch("query and cached rows are not computed from the same tokens", match["token_x"].origin)
    return tokens


def key_rotation(match: Match, operator: str) -> Rope:
    rotation = match.get(Rope, "kr_cache.rope")
    if rotation is None:
        raise NoMatch(f"query and key are not rotated; {operator} always rotates", match["token_x"].origin)
    return rotation


def options(match: Match, of_keys: float = 1.0) -> dict[str, object]:
    """The numbers and forms of a call in which `of_keys` multiplies k_rope, and the latent, whose norm has no scale but
    that of its epsilon."""
    norm, rotation, of_query = match.reading(RmsNorm, "ckv"), match.get(Rope, "kr_cache.rope"), query_norm(match)
    epsilon = norm.epsilon * of_keys**2
    found: dict[str, object] = {"rmsnorm_epsilon_ckv": epsilon, "gamma_after_cast": norm.gamma_after_cast}
    scales = {"qc_qr_scale": query_factor(match, of_keys), "kc_scale": norm.factor}
    found |= {name: scale for name, scale in scales.items() if scale != 1.0}
    if of_query is not None:
        found["rmsnorm_epsilon_cq"] = of_query.epsilon
    if rotation is not None:
        found["rope_layout"] = rotation.layout
    return found


def numbered(out: Call, places: Mapping[str, int]) -> dict[str, Expression]:
    return {name: Call(operator.getitem, out, place) for name, place in places.items()}


def replaced(
    match: Match,
    results: Mapping[str, Expression],
    rows: tuple[Axes, Axes],
    scale: Element | None,
    caches: Caches,
    *,
    heads_at: int,
) -> Iterator[Replaced]:
    """Both parts of the query, and the caches, or the rows that are used directly. Rows have one head, in dimension
    `heads_at`."""
    olds, n = given(match), match.axes("n")
    for name, new in results.items():
        old = olds.get(name)
        if old is None:
            continue
        cache = caches.get(name)
        if name not in caches:
            new = new if scale is None else Call(aten.mul.Tensor, new, tensor(scale, (*rows, n, ())))
            columns = match.roles(name)[-1]
            part = tensor(result(new, (*rows, n, columns)), match.roles(name))
            yield Replaced(old, Cast(part, old.meta["val"].dtype))
        elif cache is None:
            yield Replaced(old, Call(aten.squeeze.dim, new, heads_at))
        elif cache.update.is_appended:
            dims = [cache.batch, cache.token, cache.width]
            yield replaced_rows(cache, result(new, (*dims[: heads_at], (), *dims[heads_at:])))
        else:
            yield replaced_cache(cache, new)
