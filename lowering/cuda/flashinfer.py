"""FlashInfer, the package `flashinfer` (flashinfer-python on PyPI): MLA over two caches in pages of any size.

It plans by lengths on the host, which waits for the device at each call, so it runs only if the user asks for it."""

import importlib
import math

import torch

from mla_fx.ops.emitted.attention.arguments import Arguments, Results
from mla_fx.ops.emitted.attention.kernel_operands import in_rows

from . import split_keys
from .libraries import check_chip, check_operands, imported, lowered

KERNEL = "flashinfer"
CHIPS = (80, 86, 89, 90, 100, 103, 110, 120, 121)  # its README, without 75, which has no bfloat16
WORKSPACE = 2**27  # bytes, as its documentation recommends


def check(a: Arguments) -> None:
    imported(f"{KERNEL}.mla")
    check_chip(a.kv_cache.device, KERNEL, CHIPS)
    check_operands(a, KERNEL)


def run(a: Arguments) -> Results:
    """Compute attention over latents of sequences of one token."""
    assert a.query_rope is not None and a.block_table is not None and a.context_lens is not None
    if 0 in (a.query.numel(), a.kv_cache.numel(), a.block_table.numel()):
        return split_keys.run(a)
    tokens, _, heads, rank = a.query.shape
    page, dtype, device = a.kv_cache.shape[1], a.kv_cache.dtype, a.query.device
    lengths = a.context_lens.cpu()
    counts = (lengths + page - 1) // page
    ends = torch.cat((counts.new_zeros(1), counts.cumsum(0, dtype=counts.dtype)))
    is_read = torch.arange(a.block_table.shape[1]) < counts.unsqueeze(-1)
    wrapper = importlib.import_module(f"{KERNEL}.mla").BatchMLAPagedAttentionWrapper(
        torch.empty(WORKSPACE, dtype=torch.int8, device=device)
    )
    starts = torch.arange(tokens + 1, dtype=torch.int32)
    sizes = heads, rank, a.query_rope.shape[3], page
    wrapper.plan(starts, ends, a.block_table[is_read.to(device)], lengths, *sizes, False, a.scale, dtype, dtype)
    queries = (query.squeeze(1).contiguous() for query in (a.query, a.query_rope))
    out, lse = wrapper.run(*queries, in_rows(a.kv_cache), in_rows(a.kr_cache), return_lse=True)
    return out.unsqueeze(1), lse.unsqueeze(1) * math.log(2)  # its logarithms are those of base 2


attend = lowered("attention_by_flashinfer", run, tags=(torch.Tag.cudagraph_unsafe,))
