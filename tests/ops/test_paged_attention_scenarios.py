"""paged_attention: where its sources disagree, and its edges."""

import re

import pytest
import torch
from lib.operators.harness import refuses, samples
from lib.operators.paged_oracle import OPERATOR, case, close_to_oracle, int32, run

PAGED_ATTENTION = torch.ops.mla_fx.paged_attention


# Where the sources disagree.


def test_empty_context_takes_no_query_row():
    """ATB MultiLatentAttention consumes the row of a sequence without context, ATB PagedAttention does not."""
    full = case("base", context_lens=int32(150, 32, 1, 0))
    order = torch.tensor([3, 0, 1, 2])
    moved = full | {"context_lens": full["context_lens"][order], "block_tables": full["block_tables"][order]}
    assert torch.equal(run(moved), run(full))
    padded = full | {"query": torch.cat([full["query"], torch.full((1, 4, 32), torch.nan)])}
    torch.testing.assert_close(run(padded), torch.cat([run(full), torch.zeros(1, 4, 32)]), rtol=0, atol=0)


def test_batch_run_status_must_agree_with_context_lens():
    """The document has it choose the sequences that run, the kernels read context_lens alone: both must agree."""
    agreeing = case("batch_run_status")
    unused = agreeing | {"batch_run_status": None, "batch_run_status_enable": False}
    assert torch.equal(run(agreeing), run(unused))
    for status in (int32(1, 1, 0, 0), int32(1, 1, 1, 1)):
        disagreeing = agreeing | {"batch_run_status": status}
        refuses(
            OPERATOR, (), disagreeing, re.escape(f"batch_run_status is {status.tolist()} and context_lens [150, 32")
        )


@pytest.mark.parametrize("mode", ("type_quant_qkv_online", "type_quant_qkv_offline"))
def test_full_quantisation_has_one_scale_for_each_query_head(mode):
    """The document says [k_head_num*head_size]; kernels and golden read [H]."""
    arguments = case(mode, torch.float16)
    assert arguments["k_descale"].shape == (4,)
    only_head_2 = arguments["v_descale"] * torch.tensor([1.0, 1.0, 2.0, 1.0])
    before, after = run(arguments), run(arguments | {"v_descale": only_head_2})
    assert torch.equal(after[:, [0, 1, 3]], before[:, [0, 1, 3]])
    torch.testing.assert_close(after[:, 2], 2 * before[:, 2], rtol=2e-3, atol=1e-6)
    scale = torch.ones(2 * 32)
    refuses(OPERATOR, (), arguments | {"k_descale": scale}, r"k_descale has shape \[64\]; it must be \[H\] = \[4\]")


def test_online_running_sum_decays_what_went_before():
    """A golden script sums each tile's weights with the tile's own sum; the kernel keeps the running sum."""
    keys = torch.zeros(24, 16, 1, 32, dtype=torch.int8)
    values = torch.full((24, 16, 1, 32), 50, dtype=torch.int8)
    query = torch.zeros(1, 1, 32, dtype=torch.int8)
    one = torch.ones(1)
    table, length = torch.arange(24, dtype=torch.int32)[None], int32(384)
    options = {"quant_type": "type_quant_qkv_online", "out_data_type": torch.float16}
    out = PAGED_ATTENTION(query, keys, values, table, length, k_descale=one, v_descale=one, **options)
    assert (out == 50).all()  # three tiles of equal weights; the script's sum of two would give 75


def test_an_nz_mask_of_tokens_may_be_padded_to_16_rows():
    """The document gives it num_tokens rows, the vendor's test a multiple of 16."""
    exact = case("mask_type_spec, NZ")
    assert exact["mask"].shape[2] == exact["query"].shape[0] == 6
    padded = torch.nn.functional.pad(exact["mask"], (0, 0, 0, 10), value=torch.nan)
    assert torch.equal(run(exact | {"mask": padded}), run(exact))


def test_bfloat16_combined_parallel_mask_is_zero_or_one():
    """The document adds the mask; the bfloat16 kernel for a combined cache multiplies a 0/1 mask by -3e38."""
    mode = "mla_v_head_size, calc_type_spec"
    inverted = case(mode, torch.bfloat16)
    wanted = inverted | {name: inverted[name].float() for name in ("query", "key_cache")}
    wanted["mask"] = torch.where(inverted["mask"] == 1, -1e30, 0.0)
    assert 0.3 < inverted["mask"].float().mean() < 0.7
    torch.testing.assert_close(run(inverted).float(), run(wanted), rtol=2e-2, atol=1e-2)
    additive = inverted | {"mask": -10000 * inverted["mask"]}
    refuses(OPERATOR, (), additive, "mask holds values from -9984.0 to -?0.0; .* must hold 0 .visible. and 1 .hidden.")


def test_float16_combined_parallel_mask_is_added():
    """In float16 the kernel does what the document says."""
    arguments = case("mla_v_head_size, calc_type_spec", torch.float16)
    assert ((arguments["mask"] != 0) & (arguments["mask"] != 1)).any()
    close_to_oracle(run(arguments), arguments)


def test_value_cache_may_be_left_out_and_comes_third():
    """The document's order; a combined cache has no value_cache."""
    (combined, *_) = [each for each in samples(OPERATOR.name, torch.float32) if "mla_v_head_size" in each.kwargs]
    query, keys, values, tables, lengths = combined.args
    assert values is None
    wanted = OPERATOR.overload(*combined.args, **combined.kwargs)
    left_out = OPERATOR.overload(query, keys, block_tables=tables, context_lens=lengths, **combined.kwargs)
    torch.testing.assert_close(left_out, wanted, rtol=0, atol=0)


def test_block_tables_has_a_row_for_each_sequence():
    """The document names axis 0 num_tokens; the code has batch, which differs in parallel decoding, or batch * Hkv."""
    arguments = case("calc_type_spec, mask_type_spec")
    tokens, batch = arguments["query"].shape[0], len(arguments["context_lens"])
    assert (tokens, batch) == (6, 4)
    by_token = arguments["block_tables"][torch.tensor([0, 0, 0, 1, 2, 2])]
    refuses(OPERATOR, (), arguments | {"block_tables": by_token}, r"block_tables has shape \[6, 11\].* = \[4, \*\]")
    compressed = case("compress_type_kvhead")
    assert compressed["block_tables"].shape[0] == 3 * 2


def test_a_compressed_table_lies_over_the_end_of_a_long_context():
    """Its 2048 rows end at the last position; what lies before them is visible to all."""
    long = case("mask_type_norm_compress, NZ", torch.float64)
    assert int(long["context_lens"].max()) > 2048
    close_to_oracle(run(long), long)
    positions = torch.arange(2060)
    causal = torch.where(positions[None] > positions[:, None], -10000.0, 0.0).double()
    table = torch.where(positions[None, :2048] > positions[:2048, None], -10000.0, 0.0).double()
    plain = long | {"mask": causal[-4:], "mask_type": "mask_type_spec", "q_seq_lens": int32(4)}
    plain |= {"query": long["query"][2:], "context_lens": int32(2060), "block_tables": long["block_tables"][1:]}
    compressed = plain | {"mask": table, "mask_type": "mask_type_norm_compress"}
    torch.testing.assert_close(run(compressed), run(plain), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("mask_type", "shape"),
    (("mask_type_norm", (4, 1, 16)), ("mask_type_alibi", (4, 4, 1, 16)), ("mask_type_alibi", (4, 1, 16))),
)
def test_a_mask_of_16_columns_in_rows_goes_with_nz_caches_too(mask_type, shape):
    """Masks come in either format beside NZ caches; 16 columns alone do not make a mask one in NZ format."""
    draw = torch.Generator().manual_seed(0)
    mask = torch.randn(shape, generator=draw, dtype=torch.float64)
    arguments = case("NZ", torch.float64, context_lens=int32(16, 9, 1, 0), mask=mask, mask_type=mask_type)
    close_to_oracle(run(arguments), arguments)


@pytest.mark.parametrize("shape", ((1, 152), (2, 1, 150)))
def test_the_rows_of_a_sequence_share_a_mask_that_has_one_row_for_it(shape):
    draw = torch.Generator().manual_seed(0)
    mask = torch.randn(shape, generator=draw, dtype=torch.float64)
    arguments = case("calc_type_spec, mask_type_norm", torch.float64, mask=mask)
    close_to_oracle(run(arguments), arguments)


def test_compressed_sequences_run_by_their_status():
    arguments = case("compress_type_kvhead")
    status = {"batch_run_status": int32(1, 1, 0), "batch_run_status_enable": True}
    assert torch.equal(run(arguments | status), run(arguments))
    status["batch_run_status"] = int32(1, 0, 0)
    refuses(OPERATOR, (), arguments | status, "batch_run_status is .* and context_lens")


@pytest.mark.parametrize("spelling", ("MASK_TYPE_SPEC", "mask_type_spec", "spec", "Spec"))
def test_enumerators_are_taken_as_the_documents_and_the_wrappers_spell_them(spelling):
    arguments = case("calc_type_spec, mask_type_spec")
    assert torch.equal(run(arguments | {"mask_type": spelling, "calc_type": "CALC_TYPE_SPEC"}), run(arguments))


def test_an_enumerator_has_a_second_name():
    arguments = case("base")
    assert torch.equal(run(arguments | {"quant_type": "TYPE_QUANT_UNQUANT", "mask_type": "0"}), run(arguments))


def test_value_cache_is_left_out_where_keys_hold_the_values():
    arguments = case("mla_v_head_size")
    assert torch.equal(run({name: value for name, value in arguments.items() if name != "value_cache"}), run(arguments))


# Edges.


def test_no_sequences():
    arguments = case("base", query=torch.zeros(0, 4, 32), context_lens=int32(), block_tables=int32().view(0, 11))
    assert run(arguments).shape == (0, 4, 32)


@pytest.mark.parametrize("mode", ("base", "NZ", "scale_type_logn", "mla_v_head_size", "type_dequant_fusion"))
def test_contexts_of_zero_make_no_rows(mode):
    arguments = case(mode, context_lens=int32(0, 0, 0, 0))
    assert (run(arguments) == 0).all()
    out = torch.full_like(run(arguments), 5)
    OPERATOR.inplace(**arguments, attn_out=out)
    assert (out == 5).all()


@pytest.mark.parametrize("length", (1, 15, 16, 17, 127, 128, 129, 144, 160, 256))
@pytest.mark.parametrize("mode", ("base", "NZ", "type_bnsd", "type_dequant_fusion"))
def test_contexts_that_end_at_the_edge_of_a_block_or_tile(mode, length):
    arguments = case(mode, torch.float64)
    blocks = torch.randperm(arguments["key_cache"].shape[0])
    table = blocks.repeat(2)[: -(-length // 16)].to(torch.int32)[None]
    arguments |= {"query": arguments["query"][:1], "context_lens": int32(length), "block_tables": table}
    close_to_oracle(run(arguments), arguments)


def test_a_key_head_without_context_makes_no_rows():
    arguments = case("compress_type_kvhead", torch.float64, context_lens=int32(150, 0, 0, 1, 0, 0))
    made = close_to_oracle(run(arguments), arguments)
    assert made[:, :, 0].tolist() == [[True, True, False, False], [False, False, True, True]]


def test_one_block_for_many_sequences():
    arguments = case("base", torch.float64)
    shared = int(arguments["block_tables"][0, 0])
    tables = arguments["block_tables"].clone()
    tables[1, 0] = tables[2, 0] = shared
    close_to_oracle(run(arguments | {"block_tables": tables}), arguments | {"block_tables": tables})


@pytest.mark.parametrize("value", (torch.nan, torch.inf))
def test_what_is_not_finite_reaches_its_own_rows_only(value):
    arguments = case("base")
    clean = run(arguments)
    query = arguments["query"].clone()
    query[1, 2, 3] = value
    other = torch.ones(3, 4, dtype=torch.bool)
    other[1, 2] = False
    result = run(arguments | {"query": query})
    assert torch.equal(result[other], clean[other])
    assert result[1, 2].isnan().all()  # inf meets keys of both signs, and inf - inf is NaN
    values = arguments["value_cache"].clone()
    block = int(arguments["block_tables"][0, 1])
    values[block, 5, 1, 7] = value
    result = run(arguments | {"value_cache": values})
    touched = torch.zeros_like(result, dtype=torch.bool)
    touched[0, 2:, 7] = True
    assert torch.equal(result[~touched], clean[~touched])
    torch.testing.assert_close(result[touched], torch.full((2,), value), equal_nan=True)


def test_a_row_that_a_mask_hides_entirely_is_zero():
    mask = torch.zeros(4, 1, 150)
    mask[1] = -torch.inf
    arguments = case("mask_type_norm, 3-D", mask=mask)
    result = run(arguments)
    assert (result[1] == 0).all()
    assert result[[0, 2]].isfinite().all()


def test_a_hidden_key_counts_for_nothing():
    """-inf in a mask is the same as a context without that key."""
    arguments = case("mask_type_norm, shared", torch.float64, mask=torch.zeros(1, 150).double())
    shorter = arguments | {"context_lens": int32(149, 32, 1, 0)}
    arguments["mask"][0, 149] = -torch.inf
    torch.testing.assert_close(run(arguments), run(shorter), rtol=1e-13, atol=1e-13)


def test_results_are_written_into_views_of_any_layout():
    arguments = case("compress_type_kvhead")
    wanted = run(arguments)
    out = torch.zeros(32, 4, 2).transpose(0, 2)
    OPERATOR.inplace(**arguments, attn_out=out)
    assert torch.equal(out, wanted)
    strided = torch.zeros(2, 4, 64)[..., ::2]
    transposed = arguments["query"].transpose(0, 1).contiguous().transpose(0, 1)
    OPERATOR.inplace(**(arguments | {"query": transposed}), attn_out=strided)
    assert torch.equal(strided, wanted)
