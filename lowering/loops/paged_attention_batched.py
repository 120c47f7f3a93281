"""Lowers paged_attention.batched to attention over copies of its contexts, where no call can be."""

from torch import Tensor

from mla_fx.ops.emitted import paged_attention
from mla_fx.ops.emitted.attention.pages import READS_PAGES
from mla_fx.ops.emitted.paged_attention import Arguments

from .conditional import conditional

OPERATOR = "paged_attention.batched"
STAYS = READS_PAGES


def from_copies(a: Arguments) -> Tensor:
    return paged_attention.from_copies(a, conditional)
