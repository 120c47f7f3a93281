"""Attention over latents as libraries take it: each query token is a sequence of its own, which sees at least one key.

Then a length hides all that is hidden, so the rule of a library for several tokens of a sequence does not matter, and
lengths may be any numbers. The conversion is compiled: layers that share lengths and tables share it."""

from dataclasses import replace

import torch
from torch import Tensor

from mla_fx.ops.emitted.attention.arguments import Arguments, Attend, Results
from mla_fx.ops.emitted.attention.kernel_operands import lengths_of
from mla_fx.ops.emitted.attention.pages import context_of


def by_tokens(attend: Attend, a: Arguments) -> Results:
    """Compute attention over latents without mask, sinks and fill.

    `attend` gets sequences of one token with lengths int32 [B * S], 1 to T, and a block_table int32 of pages that
    exist. A row that sees no key becomes zeros, and one whose page does not exist NaN: a device cannot raise."""
    sizes, seen = a.query.shape[:3], seen_keys(a)
    pages = pages_of(a)
    count, read = a.kv_cache.shape[0], torch.arange(pages.shape[1], device=pages.device) * a.kv_cache.shape[1]
    is_lost = ((read < seen.unsqueeze(-1)) & ((pages < 0) | (pages >= count)).unsqueeze(1)).any(-1)
    out, lse = attend(
        replace(
            a,
            query=a.query.flatten(0, 1).unsqueeze(1),
            query_rope=None if a.query_rope is None else a.query_rope.flatten(0, 1).unsqueeze(1),
            context_lens=seen.clamp(min=1).flatten().int(),
            block_table=pages.clamp(0, count - 1).int().repeat_interleave(sizes[1], 0),
            is_causal=False,
            return_lse=True,
        )
    )
    unseen, lost = (seen == 0).unsqueeze(-1), is_lost.unsqueeze(-1)
    lse = lse.view(sizes).masked_fill(unseen, -torch.inf).masked_fill(lost, torch.nan)
    out = out.view(a.query.shape).masked_fill(unseen.unsqueeze(-1), 0)
    return out.masked_fill(lost.unsqueeze(-1), torch.nan), lse if a.return_lse else lse.new_empty(0)


def seen_keys(a: Arguments) -> Tensor:
    """How many keys each token sees, [B, S]."""
    batch, steps = a.query.shape[:2]
    context, lengths = context_of(a.kv_cache, a.block_table), lengths_of(a)
    if lengths is None:
        return a.query.new_full((batch, steps), context, dtype=torch.int64)
    before = torch.arange(1 - steps, 1, device=lengths.device)
    return (lengths.unsqueeze(1) + before).clamp(0, context)


def pages_of(a: Arguments) -> Tensor:
    """The pages of each sequence [B, Blocks], counted from the start. Without a table, a sequence is one page."""
    count = a.kv_cache.shape[0]
    if a.block_table is None:
        return torch.arange(count, device=a.kv_cache.device).unsqueeze(1)
    return torch.where(a.block_table < 0, a.block_table + count, a.block_table)
