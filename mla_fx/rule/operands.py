"""Operands that are more than one element: joined parts, rotary tables, masks."""

from __future__ import annotations

from mla_fx.rewriting.joined import joined, joined_parts
from mla_fx.rewriting.masks import check_is_causal, counts_from_first, known_causal, lengths, mask_operands
from mla_fx.rewriting.plan import first_node
from mla_fx.rewriting.tables import tables

__all__ = [
    "check_is_causal", "counts_from_first", "first_node", "joined", "joined_parts", "known_causal", "lengths",
    "mask_operands", "tables",
]  # fmt: skip
