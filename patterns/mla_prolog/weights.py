"""The weights of a prolog: those of adjacent columns as one, each with the axes of its columns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch.fx import Node

from mla_fx.rule import Match, NoMatch
from mla_fx.rule.caches import CacheRoles
from mla_fx.rule.operands import Expression, joined_parts, tensor
from mla_fx.rule.readings import (
    Axes,
    Contraction,
    Element,
    RmsNorm,
    Rope,
    axes,
    computed_from,
    has_8_bits,
    is_parameter,
)

PARTS = ("weight_dq", "weight_uq", "weight_qr", "weight_uk", "weight_dkv", "weight_kr")
PROJECTIONS = tuple(name for name in PARTS if name != "weight_uk")  # attention takes that as it is computed, too
UQ_QR, DKV_KR = ("weight_uq", "weight_qr"), ("weight_dkv", "weight_kr")
Caches = Mapping[str, CacheRoles | None]


@dataclass(frozen=True)
class Weights:
    """`columns` has the axes of each part that shares its matrix; two parts and their columns are joined in `uq_qr` and
    `dkv_kr`."""

    match: Match
    columns: Mapping[str, Axes]
    uq_qr: tuple[Element, Axes]
    dkv_kr: tuple[Element, Axes]

    @classmethod
    def of(cls, match: Match, caches: Caches) -> Weights:
        """Raises NoMatch if a weight is not a parameter, or parts of one weight are not adjacent."""
        _check_projections(match)
        if (norm := query_norm(match)) is not None:
            norm.check_rows(match.axes("q"))
        columns = {"weight_uq": match.axes("d"), "weight_dkv": row_width(match, "kv_cache", caches)}
        if "query_rope.axes" not in match.readings:
            uq_qr, dkv_kr = ((match[name], columns[name]) for name in columns)
            return cls(match, columns, uq_qr, dkv_kr)
        columns["weight_qr"] = _rotary(match, "query_rope", match.axes("r"))
        columns["weight_kr"] = _rotary(match, "kr_cache", row_width(match, "kr_cache", caches))
        uq_qr = _joined(match, UQ_QR, columns, "q_nope and q_rope")
        return cls(match, columns, uq_qr, _joined(match, DKV_KR, columns, "latent and rotary key"))

    def operands(self, dtype: torch.dtype) -> list[Expression | None]:
        """weight_dq, weight_uq_qr, weight_uk, weight_dkv_kr and both gammas; without a low-rank query, there is neither
        weight_dq nor its gamma. Codes stay codes."""
        match, (uq_qr, columns), (dkv_kr, width) = self.match, self.uq_qr, self.dkv_kr
        is_low = query_norm(match) is not None
        h, q, n = match.dims("h q n") if is_low else match.dims("h h n")

        def weight(element: Element, *dims: Axes) -> Expression:
            is_int8 = element.origin.meta["val"].dtype == torch.int8
            return tensor(replace(element, scales=None), dims, dtype=torch.int8 if is_int8 else dtype)

        return [
            weight(match["weight_dq"], h, q) if is_low else None,
            weight(uq_qr, q, (*n, *columns)),
            match.tensor("weight_uk", "n d c", dtype=dtype),
            weight(dkv_kr, h, width),
            tensor(match["gamma_cq"].stored, (q,)) if is_low else None,
            tensor(match["gamma_ckv"].stored, (self.columns["weight_dkv"],)),
        ]


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


def _joined(match: Match, names: tuple[str, str], columns: Mapping[str, Axes], what: str) -> tuple[Element, Axes]:
    """Two weights as one, without scales, and the columns of both. Raises NoMatch if they are not adjacent."""
    for name in names:
        if len(columns[name]) > 1:
            raise NoMatch(f"the columns of {name} are not one dimension", match[name].origin)
    one, other = names
    return joined_parts(match[one], columns[one], match[other], columns[other], f"the weights of {what}")


def _check_projections(match: Match) -> None:
    for name in ("dq", "dkv", "kr"):
        found = match.get(Contraction, name)
        if found is not None and found.factor != 1.0:
            raise NoMatch(f"a projection of the prolog is multiplied by {found.factor:.6g}", found.node)
    for name in PROJECTIONS:
        if name in match.elements:
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
