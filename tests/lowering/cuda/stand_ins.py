"""Modules in place of the users' libraries: their signatures, their checks, and the same computed by PyTorch.

What a library may leave undefined is not a number here: rows without keys, and keys after a length are not read."""

import importlib.machinery
import math
import sys
import types

import torch


def module(name, **contents):
    made = types.ModuleType(name)
    made.__spec__ = importlib.machinery.ModuleSpec(name, None)
    vars(made).update(contents)
    return made


def attention(query, keys, values, scale):
    """Heads [H, D] over keys [T, D]: out and natural logarithms."""
    scores = query.double() @ keys.double().mT * scale
    if not len(keys):
        return query.new_full((len(query), values.shape[1]), math.nan), torch.full((len(query),), math.inf)
    return (scores.softmax(-1) @ values.double()).to(query.dtype), scores.logsumexp(-1).float()


def get_mla_metadata(cache_seqlens, num_q_tokens_per_head_k, num_heads_k):
    assert cache_seqlens.dtype == torch.int32 and num_q_tokens_per_head_k > 0 and num_heads_k == 1
    return "metadata", "splits"


def flash_mla_with_kvcache(
    q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits,
    softmax_scale=None, causal=False,
):  # fmt: skip
    assert (tile_scheduler_metadata, num_splits) == ("metadata", "splits")
    assert q.dtype == k_cache.dtype and block_table.dtype == cache_seqlens.dtype == torch.int32
    assert q.shape[3] == 576 and head_dim_v == 512 and k_cache.shape[1:] == (64, 1, 576)
    assert q.stride(-1) == k_cache.stride(-1) == block_table.stride(-1) == 1 and cache_seqlens.is_contiguous()
    assert len(q) == len(block_table) == len(cache_seqlens) and q.shape[1] == 1 and not causal
    found = []
    for own, pages, length in zip(q, block_table, cache_seqlens.tolist(), strict=True):
        rows = torch.cat([k_cache[number] for number in pages[: -(-length // 64)].tolist()])[:length, 0]
        found.append(attention(own[0], rows, rows[:, :512], softmax_scale))
    outs, lses = (torch.stack(parts) for parts in zip(*found, strict=True))
    return outs.unsqueeze(1), lses.unsqueeze(2)


def flash_mla_of_sgl(*operands, use_legacy=False, enable_batch_invariant=False, **options):
    assert use_legacy
    return flash_mla_with_kvcache(*operands, **options)


def flash_mla_without_dense(*operands, enable_batch_invariant=False, **options):
    raise AssertionError("sparse attention is required")


class BatchMLAPagedAttentionWrapper:
    def __init__(self, float_workspace_buffer, backend="auto"):
        assert float_workspace_buffer.dtype == torch.int8

    def plan(
        self, qo_indptr, kv_indptr, kv_indices, kv_len_arr, num_heads, head_dim_ckv, head_dim_kpe, page_size,
        causal, sm_scale, q_data_type, kv_data_type,
    ):  # fmt: skip
        integers = qo_indptr, kv_indptr, kv_indices, kv_len_arr
        assert {value.dtype for value in integers} == {torch.int32} and not causal
        assert (head_dim_ckv, head_dim_kpe) == (512, 64) and q_data_type == kv_data_type
        assert qo_indptr.tolist() == list(range(len(kv_len_arr) + 1)) and kv_indptr[-1] == len(kv_indices)
        self.planned = kv_indptr.tolist(), kv_indices, kv_len_arr.tolist(), num_heads, page_size, sm_scale

    def run(self, q_nope, q_pe, ckv_cache, kpe_cache, return_lse=False):
        starts, indices, lengths, heads, page, scale = self.planned
        assert q_nope.shape[1:] == (heads, 512) and ckv_cache.shape[1] == page and return_lse
        found = []
        for number, length in enumerate(lengths):
            pages = indices[starts[number] : starts[number + 1]]
            latents, rotary = (cache[pages].flatten(0, 1)[:length] for cache in (ckv_cache, kpe_cache))
            assert len(latents) == length
            query = torch.cat((q_nope[number], q_pe[number]), -1)
            found.append(attention(query, torch.cat((latents, rotary), -1), latents, scale))
        outs, lses = (torch.stack(parts) for parts in zip(*found, strict=True))
        return outs, lses / math.log(2)


FLASH_MLA = {"get_mla_metadata": get_mla_metadata, "flash_mla_with_kvcache": flash_mla_with_kvcache}
OF_SGL = {**FLASH_MLA, "flash_mla_with_kvcache": flash_mla_of_sgl, "has_legacy": lambda: True}
WITHOUT_DENSE = {**FLASH_MLA, "flash_mla_with_kvcache": flash_mla_without_dense}


def install(monkeypatch, **flash_mla):
    """Make both libraries importable in this process, `flash_mla` with the given contents."""
    mla = module("flashinfer.mla", BatchMLAPagedAttentionWrapper=BatchMLAPagedAttentionWrapper)
    made = module("flash_mla", **(flash_mla or FLASH_MLA)), module("flashinfer", mla=mla), mla
    for one in made:
        monkeypatch.setitem(sys.modules, one.__name__, one)
