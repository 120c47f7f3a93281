"""kv_rmsnorm_rope_cache in float64, one token, head and column at a time, caches addressed by bytes; calls of it."""

import itertools
import math

import pytest
import torch

from lib.operators.harness import CATALOGUE, by_name, nd_offset, nz_offset

OPERATOR = CATALOGUE["kv_rmsnorm_rope_cache"]
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
    if mode == "BNSD":
        return (((b * shape[1] + n) * steps + s) * shape[3] + d) * element_size
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
           epsilon, cache_mode, is_output_kv, rope_layout, gamma_after_cast, kc_scale, rounds_first):  # fmt: skip
    """The rows k_rope and c_kv in float64, and for each cache the unrounded value to be found at each byte offset."""
    batch, heads, steps, _ = kv.shape
    if cache_mode == "NZ":  # the same bytes
        cache_mode = "PA_NZ"
        k_cache, ckv_cache = (cache.view(len(cache), cache.shape[2], 1, -1) for cache in (k_cache, ckv_cache))
    weights = gamma.tolist()
    cast = (lambda x: torch.tensor(x, dtype=torch.float64).to(kv.dtype).item()) if gamma_after_cast else None
    rows = {}
    for b, n, s in itertools.product(range(batch), range(heads), range(steps)):
        token = kv[b, n, s].tolist()
        turned = 0 if cos is None else cos.shape[-1]
        key, latent = token[len(weights) :], norm_row(token[: len(weights)], weights, epsilon, cast)
        latent = [value * kc_scale for value in latent]
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
                    value = surely_rounded(value, kv.dtype) if rounds_first and factor is not None else value
                    value = value if factor is None else value * factor[d]
                    stored[which][at] = value if added is None else value + added[d]
    outputs = []
    for which, cache in enumerate((k_cache, ckv_cache)):
        values = [pair[which] for pair in rows.values()]
        outputs.append(torch.tensor(values, dtype=torch.float64).view(batch, heads, steps, cache.shape[-1]))
    return outputs, stored


def surely_rounded(value, dtype):
    """`value` rounded to `dtype`; NaN if float32 cannot tell to which of two neighbours."""
    error = 0 if dtype in (torch.float32, torch.float64) else 2e-6
    low, high = torch.tensor([value * (1 - error), value * (1 + error)], dtype=torch.float64).to(dtype).tolist()
    return low if low == high else math.nan


def close(actual, wanted, dtype, casts):
    """Within one rounding to `dtype` (or as many as `casts`), on top of a few float32 roundings of values below 8."""
    work = 1e-14 if dtype == torch.float64 else 2e-6
    rounding = torch.finfo(dtype).eps * (0.5 if casts == 1 else casts)
    torch.testing.assert_close(actual.double(), wanted, rtol=rounding + work, atol=work)


def nearest(actual, wanted, dtype):
    """Check for the nearest int8 to `wanted`, ties to even; either neighbour if float32 cannot tell the side of a tie.

    Values up to 300 carry float32 errors of about 1e-6 relative; such near ties must be rare, 0.2 % on average.
    """
    known = ~wanted.isnan()
    assert (~known).sum() <= max(1, 0.02 * known.numel())
    actual, wanted = actual[known], wanted[known]
    unsure = 1e-9 if dtype == torch.float64 else 1e-3
    near = (wanted - wanted.floor() - 0.5).abs() < unsure
    exact = wanted.round().clamp(-128, 127)
    assert near.sum() <= max(1, 0.02 * near.numel())
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
    elif mode == "BNSD":
        lead, index = (batch, count, steps), None
    else:
        lead = batch * pages + spare, block_size, count
        wanted, room, step = (batch * pages, lead[0], block_size) if "BLK" in mode else (batch * steps, None, 1)
        index = torch.randperm(lead[0] * block_size if room is None else room, generator=random)[:wanted] * step
    if index is not None:
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


# What a test takes of each mode: plain, quantised, and with v.
FORMS = [
    pytest.param(mode, heads, quantize, id=f"{mode}{', v' if heads else ''}{', int8' if quantize else ''}")
    for mode, heads, quantize in itertools.product(MODES, (0, 2), ("", "kc"))
]
