"""multi_latent_attention: absorbed MLA over a paged cache, for decoding and for a few speculated tokens."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from mla_fx.ops.common.define import define
from mla_fx.ops.common.math import to_accumulation_dtype
from mla_fx.ops.common.paged import TILE, Tile, host_lengths, int8_product, online_softmax, rounded_product

from .check import RANK, RING, SPEC_MASK, check, is_causal, modes, results
from .samples import samples


def body(
    q_nope: Tensor,
    q_rope: Tensor | None,
    ctkv: Tensor,
    k_rope: Tensor | None,
    block_tables: Tensor,
    context_lens: Tensor,
    mask: Tensor | None = None,
    q_seqlen: Tensor | None = None,
    qk_descale: Tensor | None = None,
    pv_descale: Tensor | None = None,
    *,
    head_num: int = 0,
    qk_scale: float = 1.0,
    kv_head_num: int = 1,
    mask_type: str = "undefined",
    calc_type: str = "calc_type_undefined",
    cache_mode: str = "krope_ctkv",
) -> tuple[Tensor, Tensor]:
    """Attention of T query rows of H heads to the cached latents of their sequences::

        s         = (q_nope . ctkv + q_rope . k_rope) * qk_scale + mask     for the keys that a row sees
        atten_out = softmax(s) @ ctkv
        lse       = ln(sum(exp(s)))

    block_tables [B, MaxBlocks] names the blocks of 128 slots that hold the keys of each sequence in order, and
    context_lens [B] counts the keys; neither slots nor entries behind the last key are read. H is 8, 16, 32, 64 or 128;
    head_num says it again or is 0. kv_head_num is 1, or 0 for the same. qk_scale is in (0, 1]; B is at most 8192.
    Enumerators are torch_npu's words or the document's, in any case and with or without prefix.

    cache_mode says what the tensors hold:
    "krope_ctkv"    q_nope [T, H, 512], q_rope [T, H, 64], ctkv [BlockNum, 128, 1, 512], k_rope [BlockNum, 128, 1, 64];
    "nzcache"       the caches in FRACTAL_NZ: ctkv [BlockNum, 32, 128, 16], k_rope [BlockNum, 4, 128, 16];
    "int8_nzcache"  q_nope and ctkv [BlockNum, 16, 128, 32] are int8, k_rope [BlockNum, 4, 128, 16] is not; qk_descale
                    and pv_descale [H] float32, None in the other modes, are the scales of each head;
    "kvcache"       q_nope [T, H, 576] and ctkv [BlockNum, 128, 1, 576] hold both parts; q_rope and k_rope are None.
    What is not int8 shares one dtype: float16 or bfloat16, but for "int8_nzcache" also float32 or float64. Sums are
    float32, or float64 for float64. Lengths and tables are int32 or int64; lengths may lie on the CPU, as on the NPU.

    calc_type says how many rows a sequence has:
    "calc_type_undefined"  one, T = B;
    "calc_type_spec"       q_seqlen [B] rows, each 1 to 4, one sequence after another, T in all;
    "calc_type_ring"       one, T = B, and lse is returned.
    q_seqlen is None but for "calc_type_spec"; only there mask_type may differ from "undefined".

    Row r of a sequence with q rows and L keys sees all L, and mask_type says what mask, of the dtype of the results,
    adds to their scores:
    "undefined"       mask is None and adds nothing. If H is 128 or q_nope is int8, the row sees the first L - q + r + 1
                      keys only; otherwise there is no causal cut, even with q > 1;
    "mask_type_spec"  row by row, [T, max(context_lens)];
    "mask_type_free"  or "MASK_TYPE_MASK_FREE": the corner [125+2q, 128] of a causal mask, for q rows in every sequence,
                      or [B, 125+2q, 128], for at most q. With t keys in the last block, row r adds mask[t-1+r] to
                      these and, if t < q-1, mask[t+127+r] to the block before; a row behind the mask (q = 1, t = 128)
                      adds nothing.

    Roundings are the device's. Over blocks of 128 keys with running maximum m, `p = exp(s - m)` is summed unrounded but
    rounded to the dtype before it meets ctkv; the quotient of the two sums is rounded once. "int8_nzcache" takes
    `s = (q_nope . ctkv * qk_descale + q_rope . k_rope) * qk_scale`; with `r = exp(max(s of the block) - m) / 127`,
    p / r becomes float16, then int8, ties to even, and its exact product with ctkv is multiplied by `pv_descale * r`.

    Returns atten_out [T, H, 512] in the dtype of q_rope ("kvcache": of q_nope) and lse [T, H, 1] in the same, in
    float32 for "int8_nzcache"; without "calc_type_ring" lse is [0]. A row that sees nothing is 0, its lse -inf. The
    twin `multi_latent_attention_` writes tensors atten_out and lse like these instead and, as the device does, leaves
    the rows of sequences without keys as they are. The overload `host` takes context_lens and q_seqlen as lists.
    Raises ValueError for arguments that do not fit; values of lengths and tables are checked on the CPU only, unless
    within `check_values`. Inference only.

    Source: ATB MultiLatentAttentionOperation, torch_npu.atb.npu_multi_head_latent_attention. Against the document, with
    the code: lse exists in every cache mode; 128 heads and int8 go together; a block has 128 slots, not fewer; 128
    heads and int8 are causal without a mask. A mask for these, which the device takes for a causal one without reading
    it, is applied as it is. "kvcache", which no device runs, is "krope_ctkv" with merged tensors.
    """
    mode = modes(mask_type, calc_type, cache_mode)
    wanted = results(q_nope, q_rope, mode)
    rows = query_rows(context_lens, q_seqlen)
    visible = rows.context
    if is_causal(q_nope, mask):
        visible = rows.context - rows.steps + rows.step + 1
    added = added_mask(mask, mode.mask, rows, len(context_lens))
    sequence, limit = (of_row.to(q_nope.device) for of_row in (rows.sequence, visible.unsqueeze(-1)))
    query, query_rope = to_accumulation_dtype(q_nope), None if q_rope is None else to_accumulation_dtype(q_rope)
    tables = block_tables.long().clamp(0, ctkv.shape[0] - 1)

    def score(latent: Tensor, block: Tensor, seen: Tensor) -> Tensor:
        scores = query @ latent.mT
        if qk_descale is not None:
            scores = scores * qk_descale.unsqueeze(-1)
        if query_rope is not None and k_rope is not None:
            scores = scores + query_rope @ keys(k_rope, block, seen, mode.cache).mT
        return scores * qk_scale

    def tiles() -> Iterator[Tile]:
        end = int(visible.max()) if len(visible) else 0
        for number, start in enumerate(range(0, end, TILE)):
            seen = torch.arange(start, start + TILE, device=limit.device) < limit
            block = tables[sequence, number]
            latent = keys(ctkv, block, seen, mode.cache)
            scores = score(latent, block, seen)
            if added is not None:
                scores = scores + added[:, None, start : start + TILE]
            yield scores.masked_fill(~seen.unsqueeze(1), -torch.inf), latent[..., :RANK]

    dtype = wanted["atten_out"].dtype
    product = rounded_product(dtype) if pv_descale is None else int8_product(pv_descale.unsqueeze(-1))
    out, lse = online_softmax(tiles(), product, query[..., :RANK])
    if mode.calc != RING:
        lse = lse.new_empty(0)
    return out.to(dtype), lse.to(wanted["lse"].dtype)


class Rows(NamedTuple):
    """Of each query row, [T] on the CPU: its sequence, its number there, and how many rows and keys that one has."""

    sequence: Tensor
    step: Tensor
    steps: Tensor
    context: Tensor


def query_rows(context_lens: Tensor, q_seqlen: Tensor | None) -> Rows:
    context = host_lengths(context_lens)
    steps = torch.ones_like(context) if q_seqlen is None else host_lengths(q_seqlen)
    sequence = torch.arange(len(steps)).repeat_interleave(steps)
    first = steps.cumsum(0) - steps
    return Rows(sequence, torch.arange(len(sequence)) - first[sequence], steps[sequence], context[sequence])


def keys(cache: Tensor, block: Tensor, seen: Tensor, cache_mode: str) -> Tensor:
    """One block of keys for each query row, [T, 128, width]; zeros where not `seen` [T, 128], whatever is stored."""
    page = cache[block]
    page = page.transpose(1, 2).flatten(2) if cache_mode.endswith("nzcache") else page.squeeze(2)
    return torch.where(seen.unsqueeze(-1), to_accumulation_dtype(page), 0)


def added_mask(mask: Tensor | None, mask_type: str, rows: Rows, batch: int) -> Tensor | None:
    """What mask adds to the scores of each query row at each key position, [T, whole tiles]."""
    if mask is None:
        return None
    if mask_type == SPEC_MASK:
        return to_accumulation_dtype(pad(mask, (0, -mask.shape[1] % TILE)))
    sequence, step, steps, context = (of_row.unsqueeze(-1) for of_row in rows)
    tiles = (context + TILE - 1) // TILE
    tail = context - TILE * (tiles - 1)
    position = torch.arange(TILE * int(tiles.max()) if len(tiles) else 0)
    to_last = tiles - 1 - position // TILE
    line = tail - 1 + step + TILE * to_last
    lines = mask.shape[-2]
    read = ((to_last == 0) | ((to_last == 1) & (tail < steps - 1))) & (line < lines)
    picked = mask.expand(batch, lines, TILE)[sequence, line.clamp(0, lines - 1), position % TILE]
    return torch.where(read.to(mask.device), to_accumulation_dtype(picked), 0)


def body_(*, atten_out: Tensor, lse: Tensor, **arguments: Any) -> None:
    rows = query_rows(arguments["context_lens"], arguments["q_seqlen"])
    written = (rows.context > 0).to(atten_out.device)
    out, sums = body(**arguments)
    atten_out[written] = out[written]
    if sums.dim() == out.dim():
        lse[written] = sums[written]


def fake(
    *, q_nope: Tensor, q_rope: Tensor | None, mask_type: str, calc_type: str, cache_mode: str, **_: Any
) -> tuple[Tensor, Tensor]:
    wanted = results(q_nope, q_rope, modes(mask_type, calc_type, cache_mode))
    atten_out, lse = (q_nope.new_empty(result.shape, dtype=result.dtype) for result in wanted.values())
    return atten_out, lse


operator = define(
    "multi_latent_attention",
    body,
    returns=("atten_out", "lse"),
    check=check,
    fake=fake,
    samples=samples,
    in_place=body_,
    writes={"atten_out": "atten_out", "lse": "lse"},
    lengths=("context_lens", "q_seqlen"),
    traceable=False,
)
