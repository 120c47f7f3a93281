"""paged_attention: where its sources disagree, its edges, and free sizes."""

import re

import hypothesis
import pytest
import torch
from hypothesis import strategies

from ops.harness import by_name, compiles_once, refuses
from ops.test_paged_attention import OPERATOR, case, close_to_oracle, int32, run

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
    out = PAGED_ATTENTION(query, keys, table, length, values, k_descale=one, v_descale=one, **options)
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


@pytest.mark.parametrize(
    ("mode", "options"),
    (
        ("base", {"quant_type": "TYPE_QUANT_UNQUANT", "mask_type": "0", "scale_type": "0", "input_layout": "0"}),
        ("mask_type_norm, shared", {"mask_type": "1", "quant_type": "0", "compress_type": "0", "calc_type": "0"}),
        ("type_bnsd", {"input_layout": "1"}),
        ("mask_type_alibi, 3-D", {"mask_type": "2"}),
        ("calc_type_spec, mask_type_spec", {"mask_type": "3", "calc_type": "1"}),
        ("mask_type_mask_free", {"mask_type": "4"}),
        ("mask_type_norm_compress", {"mask_type": "5"}),
        ("type_dequant_fusion", {"quant_type": "1"}),
        ("type_quant_qkv_offline", {"quant_type": "2"}),
        ("type_quant_qkv_online", {"quant_type": "3"}),
        ("compress_type_kvhead", {"compress_type": "1"}),
        ("compress_type_kvhead_rope", {"compress_type": "2"}),
        ("scale_type_logn", {"scale_type": "1"}),
    ),
)
def test_enumerators_are_taken_by_their_numbers_and_second_names(mode, options):
    arguments = case(mode, torch.float16 if "qkv" in mode else torch.float32)
    assert torch.equal(run(arguments | options), run(arguments))


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


# Free sizes.

MODES = [sample.mode for dtype in (torch.float32, torch.float16) for sample in OPERATOR.samples(dtype)]
MODES = list(dict.fromkeys(MODES))


def repeated(arguments, times, more_blocks, more_columns):
    """The same batch `times` times over, with unused blocks and columns of the table behind."""
    changed = dict(arguments)
    for name in ("query", "context_lens", "batch_run_status", "q_seq_lens", "log_n"):
        if arguments[name] is not None:
            changed[name] = torch.cat([arguments[name]] * times)
    tables = torch.cat([arguments["block_tables"]] * times)
    changed["block_tables"] = torch.nn.functional.pad(tables, (0, more_columns), value=-1)
    for name in ("key_cache", "value_cache", "razor_offset"):
        if arguments[name] is not None:
            unused = torch.zeros(more_blocks, *arguments[name].shape[1:], dtype=arguments[name].dtype)
            changed[name] = torch.cat([arguments[name], unused])
    axis = repeated_mask_axis(arguments)
    if axis is not None:
        changed["mask"] = torch.cat([arguments["mask"]] * times, axis)
    return changed


def repeated_mask_axis(arguments):
    """The axis along which a mask has a part for each sequence or token, if it has one."""
    mask, sequences = arguments["mask"], len(arguments["context_lens"])
    if arguments["mask_type"] == "mask_type_spec":
        return 2 if mask.dim() == 4 else 0
    per_sequence = {
        "mask_type_norm": mask is not None and mask.dim() >= 3 and len(mask) > 1,
        "mask_type_alibi": mask is not None and mask.dim() == 4 and len(mask) in (sequences, sequences * 4),
    }
    return 0 if per_sequence.get(arguments["mask_type"]) else None


def tensors_of(arguments):
    return {name: value for name, value in arguments.items() if torch.is_tensor(value)}


@pytest.mark.parametrize("mode", MODES)
def test_one_graph_serves_every_batch_and_number_of_blocks(mode):
    dtype = torch.float16 if "qkv" in mode else torch.float32
    inputs = [tensors_of(repeated(case(mode, dtype), *sizes)) for sizes in ((7, 60, 20), (3, 12, 5), (5, 33, 0))]
    options = {name: value for name, value in case(mode, dtype).items() if not torch.is_tensor(value)}
    names = tuple(inputs[0])

    def layer(*tensors):
        return PAGED_ATTENTION(**dict(zip(names, tensors, strict=True)), **options)

    # A float from outside costs a second trace, whatever reads it.
    with torch._dynamo.config.patch(specialize_float=True):
        compiles_once(layer, [tuple(tensors.values()) for tensors in inputs])


@pytest.mark.parametrize("mode", MODES)
def test_sequences_do_not_see_each_other(mode):
    arguments = case(mode, torch.float16 if "qkv" in mode else torch.float64)
    once, thrice = run(arguments), run(repeated(arguments, 3, 2, 1))
    torch.testing.assert_close(thrice, torch.cat([once] * 3), rtol=1e-3 if "qkv" in mode else 1e-12, atol=1e-12)


@hypothesis.settings(max_examples=15, deadline=None, derandomize=True)
@hypothesis.given(
    contexts=strategies.lists(strategies.integers(0, 300), min_size=1, max_size=4),
    heads=strategies.sampled_from(((1, 1), (4, 1), (6, 2), (3, 3))),
    sizes=strategies.sampled_from(((16, 8), (8, 24), (40, 40))),
    block_size=strategies.sampled_from((16, 48, 128)),
    seed=strategies.integers(0, 99),
)
def test_decoding_of_any_size_equals_the_oracle(contexts, heads, sizes, block_size, seed):
    draw = torch.Generator().manual_seed(seed)
    pages = [-(-length // block_size) for length in contexts]
    order = torch.randperm(sum(pages) + 1, generator=draw).tolist()
    tables = torch.tensor([[order.pop() for _ in range(count)] + [-1] * (max(pages) - count) for count in pages])
    caches = [
        torch.randn(sum(pages) + 1, block_size, heads[1], size, generator=draw, dtype=torch.float64) for size in sizes
    ]
    tokens = sum(length > 0 for length in contexts)
    query = torch.randn(tokens, heads[0], sizes[0], generator=draw, dtype=torch.float64)
    tables = tables.view(len(contexts), -1).to(torch.int32)
    given = (query, caches[0], tables, int32(*contexts), caches[1])
    arguments = by_name(OPERATOR, given, {"kv_head_num": heads[1]})
    close_to_oracle(run(arguments), arguments)


@hypothesis.settings(max_examples=15, deadline=None, derandomize=True)
@hypothesis.given(
    steps=strategies.lists(strategies.integers(1, 5), min_size=1, max_size=4),
    behind=strategies.integers(0, 140),
    mode=strategies.sampled_from(("calc_type_spec, mask_type_spec", "mla_v_head_size, calc_type_spec")),
    seed=strategies.integers(0, 99),
)
def test_parallel_decoding_of_any_size_equals_the_oracle(steps, behind, mode, seed):
    draw = torch.Generator().manual_seed(seed)
    arguments = case(mode, torch.float64)
    contexts = [int(length) for length in torch.randint(0, behind + 2, (len(steps),), generator=draw)]
    tokens = sum(step for step, length in zip(steps, contexts, strict=True) if length)
    blocks = arguments["key_cache"].shape[0]
    arguments |= {
        "query": torch.randn(tokens, 4, 32, generator=draw, dtype=torch.float64),
        "mask": torch.randn(tokens, behind + 1, generator=draw, dtype=torch.float64),
        "block_tables": torch.randint(0, blocks, (len(steps), 9), generator=draw, dtype=torch.int32),
        "context_lens": int32(*contexts),
        "q_seq_lens": int32(*steps),
    }
    close_to_oracle(run(arguments), arguments)


@pytest.mark.slow
def test_a_large_decode_batch():
    """64 sequences of 4096 tokens, 128 heads of 128 over 8 key heads, in bfloat16: a few rows against float64."""
    draw = torch.Generator().manual_seed(0)
    batch, heads, kv_heads, size, length, block_size = 64, 128, 8, 128, 4096, 128
    blocks = batch * length // block_size
    caches = [torch.randn(blocks, block_size, kv_heads, size, generator=draw).bfloat16() for _ in range(2)]
    tables = torch.randperm(blocks, generator=draw).view(batch, -1).to(torch.int32)
    query = torch.randn(batch, heads, size, generator=draw).bfloat16()
    given = (query, caches[0], tables, int32(*[length] * batch), caches[1])
    out = PAGED_ATTENTION(*given, kv_head_num=kv_heads, qk_scale=size**-0.5)
    for token, head in ((0, 0), (31, 17), (63, 127)):
        keys, values = (cache[tables[token].long(), :, head // 16].flatten(0, 1).double() for cache in caches)
        weights = (keys @ query[token, head].double() * size**-0.5).softmax(0)
        error = 2.0**-8 * ((weights @ values).abs() + weights @ values.abs()) + 1e-5
        assert ((out[token, head].double() - weights @ values).abs() <= error).all()
