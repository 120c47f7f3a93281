"""The weights of a prolog: those of adjacent columns as one, each with the axes of its columns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from mla_fx.rewriting.operands import CacheRoles, check_norm_of_rows, joined_weights, rotary
from mla_fx.rewriting.weights import check_weight
from mla_fx.rule import Axes, Contraction, Element, Expression, Match, NoMatch, RmsNorm, roles, tensor

PARTS = ("weight_dq", "weight_uq", "weight_qr", "weight_uk", "weight_dkv", "weight_kr")
Caches = Mapping[str, CacheRoles | None]


@dataclass(frozen=True)
class Weights:
    """`columns` has the axes of each part, of the heads, and of the hidden states. There is no `dq` if the query is
    projected from the hidden states."""

    dq: Element | None
    uq_qr: tuple[Element, Axes]
    uk: Element
    dkv_kr: tuple[Element, Axes]
    gamma_cq: Element | None
    gamma_ckv: Element
    columns: Mapping[str, Axes]

    def operands(self, dtype: torch.dtype) -> list[Expression | None]:
        """weight_dq, weight_uq_qr, weight_uk, weight_dkv_kr and both gammas. Codes stay codes."""
        names = ("he", "hcq", "heads", "weight_uq", "hckv", "weight_dkv")
        he, hcq, n, d, hckv, width = (self.columns[name] for name in names)

        def weight(element: Element, *dims: Axes) -> Expression:
            codes = replace(element, scales=None)
            return tensor(codes, dims, dtype=torch.int8 if is_int8(element) else dtype)

        return [
            None if self.dq is None else weight(self.dq, he, hcq),
            weight(self.uq_qr[0], hcq, (*n, *self.uq_qr[1])),
            tensor(self.uk, (n, d, hckv), dtype=dtype),
            weight(self.dkv_kr[0], he, self.dkv_kr[1]),
            None if self.gamma_cq is None else tensor(self.gamma_cq.stored, (hcq,)),
            tensor(self.gamma_ckv.stored, (width,)),
        ]


def is_int8(weight: Element) -> bool:
    return bool(weight.origin.meta["val"].dtype == torch.int8)


def weights(match: Match, caches: Caches) -> Weights:
    """Raises NoMatch if a weight is not a parameter, or parts of one weight are not adjacent."""
    _check_products(match)
    _, _, n, hckv = roles(match, "query")
    norm = query_norm(match)
    d, he = match.reading(Contraction, "uk").axes, match.reading(Contraction, "dkv").axes
    hcq, width = he, row_width(match, "kv_cache", caches)
    if norm is not None:
        hcq = match.reading(Contraction, "uq").axes
        check_norm_of_rows(norm, hcq)
    columns = {"heads": n, "he": he, "hcq": hcq, "hckv": hckv, "weight_dq": hcq, "weight_uq": d, "weight_dkv": width}
    uq_qr, dkv_kr = (match["weight_uq"], d), (match["weight_dkv"], width)
    if "query_rope.axes" in match.readings:
        columns["weight_qr"] = rotary(match, "query_rope", roles(match, "query_rope")[3])
        columns["weight_kr"] = rotary(match, "kr_cache", row_width(match, "kr_cache", caches))
        parts = (("weight_uq", "weight_qr", "q_nope and q_rope"), ("weight_dkv", "weight_kr", "latent and rotary key"))
        uq_qr, dkv_kr = (
            joined_weights(match, (one, columns[one]), (other, columns[other]), what) for one, other, what in parts
        )
    dq, gamma_cq = (None, None) if norm is None else (match["weight_dq"], match["gamma_cq"])
    return Weights(dq, uq_qr, match["weight_uk"], dkv_kr, gamma_cq, match["gamma_ckv"], columns)


def query_norm(match: Match) -> RmsNorm | None:
    if match.choices["query_rank"] == "full":
        return None
    norm, found = match.reading(RmsNorm, "ckv"), match.reading(RmsNorm, "cq")
    if found.gamma_after_cast != norm.gamma_after_cast:
        raise NoMatch("the two norms of the prolog round in different places", found.gamma.origin)
    return found


def row_width(match: Match, operand: str, caches: Caches) -> Axes:
    cache = caches[operand]
    return cache.width if cache else roles(match, operand)[2]


def _check_products(match: Match) -> None:
    for name in ("dq", "dkv", "kr"):
        found = match.get(Contraction, name)
        if found is not None and found.factor != 1.0:
            raise NoMatch(f"a projection of the prolog is multiplied by {found.factor:.6g}", found.node)
    for name in PARTS:
        if name in match.elements and name != "weight_uk":  # attention takes that as it is computed, too
            check_weight(match[name], name)
