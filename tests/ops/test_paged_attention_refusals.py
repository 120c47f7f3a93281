"""What paged_attention refuses, and in which words."""

import pytest
import torch
from lib.operators.harness import by_name, refuses
from lib.operators.paged_oracle import OPERATOR, case, close_to_oracle, int32, run

from mla_fx.ops.common.sample import Sampler

SPEC, SQUARE = "calc_type_spec, mask_type_spec", "calc_type_spec, mask_type_norm"

REFUSALS = [
    # shapes and dtypes
    ("base", {"query": torch.zeros(4, 32)}, r"query has shape \[4, 32\]; it must be \[T, H, D\]"),
    ("base", {"key_cache": torch.zeros(14, 16, 64)}, r"key_cache has shape \[14, 16, 64\]"),
    ("base", {"query": torch.zeros(3, 4, 48)}, r"key_cache has shape .*\[\*, \*, 2, 48\]"),
    ("base", {"query": torch.zeros(3, 4, 32).half()}, r"key_cache has dtype torch.float32; allowed: torch.float16"),
    ("base", {"query": torch.zeros(3, 4, 32, dtype=torch.int8)}, r"query has dtype torch.int8; allowed"),
    ("base", {"head_num": 3}, "head_num is 3; it must be 0 or 4"),
    ("base", {"head_num": -4}, "head_num is -4"),
    ("base", {"kv_head_num": 3}, "kv_head_num is 3; it must be 0 or divide the 4"),
    ("base", {"kv_head_num": -2}, "kv_head_num is -2"),
    ("base", {"value_cache": torch.zeros(2, 16, 2, 32)}, r"value_cache has shape .*BlockNum must be that of key_cache"),
    ("base", {"value_cache": None}, "value_cache is None; it must be a tensor with mla_v_head_size 0"),
    ("base", {"block_tables": torch.zeros(4, 11)}, "block_tables has dtype torch.float32; allowed: torch.int32"),
    ("base", {"block_tables": torch.zeros(4, dtype=torch.int32)}, "block_tables has shape"),
    ("base", {"context_lens": int32(1, 1, 1)}, r"block_tables has shape \[4, 11\].* = \[3, \*\]"),
    ("base", {"context_lens": torch.ones(4)}, "context_lens has dtype"),
    ("base", {"query": torch.zeros(5, 4, 32)}, "query has 5 tokens; it may have 4"),
    ("type_bnsd", {"input_layout": "type_bsnd"}, r"key_cache has shape .* = \[\*, \*, 2, 32\]"),
    ("type_bnsd", {"value_cache": torch.zeros(15, 2, 16, 48)}, r"value_cache has shape .* = \[\*, 2, \*, 32\]"),
    ("NZ", {"kv_head_num": 4}, r"key_cache has shape .*\[\*, 8, \*, 16\]"),
    # values
    ("base", {"context_lens": int32(150, 32, -1, 0)}, "context_lens holds -1"),
    ("base", {"context_lens": int32(177, 32, 1, 0)}, r"block_tables has 11 columns; it must have 12 for .* 177"),
    ("base", {"context_lens": int32(150, 32, 1, 1)}, "context_lens holds 4 sequences with a context; query has 3"),
    ("base", {"context_lens": int32(150, 33, 1, 0)}, "block_tables holds -1 within a context; it must be at least 0"),
    ("base", {"block_tables": torch.full((4, 11), 15, dtype=torch.int32)}, "block_tables holds 15 within .* below 15"),
    # enumerators
    ("base", {"mask_type": "causal"}, "mask_type is 'causal'; allowed: 'undefined', 'mask_type_norm'"),
    ("base", {"quant_type": "int8"}, "quant_type is 'int8'"),
    ("base", {"compress_type": "kv"}, "compress_type is 'kv'"),
    ("base", {"calc_type": "ring"}, "calc_type is 'ring'"),
    ("base", {"scale_type": "sqrt"}, "scale_type is 'sqrt'"),
    ("base", {"input_layout": "tnd"}, "input_layout is 'tnd'"),
    # masks
    ("base", {"mask": torch.zeros(1, 150)}, "mask is given; it must be None with mask_type 'undefined'"),
    ("mask_type_norm, shared", {"mask": None}, "mask is None; it must be a tensor with mask_type 'mask_type_norm'"),
    ("mask_type_norm, shared", {"mask": torch.zeros(1, 149)}, "mask has 149 columns; it must have 150"),
    ("mask_type_norm, shared", {"mask": torch.zeros(1, 150).half()}, "mask has dtype torch.float16"),
    ("mask_type_norm, square", {"mask": torch.zeros(150, 151)}, r"mask has shape \[150, 151\]; it must be \[1, S\]"),
    ("mask_type_norm, 3-D", {"mask": torch.zeros(3, 1, 150)}, r"mask has shape .*\[4, 1, \*\]"),
    ("mask_type_alibi, 3-D", {"mask": torch.zeros(2, 1, 150)}, r"mask has shape .*\[4, 1, \*\]"),
    ("mask_type_alibi, 4-D", {"mask": torch.zeros(4, 2, 1, 150)}, r"mask has shape .*\[4, 4, 1, \*\]"),
    (SPEC, {"mask": torch.zeros(5, 150)}, r"mask has shape .*\[6, \*\]"),
    (SPEC, {"mask": torch.zeros(6, 149)}, "mask has 149 columns"),
    ("mask_type_norm, shared", {"mask": torch.zeros(1, 10, 16, 16)}, r"mask has shape .* \[S, S\] or \[B"),
    ("mask_type_alibi, 3-D", {"mask": torch.zeros(4, 10, 16, 16)}, r"mask has shape .*\[4, 4, 1, \*\]"),
    ("mask_type_norm, NZ", {"mask": torch.zeros(3, 10, 16, 16)}, r"mask has shape .*\[4, \*, 16, 16\] .the"),
    ("mask_type_norm, NZ", {"mask": torch.zeros(4, 10, 32, 16)}, r"mask has shape .*\[4, \*, 16, 16\]"),
    ("mask_type_norm, NZ", {"mask": torch.zeros(4, 9, 16, 16)}, "mask has 144 columns; it must have 150"),
    ("mask_type_norm, NZ", {"mask": torch.zeros(4, 10, 16, 8)}, r"mask has shape .* \[S, S\] or \[B, 1, S\]"),
    ("mask_type_alibi, NZ", {"mask": torch.zeros(8, 10, 16, 16)}, r"mask has shape .*\[B\*H, S/16, 16, 16\] = \[16,"),
    ("mask_type_alibi, NZ", {"mask": torch.zeros(4, 10, 32, 16)}, r"mask has shape .*\[H, S/16, 16, 16\] = \[4, \*"),
    ("mask_type_alibi, NZ", {"mask": torch.zeros(4, 9, 16, 16)}, "mask has 144 columns; it must have 150"),
    ("mask_type_spec, NZ", {"mask": torch.zeros(1, 10, 7, 16)}, r"mask has shape .*\[1, S/16, T, 16\] = \[1, \*, 6"),
    ("mask_type_spec, NZ", {"mask": torch.zeros(2, 10, 6, 16)}, r"mask has shape .*\[1, S/16, T, 16\] = \[1, \*"),
    ("mask_type_spec, NZ", {"mask": torch.zeros(1, 9, 6, 16)}, "mask has 144 columns; it must have 150"),
    ("mask_type_mask_free", {"mask": torch.zeros(128, 128)}, r"mask has shape .*\[1, 8, 128, 16\]"),
    ("mask_type_mask_free", {"context_lens": int32(130, 4, 257)}, "differ by a multiple of 128"),
    ("mask_type_norm_compress", {"mask": torch.zeros(1024, 1024)}, r"mask has shape .* one of \[2048, 2048\]"),
    (SQUARE, {"q_seq_lens": int32(1, 3), "context_lens": int32(150, 2)}, "q_seq_lens is .* not exceed context_lens"),
    # batch_run_status
    ("base", {"batch_run_status_enable": True}, "batch_run_status is None; .* batch_run_status_enable True"),
    ("batch_run_status", {"batch_run_status_enable": False}, "batch_run_status is given"),
    ("batch_run_status", {"batch_run_status": int32(1, 1, 1)}, r"batch_run_status has shape \[3\]"),
    # quantisation
    ("type_dequant_fusion", {"k_descale": None}, "k_descale is None; .* quant_type 'type_dequant_fusion'"),
    ("type_dequant_fusion", {"k_descale": torch.ones(4)}, r"k_descale has shape \[4\].* = \[64\]"),
    ("type_dequant_fusion", {"k_descale": torch.ones(64).half()}, "k_descale has dtype torch.float16"),
    ("type_dequant_fusion", {"v_descale": torch.ones(64).long()}, "v_descale has dtype torch.int64; it must be"),
    ("type_dequant_fusion", {"k_offset": torch.ones(64, dtype=torch.int32)}, "k_offset is given; .* False"),
    ("type_dequant_fusion", {"has_quant_offset": True}, "k_offset is None; it must be a tensor with has_quant_offset"),
    ("type_dequant_fusion", {"key_cache": torch.zeros(15, 16, 2, 32)}, "key_cache has dtype torch.float32"),
    ("type_dequant_fusion, offsets", {"v_offset": torch.ones(64)}, "v_offset has dtype torch.float32"),
    ("type_dequant_fusion, offsets", {"quant_type": "undefined"}, "quant_type is 'undefined'"),
    ("base", {"k_descale": torch.ones(64)}, "k_descale is given; it must be None with quant_type"),
    ("base", {"has_quant_offset": True}, "k_offset is None"),
    ("base", {"out_data_type": torch.float16}, "out_data_type is torch.float16; it must be None"),
    ("type_quant_qkv_online", {"out_data_type": None}, "out_data_type is None; it must be torch.float16 or"),
    ("type_quant_qkv_online", {"out_data_type": torch.float32}, "out_data_type is torch.float32"),
    ("type_quant_qkv_online", {"q_scale": 0.5}, "q_scale is 0.5"),
    ("type_quant_qkv_online", {"p_scale": torch.ones(4)}, "p_scale is given"),
    ("type_quant_qkv_online", {"k_descale": torch.ones(4).long()}, "v_descale has dtype torch.float32; it must be"),
    ("type_quant_qkv_online", {"k_descale": torch.ones(4).half()}, "k_descale has dtype torch.float16; allowed"),
    ("type_quant_qkv_offline", {"p_scale": torch.ones(4).long()}, "p_scale has dtype torch.int64; allowed"),
    ("type_quant_qkv_offline", {"p_scale": None}, "p_scale is None"),
    ("type_quant_qkv_offline", {"p_scale": torch.ones(2)}, r"p_scale has shape \[2\]"),
    ("type_quant_qkv_online", {"query": torch.zeros(3, 4, 32).half()}, "query has dtype torch.float16; .* torch.int8"),
    # parallel decoding
    (SPEC, {"q_seq_lens": None}, "q_seq_lens is None; it must be a tensor with calc_type 'calc_type_spec'"),
    (SPEC, {"q_seq_lens": int32(3, 1, 1, 1)}, r"q_seq_lens is .*, 5 tokens .*; they must sum to 6"),
    (SPEC, {"q_seq_lens": int32(4, 2, 0, 1)}, "q_seq_lens is .*; it must be 1 or more"),
    (SPEC, {"q_seq_lens": int32(3, 1, 2)}, r"q_seq_lens has shape \[3\]"),
    ("base", {"q_seq_lens": int32(1, 1, 1, 1)}, "q_seq_lens is given"),
    # compression and scale
    ("compress_type_kvhead", {"context_lens": int32(150, 17, 32)}, "context_lens has 3 entries; .*Hkv being 2"),
    ("compress_type_kvhead", {"key_cache": torch.zeros(17, 16, 2, 32)}, r"key_cache has shape .*\[\*, \*, 1, 32\]"),
    ("compress_type_kvhead", {"razor_offset": torch.zeros(17, 16)}, "razor_offset is given"),
    ("compress_type_kvhead_rope", {"razor_offset": None}, "razor_offset is None"),
    ("compress_type_kvhead_rope", {"razor_offset": torch.zeros(3, 16)}, r"razor_offset has shape \[3, 16\]"),
    ("compress_type_kvhead_rope", {"razor_offset": torch.zeros(16, 16).half()}, "razor_offset has dtype"),
    ("scale_type_logn", {"log_n": None}, "log_n is None"),
    ("scale_type_logn", {"log_n": torch.ones(3)}, r"log_n has shape \[3\]"),
    ("scale_type_logn", {"log_n": torch.ones(4).half()}, "log_n has dtype torch.float16"),
    ("base", {"log_n": torch.ones(4)}, "log_n is given"),
    # combined caches
    ("mla_v_head_size", {"kv_head_num": 2}, "kv_head_num is 2; it must be 1 with mla_v_head_size 24"),
    ("mla_v_head_size", {"mla_v_head_size": 33}, "mla_v_head_size is 33; it must be at most 32"),
    ("mla_v_head_size", {"mla_v_head_size": -1}, "mla_v_head_size is -1"),
    ("mla_v_head_size", {"value_cache": torch.zeros(14, 16, 1, 24)}, "value_cache is given; .* mla_v_head_size 24"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "changes", "message"), REFUSALS, ids=lambda value: value if isinstance(value, str) else ""
)
def test_refuses(mode, changes, message):
    dtype = torch.float16 if "qkv" in mode else torch.float32
    refuses(OPERATOR, (), case(mode, dtype, **changes), message)


EXCLUDED = [
    (SPEC, {"batch_run_status_enable": True, "batch_run_status": int32(1, 1, 1, 0)}),
    (SPEC, {"compress_type": "kvhead"}),
    (SPEC, {"quant_type": "dequant_fusion"}),
    (SPEC, {"quant_type": "quant_qkv_online"}),
    (SPEC, {"scale_type": "logn", "log_n": torch.ones(4)}),
    (SPEC, {"input_layout": "bnsd"}),
    (SPEC, {"mask_type": "alibi"}),
    ("compress_type_kvhead_rope", {"mask_type": "norm"}),
    ("compress_type_kvhead_rope", {"mask_type": "alibi"}),
    ("compress_type_kvhead_rope", {"batch_run_status_enable": True}),
    ("compress_type_kvhead_rope", {"quant_type": "quant_qkv_offline"}),
    ("compress_type_kvhead", {"quant_type": "quant_qkv_online"}),
    ("scale_type_logn", {"quant_type": "dequant_fusion"}),
    ("scale_type_logn", {"quant_type": "quant_qkv_offline"}),
    ("scale_type_logn", {"compress_type": "kvhead"}),
    ("scale_type_logn", {"kv_head_num": 1, "mla_v_head_size": 24, "value_cache": None}),
    ("scale_type_logn", {"input_layout": "bnsd"}),
    ("mla_v_head_size", {"mask_type": "alibi"}),
    ("mla_v_head_size", {"compress_type": "kvhead"}),
    ("mla_v_head_size", {"quant_type": "dequant_fusion"}),
    ("mla_v_head_size", {"input_layout": "bnsd"}),
    ("type_bnsd", {"compress_type": "kvhead"}),
    ("type_bnsd", {"quant_type": "dequant_fusion"}),
    ("NZ", {"batch_run_status_enable": True}),
    ("NZ", {"compress_type": "kvhead"}),
    ("NZ", {"quant_type": "dequant_fusion"}),
    ("NZ", {"kv_head_num": 1, "mla_v_head_size": 16, "value_cache": None}),
    ("NZ", {"input_layout": "bnsd"}),
]


@pytest.mark.parametrize(("mode", "changes"), EXCLUDED)
def test_combinations_that_no_chip_has_are_refused(mode, changes):
    refuses(OPERATOR, (), case(mode, **changes), "exclude each other")


@pytest.mark.parametrize(
    ("mode", "changes", "message"),
    (
        ("type_quant_qkv_online", {"has_quant_offset": True}, "has_quant_offset|k_offset"),
        ("base", {"mask_type": "spec", "mask": torch.zeros(3, 150)}, "must come with calc_type 'calc_type_spec'"),
        ("NZ", {"mask_type": "free", "mask": torch.zeros(1, 8, 128, 16)}, "must come with calc_type 'calc_type_spec'"),
        ("base", {"mask_type": "norm_compress", "mask": torch.zeros(2048, 2048)}, "must come with NZ caches"),
        (SPEC, {"mask_type": "mask_free", "mask": torch.zeros(1, 8, 128, 16)}, "must come with NZ caches"),
        (SPEC, {"mask_type": "undefined", "mask": None}, "and ND caches it must be one with a mask"),
        ("calc_type_spec, NZ", {"mask_type": "norm", "mask": torch.zeros(1, 150)}, "and NZ caches it must be 'mask"),
        ("mla_v_head_size, calc_type_spec", {"mask_type": "norm"}, "a combined cache it must be 'mask_type_spec'"),
    ),
)  # fmt: skip
def test_masks_come_with_what_they_mask(mode, changes, message):
    refuses(OPERATOR, (), case(mode, torch.float16 if "qkv" in mode else torch.float32, **changes), message)


def shaped(heads, key_size, value_size, block_size, **options):
    """Arguments of one token whose context is one block."""
    kv_heads = options.get("kv_head_num", heads)
    draw = Sampler(torch.float32)
    value = None if options.get("mla_v_head_size") else draw.normal(1, block_size, kv_heads, value_size)
    return {
        "query": draw.normal(1, heads, key_size),
        "key_cache": draw.normal(1, block_size, kv_heads, key_size),
        "value_cache": value,
        "block_tables": torch.zeros(1, 1, dtype=torch.int32),
        "context_lens": int32(block_size),
        "qk_scale": key_size**-0.5,
    } | options


LOGN = {"scale_type": "logn", "log_n": torch.ones(1)}
PARALLEL = {
    "calc_type": "spec",
    "q_seq_lens": int32(1),
    "mask_type": "mask_type_spec",
    "mask": Sampler(torch.float32).normal(1, 144),
}


@pytest.mark.parametrize(
    ("arguments", "message"),
    (
        (shaped(1, 32, 32, 24), "BlockSize of key_cache is 24; it must be a multiple of 16"),
        (shaped(1, 592, 32, 16), "head size is 592; it must be at most 576"),
        (shaped(1, 32, 592, 16), "head size is 592; it must be at most 576"),
        (shaped(1, 288, 32, 144), "BlockSize is 144; it must be at most 128 with head size 288"),
        (shaped(1, 256, 256, 144), "BlockSize is 144; it must be below 128 or a multiple of it"),
        (shaped(1, 32, 48, 16, **LOGN), "head size of value_cache is 48; it must be 32"),
        (shaped(1, 272, 272, 16, **LOGN), "head size is 272 and BlockSize 16; .* at most 256"),
        (shaped(1, 128, 128, 144, **LOGN), "head size is 128 and BlockSize 144; .* at most 16384"),
        (shaped(144, 128, 128, 16, **PARALLEL), "query has 144 heads of size 128; .* at most 16384"),
        (shaped(8, 576, 0, 256, kv_head_num=1, mla_v_head_size=512), "BlockSize is 256; it must be at most 128"),
    ),
)  # fmt: skip
def test_sizes_that_the_interface_does_not_have(arguments, message):
    refuses(OPERATOR, (), arguments, message)


@pytest.mark.parametrize(
    "arguments",
    (
        shaped(16, 576, 0, 256, kv_head_num=1, mla_v_head_size=512),
        shaped(2, 576, 576, 128),
        shaped(1, 256, 256, 256),
        shaped(128, 128, 128, 128, kv_head_num=1, **PARALLEL),
    ),
)
def test_the_largest_sizes(arguments):
    arguments = by_name(OPERATOR, (), arguments)
    assert close_to_oracle(run(arguments), arguments).all()


def test_output_of_the_twin_must_fit():
    arguments = case("base")
    for out, message in (
        (torch.zeros(3, 4, 16), r"attn_out has shape \[3, 4, 16\]"),
        (torch.zeros(3, 4, 32).half(), "attn_out has dtype torch.float16"),
    ):
        with pytest.raises(ValueError, match=message):
            OPERATOR.inplace(**arguments, attn_out=out)
        assert (out == 0).all()
