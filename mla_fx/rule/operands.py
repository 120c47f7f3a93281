"""Plans: calls and their operands, among them joined parts, rotary tables and masks."""

from mla_fx.rewriting.masks import (
    check_is_causal,
    counts_from_first,
    known_causal,
    lengths,
    mask_and_lengths,
    mask_operands,
)
from mla_fx.rewriting.materialize import tensor
from mla_fx.rewriting.operands import joined, joined_parts, merged, tables
from mla_fx.rewriting.plan import (
    ByHoisting,
    Call,
    Cast,
    Computed,
    Expression,
    Inlined,
    Replacement,
    ViewOf,
    first_node,
    result,
    times,
)
from mla_fx.rewriting.replacement import (
    ATTENTION,
    LATENT_ATTENTION,
    PLAIN_ATTENTION,
    WITHOUT_LSE,
    replacing,
)

__all__ = [
    "ATTENTION", "LATENT_ATTENTION", "PLAIN_ATTENTION", "WITHOUT_LSE", "ByHoisting", "Call", "Cast", "Computed",
    "Expression", "Inlined", "Replacement", "ViewOf", "check_is_causal", "counts_from_first", "first_node", "joined",
    "joined_parts", "known_causal", "lengths", "mask_and_lengths", "mask_operands", "merged", "replacing", "result",
    "tables", "tensor", "times",
]  # fmt: skip
