"""multi_latent_attention: absorbed MLA over a paged cache, for decoding and for a few speculated tokens."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from mla_fx.ops.common.define import define
from mla_fx.ops.common.math import to_accumulation_dtype
from mla_fx.ops.common.paged import TILE, Tile, host_lengths, int8_product, online_softmax, rounded_product

from .arguments import RANK, RING, SPEC_MASK, Arguments, is_causal, modes, results
from .check import check
from .samples import samples


def body(a: Arguments) -> tuple[Tensor, Tensor]:
    """Attention of T query rows of H heads to the cached latents of their sequences::

        s         = (q_nope . ctkv + q_rope . k_rope) * qk_scale + mask     for the keys that a row sees
        atten_out = softmax(s) @ ctkv
        lse       = ln(sum(exp(s)))

    block_tables [B, MaxBlocks] names the blocks of 128 slots that hold the keys of each sequence in order, and
    context_lens [B] counts the keys; slots and entries past the last key are not read. H is 8, 16, 32, 64 or 128;
    head_num is H, or 0. kv_head_num is 1, or 0 for the same. qk_scale is in (0, 1]; B is at most 8192.
    Enumerators are torch_npu's words or the document's, in any case and with or without prefix, or all of them
    their numbers.

    cache_mode defines the tensors:
    "krope_ctkv"    q_nope [T, H, 512], q_rope [T, H, 64], ctkv [BlockNum, 128, 1, 512], k_rope [BlockNum, 128, 1, 64];
    "nzcache"       the caches in FRACTAL_NZ: ctkv [BlockNum, 32, 128, 16], k_rope [BlockNum, 4, 128, 16];
    "int8_nzcache"  q_nope and ctkv [BlockNum, 16, 128, 32] are int8, k_rope [BlockNum, 4, 128, 16] is not; qk_descale
                    and pv_descale [H] float32, None in the other modes, are the scales of each head;
    "kvcache"       q_nope [T, H, 576] and ctkv [BlockNum, 128, 1, 576] hold both parts; q_rope and k_rope are None.
    What is not int8 shares one dtype: float16 or bfloat16, without int8 also float32 or float64. Sums are float32, or
    float64 for float64. Lengths and tables are int32 or int64; lengths may lie on the CPU, as on the NPU.

    calc_type defines the number of rows of a sequence:
    "calc_type_spec"       q_seqlen [B] rows, each 1 to 4, one sequence after another, T in all;
    "calc_type_undefined"  one, T = B;
    "calc_type_ring"       one, T = B, and lse is returned.
    With the last two q_seqlen is None and mask_type "undefined".

    If H is 128 or q_nope is int8, row r of a sequence with q rows and L keys sees the first L - q + r + 1 of them, and
    mask_type must be "undefined": the kernel reads no mask there. Otherwise it sees all L, also with q > 1, and
    mask_type says what mask, of the dtype of the results, adds to their scores:
    "undefined"       nothing, mask is None;
    "mask_type_spec"  row by row, [T, max(context_lens)];
    "mask_type_free"  or "MASK_TYPE_MASK_FREE": the corner [125+2q, 128] of a causal mask, or one for each sequence, [B,
                      125+2q, 128], q being the largest of q_seqlen. With t keys in the last block, row r adds
                      mask[t-1+r] to these and, if t < q-1 for the q of its sequence, mask[t+127+r] to the block before;
                      a row behind the mask (q = 1, t = 128) adds nothing. The document's corner for the largest q is
                      causal where a sequence has that many rows; from one with fewer it hides its last keys.

    Roundings are the device's. Over blocks of 128 keys with running maximum m, `p = exp(s - m)` is summed unrounded but
    rounded to the dtype before it meets ctkv; the quotient of the two sums is rounded once. "int8_nzcache" takes
    `s = (q_nope . ctkv * qk_descale + q_rope . k_rope) * qk_scale`; with `r = exp(max(s of the block) - m) / 127`,
    p / r becomes float16, then int8, ties to even, and its exact product with ctkv is multiplied by `pv_descale * r`.

    Returns atten_out [T, H, 512] in the dtype of q_rope ("kvcache": of q_nope) and lse [T, H, 1] in the same, in
    float32 for "int8_nzcache"; without "calc_type_ring" lse is [0]. A row that sees nothing is 0, its lse -inf. In
    place, `multi_latent_attention_` writes a tensor atten_out like this instead, with "calc_type_ring" an lse too, and
    leaves the rows of sequences without keys as they are, as the device does. The overload `host` takes context_lens
    and q_seqlen as lists. Raises ValueError for arguments that do not fit; values of lengths and tables are checked on
    the CPU only, unless within `check_values`. Inference only.

    Source: ATB MultiLatentAttentionOperation, torch_npu.atb.npu_multi_head_latent_attention. Against the document, with
    the code: lse exists in every cache mode; 128 heads and int8 go together; a block has 128 slots, not fewer; 128
    heads and int8 are causal without a mask. "kvcache", which no device runs, is "krope_ctkv" with merged tensors.
    """
    mode = modes(a)
    rows = query_rows(a)
    visible = rows.context - rows.steps + rows.step + 1 if is_causal(a.q_nope) else rows.context
    added = added_mask(a, mode.mask, rows)
    sequence, limit = (of_row.to(a.q_nope.device) for of_row in (rows.sequence, visible.unsqueeze(-1)))
    query = to_accumulation_dtype(a.q_nope)
    tables = a.block_tables.long().clamp(0, a.ctkv.shape[0] - 1)

    def tiles() -> Iterator[Tile]:
        end = int(visible.max()) if len(visible) else 0
        for number, start in enumerate(range(0, end, TILE)):
            seen = torch.arange(start, start + TILE, device=limit.device) < limit
            block = tables[sequence, number]
            latent = keys(a.ctkv, block, seen, mode.cache)
            scores = unscaled_scores(a, query, latent, block, seen, mode.cache) * a.qk_scale
            if added is not None:
                scores = scores + added[:, None, start : start + TILE]
            yield scores.masked_fill(~seen.unsqueeze(1), -torch.inf), latent[..., :RANK]

    dtype, lse_dtype = (result.dtype for result in results(a, mode))
    product = rounded_product(dtype) if a.pv_descale is None else int8_product(a.pv_descale.unsqueeze(-1))
    out, lse = online_softmax(tiles(), product, query[..., :RANK])
    if mode.calc != RING:
        lse = lse.new_empty(0)
    return out.to(dtype), lse.to(lse_dtype)


def unscaled_scores(
    a: Arguments, query: Tensor, latent: Tensor, block: Tensor, seen: Tensor, cache_mode: str
) -> Tensor:
    """[T, H, 128]; the rotary part is not quantised, so it is not descaled."""
    scores = query @ latent.mT
    if a.qk_descale is not None:
        scores = scores * a.qk_descale.unsqueeze(-1)
    if a.q_rope is None or a.k_rope is None:
        return scores
    return scores + to_accumulation_dtype(a.q_rope) @ keys(a.k_rope, block, seen, cache_mode).mT


class Rows(NamedTuple):
    """The query rows, [T] each on the CPU."""

    sequence: Tensor
    step: Tensor  # the row's number among the rows of its sequence
    steps: Tensor  # the number of rows of its sequence
    context: Tensor  # the number of keys of its sequence


def query_rows(a: Arguments) -> Rows:
    context = host_lengths(a.context_lens)
    steps = torch.ones_like(context) if a.q_seqlen is None else host_lengths(a.q_seqlen)
    sequence = torch.arange(len(steps)).repeat_interleave(steps)
    first = steps.cumsum(0) - steps
    return Rows(sequence, torch.arange(len(sequence)) - first[sequence], steps[sequence], context[sequence])


def keys(cache: Tensor, block: Tensor, seen: Tensor, cache_mode: str) -> Tensor:
    """One block of keys per query row, [T, 128, width]; zeros where not `seen` [T, 128], whatever is stored."""
    page = cache[block]
    page = page.transpose(1, 2).flatten(2) if cache_mode.endswith("nzcache") else page.squeeze(2)
    return torch.where(seen.unsqueeze(-1), to_accumulation_dtype(page), 0)


def added_mask(a: Arguments, mask_type: str, rows: Rows) -> Tensor | None:
    """What mask adds to the scores of each query row at each key position, [T, whole tiles]."""
    mask = a.mask
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
    corners = mask.expand(len(a.context_lens), lines, TILE)
    picked = corners[sequence, line.clamp(0, lines - 1), position % TILE]
    return torch.where(read.to(mask.device), to_accumulation_dtype(picked), 0)


def body_(a: Arguments, *, atten_out: Tensor, lse: Tensor | None) -> None:
    written = (query_rows(a).context > 0).to(atten_out.device)
    out, sums = body(a)
    atten_out[written] = out[written]
    if lse is not None and sums.numel():
        lse[written] = sums[written]


def fake(a: Arguments) -> tuple[Tensor, Tensor]:
    atten_out, lse = (a.q_nope.new_empty(result.shape, dtype=result.dtype) for result in results(a, modes(a)))
    return atten_out, lse


operator = define(
    "multi_latent_attention",
    Arguments,
    body,
    returns=("atten_out", "lse"),
    check=check,
    fake=fake,
    samples=samples,
    in_place=body_,
    writes={"atten_out": "atten_out", "lse": "lse"},
    optional=("lse",),
    lengths=("context_lens", "q_seqlen"),
    enumerators={"mask_type": 0, "calc_type": 0, "cache_mode": 1},
)
