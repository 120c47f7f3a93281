"""paged_attention: attention over paged keys and values, every scenario of ATB PagedAttentionOperation."""

import torch
from torch import Tensor

from mla_fx.ops.common.check import check_devices, check_rank
from mla_fx.ops.common.define import define

from .arguments import Arguments, check_options, read_options
from .attention import attend_, value_size
from .lengths import check_lengths
from .samples import samples
from .tensors import LENGTHS, check_caches, check_mask, check_out, check_scales


def body(a: Arguments) -> Tensor:
    """Attention of query tokens over the keys and values of their sequences in paged caches::

        key j of sequence b = key_cache[block_tables[b, j // BlockSize], j % BlockSize],  j < context_lens[b]
        s        = (query . key + razor) * qk_scale * log_n + mask      in float32, float64 for float64
        attn_out = sum(P exp(s - m) value) / sum(exp(s - m))            P rounds to the dtype of query, m is the maximum

    computed over tiles of 128 keys with a running maximum; query head h reads key head h // (H/Hkv). A row all of whose
    keys a mask of -inf hides is 0.

    query [T, H, D], one token for each sequence that has a context, in order: context_lens 0 takes no row of query and
    makes no row of attn_out. head_num is H, or 0; kv_head_num is Hkv, a divisor of H, or 0 for H. query is multiplied
    by q_scale in its dtype first unless that is 0 or 1. query and caches share float16, bfloat16, float32 or float64.
    key_cache and value_cache, with the same BlockNum and BlockSize, a multiple of 16:
    - input_layout "type_bsnd" [BlockNum, BlockSize, Hkv, D] and [.., Dv];
    - input_layout "type_bnsd" [BlockNum, Hkv, BlockSize, D], Dv = D;
    - NZ [BlockNum, Hkv*D/16, BlockSize, 16], recognised by the 16 where D is another size, Dv = D: element d of head n
      at [block, (n*D + d) // 16, offset, d % 16].
    D and Dv are at most 576, above 256 with BlockSize at most 128 (256 for a combined cache of 576 and 512 columns and
    16 or 32 heads); in NZ, and with calc_type, scale_type, compress_type or quant_type chosen, Dv = D is at most 256
    and D * BlockSize at most 16384, unless the cache is combined.
    mla_v_head_size Dv: one combined cache, without a value_cache, Hkv 1: a value is the first Dv columns of its key.
    block_tables [B, MaxBlocks], int32 or int64; entries past a context are not read. context_lens [B], and below
    batch_run_status [B] and q_seq_lens [B], are integers of any device or lists of the host.

    mask_type says what mask, in the dtype of attn_out, adds to the scores; column j of its S, at least the longest
    context, belongs to key position j. "undefined" is none;
    - "mask_type_norm" [1, S] for all, [S, S] whose row is the position of the query (the last of the context for the
      last query), or [B, 1, S];
    - "mask_type_alibi" [H, 1, S] or [B, H or 1, 1, S];
    - "mask_type_spec" [T, S]; for a combined cache in bfloat16 1 hides and 0 shows, as the kernel multiplies by -3e38;
    - "mask_type_mask_free" (or "mask_type_free") a causal 128 x 128 table, NZ: queries are in blocks of 128 whose own
      block of keys it masks, later keys are hidden; BlockSize 128, context_lens - q_seq_lens a multiple of 128;
    - "mask_type_norm_compress" a causal table [2048, 2048], [1, 2048, 2048], [1, 1, 2048, 2048] or NZ by position of
      query and key, over the last 2048 positions of a longer context, before which all is visible.
    The last two go with NZ caches. With these, any mask may be in NZ format: [X, S/16, R, 16] for a matrix of R rows
    each, element (r, j) at [j // 16, r, j % 16]. Its X and R are 1 or B and 16 for "mask_type_norm", H or B*H and 16
    for "mask_type_alibi", where the first of the 16 rows counts; otherwise X is 1 and R the rows of the matrix, of
    "mask_type_spec" also rounded up to 16.

    batch_run_status_enable: batch_run_status is 0 where a sequence does not run. The document says that it controls
    this, but no kernel reads it; so it must be 0 exactly where context_lens is 0: there both agree.

    quant_type "type_dequant_fusion": the caches are int8 and represent `(float32(key) + k_offset) * k_descale` rounded
    to the dtype of query, for values with v_offset and v_descale, all [Hkv*D]; k_offset and v_offset are int32, given
    with has_quant_offset alone.
    "type_quant_qkv_offline" and "type_quant_qkv_online": query is int8 too; out_data_type, float16 or bfloat16, is the
    dtype of attn_out. With k_descale and v_descale [H], `s = int32(query . key) * k_descale[h] * qk_scale + mask`.
    Weights are cast to float16, then to int8, half to even: offline `p * p_scale[h]`, p_scale float32 [H], with values
    `int32(weights . value) * v_descale[h]`, so that v_descale holds 1 / p_scale; online `p / r` with `r = max(p of the
    row in this tile) / 127` and `int32(weights . value) * (v_descale[h] * r)`.
    k_descale and v_descale are both float32, or both int64 with the bits of a float32 in the low half.

    calc_type "calc_type_spec", parallel decoding: sequence b has q_seq_lens[b] tokens in query, which sum to T over the
    sequences with a context. The mask decides which keys they see; without one, they see all.
    compress_type "compress_type_kvhead": each key head of a sequence has a context of its own: context_lens [B*Hkv] and
    block_tables [B*Hkv, MaxBlocks] hold that of head n of sequence b at b*Hkv + n, the caches [BlockNum, BlockSize, 1,
    D]. A sequence whose contexts are all 0 has no row of query; a head without context makes no result for its queries.
    "compress_type_kvhead_rope" adds razor_offset, float32 [BlockNum, BlockSize], before the scale.
    scale_type "scale_type_logn": log_n [B] multiplies qk_scale in its own dtype, float32; also float16 with NZ caches,
    and float64 with float64. "scale_type_tor" has none.

    Enumerators are the document's names in any case, with or without their prefix, or all of them their numbers.
    Returns attn_out [T, H, Dv] in the dtype of query or out_data_type, 0 where no sequence makes a row; in place,
    `paged_attention_` writes attn_out and leaves such rows.
    Raises ValueError for arguments that do not fit, and for combinations that no chip has:
    - parallel decoding with batch_run_status_enable, compress_type, quant_type, scale_type_logn, type_bnsd or
      mask_type_alibi, without a mask over plain caches of keys and values, and with mask_type_norm over any others;
    - compress_type_kvhead_rope with a mask or batch_run_status_enable;
    - scale_type_logn with quant_type, compress_type, mla_v_head_size or type_bnsd;
    - mla_v_head_size with mask_type_alibi, compress_type, type_dequant_fusion or type_bnsd;
    - type_bnsd with compress_type or quant_type, and full quantisation with compress_type;
    - NZ caches with batch_run_status_enable, compress_type, quant_type, mla_v_head_size or type_bnsd.
    Lengths are checked always, values of block_tables and mask on the CPU. Inference only.
    The document is ATB PagedAttentionOperation, whose order of arguments this is.
    """
    o = read_options(a)
    attn_out = a.query.new_zeros(*a.query.shape[:2], value_size(a, o), dtype=a.out_data_type)
    attend_(attn_out, a, o)
    return attn_out


def body_(a: Arguments, *, attn_out: Tensor) -> None:
    attend_(attn_out, a, read_options(a))


def check(a: Arguments, *, attn_out: Tensor | None = None) -> None:
    check_devices(vars(a) | {"attn_out": attn_out}, LENGTHS)
    check_rank("query", a.query, "T, H, D")
    check_rank("key_cache", a.key_cache, "BlockNum, BlockSize, Hkv, D")
    o = read_options(a)
    check_options(a, o)
    check_caches(a, o)
    check_scales(a, o)
    dtype = a.out_data_type or a.query.dtype
    check_mask(a, o, dtype)
    check_lengths(a, o)
    check_out(a, attn_out, dtype, value_size(a, o))


def fake(a: Arguments) -> Tensor:
    size = value_size(a, read_options(a))
    return torch.empty((*a.query.shape[:2], size), dtype=a.out_data_type or a.query.dtype, device=a.query.device)


ENUMERATORS = ("mask_type", "quant_type", "compress_type", "calc_type", "scale_type", "input_layout")
operator = define(
    "paged_attention",
    Arguments,
    body,
    returns=("attn_out",),
    check=check,
    fake=fake,
    samples=samples,
    in_place=body_,
    writes={"attn_out": "attn_out"},
    lengths=("context_lens", "batch_run_status", "q_seq_lens"),
    enumerators=dict.fromkeys(ENUMERATORS, 0),
)
