"""multi_latent_attention: what it refuses, spellings, NaN and infinities, empty and tiny inputs."""

import math

import pytest
import torch
from lib.operators import mla_oracle
from lib.operators.harness import refuses
from lib.operators.mla_oracle import CACHES, FLOATING, RING, drawn, operator, run


def equal(actual, wanted):
    torch.testing.assert_close(actual, wanted, rtol=0, atol=0, equal_nan=True)


# Refusals.

DECODE = {"cache_mode": "krope_ctkv"}
MERGED = {"cache_mode": "kvcache"}
NZ = {"cache_mode": "nzcache"}
INT8 = {"cache_mode": "int8_nzcache"}
TWO = {"steps": (2, 2)}
SPEC = {"cache_mode": "krope_ctkv", **TWO}
SPEC_MASK = {**SPEC, "mask_type": "mask_type_spec"}
FREE_MASK = {**SPEC, "mask_type": "mask_type_free"}


def half(*shape):
    return torch.zeros(shape, dtype=torch.float16)


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


REFUSALS = [
    (DECODE, {"q_nope": half(2, 4096)}, r"q_nope has shape \[2, 4096\]; it must be \[T, H, width\]"),
    (DECODE, {"q_nope": half(2, 8, 256)}, r"q_nope has shape \[2, 8, 256\]; it must be .* = \[2, 8, 512\]"),
    (DECODE, {"q_nope": half(2, 12, 512), "head_num": 12}, "q_nope has 12 heads; allowed: 8, 16, 32, 64, 128"),
    (DECODE, {"head_num": 16}, "head_num is 16; it must be 8, the heads of q_nope, or 0"),
    (DECODE, {"kv_head_num": 8}, "kv_head_num is 8; it must be 1"),
    (DECODE, {"qk_scale": 0.0}, "qk_scale is 0.0; it must be above 0 and at most 1"),
    (DECODE, {"qk_scale": 1.5}, "qk_scale is 1.5; it must be above 0 and at most 1"),
    (DECODE, {"qk_scale": math.nan}, "qk_scale is nan; it must be above 0 and at most 1"),
    (DECODE, {"mask_type": "causal"}, "mask_type is 'causal'; allowed: 'undefined', 'mask_type_spec', 'mask_type_fr"),
    (DECODE, {"calc_type": "prefill"}, "calc_type is 'prefill'; allowed: 'calc_type_undefined', 'calc_type_spec'"),
    (DECODE, {"cache_mode": "nd"}, "cache_mode is 'nd'; allowed: 'kvcache', 'krope_ctkv', 'int8_nzcache', 'nzcache'"),
    (DECODE, {"q_rope": None}, "q_rope is None; it must be a tensor with cache_mode 'krope_ctkv'"),
    (DECODE, {"k_rope": None}, "k_rope is None; it must be a tensor with cache_mode 'krope_ctkv'"),
    (MERGED, {"q_rope": half(2, 8, 64)}, "q_rope is given; it must be None with cache_mode 'kvcache'"),
    (MERGED, {"k_rope": half(4, 128, 1, 64)}, "k_rope is given; it must be None with cache_mode 'kvcache'"),
    (MERGED, {"q_nope": half(2, 8, 512)}, r"q_nope .* \[T, H, Hckv\+Dr\] = \[2, 8, 576\]"),
    (MERGED, {"ctkv": half(4, 128, 1, 512)}, r"ctkv .* \[BlockNum, BlockSize, KvHeads, Hckv\+Dr\] = .* 576\]"),
    (DECODE, {"q_rope": half(2, 8, 32)}, r"q_rope has shape \[2, 8, 32\]; it must be \[T, H, Dr\] = \[2, 8, 64\]"),
    (DECODE, {"q_rope": half(3, 8, 64)}, r"q_rope has shape \[3, 8, 64\]; it must be .* = \[2, 8, 64\]"),
    (DECODE, {"ctkv": half(4, 128, 512)}, r"ctkv has shape \[4, 128, 512\]; it must be \[BlockNum, BlockSize, KvHeads"),
    (DECODE, {"ctkv": half(4, 128, 2, 512)}, r"ctkv .* = \[\*, 128, 1, 512\]"),
    (DECODE, {"k_rope": half(3, 128, 1, 64)}, r"k_rope .* = \[4, 128, 1, 64\]"),
    (NZ, {"ctkv": half(4, 128, 1, 512)}, r"ctkv .* \[BlockNum, width/n0, BlockSize, n0\] = \[\*, 32, 128, 16\]"),
    (NZ, {"k_rope": half(4, 2, 128, 32)}, r"k_rope .* = \[4, 4, 128, 16\]"),
    (INT8, {"ctkv": half(4, 32, 128, 16).to(torch.int8)}, r"ctkv .* = \[\*, 16, 128, 32\]"),
    (INT8, {"ctkv": half(4, 16, 128, 32)}, "ctkv has dtype torch.float16; allowed: torch.int8"),
    (INT8, {"q_nope": half(2, 8, 512)}, "q_nope has dtype torch.float16; allowed: torch.int8"),
    (INT8, {"q_rope": half(2, 8, 64).float()}, "q_rope has dtype torch.float32; allowed: torch.float16"),
    (INT8, {"k_rope": half(4, 4, 128, 16).bfloat16()}, "k_rope has dtype torch.bfloat16; allowed: torch.float16"),
    (INT8, {"qk_descale": None}, "qk_descale is None; it must be a tensor with cache_mode 'int8_nzcache'"),
    (INT8, {"pv_descale": None}, "pv_descale is None; it must be a tensor with cache_mode 'int8_nzcache'"),
    (INT8, {"pv_descale": torch.ones(1)}, r"pv_descale has shape \[1\]; it must be \[H\] = \[8\]"),
    (INT8, {"qk_descale": torch.ones(8).half()}, "qk_descale has dtype torch.float16; allowed: torch.float32"),
    (NZ, {"qk_descale": torch.ones(8)}, "qk_descale is given; it must be None with cache_mode 'nzcache'"),
    (DECODE, {"q_nope": half(2, 8, 512).to(torch.int8)}, "q_nope has dtype torch.int8; allowed: torch.float16"),
    (DECODE, {"q_nope": half(2, 8, 512).float()}, "q_nope has dtype torch.float32; allowed: torch.float16"),
    (DECODE, {"ctkv": half(4, 128, 1, 512).double()}, "ctkv has dtype torch.float64; allowed: torch.float16"),
    (DECODE, {"ctkv": half(4, 128, 1, 512).to("meta")}, "ctkv is on meta; it must be on cpu, the device of q_nope"),
    (DECODE, {"block_tables": half(2, 3)}, "block_tables has dtype torch.float16; allowed: torch.int32, torch.int64"),
    (DECODE, {"block_tables": ints(0, 1)}, r"block_tables has shape \[2\]; it must be \[B, MaxBlocks\]"),
    (DECODE, {"block_tables": ints([0, 4], [1, 0])}, "block_tables holds 4 within a context; it must be 0 to 3"),
    (DECODE, {"block_tables": ints([0, -1], [1, 0])}, "block_tables holds -1 within a context; it must be 0 to 3"),
    (DECODE, {"block_tables": ints([0], [1])}, "context_lens holds 130; it must be 0 to 128, 128 for each column"),
    (DECODE, {"context_lens": ints(130, -2)}, "context_lens holds -2; it must be 0 to 384"),
    (DECODE, {"context_lens": ints(130)}, r"context_lens has shape \[1\]; it must be \[B\] = \[2\]"),
    (DECODE, {"context_lens": half(2)}, "context_lens has dtype torch.float16; allowed: torch.int32, torch.int64"),
    (DECODE, {"q_seqlen": ints(1, 1)}, "q_seqlen is given; it must be None with calc_type 'calc_type_undefined'"),
    (DECODE, {"q_seqlen": ints(1, 1), "calc_type": RING}, "q_seqlen is given; .* with calc_type 'calc_type_ring'"),
    (DECODE, {"calc_type": "spec"}, "q_seqlen is None; it must be a tensor with calc_type 'calc_type_spec'"),
    (SPEC, {"calc_type": "undefined", "q_seqlen": None}, "q_nope has 4 rows; with calc_type .* it must have 2, one"),
    (SPEC, {"calc_type": "ring", "q_seqlen": None}, "q_nope has 4 rows; with calc_type 'calc_type_ring' .* 2, one"),
    (SPEC, {"q_seqlen": ints(2, 1)}, "q_seqlen sums to 3; it must sum to 4, the rows of q_nope"),
    (SPEC, {"q_seqlen": ints(4, 0)}, "q_seqlen holds 0; it must be 1 to 4"),
    (SPEC, {"q_seqlen": ints(5, -1)}, "q_seqlen holds 5; it must be 1 to 4"),
    (SPEC, {"q_seqlen": ints(4)}, r"q_seqlen has shape \[1\]; it must be \[B\] = \[2\]"),
    (SPEC, {"q_seqlen": half(2)}, "q_seqlen has dtype torch.float16; allowed: torch.int32, torch.int64"),
    (SPEC, {"mask": half(4, 130)}, "mask is given; it must be None with mask_type 'undefined'"),
    (SPEC_MASK, {"mask": None}, "mask is None; it must be a tensor with mask_type 'mask_type_spec'"),
    (SPEC_MASK, {"mask": half(3, 130)}, r"mask has shape \[3, 130\]; it must be .* = \[4, \*\]"),
    (SPEC_MASK, {"mask": half(4, 130).float()}, "mask has dtype torch.float32; allowed: torch.float16"),
    (SPEC_MASK, {"mask": half(2, 2, 130)}, r"mask has shape \[2, 2, 130\]; it must be \[T, max\(context_lens\)\]"),
    (FREE_MASK, {"mask": half(127, 128)}, r"mask has shape \[127, 128\]; it must have 125\+2q = 129 rows"),
    (FREE_MASK, {"mask": half(129, 64)}, r"mask has shape \[129, 64\]; it must be .* = \[\*, 128\]"),
    (FREE_MASK, {"mask": half(3, 129, 128)}, r"mask has shape \[3, 129, 128\]; it must be .* = \[2, \*, 128\]"),
    (FREE_MASK, {"mask": half(129)}, r"mask has shape \[129\]; it must be \[125\+2q, 128\] or \[B, 125\+2q, 128\]"),
    (FREE_MASK, {"q_seqlen": ints(3, 1)}, r"mask has shape \[129, 128\]; it must have 125\+2q = 131 rows, q the"),
    (FREE_MASK, {"q_seqlen": ints(1, 1), "q_nope": half(2, 8, 512), "q_rope": half(2, 8, 64)}, r"125\+2q = 127 rows"),
]  # fmt: skip


@pytest.mark.parametrize(("base", "changes", "message"), REFUSALS, ids=[message for _, _, message in REFUSALS])
def test_refuses(base, changes, message):
    refuses(operator, (), drawn(**base) | changes, message)


@pytest.mark.parametrize("cache_mode", FLOATING)
@pytest.mark.parametrize("calc_type", ["undefined", "ring"])
def test_refuses_a_mask_outside_of_spec(cache_mode, calc_type):
    a = drawn(cache_mode) | {"mask": half(2, 130), "mask_type": "mask_type_spec", "calc_type": calc_type}
    refuses(operator, (), a, f"mask_type is 'mask_type_spec'; with calc_type 'calc_type_{calc_type}' it must be 'undef")


def test_int8_with_ring_takes_no_mask():
    a = drawn("int8_nzcache") | {"mask": half(2, 130), "mask_type": "mask_type_spec", "calc_type": RING}
    refuses(operator, (), a, "mask_type is 'mask_type_spec'; with calc_type 'calc_type_ring' it must be 'undefined'")


def test_refuses_a_batch_above_8192():
    a = drawn("krope_ctkv", contexts=(1,))
    a |= {"q_nope": half(1, 8, 512).expand(8193, 8, 512), "q_rope": half(1, 8, 64).expand(8193, 8, 64)}
    a |= {"block_tables": torch.zeros(8193, 1, dtype=torch.int32), "context_lens": torch.zeros(8193, dtype=torch.int32)}
    refuses(operator, (), a, "block_tables has 8193 rows, one for each sequence; at most 8192 are allowed")


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ({"atten_out": half(2, 8, 576)}, r"atten_out has shape \[2, 8, 576\]; it must be .* = \[2, 8, 512\]"),
        ({"atten_out": half(2, 8, 512).float()}, "atten_out has dtype torch.float32; allowed: torch.float16"),
        ({"atten_out": half(2, 8, 512).to("meta")}, "atten_out is on meta; it must be on cpu"),
        ({"lse": half(2, 8)}, r"lse has shape \[2, 8\]; it must be \[T, H, 1\]"),
        ({"lse": half(0)}, r"lse has shape \[0\]; it must be \[T, H, 1\]"),
        ({"lse": half(2, 8, 1).double()}, "lse has dtype torch.float64; allowed: torch.float16"),
    ],
)
def test_the_twin_refuses_outputs_that_do_not_fit(outputs, message):
    given = {"atten_out": half(2, 8, 512), "lse": half(2, 8, 1)} | outputs
    with pytest.raises(ValueError, match=message):
        operator.inplace(**drawn("krope_ctkv", calc_type=RING), **given)
    assert all(not output.any() for output in given.values() if not output.is_meta)


def test_the_twin_wants_an_empty_lse_without_ring():
    with pytest.raises(ValueError, match=r"lse has shape \[2, 8, 1\]; it must be \[empty\]"):
        operator.inplace(**drawn("krope_ctkv"), atten_out=half(2, 8, 512), lse=half(2, 8, 1))


# Spellings and forms of the arguments.


@pytest.mark.parametrize("spelling", ["mask_type_free", "free", "MASK_TYPE_MASK_FREE", "MASK_FREE", "Mask_Type_Free"])
def test_enumerators_are_read_in_any_spelling(spelling):
    a = drawn(**FREE_MASK)
    equal(run(a, mask_type=spelling, calc_type="CALC_TYPE_SPEC", cache_mode="KROPE_CTKV"), run(a))
    equal(run(a, mask_type=spelling, calc_type="spec", head_num=0, kv_head_num=0), run(a))


def test_lengths_and_tables_are_int32_or_int64_and_strides_are_free():
    a = drawn(**SPEC)
    wide = {name: a[name].long() for name in ("block_tables", "context_lens", "q_seqlen")}
    equal(run(a, **wide), run(a))
    strided = {
        name: torch.stack([value, torch.zeros_like(value)], -1)[..., 0]
        for name, value in a.items()
        if torch.is_tensor(value)
    }
    assert not strided["ctkv"].is_contiguous()
    equal(run(a, **strided), run(a))


# NaN and infinities.


def unread(a):
    """For each slot of the cache, whether no row of any sequence may read it."""
    free = torch.ones(a["ctkv"].shape[0], 128, dtype=torch.bool)
    for table, context in zip(a["block_tables"].tolist(), a["context_lens"].tolist(), strict=True):
        for position in range(context):
            free[table[position // 128], position % 128] = False
    return free


def slots_filled(a, name, slots, value):
    """A copy of a cache with `value` in all columns of the slots [BlockNum, 128] that are true."""
    cache = a[name].clone()
    rows = cache.squeeze(2) if cache.shape[1] == 128 else cache.transpose(1, 2)
    rows[slots] = value
    return cache


@pytest.mark.parametrize("garbage", [math.nan, math.inf])
@pytest.mark.parametrize("cache_mode", CACHES)
def test_garbage_behind_the_contexts_does_not_reach_results(cache_mode, garbage):
    a = drawn(cache_mode, contexts=(130, 0, 128, 5), calc_type=RING)
    wanted = run(a)
    floats = [name for name in ("ctkv", "k_rope") if a[name] is not None and a[name].is_floating_point()]
    spoiled = {name: slots_filled(a, name, unread(a), garbage) for name in floats}
    assert all(not cache.isfinite().all() for cache in spoiled.values())
    equal(run(a, **spoiled), wanted)


@pytest.mark.parametrize("entry", [-1, -(2**31), 4, 2**31 - 1])
@pytest.mark.parametrize("cache_mode", CACHES)
def test_entries_of_block_tables_behind_the_contexts_are_not_read(cache_mode, entry):
    a = drawn(cache_mode, contexts=(130, 0, 128), calc_type=RING)
    tables = a["block_tables"]
    assert (tables == -1).sum() == 6
    equal(run(a, block_tables=torch.where(tables == -1, entry, tables)), run(a))


@pytest.mark.parametrize("heads", [128, 8])
def test_a_nan_key_that_a_row_does_not_see_does_not_reach_it(heads):
    """Only the last of three causal rows sees the last key; below 128 heads all three see it."""
    a = drawn("krope_ctkv", contexts=(130, 7), heads=heads, steps=(3, 1))
    last = torch.zeros(a["ctkv"].shape[0], 128, dtype=torch.bool)
    last[a["block_tables"][0, 1], 1] = True
    wanted, _ = run(a)
    out, _ = run(a, ctkv=slots_filled(a, "ctkv", last, math.nan))
    seeing = slice(2, 3) if heads == 128 else slice(0, 3)
    assert out[seeing].isnan().all()
    wanted[seeing] = math.nan
    equal(out, wanted)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("cache_mode", CACHES)
def test_a_nan_or_inf_query_spoils_its_own_row_and_head_only(cache_mode, value):
    a = drawn(cache_mode, contexts=(130, 5), calc_type=RING)
    name = "q_nope" if a["q_rope"] is None else "q_rope"
    query = a[name].clone()
    query[0, 3, 1] = value
    wanted, actual = run(a), run(a, **{name: query})
    for result, expected in zip(actual, wanted, strict=True):
        assert result[0, 3].isnan().all()
        expected[0, 3] = math.nan
        equal(result, expected)


def test_a_nan_query_of_an_empty_context_gives_zero():
    a = drawn("krope_ctkv", contexts=(0, 5), calc_type=RING)
    a["q_nope"][0] = math.nan
    out, lse = run(a)
    assert (out[0] == 0).all()
    assert (lse[0] == -math.inf).all()
    assert out[1].isfinite().all()


@pytest.mark.parametrize("cache_mode", [cache for cache in CACHES if cache != "kvcache"])
def test_a_score_of_minus_infinity_hides_its_key(cache_mode):
    a = drawn(cache_mode, contexts=(2,), calc_type=RING)
    a["q_rope"].abs_()
    second = torch.zeros(a["ctkv"].shape[0], 128, dtype=torch.bool)
    second[a["block_tables"][0, 0], 1] = True
    equal(run(a, k_rope=slots_filled(a, "k_rope", second, -math.inf)), run(a, context_lens=ints(1)))


def test_a_score_of_minus_infinity_hides_its_key_in_a_merged_cache():
    """The infinity is in the rope part, after the columns that are also values."""
    a = drawn("kvcache", contexts=(2,), calc_type=RING)
    a["q_nope"].abs_()
    a["ctkv"][a["block_tables"][0, 0], 1, 0, 575] = -math.inf
    equal(run(a), run(a, context_lens=ints(1)))


def test_infinite_latents_spoil_their_column_only():
    """0 times -inf is NaN, as on the device: the key is hidden, its value still meets a weight of 0."""
    a = drawn("krope_ctkv", contexts=(2,))
    a["q_nope"].abs_()
    wanted, _ = run(a, context_lens=ints(1))
    a["ctkv"][a["block_tables"][0, 0], 1, 0, 7] = -math.inf
    out, _ = run(a)
    wanted[..., 7] = math.nan
    equal(out, wanted)


def test_a_mask_of_minus_infinity_hides_and_a_row_that_sees_nothing_is_zero():
    a = drawn(**SPEC_MASK)
    a["mask"].zero_()
    a["mask"][0, 5:] = -math.inf
    a["mask"][1] = -math.inf
    out, _ = run(a)
    wanted, _ = run(a, context_lens=ints(5, 2), mask=half(4, 5))
    equal(out[0], wanted[0])
    assert (out[1] == 0).all()


# Small sizes.


@pytest.mark.parametrize("cache_mode", CACHES)
@pytest.mark.parametrize("calc_type", ["calc_type_undefined", "calc_type_spec", RING])
def test_an_empty_batch(cache_mode, calc_type):
    a = drawn(cache_mode, calc_type=RING)
    a |= {name: a[name][:0] for name in ("q_nope", "q_rope", "block_tables", "context_lens") if a[name] is not None}
    a |= {"calc_type": calc_type, "q_seqlen": ints() if calc_type == "calc_type_spec" else None}
    out, lse = run(a)
    assert out.shape == (0, 8, 512)
    assert lse.shape == ((0, 8, 1) if calc_type == RING else (0,))
    operator.inplace(**a, atten_out=out, lse=lse)


@pytest.mark.parametrize("mask_type", ["mask_type_spec", "mask_type_free"])
def test_an_empty_batch_with_a_mask(mask_type):
    a = drawn(**SPEC_MASK) | {"mask_type": mask_type, "q_seqlen": ints(), "context_lens": ints()}
    a |= {name: a[name][:0] for name in ("q_nope", "q_rope", "block_tables")}
    mask = half(0, 0) if mask_type == "mask_type_spec" else half(129, 128)
    assert run(a, mask=mask)[0].shape == (0, 8, 512)


@pytest.mark.parametrize("cache_mode", CACHES)
def test_no_keys_at_all(cache_mode):
    a = drawn(cache_mode, contexts=(0, 0), calc_type=RING)
    no_blocks = {name: a[name][:0] for name in ("ctkv", "k_rope") if a[name] is not None}
    for changes in ({}, no_blocks, no_blocks | {"block_tables": a["block_tables"][:, :0]}):
        out, lse = run(a, **changes)
        assert (out == 0).all()
        assert (lse == -math.inf).all()


@pytest.mark.parametrize("cache_mode", FLOATING)
def test_a_single_key_is_returned_to_the_bit(cache_mode):
    a = drawn(cache_mode, contexts=(1,))
    row = mla_oracle.cache_row(a["ctkv"], int(a["block_tables"][0, 0]) * 128, cache_mode)[:512]
    equal(run(a)[0].double(), torch.from_numpy(row).expand(1, 8, 512))


@pytest.mark.parametrize("heads", [8, 128])
def test_fewer_keys_than_causal_rows_leave_the_first_rows_without_any(heads):
    a = drawn("krope_ctkv", contexts=(2, 130), heads=heads, steps=(4, 1))
    out, _ = run(a)
    blind = (out == 0).flatten(1).all(1).tolist()
    assert blind == ([True, True, False, False, False] if heads == 128 else [False] * 5)
