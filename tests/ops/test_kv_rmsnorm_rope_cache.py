"""kv_rmsnorm_rope_cache against a float64 oracle, its roundings to the bit, and its edges."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lib.operators.harness import bfloat16, by_name, cases, compiles_once, to_int8, twin_call
from lib.operators.kv_oracle import FORMS, MODES, OPERATOR, build, byte_offset, matches_oracle
from torch.fx.experimental.proxy_tensor import make_fx

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@pytest.mark.slow
@pytest.mark.parametrize(("operator", "args", "kwargs"), cases(DTYPES, ("kv_rmsnorm_rope_cache",)))
def test_sample_against_oracle(operator, args, kwargs):
    matches_oracle(args, kwargs)


@pytest.mark.slow
@settings(max_examples=15, deadline=None, derandomize=True)
@given(data=st.data())
@pytest.mark.parametrize("mode", MODES)
def test_any_sizes_against_oracle(mode, data):
    args, kwargs = build(
        mode,
        batch=data.draw(st.integers(0, 3)),
        steps=data.draw(st.integers(0, 40)),
        heads=data.draw(st.sampled_from([0, 0, 1, 2, 4])),
        block_size=data.draw(st.sampled_from([32, 64])),
        spare=data.draw(st.integers(1, 3)),
        negative=data.draw(st.sampled_from([0.0, 0.3, 1.0])),
        offset=data.draw(st.booleans()),
        rotate=data.draw(st.booleans()),
        dtype=data.draw(st.sampled_from(DTYPES)),
        seed=data.draw(st.integers(0, 9)),
        quantize=data.draw(st.sampled_from(["", "k", "c", "kc"])),
    )
    matches_oracle(args, kwargs | {"rounds_first": data.draw(st.booleans())})


@settings(max_examples=10, deadline=None, derandomize=True)
@given(st.integers(0, 3), st.integers(0, 40), st.sampled_from([0, 0, 1, 2]), st.sampled_from(DTYPES), st.booleans())
def test_rows_that_are_the_cache(batch, steps, heads, dtype, is_quantised):
    quantize = "kc" if is_quantised else ""
    matches_oracle(*build("BNSD", batch=batch, steps=steps, heads=heads, dtype=dtype, quantize=quantize))


def of_many_sizes(mode, **options):
    """The first sizes all differ, for a tracer takes equal ones for one symbol."""
    sizes = ((3, 150, 128, 2), (5, 7, 160, 4), (4, 70, 32, 3))
    return [build(mode, batch=b, steps=s, block_size=size, spare=extra, **options)[0] for b, s, size, extra in sizes]


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "heads", "quantize"), FORMS)
def test_compiles_once_for_all_sizes(mode, heads, quantize):
    def layer(*args):
        return torch.ops.mla_fx.kv_rmsnorm_rope_cache(*args, cache_mode=mode)

    compiles_once(layer, of_many_sizes(mode, heads=heads, quantize=quantize))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["Norm", "PA", "PA_BLK_BNSD"])
def test_body_is_traced_once_for_all_sizes(mode):
    compiles_once(lambda *args: OPERATOR.body(*args, cache_mode=mode), of_many_sizes(mode))


@pytest.mark.parametrize(("mode", "heads", "quantize"), FORMS)
def test_twin_compiles_and_writes_the_caches(mode, heads, quantize):
    args, kwargs = build(mode, heads=heads, quantize=quantize, negative=0.3)
    wanted = OPERATOR.overload(*args, **kwargs)
    caches = [cache.clone() for cache in args[5:7]]
    compiled = torch.compile(OPERATOR.inplace, backend="aot_eager", fullgraph=True)
    rest = compiled(*args[:5], *caches, *args[7:], **kwargs)
    torch.testing.assert_close((*caches, *rest), wanted, rtol=0, atol=0)


@pytest.mark.parametrize(("mode", "heads", "quantize"), FORMS)
def test_body_writes_each_cache_by_one_index_put(mode, heads, quantize):
    """And makes nothing else of a cache's size but views: only then can a compiler write it in place."""
    args, kwargs = build(mode, heads=heads, quantize=quantize, spare=9)
    graph = make_fx(lambda *tensors: OPERATOR.body(*tensors, **kwargs))(*args).graph
    calls = [node for node in graph.nodes if node.op == "call_function"]
    big = [node.target for node in calls if node.meta["val"].numel() in (args[5].numel(), args[6].numel())]
    views = (torch.ops.aten.view.default,)
    assert [target for target in big if target not in views] == [torch.ops.aten.index_put.default] * 2
    assert (torch.ops.aten.view.default in big) == (heads > 0 or mode.endswith("NZ"))


# Rounding, to the bit: numpy in float32, one operation at a time. Sums of squares of small integers are exact.


def integers(**options):
    """A bfloat16 case whose kv holds integers, and its arguments in float32 by name."""
    args, kwargs = build("PA_NZ", dtype=torch.bfloat16, batch=4, steps=40, **options)
    random = torch.Generator().manual_seed(3)
    kv = torch.randint(-8, 9, args[0].shape, generator=random).bfloat16()
    args = (kv, *args[1:])
    values = by_name(OPERATOR, args, kwargs).items()
    return args, kwargs, {k: v.float().numpy() for k, v in values if torch.is_tensor(v) and v.is_floating_point()}


def emulated_norm(x):
    mean = (x * x).sum(-1, keepdims=True, dtype=np.float32) * np.float32(1 / x.shape[-1])
    return x / np.sqrt(mean + np.float32(1e-5))


def emulated_rope(x, a):
    first, second, half = x[..., 0::2], x[..., 1::2], x.shape[-1] // 2
    low = first * a["cos"][..., :half] - second * a["sin"][..., :half]
    high = second * a["cos"][..., half:] + first * a["sin"][..., half:]
    return np.concatenate((low, high), -1)


def emulated_rows(a):
    """The key, and the latent before its product with gamma."""
    rank = a["gamma"].shape[0]
    return emulated_rope(a["kv"][..., rank:], a), emulated_norm(a["kv"][..., :rank])


def emulated_rows_with_v(a):
    """The key of all heads, and v."""
    key, width = emulated_norm(a["kv"]) * a["gamma"], a["cos"].shape[-1]
    return np.concatenate((emulated_rope(key[..., :width], a), key[..., width:]), -1), a["v"]


def rows_of(result, args):
    """The rows [B, N, S, D] of an NZ cache in the order of the tokens, read byte by byte."""
    batch, heads, steps, _ = args[0].shape
    width = result.shape[-1]
    raw = result.contiguous().view(-1)
    places = itertools.product(range(batch), range(heads), range(steps), range(width))
    offsets = [byte_offset("PA_NZ", result.shape, 1, args[4], steps, (b, s, n, d)) for b, n, s, d in places]
    return raw[offsets].view(batch, heads, steps, width).numpy()


def test_int8_is_taken_from_unrounded_float32_values():
    args, kwargs, a = integers(quantize="kc")
    results = OPERATOR.overload(*args, **kwargs)
    key, normed = emulated_rows(a)
    rows = (key, a["k_rope_scale"]), (normed * a["gamma"], a["c_kv_scale"])
    for result, (row, scale) in zip(results, rows, strict=False):
        actual = rows_of(result, args)
        assert np.array_equal(actual, to_int8(row * scale))
        assert not np.array_equal(actual, to_int8(bfloat16(row) * scale))


def test_int8_of_rows_that_are_rounded_first():
    args, kwargs, a = integers(quantize="kc")
    results = OPERATOR.overload(*args, **kwargs, rounds_first=True)
    unrounded = OPERATOR.overload(*args, **kwargs)
    key, normed = emulated_rows(a)
    rows = (key, a["k_rope_scale"]), (normed * a["gamma"], a["c_kv_scale"])
    for result, other, (row, scale) in zip(results, unrounded, rows, strict=False):
        assert np.array_equal(rows_of(result, args), to_int8(bfloat16(row) * scale))
        assert not torch.equal(result, other)
    assert all(map(torch.equal, results[2:], unrounded[2:]))


def test_rounding_first_changes_nothing_without_int8():
    args, kwargs = build("Norm", dtype=torch.bfloat16)
    results = (OPERATOR.overload(*args, **kwargs, rounds_first=rounds) for rounds in (False, True))
    torch.testing.assert_close(*results, rtol=0, atol=0)


@pytest.mark.parametrize("offset", [False, True])
def test_int8_with_v_is_taken_from_unrounded_float32_values(offset):
    args, kwargs, a = integers(quantize="kc", heads=2, offset=offset)
    results = OPERATOR.overload(*args, **kwargs)
    for result, row, name in zip(results, emulated_rows_with_v(a), ("k_rope", "c_kv"), strict=False):
        scale, shift = a[f"{name}_scale"][:, None], a[f"{name}_offset"][:, None] if offset else np.float32(0)
        actual = rows_of(result, args)
        assert np.array_equal(actual, to_int8(row * scale + shift))
        if name == "k_rope":
            assert not np.array_equal(actual, to_int8(bfloat16(row) * scale + shift))


def test_rows_are_rounded_once_to_bfloat16_ties_to_even():
    args, kwargs, a = integers()
    key, normed = emulated_rows(a)
    _, _, k_rope, c_kv = OPERATOR.overload(*args, **kwargs)
    assert np.array_equal(k_rope.float().numpy(), bfloat16(key))
    assert np.array_equal(c_kv.float().numpy(), bfloat16(normed * a["gamma"]))
    assert not np.array_equal(c_kv.float().numpy(), bfloat16(bfloat16(normed) * a["gamma"]))


def test_gamma_after_cast_rounds_before_and_after_gamma_and_quantises_that():
    args, kwargs, a = integers(quantize="c")
    _, normed = emulated_rows(a)
    wanted = bfloat16(bfloat16(normed) * a["gamma"])
    _, ckv_cache, _, c_kv = OPERATOR.overload(*args, **kwargs, gamma_after_cast=True)
    assert np.array_equal(c_kv.float().numpy(), wanted)
    actual = rows_of(ckv_cache, args)
    assert np.array_equal(actual, to_int8(wanted * a["c_kv_scale"]))


def test_int8_ties_go_to_even_and_large_values_saturate():
    args, kwargs = build("PA", batch=1, steps=1, quantize="k", offset=False, rotate=False)
    values = torch.tensor([1.0, 3, 5, -1, -3, -5, 253, 255, 257, 1e6, -255, -257, -259, -1e6, 1e30, -1e30, 0, -0.0])
    kv = args[0].clone()
    kv[..., 64 : 64 + len(values)] = values
    scale = torch.full_like(args[7], 0.5)
    k_cache = OPERATOR.overload(kv, *args[1:7], scale, *args[8:], **kwargs)[0]
    wanted = [0, 2, 2, 0, -2, -2, 126, 127, 127, 127, -128, -128, -128, -128, 127, -128, 0, 0]
    assert k_cache.view(-1, 32)[int(args[4][0])][: len(wanted)].tolist() == wanted


# Values that are no numbers, and sizes at the edge.


@pytest.mark.parametrize("quantize", ["", "kc"])
def test_nan_and_infinity_spoil_one_row_only(quantize):
    """An infinite column of the latent leaves zeros beside it and is NaN itself; a rotation makes inf of its pair."""
    args, kwargs = build("PA", batch=1, steps=4, quantize=quantize, offset=False)
    kv, cos, sin = args[0].clone(), torch.ones_like(args[2]), torch.zeros_like(args[3])
    kv[0, 0, 0, 3] = torch.nan
    kv[0, 0, 1, 3] = torch.inf
    kv[0, 0, 2, 64 + 6] = torch.nan
    kv[0, 0, 3, 64 + 6] = -torch.inf
    sound = (args[0], args[1], cos, sin, *args[4:])
    results, wanted = (OPERATOR.overload(x, *sound[1:], **kwargs) for x in (kv, args[0]))
    k_rope, c_kv = (tensor[0, 0].clone() for tensor in wanted[2:])
    c_kv[0] = torch.nan
    c_kv[1] = 0
    c_kv[1, 3] = torch.nan
    # Pair 3 is columns 3 and 16 + 3 of the result; sin = 0 times an infinity is NaN.
    k_rope[2, [3, 16 + 3]] = torch.nan
    k_rope[3, 3], k_rope[3, 16 + 3] = -torch.inf, torch.nan
    torch.testing.assert_close(results[2][0, 0], k_rope, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(results[3][0, 0].abs(), c_kv.abs(), rtol=0, atol=0, equal_nan=True)
    for result, old, rows, scale in zip(results, wanted, (k_rope, c_kv), args[7:9], strict=False):
        expected = old.clone()
        stored = rows if scale is None else (rows * scale).round().clamp(-128, 127).nan_to_num(0).to(torch.int8)
        expected.view(-1, old.shape[-1])[args[4]] = stored
        torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("mode", "heads", "quantize"), [form for form in FORMS if not form.values[2]])
@pytest.mark.parametrize("negative", [0.3, 1.0])
def test_nan_in_the_cache_stays_where_it_is(mode, heads, quantize, negative):
    args, kwargs = build(mode, heads=heads, quantize=quantize, negative=negative)
    garbage = [torch.full_like(cache, torch.nan) for cache in args[5:7]]
    args = (*args[:5], *garbage, *args[7:])
    matches_oracle(args, kwargs)


SIZES = {
    "empty batch": {"batch": 0}, "no token": {"steps": 0}, "one token": {"batch": 1, "steps": 1},
    "one short of a page": {"steps": 31}, "a page": {"steps": 32}, "a page and one": {"steps": 33},
    "no spare page": {"steps": 64, "spare": 0}, "all skipped": {"steps": 40, "negative": 1.0},
    "some skipped": {"steps": 40, "negative": 0.4}, "one row": {"batch": 1, "steps": 33},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "heads", "quantize"), FORMS)
@pytest.mark.parametrize("size", SIZES)
def test_sizes_at_the_edge(mode, heads, quantize, size):
    matches_oracle(*build(mode, heads=heads, quantize=quantize, **SIZES[size]))


@pytest.mark.parametrize(("mode", "heads", "quantize"), [form for form in FORMS if "BLK" not in form.values[0]])
def test_cache_without_slots_takes_skipped_tokens(mode, heads, quantize):
    args, kwargs = build(mode, heads=heads, quantize=quantize, negative=1.0)
    empty = [cache[:, :, :0] if mode == "Norm" else cache[:0] for cache in args[5:7]]
    matches_oracle((*args[:5], *empty, *args[7:]), kwargs)


@pytest.mark.parametrize(("mode", "heads", "quantize"), FORMS)
def test_strided_arguments(mode, heads, quantize):
    """kv and v with axes in another order; of each cache every other block of a larger one, which keeps the rest."""
    args, kwargs = build(mode, heads=heads, quantize=quantize, steps=33, negative=0.2)
    larger = [cache.repeat_interleave(2, 0) for cache in args[5:7]]
    strided = [cache[::2] for cache in larger]
    kv, v = (None if x is None else x.mT.contiguous().mT for x in (args[0], args[11]))
    arguments = (kv, *args[1:5], *strided, *args[7:11], v)
    wanted = OPERATOR.overload(*arguments, **kwargs)
    matches_oracle(arguments, kwargs, wanted)
    OPERATOR.inplace(*arguments, **kwargs)
    for whole, result, old in zip(larger, wanted, args[5:7], strict=False):
        assert torch.equal(whole[::2], result)
        assert torch.equal(whole[1::2], old)


@pytest.mark.parametrize("mode", ["Norm", "PA"])
def test_tables_of_one_step_serve_all(mode):
    args, kwargs = build(mode)
    matches_oracle((*args[:2], *(table[:, :, :1] for table in args[2:4]), *args[4:]), kwargs)


def test_results_share_no_memory():
    for heads in (0, 1, 2):
        args, kwargs = build("PA", heads=heads, rotate=False)
        results, _ = twin_call(OPERATOR, args, kwargs)
        tensors = [x for x in (*args, *results.values()) if x is not None]
        assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == len(tensors)
