"""FlashMLA, the package `flash_mla` (sgl-flash-mla on PyPI): its dense decoding over pages of one combined cache.

The limits are those of github.com/deepseek-ai/FlashMLA at commit 9241ae3, csrc/api/dense_decode.h: dense decoding is
for SM90 alone. Its release of 2026-09-30 has none any more; sgl-flash-mla 1.0.0 keeps it behind `use_legacy`."""

import importlib
import inspect

import torch

from mla_fx.errors import NoMatch
from mla_fx.ops.emitted.attention.arguments import Arguments, Results

from ..ascend import limits
from . import split_keys
from .libraries import RANK, ROPE, check_chip, check_operands, imported, lowered

KERNEL = "flash_mla"
CHIPS = (90,)
HEADS = (16, 32, 64, 128)  # those that its tests run
PAGE = 64
ALIGNED = 16  # bytes that it reads at once


def check(a: Arguments) -> None:
    library = imported(KERNEL)
    check_chip(a.kv_cache.device, KERNEL, CHIPS)
    known = inspect.signature(library.flash_mla_with_kvcache).parameters
    if "use_legacy" in known and not library.has_legacy():
        raise NoMatch(f"{KERNEL} was built without dense decoding")
    if "enable_batch_invariant" in known and "use_legacy" not in known:
        raise NoMatch(f"this release of {KERNEL} has no dense decoding")
    check_operands(a, KERNEL)
    limits.size("query has N", a.query.shape[2], KERNEL, HEADS)
    if a.block_table is None:
        raise NoMatch(f"block_table is None; {KERNEL} takes pages")
    limits.size("kv_cache has BlockSize", a.kv_cache.shape[1], KERNEL, [PAGE])
    for name in ("kv_cache", "kr_cache"):  # views of one cache
        limits.size(f"the stride of rows of {name}", getattr(a, name).stride(1), KERNEL, [RANK + ROPE])


def run(a: Arguments) -> Results:
    """Compute attention over latents of sequences of one token; by split_keys if the caches are not one combined cache,
    which their addresses say."""
    if a.query.numel() == 0 or not is_combined(a):
        return split_keys.run(a)
    assert a.query_rope is not None and a.block_table is not None and a.context_lens is not None
    library = importlib.import_module(KERNEL)
    decode = library.flash_mla_with_kvcache
    given = {"use_legacy": True} if "use_legacy" in inspect.signature(decode).parameters else {}
    heads, rank = a.query.shape[2:]
    pages, rows, _ = a.kv_cache.shape
    page, row, _ = a.kv_cache.stride()
    out, lse = decode(
        torch.cat((a.query, a.query_rope), -1),
        a.kv_cache.as_strided((pages, rows, 1, row), (page, row, row, 1)),
        a.block_table,
        a.context_lens,
        rank,
        *library.get_mla_metadata(a.context_lens, heads, 1),
        softmax_scale=a.scale,
        causal=False,
        **given,
    )
    return out, lse.transpose(1, 2)


def is_combined(a: Arguments) -> bool:
    """Whether both caches are views of one with rows [R + Dr], aligned, and there is one."""
    latents, rotary = a.kv_cache, a.kr_cache
    if rotary is None or a.block_table is None or 0 in (latents.numel(), a.block_table.numel()):
        return False
    rank, size = latents.shape[2], latents.element_size()
    is_next = rotary.data_ptr() == latents.data_ptr() + rank * size
    is_one = latents.untyped_storage().data_ptr() == rotary.untyped_storage().data_ptr() and is_next
    is_dense = latents.stride()[1:] == (rank + rotary.shape[2], 1) and latents.stride() == rotary.stride()
    is_aligned = latents.data_ptr() % ALIGNED == 0 and latents.stride(0) * size % ALIGNED == 0
    return is_one and is_dense and is_aligned and len(latents) == len(rotary)


attend = lowered("attention_by_flash_mla", run)
