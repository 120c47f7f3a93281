"""Calls of mla_prolog_v3, and their results: float64, one token and one head at a time, caches as bytes."""

import math
from dataclasses import dataclass, field

import torch

from lib.operators.harness import CATALOGUE, by_name, nd_offset, nz_offset
from mla_fx.ops.emitted.mla_prolog import samples as _prolog_sample

TILE = 128
V1, V3 = CATALOGUE["mla_prolog"], CATALOGUE["mla_prolog_v3"]
CACHES = ("kv_cache", "kr_cache")
# Every combination of quantisations with every cache mode that supports it.
PAGED = ("PA_BSND", "PA_NZ", "PA_BLK_BSND", "PA_BLK_NZ")
MODES = [
    (weights, caches, cache_mode)
    for weights, allowed in {0: (0,), 1: (0, 2, 3), 2: (0, 1, 3)}.items()
    for caches in allowed
    for cache_mode in (("PA_BSND", "BSND", "TND") if caches == 3 else (*PAGED, "BSND", "TND"))
]


def call(weights, caches, cache_mode="PA_BSND", tokens=(2, 3), dtype=torch.bfloat16, **options):
    """All arguments of a call by name."""
    if cache_mode == "TND" and len(tokens) == 2:
        tokens = (tokens[0] * tokens[1],)
    _, args, kwargs = _prolog_sample.sample_v3(dtype, weights, caches, cache_mode, tokens, **options)
    return by_name(V3, args, kwargs | {"query_norm_flag": True})


def results(a):
    names = ("query", "query_rope", "query_scale", "query_norm", "norm_scale", *CACHES)
    return dict(zip(names, V3.overload(**a), strict=True))


@dataclass
class Wanted:
    """Values before their last rounding, to int8 or to the dtype; lists over tokens, and over heads within."""

    query: list = field(default_factory=list)
    query_rope: list = field(default_factory=list)
    query_scale: list = field(default_factory=list)
    query_norm: list = field(default_factory=list)
    norm_scale: list = field(default_factory=list)
    latent: list = field(default_factory=list)
    key: list = field(default_factory=list)
    tile_scales: list = field(default_factory=list)


def oracle(a, query_norm=None):
    """What a call of v3 with the arguments `a` by name must give.

    `query_norm` [T, Hcq] is the operator's own result and the starting point for the rest: a tie that is rounded the
    other way
    moves everything after it by more than its own rounding.
    """
    dtype = a["weight_uk"].dtype
    x, sin, cos = (a[name].double().flatten(0, -2) for name in ("token_x", "rope_sin", "rope_cos"))
    wanted = Wanted()
    for t in range(len(x)):
        c = projected(a, x[t], t, "dq", dtype)
        n = norm(a, c, "cq") * a["qc_qr_scale"]
        if a["weight_quant_mode"] == 0:
            wanted.query_norm.append(n)
            u = rounded(rounded(n, dtype) @ a["weight_uq_qr"].double(), dtype)
        else:
            if a["smooth_scales_cq"] is not None:
                n = n * a["smooth_scales_cq"][0].double()
            scale = float(n.abs().max()) / 127
            wanted.query_norm.append(n / scale)
            wanted.norm_scale.append(scale)
            integers = (n / scale).round() if query_norm is None else query_norm[t].double()
            u = integers @ a["weight_uq_qr"].double() * scale * a["dequant_scale_w_uq_qr"][0].double()
        heads(a, wanted, u, sin[t], cos[t], dtype)
        keys(a, wanted, projected(a, x[t], t, "dkv_kr", dtype), sin[t], cos[t], dtype)
    return wanted


def rounded(x, dtype):
    return x.to(dtype).double()


def projected(a, row, t, name, dtype):
    """A row of token_x through one of the weights that are int8 in weight_quant_mode 2 only."""
    product = row @ a[f"weight_{name}"].double()
    if a["weight_quant_mode"] < 2:
        return rounded(product, dtype)
    return product * float(a["dequant_scale_x"][t, 0]) * a[f"dequant_scale_w_{name}"][0].double()


def norm(a, row, name):
    dtype, gamma, epsilon = a["weight_uk"].dtype, a[f"rmsnorm_gamma_{name}"].double(), a[f"rmsnorm_epsilon_{name}"]
    if not a["gamma_after_cast"]:
        return row / math.sqrt(sum(float(value) ** 2 for value in row) / len(row) + epsilon) * gamma
    row = rounded(row, dtype)
    normed = row / math.sqrt(sum(float(value) ** 2 for value in row) / len(row) + epsilon)
    return rounded(rounded(normed, dtype) * gamma, dtype)


def rope(a, row, sin, cos):
    half, out = len(row) // 2, torch.empty_like(row)
    read, written = a["rope_layout"].split("_")
    for i in range(half):
        one, other = (2 * i, 2 * i + 1) if read == "interleave" else (i, half + i)
        here, there = (2 * i, 2 * i + 1) if written == "interleave" else (i, half + i)
        out[here] = row[one] * cos[i] - row[other] * sin[i]
        out[there] = row[other] * cos[half + i] + row[one] * sin[half + i]
    return out


def heads(a, wanted, u, sin, cos, dtype):
    count, nope, _ = a["weight_uk"].shape
    rows, ropes, scales = [], [], []
    for n, head in enumerate(u.split(len(u) // count)):
        row = rounded(head[:nope], dtype) @ a["weight_uk"][n].double()
        rotated = rope(a, head[nope:], sin, cos)
        if a["kv_cache_quant_mode"] == 1:
            row = rounded(row, dtype)
            scales.append(float(row.abs().max()) / 127)
            row = row / scales[-1]
            rotated = rounded(rotated, dtype) * (float(a["quant_scale_ckv"][0]) / scales[-1])
        rows.append(row)
        ropes.append(rotated)
    wanted.query.append(torch.stack(rows))
    wanted.query_rope.append(torch.stack(ropes))
    wanted.query_scale.append(scales)


def keys(a, wanted, row, sin, cos, dtype):
    rank = a["weight_uk"].shape[2]
    latent = norm(a, row[:rank], "ckv") * a["kc_scale"]
    key = rope(a, row[rank:], sin, cos)
    mode = a["kv_cache_quant_mode"]
    if mode == 1:
        latent = latent * float(a["quant_scale_ckv"][0])
    if mode == 2:
        latent = latent * a["quant_scale_ckv"][0].double()
        key = rounded(key, dtype) * a["quant_scale_ckr"][0].double()
    if mode == 3:
        scales = []
        alpha = float(a["k_nope_clip_alpha"][0])
        for first in range(0, rank, TILE):
            tile = latent[first : first + TILE]
            bound = float(tile.abs().max()) * alpha
            scales.append(bound / 127)
            latent[first : first + TILE] = tile.clamp(-bound, bound) / scales[-1]
        wanted.tile_scales.append(scales)
    wanted.latent.append(latent)
    wanted.key.append(key)


def slots(a):
    """The slot of each token, None if it is not stored."""
    *tokens, _ = a["token_x"].shape
    if a["cache_index"] is None:
        return list(range(math.prod(tokens)))
    if a["kv_cache"].shape[0] == 0:
        return [None] * math.prod(tokens)
    if a["cache_mode"] == "Norm":
        places = enumerate(a["cache_index"].expand(tokens).tolist())
        room = a["kv_cache"].shape[2]
        return [b * room + slot if slot >= 0 else None for b, row in places for slot in row]
    block_size = a["kv_cache"].shape[1]
    if "BLK" not in a["cache_mode"]:
        return [slot if slot >= 0 else None for slot in a["cache_index"].flatten().tolist()]
    ends = a["actual_seq_len"].tolist() if len(tokens) == 1 else [tokens[1] * (b + 1) for b in range(tokens[0])]
    found, blocks, start = [], iter(a["cache_index"].flatten().tolist()), 0
    for end in ends:
        for step in range(end - start):
            if step % block_size == 0:
                block = next(blocks)
            found.append(block * block_size + step % block_size if block >= 0 else None)
        start = end
    return found


def stored(cache, before, where, cache_mode):
    """The rows of a cache at slots `where`, byte for byte; every other byte is still that of `before`."""
    *_, width = cache.shape
    size = cache.element_size()
    address = nz_offset if cache_mode.endswith("NZ") else nd_offset
    block_size = cache.shape[1] if cache_mode.startswith("PA") else 1
    offsets = [[address(slot, column, block_size, width, size) for column in range(width)]
               for slot in where if slot is not None]  # fmt: skip
    offsets = torch.tensor(offsets, dtype=torch.int64).view(-1, width, 1) + torch.arange(size)
    raw, old = (tensor.contiguous().view(torch.uint8).flatten() for tensor in (cache, before))
    touched = torch.zeros(len(raw), dtype=torch.bool)
    touched[offsets.flatten()] = True
    assert int(touched.sum()) == offsets.numel()
    assert torch.equal(raw[~touched], old[~touched])
    return raw[offsets].flatten(1).view(cache.dtype)


def unpacked(row, rank, width, dtype):
    """The latents, rope values and scales in the bytes of packed rows."""
    scales = row[:, rank + 2 * width :].clone().view(torch.float32)
    return row[:, :rank], row[:, rank : rank + 2 * width].clone().view(dtype), scales


# The spacing of values of a 16-bit dtype next to 1. The oracle rounds where the operator does, so that they differ by
# their last rounding, half a spacing, and by few earlier ones that a sum in another order made go the other way, less
# than a spacing of the row's largest value. Wider dtypes: what sums of some tens of products lose.
SPACING = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 2**-20, torch.float64: 2**-46}


def near(actual, wanted, dtype):
    wanted = wanted.view(actual.shape)
    assert actual.dtype == dtype
    slack = SPACING[dtype] * (wanted.abs() / 2 + wanted.abs().amax(-1, keepdim=True))
    beyond = (actual.double() - wanted).abs() - slack
    assert bool((beyond <= 0).all()), f"off by {beyond.max()} more than rounding allows"


def near_integers(actual, wanted, dtype, slack=0.0):
    """Check that int8 results are the nearest integers, saturated.

    Values from sums in another order differ by their float32 error, at most 1e-3 of these 127 steps. In 16 bits, one in
    a
    hundred may come from a value that was rounded the other way, one spacing apart. `slack` is what the rounding itself
    adds.
    """
    wanted = wanted.view(actual.shape).clamp(-128, 127)
    assert actual.dtype == torch.int8
    beyond = (actual.double() - wanted).abs() - 0.5 - slack
    tie = 1e-9 if dtype == torch.float64 else 1e-3
    few = 0.01 if dtype.itemsize == 2 else 0.0
    assert int((beyond > tie).sum()) <= few * beyond.numel()
    assert bool((beyond <= max(tie, 127 * SPACING[dtype] if few else 0)).all())


def expect(a, results):
    """Check the seven results of v3 for the arguments `a` by name."""
    query, query_rope, query_scale, query_norm, norm_scale, kv_cache, kr_cache = results
    dtype, count = a["weight_uk"].dtype, math.prod(a["token_x"].shape[:-1])
    weights, caches = a["weight_quant_mode"], a["kv_cache_quant_mode"]
    assert query_norm.numel() or not a["query_norm_flag"] or not count
    wanted = oracle(a, query_norm.view(count, -1) if weights and query_norm.numel() else None)

    def rows(values):
        return torch.stack(values) if values else torch.zeros(0).double()

    if a["query_norm_flag"]:
        assert query_norm.shape == (*a["token_x"].shape[:-1], a["weight_dq"].shape[1])
        (near_integers if weights else near)(query_norm, rows(wanted.query_norm), dtype)
    if a["query_norm_flag"] and weights:
        assert norm_scale.shape == (count, 1)
        near_scale(norm_scale, wanted.norm_scale, dtype)
    assert a["query_norm_flag"] or query_norm.shape == (0,)
    assert (a["query_norm_flag"] and weights) or norm_scale.shape == (0,)
    if caches == 1:
        assert query_scale.shape == (count, a["weight_uk"].shape[0], 1)
        near_scale(query_scale, wanted.query_scale, dtype)
        # By way of float16, whose spacing is 1/16 there: up to half of that is added to the distance.
        near_integers(query, rows(wanted.query), dtype, slack=1 / 32)
    else:
        assert query_scale.shape == (0,)
        near(query, rows(wanted.query), dtype)
    near(query_rope, rows(wanted.query_rope), dtype)
    expect_caches(a, wanted, kv_cache, kr_cache)


def expect_caches(a, wanted, kv_cache, kr_cache):
    dtype, caches = a["weight_uk"].dtype, a["kv_cache_quant_mode"]
    where = slots(a)
    kept = [t for t, slot in enumerate(where) if slot is not None]
    before = [a[name] for name in ("kv_cache", "kr_cache")]
    latent = stored(kv_cache, before[0], where, a["cache_mode"])
    if caches == 3:
        assert kr_cache.shape == (0,)
        latent, key, scales = unpacked(latent, a["weight_uk"].shape[2], a["rope_sin"].shape[-1], dtype)
        near_scale(scales, [wanted.tile_scales[t] for t in kept], dtype)
    else:
        key = stored(kr_cache, before[1], where, a["cache_mode"])
    if kept:
        (near_integers if caches else near)(latent, torch.stack([wanted.latent[t] for t in kept]), dtype)
        (near_integers if caches == 2 else near)(key, torch.stack([wanted.key[t] for t in kept]), dtype)


def near_scale(actual, wanted, dtype):
    """float32, and as exact as the largest value of the row, which was rounded to the dtype at some point."""
    assert actual.dtype == torch.float32
    wanted = torch.tensor(wanted, dtype=torch.float64).view(actual.shape)
    torch.testing.assert_close(actual.double(), wanted, rtol=max(SPACING[dtype], 2**-22), atol=0)
