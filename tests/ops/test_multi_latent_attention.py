"""multi_latent_attention: every mode against float64, its roundings bit by bit, and the decisions between sources."""

import math

import numpy as np
import pytest
import torch
from lib.operators import mla_oracle
from lib.operators.harness import by_name, cases, fake_with_free_sizes, refuses

from mla_fx.ops.called.multi_latent_attention.operator import operator
from mla_fx.ops.called.multi_latent_attention.samples import corner_mask, sample

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
CACHES = ("krope_ctkv", "nzcache", "kvcache", "int8_nzcache")


def drawn(dtype, cache_mode, seed=11, **options):
    """The arguments of a sample by name."""
    _, args, kwargs = sample(dtype, seed, cache_mode, **options)
    return by_name(operator, args, kwargs)


def dtype_of(cache_mode):
    """The dtype in which the mode computes most exactly."""
    return torch.float16 if cache_mode == "int8_nzcache" else torch.float64


def alone(a, row, count):
    """The decode of one query row with `count` keys of its sequence."""
    rows = slice(row.token, row.token + 1)
    lone = {"q_nope": a["q_nope"][rows], "q_rope": None if a["q_rope"] is None else a["q_rope"][rows]}
    lone |= {"block_tables": a["block_tables"][row.sequence : row.sequence + 1], "context_lens": torch.tensor([count])}
    options = {"mask": None, "mask_type": "undefined", "q_seqlen": None, "calc_type": "calc_type_undefined"}
    return operator.overload(**(a | lone | options))[0][0]


@pytest.mark.slow
@pytest.mark.parametrize(("operator", "args", "kwargs"), cases(DTYPES, ("multi_latent_attention",)))
def test_sample_against_oracle(operator, args, kwargs):
    arguments = by_name(operator, args, kwargs)
    out, lse = operator.overload(*args, **kwargs)
    ring = kwargs["calc_type"] == "calc_type_ring"
    assert lse.shape == ((*out.shape[:2], 1) if ring else (0,))
    mla_oracle.compare(arguments, out, lse if ring else None)


@pytest.mark.parametrize("cache_mode", CACHES)
@pytest.mark.parametrize("contexts", [(127, 128, 129), (255, 256, 257), (1, 0, 384)])
def test_contexts_around_the_edges_of_blocks(cache_mode, contexts):
    a = drawn(dtype_of(cache_mode), cache_mode, heads=8, contexts=contexts, calc_type="calc_type_ring")
    mla_oracle.compare(a, *operator.overload(**a))


@pytest.mark.parametrize("heads", [8, 16, 32, 64, 128])
@pytest.mark.parametrize("cache_mode", CACHES)
def test_head_counts(cache_mode, heads):
    a = drawn(dtype_of(cache_mode), cache_mode, heads=heads, contexts=(6, 131), steps=(1, 2))
    mla_oracle.compare(a, operator.overload(**a)[0])


# The roundings. With a cache of one-hot rows each column of the result is one weight, as it was rounded.


def one_hot(scores, cache_mode, dtype):
    """One row whose H heads score `scores` [H, L], L up to 512, before scaling; for int8 100 times that."""
    heads, context = scores.shape
    quantized = cache_mode == "int8_nzcache"
    a = drawn(dtype, cache_mode, heads=heads, contexts=(context,))
    a["q_nope"] = torch.zeros(1, heads, 512, dtype=torch.int8 if quantized else dtype)
    a["q_nope"][0, :, :context] = torch.from_numpy(scores).to(a["q_nope"].dtype)
    a["q_rope"] = torch.zeros_like(a["q_rope"])
    rows = (100 if quantized else 1) * torch.eye(512)
    if quantized:
        a["ctkv"] = rows.view(4, 128, 16, 32).transpose(1, 2).to(torch.int8).contiguous()
        a["k_rope"] = a["k_rope"].new_zeros(4, 4, 128, 16)
    else:
        a["ctkv"] = rows.view(4, 128, 1, 512).to(dtype)
        a["k_rope"] = a["k_rope"].new_zeros(4, 128, 1, 64)
    a["block_tables"] = torch.arange(4, dtype=torch.int32).view(1, 4)
    return a


def online(scores):
    """For one row of float32 scores: the weight of each, and what it is multiplied by, and the scale of its tile."""
    largest, factor = -np.inf, np.zeros(len(scores))
    weights, scales, total = np.zeros(len(scores)), np.zeros(len(scores)), 0.0
    for start in range(0, len(scores), 128):
        at = slice(start, start + 128)
        previous, largest = largest, max(largest, scores[at].max())
        decay = math.exp(previous - largest)
        factor, total = factor * decay, total * decay
        weights[at], factor[at] = np.exp(scores[at] - largest), 1.0
        scales[at] = np.exp(scores[at].max() - largest) / 127
        total += weights[at].sum()
    return weights, factor / total, scales


def decided(rounding, values):
    """`rounding(values)`, and where an error of 1e-6 of the values cannot change it."""
    rounded = rounding(values)
    return rounded, (rounding(values * (1 - 1e-6)) == rounded) & (rounding(values * (1 + 1e-6)) == rounded)


def cast(dtype):
    return lambda values: torch.from_numpy(np.asarray(values)).to(dtype).double().numpy()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_round_before_they_are_normalised(dtype):
    """To the bit: p = exp(s - running maximum) is rounded, its sum is not, and the quotient is rounded."""
    drawn_scores = np.random.default_rng(5).normal(size=(8, 300)) * 3 + np.linspace(0, 4, 300)
    scores = cast(dtype)(drawn_scores)
    out, _ = operator.overload(**(one_hot(scores, "krope_ctkv", dtype) | {"qk_scale": 0.5}))
    normalised_first = 0
    for head in range(8):
        weights, factor, _ = online(scores[head] * 0.5)
        rounded, sure = decided(cast(dtype), weights)
        wanted, sure_too = decided(cast(dtype), rounded * factor)
        sure &= sure_too
        actual = out[0, head].double().numpy()
        assert sure.mean() > 0.98
        assert (actual[:300] == wanted)[sure].all()
        assert (actual[300:] == 0).all()
        normalised_first += (wanted != cast(dtype)(weights * factor)).sum()
    assert normalised_first > 100, "rounding once would pass this test"


def test_int8_weights_round_to_float16_and_then_half_to_even():
    """To the bit: the weight over the scale of its tile, float16, then the nearest integer with ties to even."""
    scores = np.random.default_rng(6).integers(-128, 128, size=(8, 300)).astype(np.float64)
    a = one_hot(scores, "int8_nzcache", torch.float16) | {"qk_scale": 1.0}
    a["qk_descale"] = torch.linspace(0.0001, 0.0002, 8)
    out, _ = operator.overload(**a)
    rounded_once = half_up = 0
    for head in range(8):
        products = (scores[head] * 100).astype(np.float32) * a["qk_descale"][head].numpy()
        weights, factor, scales = online(products.astype(np.float64))
        ratio = weights / scales
        wanted, sure = decided(lambda x: np.rint(x.astype(np.float16).astype(np.float64)), ratio)
        unit = factor * scales * 100 * float(a["pv_descale"][head])
        assert sure.mean() > 0.99
        assert (np.rint(out[0, head, :300].double().numpy() / unit) == wanted)[sure].all()
        rounded_once += (wanted != np.rint(ratio)).sum()
        half_up += (wanted != np.floor(ratio.astype(np.float16).astype(np.float64) + 0.5)).sum()
    assert rounded_once > 10, "rounding without float16 would pass this test"
    assert half_up > 10, "rounding ties up would pass this test"


def test_int8_products_are_exact():
    """The largest sums of 512 products, which no 16-bit and no careless float32 sum would hold."""
    a = drawn(torch.float16, "int8_nzcache", heads=8, contexts=(2,), calc_type="calc_type_ring")
    a["q_nope"].fill_(-128)
    a["q_rope"].zero_()
    a["ctkv"].fill_(-128)
    a["ctkv"][a["block_tables"][0, 0], 0, 1, 0] = -127
    a["qk_descale"].fill_(2.0**-7)
    _, lse = operator.overload(**(a | {"qk_scale": 2.0**-4}))
    scores = [512 * 128 * 128 / 2**11, (512 * 128 * 128 - 128) / 2**11]
    wanted = scores[0] + math.log(sum(math.exp(score - scores[0]) for score in scores))
    np.testing.assert_allclose(lse.flatten().tolist(), [wanted] * 8, rtol=2**-23)


# The decisions where sources disagree.


@pytest.mark.parametrize("cache_mode", CACHES)
def test_lse_is_for_krope_ctkv_in_16_bits_but_exists_everywhere(cache_mode):
    """The document gives lse to KROPE_CTKV in 16 bits; the code gives it to every cache, and float32 for int8."""
    a = drawn(torch.bfloat16, cache_mode, heads=8, contexts=(130, 2), calc_type="calc_type_ring")
    out, lse = operator.overload(**a)
    assert (out.dtype, lse.shape) == (torch.bfloat16, (2, 8, 1))
    assert lse.dtype == (torch.float32 if cache_mode == "int8_nzcache" else torch.bfloat16)
    mla_oracle.compare(a, out, lse)


def test_int8_with_128_heads_is_excluded_but_works():
    """The document excludes 128 heads for INT8_NZCACHE; the tests of ATB cover them."""
    a = drawn(torch.bfloat16, "int8_nzcache", heads=128, contexts=(130, 3), steps=(2, 1))
    mla_oracle.compare(a, operator.overload(**a)[0])


@pytest.mark.parametrize("cache_mode", CACHES)
def test_block_size_up_to_128_is_documented_but_it_is_128(cache_mode):
    """The document allows blocks of at most 128; the code decodes blocks of 128 only."""
    a = drawn(torch.bfloat16, cache_mode, heads=8, contexts=(60,))
    axis = 2 if "nz" in cache_mode else 1
    smaller = {name: a[name].narrow(axis, 0, 64) for name in ("ctkv", "k_rope") if a[name] is not None}
    refuses(operator, (), a | smaller, r"ctkv has shape \[.*64.*\]; it must be \[.*128.*\]")


@pytest.mark.parametrize(("cache_mode", "heads"), [*((cache, 128) for cache in CACHES), ("int8_nzcache", 16)])
def test_causal_tail_needs_a_mask_but_is_implied(cache_mode, heads):
    """The document wants a mask for q > 1; the kernel cuts causally without one for 128 heads and for int8."""
    a = drawn(dtype_of(cache_mode), cache_mode, heads=heads, contexts=(130, 9, 4), steps=(3, 2, 4))
    out, _ = operator.overload(**a)
    for row in mla_oracle.each_row(a):
        torch.testing.assert_close(out[row.token], alone(a, row, row.context - row.steps + row.step + 1))


@pytest.mark.parametrize("mask_type", ["mask_type_spec", "mask_type_free"])
@pytest.mark.parametrize(
    ("cache_mode", "heads", "reason"),
    [("krope_ctkv", 128, "128 heads"), ("kvcache", 128, "128 heads"), ("int8_nzcache", 8, "an int8 q_nope")],
)
def test_a_mask_that_the_kernel_ignores_is_refused(cache_mode, heads, reason, mask_type):
    """The document adds it, the kernel never reads it: neither would be right for a mask that is not causal."""
    dtype = dtype_of(cache_mode)
    a = drawn(dtype, cache_mode, heads=heads, contexts=(9, 140), steps=(2, 2)) | {"mask_type": mask_type}
    a["mask"] = torch.zeros((129, 128) if mask_type == "mask_type_free" else (4, 140), dtype=dtype)
    refuses(operator, (), a, f"mask_type is '{mask_type}'; with {reason} it must be 'undefined': the kernel is causal")


@pytest.mark.parametrize("cache_mode", ["krope_ctkv", "nzcache", "kvcache"])
def test_undefined_mask_with_spec_looks_causal_but_sees_the_full_context(cache_mode):
    """Speculated rows are expected to be causal; below 128 heads the kernel shows every key to each of them."""
    a = drawn(torch.float64, cache_mode, heads=16, contexts=(130, 9), steps=(3, 2))
    out, _ = operator.overload(**a)
    for row in mla_oracle.each_row(a):
        torch.testing.assert_close(out[row.token], alone(a, row, row.context))


@pytest.mark.parametrize("width", [129, 131, 256])
def test_spec_mask_may_be_wide_but_must_have_the_largest_context(width):
    """The document says max_seq_len columns; the kernel strides rows by the largest of context_lens."""
    a = drawn(torch.float16, "krope_ctkv", heads=8, contexts=(130, 9), steps=(2, 2), mask_type="mask_type_spec")
    mask = torch.zeros(4, width, dtype=torch.float16)
    refuses(operator, (), a | {"mask": mask}, rf"mask has shape \[4, {width}\]; it must have 130 columns")


@pytest.mark.parametrize("cache_mode", CACHES)
def test_rows_of_empty_contexts_are_consumed(cache_mode):
    """Paged attention skips sequences without keys; this operator counts their query rows."""
    a = drawn(dtype_of(cache_mode), cache_mode, heads=8, contexts=(4, 0, 131), steps=(1, 3, 2))
    out, _ = operator.overload(**a)
    assert (out[1:4] == 0).all()
    last = mla_oracle.Row(token=5, sequence=2, step=1, steps=2, context=131)
    torch.testing.assert_close(out[5], alone(a, last, 131))


def test_rope_scores_lie_outside_the_int8_scale():
    """The fused inference attention scales both parts of an int8 score; this operator leaves the rope part alone."""
    a = drawn(torch.float16, "int8_nzcache", heads=8, contexts=(131, 4), calc_type="calc_type_ring")
    halved = a | {"qk_descale": a["qk_descale"] / 2}
    rope_only = {"q_nope": torch.zeros_like(a["q_nope"])}
    torch.testing.assert_close(
        operator.overload(**(a | rope_only)), operator.overload(**(halved | rope_only)), rtol=0, atol=0
    )
    nope_only = {"q_rope": torch.zeros_like(a["q_rope"])}
    _, wanted = operator.overload(**(a | nope_only | {"qk_scale": 0.04}))
    _, actual = operator.overload(**(halved | nope_only | {"qk_scale": 0.08}))
    torch.testing.assert_close(actual, wanted)
    assert (operator.overload(**a)[1] != operator.overload(**halved)[1]).all()


@pytest.mark.parametrize("cache_mode", CACHES)
def test_fake_lse_has_the_dtype_of_q_nope_in_torch_npu_but_not_here(cache_mode):
    """torch_npu's fake kernel takes q_nope's, which is int8; the wrapper q_rope's; the int8 kernel writes float32."""
    a = drawn(torch.bfloat16, cache_mode, heads=8, contexts=(130, 2), calc_type="calc_type_ring")
    (out, lse), guards = fake_with_free_sizes(operator, (), a)
    assert (out.dtype, guards) == (torch.bfloat16, [])
    assert lse.dtype == (torch.float32 if cache_mode == "int8_nzcache" else torch.bfloat16)


def test_kvcache_is_not_connected_but_works():
    """No device runs the merged cache; it is KROPE_CTKV with both parts in one tensor."""
    a = drawn(torch.float64, "krope_ctkv", heads=8, contexts=(130, 9), steps=(2, 1))
    merged = {
        "q_nope": torch.cat([a["q_nope"], a["q_rope"]], -1),
        "ctkv": torch.cat([a["ctkv"], a["k_rope"]], -1),
        "q_rope": None,
        "k_rope": None,
        "cache_mode": "kvcache",
    }
    torch.testing.assert_close(operator.overload(**(a | merged)), operator.overload(**a))


# The corner mask.


@pytest.mark.parametrize("steps", [1, 2, 3, 4])
def test_the_documents_corner_mask_is_the_causal_cut(steps):
    """Also where the rows reach over the edge of the last block: every tail from 1 to `steps` and around 128."""
    contexts = [length for length in (4, 5, 64, 127, *range(128, 134), 255, 256, 257, 258) if length >= steps]
    a = drawn(torch.float64, "krope_ctkv", heads=8, contexts=contexts, steps=[steps] * len(contexts))
    corner = {"mask": corner_mask(steps, steps).double(), "mask_type": "mask_type_free"}
    out, _ = operator.overload(**(a | corner))
    for row in mla_oracle.each_row(a):
        torch.testing.assert_close(out[row.token], alone(a, row, row.context - row.steps + row.step + 1))


def test_a_single_row_at_the_end_of_a_block_reads_behind_the_corner_mask_and_adds_nothing():
    """For q = 1 the mask has 127 lines, and with 128 keys in the last block the kernel reads the 128th."""
    a = drawn(torch.float64, "krope_ctkv", heads=8, contexts=(128, 127, 256), steps=(1, 1, 1))
    corner = {"mask": torch.full((127, 128), 1e3).double().tril(-1), "mask_type": "mask_type_free"}
    out, _ = operator.overload(**(a | corner))
    wanted, _ = operator.overload(**a)
    torch.testing.assert_close(out[[0, 2]], wanted[[0, 2]], rtol=0, atol=0)
    assert not torch.allclose(out[1], wanted[1])


def test_corner_masks_of_their_own_serve_different_numbers_of_rows():
    steps = (1, 4, 2)
    a = drawn(torch.float64, "nzcache", heads=8, contexts=(128, 130, 257), steps=steps)
    corners = torch.stack([corner_mask(4, count) for count in steps]).double()
    out, _ = operator.overload(**(a | {"mask": corners, "mask_type": "mask_type_free"}))
    for row in mla_oracle.each_row(a):
        torch.testing.assert_close(out[row.token], alone(a, row, row.context - row.steps + row.step + 1))


def test_one_corner_mask_hides_the_last_keys_of_sequences_with_fewer_rows():
    """The document has one q; the kernel adds the same lines to every sequence, and they count from the largest q."""
    steps, most = (1, 4, 2), 4
    a = drawn(torch.float64, "krope_ctkv", heads=8, contexts=(128, 130, 257), steps=steps)
    corner = {"mask": corner_mask(most, most).double(), "mask_type": "mask_type_free"}
    mla_oracle.compare(a | corner, operator.overload(**(a | corner))[0])
    out, _ = operator.overload(**(a | corner | {"context_lens": torch.tensor([64, 130, 200])}))
    for row in mla_oracle.each_row(a | {"context_lens": torch.tensor([64, 130, 200])}):
        torch.testing.assert_close(out[row.token], alone(a, row, row.context - most + row.step + 1))


# The twin.


@pytest.mark.parametrize("calc_type", ["calc_type_undefined", "calc_type_ring"])
@pytest.mark.parametrize("cache_mode", CACHES)
def test_the_twin_leaves_rows_without_keys_alone(cache_mode, calc_type):
    a = drawn(torch.float16, cache_mode, heads=8, contexts=(0, 130, 0), calc_type=calc_type)
    wanted = operator.overload(**a)
    outputs = [torch.full_like(result, 77) for result in wanted]
    assert operator.inplace(**a, atten_out=outputs[0], lse=outputs[1]) is None
    for output, result in zip(outputs, wanted, strict=True):
        expected = result.clone()
        if output.numel():
            expected[[0, 2]] = 77
        torch.testing.assert_close(output, expected, rtol=0, atol=0)


def test_the_twin_asks_for_lse_where_it_is_written():
    a = drawn(torch.float16, "krope_ctkv", heads=8, contexts=(3, 5), calc_type="calc_type_ring")
    out = torch.full((2, 8, 512), 77.0, dtype=torch.float16)
    with pytest.raises(ValueError, match="lse is None; it must be a tensor with calc_type 'calc_type_ring'"):
        operator.inplace(**a, atten_out=out)
    assert (out == 77).all()


def test_the_twin_leaves_rows_of_several_steps_alone():
    a = drawn(torch.float16, "krope_ctkv", heads=8, contexts=(3, 0, 5), steps=(2, 3, 1))
    out = torch.full((6, 8, 512), 77.0, dtype=torch.float16)
    operator.inplace(**a, atten_out=out)
    assert (out == 77).flatten(1).all(1).tolist() == [False, False, True, True, True, False]
    torch.testing.assert_close(out[[0, 1, 5]], operator.overload(**a)[0][[0, 1, 5]], rtol=0, atol=0)


def test_the_twin_writes_into_strided_outputs():
    a = drawn(torch.float16, "krope_ctkv", heads=8, contexts=(3, 5), calc_type="calc_type_ring")
    room = torch.zeros(8, 2, 1024, dtype=torch.float16)
    out, lse = room.transpose(0, 1)[..., ::2], room.transpose(0, 1)[..., 1:2]
    operator.inplace(**a, atten_out=out, lse=lse)
    wanted = operator.overload(**a)
    torch.testing.assert_close((out, lse), wanted, rtol=0, atol=0)
    assert (room[..., 3::2] == 0).all()
