"""ATB's PagedAttentionOperation through torch_npu, in three scenarios of its document: the basic one, one cache of MLA
for keys and values, and parallel decoding with a mask. Results are compared with float64.

On an Ascend NPU this runs the vendor's kernels; without torch_npu it runs `torch.ops.mla_fx.paged_attention_` on
the CPU, with the same arguments:  python examples/npu_paged_attention.py"""

from __future__ import annotations

import torch
from torch import Tensor

import mla_fx  # noqa: F401  registers torch.ops.mla_fx

try:
    import torch_npu  # type: ignore[import-not-found]
except ImportError:
    torch_npu = None
DEVICE = "cpu" if torch_npu is None else "npu"

CONTEXT_LENS = torch.tensor([130, 257, 64], dtype=torch.int32)  # on the host
BLOCK_SIZE, SCALE = 128, 0.09
BLOCKS = [-(-length // BLOCK_SIZE) for length in CONTEXT_LENS.tolist()]


def base(query: Tensor, keys: Tensor, values: Tensor, tables: Tensor, out: Tensor) -> None:
    heads, kv_heads = query.shape[1], keys.shape[2]
    if torch_npu is not None:
        torch_npu._npu_paged_attention(query, keys, values, kv_heads, heads, SCALE, tables, CONTEXT_LENS, out)
        return
    options = {"head_num": heads, "kv_head_num": kv_heads, "qk_scale": SCALE}
    torch.ops.mla_fx.paged_attention_(query, keys, values, tables, CONTEXT_LENS, out, **options)


def combined(query: Tensor, keys: Tensor, tables: Tensor, out: Tensor) -> None:
    """A value is the first columns of its key; `out` has their number."""
    heads, width = query.shape[1], out.shape[2]
    if torch_npu is not None:
        torch_npu._npu_paged_attention_mla(query, keys, 1, heads, SCALE, tables, CONTEXT_LENS, width, out)
        return
    options = {"head_num": heads, "kv_head_num": 1, "qk_scale": SCALE, "mla_v_head_size": width}
    torch.ops.mla_fx.paged_attention_(query, keys, None, tables, CONTEXT_LENS, out, **options)


def parallel(
    query: Tensor, keys: Tensor, values: Tensor, tables: Tensor, mask: Tensor, steps: Tensor, out: Tensor
) -> None:
    """Several tokens of each sequence, sequence by sequence; the mask has a row for each."""
    heads, kv_heads = query.shape[1], keys.shape[2]
    if torch_npu is not None:
        lengths = CONTEXT_LENS, mask, steps
        torch_npu._npu_paged_attention_splitfuse(query, keys, values, tables, *lengths, kv_heads, heads, SCALE, out)
        return
    options = {"head_num": heads, "kv_head_num": kv_heads, "qk_scale": SCALE, "q_seq_lens": steps}
    options |= {"mask_type": "mask_type_spec", "calc_type": "calc_type_spec"}
    torch.ops.mla_fx.paged_attention_(query, keys, values, tables, CONTEXT_LENS, out, mask, **options)


# --- data, and the same in float64 --------------------------------------------------------------------------------


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape).bfloat16().to(DEVICE)


def drawn_tables() -> Tensor:
    """The blocks of each sequence, in any order."""
    order = torch.split(torch.randperm(sum(BLOCKS)).int(), BLOCKS)
    return torch.nn.utils.rnn.pad_sequence(list(order), batch_first=True).to(DEVICE)


def expected(query: Tensor, keys: Tensor, values: Tensor, tables: Tensor, steps: list[int]) -> Tensor:
    """Row r of a sequence with q rows and L keys sees the first L - q + r + 1 of them."""
    group = query.shape[1] // keys.shape[2]
    keys, values = (cache.cpu().double().repeat_interleave(group, 2) for cache in (keys, values))
    outs = []
    queries = torch.split(query.cpu().double(), steps)
    for rows, table, length in zip(queries, tables.cpu(), CONTEXT_LENS.tolist(), strict=True):
        key, value = (cache[table.long()].flatten(0, 1)[:length] for cache in (keys, values))
        scores = torch.einsum("rhd,khd->rhk", rows, key) * SCALE
        last = length - len(rows) + torch.arange(len(rows))
        scores = scores.masked_fill(torch.arange(length) > last.view(-1, 1, 1), -torch.inf)
        outs.append(torch.einsum("rhk,khd->rhd", scores.softmax(-1), value))
    return torch.cat(outs)


def causal_mask(steps: list[int]) -> Tensor:
    width = int(CONTEXT_LENS.max())
    lengths = CONTEXT_LENS.tolist()
    lasts = [length - count + torch.arange(count) for length, count in zip(lengths, steps, strict=True)]
    hidden = torch.arange(width) > torch.cat(lasts).unsqueeze(1)
    return torch.zeros(sum(steps), width).masked_fill(hidden, -10000.0).bfloat16().to(DEVICE)


def check(name: str, actual: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(actual.cpu().double(), wanted, rtol=0.02, atol=0.02)
    print(f"{name}: {list(actual.shape)} is right")


def main() -> None:
    print("torch.ops.mla_fx on the CPU" if torch_npu is None else "torch_npu on the NPU")
    torch.manual_seed(0)
    batch, blocks, tables = len(BLOCKS), sum(BLOCKS), drawn_tables()
    one, several = [1] * batch, [2, 3, 1]

    query, out = drawn(batch, 32, 128), drawn(batch, 32, 128)
    keys, values = drawn(blocks, BLOCK_SIZE, 8, 128), drawn(blocks, BLOCK_SIZE, 8, 128)
    base(query, keys, values, tables, out)
    check("base scenario", out, expected(query, keys, values, tables, one))

    query, out, cache = drawn(batch, 32, 576), drawn(batch, 32, 512), drawn(blocks, BLOCK_SIZE, 1, 576)
    combined(query, cache, tables, out)
    check("one cache", out, expected(query, cache, cache[..., :512], tables, one))

    query, out = drawn(sum(several), 32, 128), drawn(sum(several), 32, 128)
    steps = torch.tensor(several, dtype=torch.int32)
    parallel(query, keys, values, tables, causal_mask(several), steps, out)
    check("parallel decoding", out, expected(query, keys, values, tables, several))


if __name__ == "__main__":
    main()
