"""What mla_prolog_v3 computes: the formula in float64, and the kernel's roundings to the bit."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lib.operators.harness import bfloat16, by_name, cases, fake_with_free_sizes, hints, same_tensors, to_int8
from lib.operators.prolog_oracle import MODES, V3, call, expect, results

from mla_fx.ops.common import cast as _cast
from mla_fx.ops.emitted.mla_prolog import operator as _prolog

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize(("operator", "args", "kwargs"), cases(DTYPES, ("mla_prolog_v3",)))
def test_sample_against_oracle(operator, args, kwargs):
    asked = operator.overload(*args, **(kwargs | {"query_norm_flag": True}))
    expect(by_name(operator, args, kwargs | {"query_norm_flag": True}), asked)
    if not kwargs.get("query_norm_flag"):
        plain = operator.overload(*args, **kwargs)
        assert plain[3].shape == plain[4].shape == (0,)
        same_tensors((*plain[:3], *plain[5:]), (*asked[:3], *asked[5:]))


@pytest.mark.slow
@pytest.mark.parametrize(("weights", "caches", "cache_mode"), MODES)
def test_every_mode_against_oracle(weights, caches, cache_mode):
    """Two sequences of more than one block, in the vendor's dtype."""
    a = call(weights, caches, cache_mode, (2, 17))
    if "BLK" in cache_mode:
        expect(a, V3.overload(**a))
        a = call(weights, caches, cache_mode, (34,), lengths=(1, 16, 0, 17))
    expect(a, V3.overload(**a))


@settings(max_examples=15, deadline=None, derandomize=True)
@given(st.sampled_from(MODES), st.integers(0, 3), st.integers(0, 18), st.integers(8, 9), st.data())
def test_any_size_against_oracle(mode, batch, steps, blocks, data):
    dtype = torch.bfloat16 if mode[1] == 3 else torch.float64
    a = call(*mode, (batch, steps), dtype, blocks=blocks)
    if a["cache_index"] is not None and a["cache_index"].numel():
        skipped = data.draw(st.integers(0, a["cache_index"].numel()))
        a["cache_index"].view(-1)[:skipped] = -1
    real = V3.overload(**a)
    expect(a, real)
    fakes, guards = fake_with_free_sizes(V3, (), a)
    assert guards == []
    assert [hints(fake.shape) for fake in fakes] == [tuple(result.shape) for result in real]


# The kernel's roundings, emulated in numpy float32. Sums are exact: integers times powers of two, widths powers of two.

LIMIT = np.float32(127)


def half_away(x):
    """To float16 with ties away from zero: of the two neighbours the nearer one, or the larger."""
    nearest = np.asarray(x, np.float16)
    outer = np.nextafter(nearest, np.copysign(np.float16(np.inf), nearest))
    wide = np.asarray(x, np.float64)
    return np.where(np.abs(outer - wide) <= np.abs(nearest - wide), outer, nearest).astype(np.float32)


def int8_by_half(x):
    half = half_away(x)
    return np.clip(np.copysign(np.floor(np.abs(half) + np.float32(0.5)), half), -128, 127).astype(np.int8)


def emulated_norm(x, gamma, epsilon, factor):
    mean = (x * x).sum(-1, dtype=np.float32, keepdims=True) * np.float32(1 / x.shape[-1])
    # PyTorch's vectorised square root is not always the nearest float32; it is taken as it is.
    root = torch.from_numpy(mean + np.float32(epsilon)).sqrt().numpy()
    return x / root * gamma * np.float32(factor)


def emulated_rope(x, sin, cos):
    first, second, half = x[..., 0::2], x[..., 1::2], x.shape[-1] // 2
    return np.concatenate((first * cos[..., :half] + second * -sin[..., :half],
                           second * cos[..., half:] + first * sin[..., half:]), -1)  # fmt: skip


def emulated_product(x, weight, row, column):
    product = x.astype(np.float32) @ weight.astype(np.float32)
    return bfloat16(product) if row is None or column is None else product * row * column


def as_arrays(a):
    """The arguments of a call, bfloat16 as float32."""
    tensors = {name: value for name, value in a.items() if torch.is_tensor(value)}
    wide = {name: value.float() if value.dtype == torch.bfloat16 else value for name, value in tensors.items()}
    return a | {name: value.numpy() for name, value in wide.items()}


def emulated_query(n):
    """query_norm, its scale, and its product with weight_uq_qr [T, N, D+Dr]."""
    product = emulated_product(n["token_x"], n["weight_dq"], n["dequant_scale_x"], n["dequant_scale_w_dq"])
    normed = emulated_norm(product, n["rmsnorm_gamma_cq"], n["rmsnorm_epsilon_cq"], n["qc_qr_scale"])
    norm, scale = bfloat16(normed), None
    if n["weight_quant_mode"]:
        normed = normed * n["smooth_scales_cq"]
        largest = np.abs(normed).max(-1, keepdims=True)
        norm, scale = to_int8(normed * (LIMIT / largest)), largest / LIMIT
    up = emulated_product(norm, n["weight_uq_qr"], scale, n["dequant_scale_w_uq_qr"])
    return norm, scale, up.reshape(len(up), len(n["weight_uk"]), -1)


def emulated_tables(n):
    return n["rope_sin"][:, None], n["rope_cos"][:, None]


def emulated_keys(n):
    """The rows before they are stored, the latent unrounded."""
    keys = emulated_product(n["token_x"], n["weight_dkv_kr"], n["dequant_scale_x"], n["dequant_scale_w_dkv_kr"])
    rank = n["weight_uk"].shape[2]
    latent = emulated_norm(keys[:, :rank], n["rmsnorm_gamma_ckv"], n["rmsnorm_epsilon_ckv"], n["kc_scale"])
    return latent, bfloat16(emulated_rope(keys[:, rank:], n["rope_sin"], n["rope_cos"]))


def emulate(a):
    """All results for tokens [T, He], bit by bit, the caches as rows."""
    n = as_arrays(a)
    norm, norm_scale, up = emulated_query(n)
    nope = n["weight_uk"].shape[1]
    query = bfloat16(np.einsum("tnd,ndc->tnc", bfloat16(up[..., :nope]), n["weight_uk"]))
    query_rope = bfloat16(emulated_rope(up[..., nope:], *emulated_tables(n)))
    query_scale = None
    if n["kv_cache_quant_mode"] == 1:
        largest = np.abs(query).max(-1, keepdims=True)
        query_scale, query = largest / LIMIT, int8_by_half(query * (LIMIT / largest))
        query_rope = bfloat16(query_rope * (n["quant_scale_ckv"] / query_scale))
    return query, query_rope, query_scale, norm, norm_scale, *emulated_rows(n, *emulated_keys(n))


def emulated_rows(n, latent, key):
    caches = n["kv_cache_quant_mode"]
    if caches == 3:
        tiles = latent.reshape(len(latent), -1, 128)
        bound = np.abs(tiles).max(-1, keepdims=True) * n["k_nope_clip_alpha"]
        scale = bound * np.float32(1 / 127)
        integers = to_int8(np.maximum(np.minimum(tiles, bound), -bound) * (np.float32(1) / scale))
        bits = (key.view(np.uint32) >> 16).astype(np.uint16).view(np.int8)
        return np.concatenate((integers.reshape(latent.shape), bits, scale[..., 0].view(np.int8)), -1), None
    if caches == 0:
        return bfloat16(latent), key
    latent = to_int8(latent * n["quant_scale_ckv"])
    return latent, to_int8(key * n["quant_scale_ckr"]) if caches == 2 else key


def exact_call(weights, caches):
    """Sums without rounding: small integers, powers of two, one entry a column in weight_uk."""
    generator = torch.Generator().manual_seed(7)
    tokens, hidden, columns, rank, width = 64, 16, 32, 256 if caches == 3 else 64, 32

    def drawn(*shape, limit=3, dtype=torch.bfloat16):
        return torch.randint(-limit, limit + 1, shape, generator=generator).to(dtype)

    def scale(*shape):
        return (0.7 + 0.6 * torch.rand(shape, generator=generator)).float()

    some, full = weights > 0, weights == 2
    dtypes = {"some": torch.int8 if some else torch.bfloat16, "full": torch.int8 if full else torch.bfloat16}
    selected = torch.arange(rank).remainder(8) == torch.arange(8).unsqueeze(-1)
    turned = 6 * torch.rand(tokens, width, generator=generator)
    powers = {
        "dequant_scale_x": (tokens, 1),
        "dequant_scale_w_dq": (1, columns),
        "dequant_scale_w_dkv_kr": (1, rank + width),
    }
    a = {
        "token_x": drawn(tokens, hidden, dtype=dtypes["full"]),
        "weight_dq": drawn(hidden, columns, dtype=dtypes["full"]),
        "weight_uq_qr": drawn(columns, 2 * (8 + width), limit=100 if some else 3, dtype=dtypes["some"]),
        "weight_uk": (selected * 2.0 ** drawn(2, 1, rank, limit=2, dtype=torch.float32)).bfloat16(),
        "weight_dkv_kr": drawn(hidden, rank + width, dtype=dtypes["full"]),
        "rmsnorm_gamma_cq": scale(columns).bfloat16(),
        "rmsnorm_gamma_ckv": scale(rank).bfloat16(),
        "rope_sin": turned.sin().bfloat16(),
        "rope_cos": turned.cos().bfloat16(),
        "kv_cache": torch.zeros(tokens, 1, rank + 2 * width + 8 if caches == 3 else rank).to(
            torch.int8 if caches else torch.bfloat16
        ),
        "kr_cache": torch.zeros(0)
        if caches == 3
        else torch.zeros(tokens, 1, width).to(torch.int8 if caches == 2 else torch.bfloat16),
        "quant_scale_ckv": {1: 50 * scale(1), 2: 50 * scale(1, rank)}.get(caches),
        "quant_scale_ckr": 8 * scale(1, width) if caches == 2 else None,
        "dequant_scale_w_uq_qr": 0.01 * scale(1, 2 * (8 + width)) if some else None,
        "smooth_scales_cq": scale(1, columns) if some else None,
        "k_nope_clip_alpha": torch.tensor([0.83]) if caches == 3 else None,
        "query_quant_mode": int(caches == 1),
        "ckvkr_repo_mode": int(caches == 3),
        "quant_scale_repo_mode": int(caches == 3),
    }
    if full:
        a |= {name: 2.0 ** drawn(*shape, limit=1, dtype=torch.float32) for name, shape in powers.items()}
    options = {"weight_quant_mode": weights, "kv_cache_quant_mode": caches, "cache_mode": "TND", "qc_qr_scale": 0.7}
    return by_name(V3, (), a | options | {"kc_scale": 1.3, "query_norm_flag": True})


def array(tensor):
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()


@pytest.mark.parametrize(("weights", "caches"), sorted({mode[:2] for mode in MODES}))
def test_roundings_to_the_bit(weights, caches):
    a = exact_call(weights, caches)
    for (name, result), wanted in zip(results(a).items(), emulate(a), strict=True):
        if wanted is None:
            assert result.shape == (0,)
            continue
        actual = array(result)
        np.testing.assert_array_equal(actual, wanted.reshape(actual.shape), err_msg=name)


def test_order_of_division_and_product_to_the_bit():
    """Values times the reciprocal of a scale, or times 127 / max: a plain division would round some ties otherwise."""
    latent = torch.randn(8192, 256, generator=torch.Generator().manual_seed(3))
    key, alpha = torch.zeros(8192, 8).bfloat16(), torch.tensor([0.83])
    n = {"kv_cache_quant_mode": 3, "k_nope_clip_alpha": alpha.numpy()}
    wanted, _ = emulated_rows(n, latent.numpy(), key.float().numpy())
    np.testing.assert_array_equal(_prolog.packed_rows(latent, key, alpha).numpy(), wanted)
    tiles = latent.numpy().reshape(8192, 2, 128)
    bound = np.abs(tiles).max(-1, keepdims=True) * np.float32(0.83)
    divided = to_int8(np.clip(tiles, -bound, bound) / (bound * np.float32(1 / 127)))
    assert (divided.reshape(latent.shape) != wanted[:, :256]).any()

    largest = np.abs(latent.numpy()).max(-1, keepdims=True)
    integers, scale = _cast.quantize_rows(latent, inverse_first=False)
    np.testing.assert_array_equal(integers.numpy(), to_int8(latent.numpy() * (LIMIT / largest)))
    np.testing.assert_array_equal(scale.numpy(), largest / LIMIT)
    assert (integers.numpy() != to_int8(latent.numpy() / scale.numpy())).any()


# Where the sources disagree


@pytest.mark.parametrize("weights", [1, 2])
def test_query_stays_in_the_dtype_beside_packed_rows(weights):
    """4: the page says that query is quantised per token and head; its table, the meta function, the kernel: bf16."""
    found = results(call(weights, 3))
    assert found["query"].dtype == found["query_rope"].dtype == torch.bfloat16
    assert found["query_scale"].shape == (0,)


@pytest.mark.parametrize(("weights", "caches"), sorted({mode[:2] for mode in MODES}))
def test_only_a_quantised_query_has_a_scale(weights, caches):
    """5: the page gives weight_quant_mode 2 to 5 a dequant_scale_q_nope; meta function and host: kv mode 1 alone."""
    found = results(call(weights, caches))
    assert found["query_scale"].shape == ((6, 3, 1) if caches == 1 else (0,))
    assert (found["query"].dtype == torch.int8) == (caches == 1)


def test_weight_uq_qr_is_quantised_per_column():
    """6: the page calls it per token; the kernel multiplies each column by its own scale."""
    a = call(2, 0)
    before = results(a)
    scale = a["dequant_scale_w_uq_qr"].clone()
    scale[0, -1] *= 2  # of the last rope column of the last head
    changed = results(a | {"dequant_scale_w_uq_qr": scale})
    assert torch.equal(changed["query"], before["query"])
    moved = (changed["query_rope"] != before["query_rope"]).nonzero()
    assert set(moved[:, 2].tolist()) == {2}
    assert set(moved[:, 3].tolist()) == {15, 31}


def test_keys_are_rounded_before_their_norm():
    """16: the reference normalises the unrounded product, the kernel the one in bf16."""
    a = exact_call(0, 0)
    a["token_x"] = a["token_x"] * 0.99  # products that bf16 does not hold
    n = as_arrays(a)
    kernel, _ = emulated_keys(n)
    product = n["token_x"] @ n["weight_dkv_kr"][:, :64]
    reference = emulated_norm(product, n["rmsnorm_gamma_ckv"], n["rmsnorm_epsilon_ckv"], n["kc_scale"])
    stored = array(results(a)["kv_cache"]).reshape(kernel.shape)
    assert np.abs(stored - kernel).max() <= np.abs(stored).max() * 2**-8
    assert (stored != bfloat16(kernel)).mean() < 0.01  # sums in another order
    assert (bfloat16(reference) != bfloat16(kernel)).mean() > 0.1


def test_int8_query_rounds_twice_away_from_zero():
    """17: the reference takes the nearest integer, the kernel goes by way of float16."""
    a = exact_call(2, 1)
    wanted = emulate(a | {"kv_cache_quant_mode": 0})[0]
    scaled = wanted * (LIMIT / np.abs(wanted).max(-1, keepdims=True))
    found = array(results(a)["query"])
    np.testing.assert_array_equal(found, int8_by_half(scaled))
    other = found.astype(int) - to_int8(scaled)
    assert 0 < (other != 0).mean() < 0.05
    assert np.abs(other).max() == 1


@pytest.mark.parametrize("weights", [1, 2])
def test_query_rope_is_not_rounded_before_its_rotation(weights):
    """37: pypto's prolog rounds to bf16 before it rotates, this one after it alone."""
    a = exact_call(weights, 0)
    n = as_arrays(a)
    up = emulated_query(n)[2][..., n["weight_uk"].shape[1] :]
    found = array(results(a)["query_rope"])
    np.testing.assert_array_equal(found, bfloat16(emulated_rope(up, *emulated_tables(n))))
    assert (found != bfloat16(emulated_rope(bfloat16(up), *emulated_tables(n)))).mean() > 0.1
