"""The weights of a prolog: those of adjacent columns as one, each with the axes of its columns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch.fx import Node

from mla_fx.rule import Match, NoMatch
from mla_fx.rule.caches import CacheRoles
from mla_fx.rule.indices import Axes, axes
from mla_fx.rule.operands import Expression, joined_parts, tensor
from mla_fx.rule.readings import Contraction, Element, RmsNorm, Rope, computed_from, has_8_bits, is_parameter

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
    n, hckv, d, he = match.dims("n c d h")
    norm = query_norm(match)
    hcq, width = he, row_width(match, "kv_cache", caches)
    if norm is not None:
        hcq = match.axes("q")
        norm.check_rows(hcq)
    columns = {"heads": n, "he": he, "hcq": hcq, "hckv": hckv, "weight_dq": hcq, "weight_uq": d, "weight_dkv": width}
    uq_qr, dkv_kr = (match["weight_uq"], d), (match["weight_dkv"], width)
    if "query_rope.axes" in match.readings:
        columns["weight_qr"] = _rotary(match, "query_rope", match.axes("r"))
        columns["weight_kr"] = _rotary(match, "kr_cache", row_width(match, "kr_cache", caches))
        parts = (("weight_uq", "weight_qr", "q_nope and q_rope"), ("weight_dkv", "weight_kr", "latent and rotary key"))
        uq_qr, dkv_kr = (
            _joined(match, (one, columns[one]), (other, columns[other]), what) for one, other, what in parts
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
    return cache.width if cache else match.roles(operand)[2]


def _rotary(match: Match, operand: str, unrotated: Axes) -> Axes:
    """The columns of an operand that its rotation turns; `unrotated` if it is not rotated."""
    rotation = match.get(Rope, f"{operand}.rope")
    return axes(rotation.along, "the rotary dimension", rotation.node) if rotation else unrotated


def _joined(match: Match, first: tuple[str, Axes], second: tuple[str, Axes], what: str) -> tuple[Element, Axes]:
    """Two weights, given by name, as one, without scales, and the columns of both. Raises NoMatch if they are not
    adjacent."""
    for name, columns in (first, second):
        if len(columns) > 1:
            raise NoMatch(f"the columns of {name} are not one dimension", match[name].origin)
    return joined_parts(match[first[0]], first[1], match[second[0]], second[1], f"the weights of {what}")


def _check_products(match: Match) -> None:
    for name in ("dq", "dkv", "kr"):
        found = match.get(Contraction, name)
        if found is not None and found.factor != 1.0:
            raise NoMatch(f"a projection of the prolog is multiplied by {found.factor:.6g}", found.node)
    for name in PARTS:
        if name in match.elements and name != "weight_uk":  # attention takes that as it is computed, too
            _check_weight(match[name], name)


def _check_weight(weight: Element, name: str) -> None:
    """Raises NoMatch unless a weight and its scales are parameters."""
    scales = () if weight.scales is None else weight.scales.by
    computed = [part.origin for part in (weight, *scales) if not is_parameter(part.origin)]
    if not computed:
        return
    packed = sorted({str(dtype) for node in computed for dtype in _packed(node)})
    if packed:
        raise NoMatch(f"{name} is dequantised in the graph, from {packed[0]}; expected a plain parameter", computed[0])
    raise NoMatch(f"{name} is computed in the graph, expected a parameter", computed[0])


def _packed(value: Node) -> set[torch.dtype]:
    """The 8-bit dtypes of the graph inputs that a value is computed from."""
    return {node.meta["val"].dtype for node in computed_from(value) if is_parameter(node) and has_8_bits(node)}
