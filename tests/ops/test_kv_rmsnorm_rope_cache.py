"""kv_rmsnorm_rope_cache against a float64 oracle: one token, head and column at a time, caches addressed by bytes."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

from ops.harness import CATALOGUE, by_name, cases, compiles_once, nd_offset, nz_offset, twin_call

NAME = "kv_rmsnorm_rope_cache"
OPERATOR = CATALOGUE[NAME]
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
MODES = ("Norm", "PA", "PA_BNSD", "PA_NZ", "PA_BLK_BNSD", "PA_BLK_NZ")
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def norm_row(row, gamma, epsilon, cast):
    """`cast` rounds to a dtype after the division and after the product; None rounds nowhere."""
    root = math.sqrt(sum(x * x for x in row) / len(row) + epsilon) if row else 1.0
    if cast is None:
        return [x / root * g for x, g in zip(row, gamma, strict=True)]
    return [cast(cast(x / root) * g) for x, g in zip(row, gamma, strict=True)]


def rope_row(row, cos, sin, layout):
    half = len(row) // 2
    out = [0.0] * len(row)
    for i in range(half):
        first, second = (2 * i, 2 * i + 1) if layout.startswith("interleave") else (i, half + i)
        at_first, at_second = (i, half + i) if layout.endswith("_half") else (2 * i, 2 * i + 1)
        out[at_first] = row[first] * cos[i] - row[second] * sin[i]
        out[at_second] = row[second] * cos[half + i] + row[first] * sin[half + i]
    return out


def byte_offset(mode, shape, element_size, index, steps, place):
    """Where the bytes of column d of head n of token (b, s) start in a cache, or None if nothing is stored."""
    b, s, n, d = place
    if mode == "Norm":
        _, heads, room, width = shape
        position = int(index[min(b, len(index) - 1)][s])
        return None if position < 0 else (((b * heads + n) * room + position) * width + d) * element_size
    _, block_size, heads, width = shape
    if "BLK" in mode:
        start = int(index[b * math.ceil(steps / block_size) + s // block_size])
        slot = start if start < 0 else start // block_size * block_size + s % block_size
    else:
        slot = int(index[b * steps + s])
    if slot < 0:
        return None
    if not mode.endswith("NZ"):
        return nd_offset(slot, n * width + d, block_size, heads * width, element_size)
    page, row = divmod(slot, block_size)
    page_of_head = (page * heads + n) * block_size * width * element_size
    return page_of_head + nz_offset(row, d, block_size, width, element_size)


def oracle(kv, gamma, cos, sin, index, k_cache, ckv_cache, k_rope_scale, c_kv_scale, k_rope_offset, c_kv_offset, v, *,
           epsilon, cache_mode, is_output_kv, rope_layout, gamma_after_cast):  # fmt: skip
    """The rows k_rope and c_kv in float64, and for each cache the unrounded value to be found at each byte offset."""
    batch, heads, steps, _ = kv.shape
    weights = gamma.tolist()
    cast = (lambda x: torch.tensor(x, dtype=torch.float64).to(kv.dtype).item()) if gamma_after_cast else None
    rows = {}
    for b, n, s in itertools.product(range(batch), range(heads), range(steps)):
        token = kv[b, n, s].tolist()
        turned = 0 if cos is None else cos.shape[-1]
        key, latent = token[len(weights) :], norm_row(token[: len(weights)], weights, epsilon, cast)
        if v is not None:
            key, latent = latent, v[b, n, s].tolist()
        if turned:
            at = min(b, cos.shape[0] - 1), 0, min(s, cos.shape[2] - 1)
            key = rope_row(key[:turned], cos[at].tolist(), sin[at].tolist(), rope_layout) + key[turned:]
        rows[b, n, s] = key, latent
    stored = ({}, {})
    scales = (k_rope_scale, k_rope_offset), (c_kv_scale, c_kv_offset)
    for which, (cache, (scale, offset)) in enumerate(zip((k_cache, ckv_cache), scales, strict=True)):
        for (b, n, s), pair in rows.items():
            factor = None if scale is None else scale.reshape(heads, -1)[n].tolist()
            added = None if offset is None else offset.reshape(heads, -1)[n].tolist()
            for d, value in enumerate(pair[which]):
                at = byte_offset(cache_mode, cache.shape, cache.element_size(), index, steps, (b, s, n, d))
                if at is not None:
                    value = value if factor is None else value * factor[d]
                    stored[which][at] = value if added is None else value + added[d]
    outputs = []
    for which, cache in enumerate((k_cache, ckv_cache)):
        values = [pair[which] for pair in rows.values()]
        outputs.append(torch.tensor(values, dtype=torch.float64).view(batch, heads, steps, cache.shape[-1]))
    return outputs, stored


def close(actual, wanted, dtype, casts):
    """Within one rounding to `dtype` (or as many as `casts`), on top of a few float32 roundings of values below 8."""
    work = 1e-14 if dtype == torch.float64 else 2e-6
    rounding = torch.finfo(dtype).eps * (0.5 if casts == 1 else casts)
    torch.testing.assert_close(actual.double(), wanted, rtol=rounding + work, atol=work)


def nearest(actual, wanted, dtype):
    """The nearest int8 to `wanted`, ties to even; either neighbour where float32 cannot tell the side of a tie.

    Values up to 300 carry float32 errors of some 1e-6 of that; such near ties must be rare, 0.2 % on average.
    """
    unsure = 1e-9 if dtype == torch.float64 else 1e-3
    near = (wanted - wanted.floor() - 0.5).abs() < unsure
    exact = wanted.round().clamp(-128, 127)
    assert near.double().mean() < 0.02
    assert torch.equal(actual.double()[~near], exact[~near])
    assert ((actual.double() - exact).abs()[near] <= 1).all()


def matches_oracle(args, kwargs, results=None):
    """Results of the functional form, and every element of both caches, touched or not."""
    arguments = by_name(OPERATOR, args, kwargs)
    dtype = arguments["kv"].dtype
    results = OPERATOR.overload(*args, **kwargs) if results is None else results
    rows, stored = oracle(**arguments)
    casts = 3 if arguments["gamma_after_cast"] else 1
    for result, wanted in zip(results[2:], rows, strict=True):
        assert result.dtype == dtype
        close(result, wanted, dtype, casts)
    for name, result, values in zip(("k_cache", "ckv_cache"), results, stored, strict=False):
        before = arguments[name]
        assert (result.dtype, result.shape) == (before.dtype, before.shape)
        size = before.element_size()
        places = torch.tensor(list(values), dtype=torch.int64) // size
        wanted = torch.tensor(list(values.values()), dtype=torch.float64)
        flat, old = (cache.contiguous().flatten() for cache in (result, before))
        if result.dtype != torch.int8:
            close(flat[places], wanted, dtype, casts)
        elif len(places):
            nearest(flat[places], wanted, dtype)
        untouched = torch.ones(flat.numel(), dtype=torch.bool)
        untouched[places] = False
        assert torch.equal(flat.view(BITS[size])[untouched], old.view(BITS[size])[untouched])


@pytest.mark.parametrize(("operator", "args", "kwargs"), cases(DTYPES, (NAME,)))
def test_sample_against_oracle(operator, args, kwargs):
    matches_oracle(args, kwargs)


def build(mode, *, batch=2, steps=5, heads=0, quantize=(), offset=True, block_size=32, spare=1, dtype=torch.float32,
          negative=0.0, seed=0, rotate=True):  # fmt: skip
    """Arguments of any sizes; `spare` blocks or positions more than needed, a share of `negative` indices.

    `heads` are those of v, 0 being no v, without which there are no offsets.
    """
    random = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=random, dtype=torch.float64).to(dtype)

    rope, k_width, ckv_width = (16, 32, 64) if heads else (32, 32, 64)
    count = max(heads, 1)
    pages = -(-steps // block_size)
    if mode == "Norm":
        lead = batch, count, steps + spare
        rows = [torch.randperm(steps + spare, generator=random)[:steps] for _ in range(batch)]
        index = torch.stack(rows) if rows else torch.zeros(0, steps, dtype=torch.int64)
    else:
        lead = batch * pages + spare, block_size, count
        wanted, room, step = (batch * pages, lead[0], block_size) if "BLK" in mode else (batch * steps, None, 1)
        index = torch.randperm(lead[0] * block_size if room is None else room, generator=random)[:wanted] * step
    index = torch.where(torch.rand(index.shape, generator=random) < negative, -1 - index, index)
    angle = 6 * torch.rand(batch, 1, steps, rope, generator=random, dtype=torch.float64)
    caches, columns = [], []
    for name, width in (("k", k_width), ("c", ckv_width)):
        cache = normal(*lead, width)
        caches.append((30 * cache.clamp(-4, 4)).to(torch.int8) if name in quantize else cache)
        columns.append(40 + 9 * torch.randn(*([heads] if heads else []), width, generator=random))
    scales = [column if name in quantize else None for name, column in zip("kc", columns, strict=True)]
    offsets = [None if scale is None or not offset or not heads else scale.flip(-1) - 40 for scale in scales]
    total = k_width if heads else k_width + ckv_width
    args = (
        normal(batch, count, steps, total), 1 + 0.1 * normal(k_width if heads else ckv_width),
        angle.cos().to(dtype) if rotate else None, angle.sin().to(dtype) if rotate else None,
        index, *caches, *scales, *offsets, normal(batch, heads, steps, ckv_width) if heads else None,
    )  # fmt: skip
    return args, {"cache_mode": mode}


# What a test takes of each mode: plain, quantised where the mode allows, and with v.
FORMS = [
    pytest.param(mode, heads, quantize, id=f"{mode}{', v' if heads else ''}{', int8' if quantize else ''}")
    for mode, heads, quantize in itertools.product(MODES, (0, 2), ("", "kc"))
    if not (mode == "Norm" and quantize)
]


@settings(max_examples=15, deadline=None, derandomize=True)
@given(data=st.data())
@pytest.mark.parametrize("mode", MODES)
def test_any_sizes_against_oracle(mode, data):
    quantize = "" if mode == "Norm" else data.draw(st.sampled_from(["", "k", "c", "kc"]))
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
        quantize=quantize,
    )
    matches_oracle(args, kwargs)


def of_many_sizes(mode, **options):
    """The first sizes all differ, for a tracer takes equal ones for one symbol."""
    sizes = ((3, 150, 128, 2), (5, 7, 160, 4), (4, 70, 32, 3))
    return [build(mode, batch=b, steps=s, block_size=size, spare=extra, **options)[0] for b, s, size, extra in sizes]


@pytest.mark.parametrize(("mode", "heads", "quantize"), FORMS)
def test_compiles_once_for_all_sizes(mode, heads, quantize):
    def layer(*args):
        return torch.ops.mla_fx.kv_rmsnorm_rope_cache(*args, cache_mode=mode)

    compiles_once(layer, of_many_sizes(mode, heads=heads, quantize=quantize))


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


def bfloat16(x):
    """float32 rounded to bfloat16, ties to even, by its bits."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def int8(x):
    return np.clip(np.rint(x), -128, 127).astype(np.int8)


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
        assert np.array_equal(actual, int8(row * scale))
        assert not np.array_equal(actual, int8(bfloat16(row) * scale))


@pytest.mark.parametrize("offset", [False, True])
def test_int8_with_v_is_taken_from_unrounded_float32_values(offset):
    args, kwargs, a = integers(quantize="kc", heads=2, offset=offset)
    results = OPERATOR.overload(*args, **kwargs)
    for result, row, name in zip(results, emulated_rows_with_v(a), ("k_rope", "c_kv"), strict=False):
        scale, shift = a[f"{name}_scale"][:, None], a[f"{name}_offset"][:, None] if offset else np.float32(0)
        actual = rows_of(result, args)
        assert np.array_equal(actual, int8(row * scale + shift))
        if name == "k_rope":
            assert not np.array_equal(actual, int8(bfloat16(row) * scale + shift))


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
    assert np.array_equal(actual, int8(wanted * a["c_kv_scale"]))


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
