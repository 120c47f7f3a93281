"""mla_prolog_quant bit by bit, and where its source contradicts itself or others.

The emulation computes in numpy's float32. Its inputs are integers. Either every sum is exact in float32, in any
order, or at most one product enters each sum; so there is one right answer for every bit.
"""

import numpy as np
import pytest
import torch
from lib.operators.harness import CATALOGUE, refuses, result_names, same_tensors
from lib.operators.harness import bfloat16 as bf16

OPERATOR = CATALOGUE["mla_prolog_quant"]
FLOAT = np.float32
WIDTH, NOPE, HEADS, TOKENS = 4, 6, 2, 7


def functional(arguments):
    return dict(zip(result_names(OPERATOR.overload), OPERATOR.overload(**arguments), strict=True))


def integer_arguments(dense=True, seed=0, dtype=torch.bfloat16, **options):
    """Arguments without a sum that could be rounded in two ways.

    Dense, the axes that are normalised have 16 columns, so that the factor of the mean is exact. Otherwise they have
    12, so that it is not; but only two columns of w_dq and w_dkv_kr, in different tiles, hold anything.
    """
    draw = np.random.default_rng(seed)
    columns = HEADS * (NOPE + WIDTH)
    compressed = rank = 16 if dense else 12
    w_dq, w_dkv_kr = (draw.integers(-15, 16, (8, size)) for size in (compressed, rank + WIDTH))
    if not dense:
        w_dq[:, [*range(2, 5), *range(6, 12)]] = w_dkv_kr[:, [*range(2, 5), *range(6, 12)]] = 0
        w_dq[:, 0] = w_dkv_kr[:, 0] = 0
    w_uk = np.zeros((HEADS, NOPE, rank))
    for column in range(rank):
        w_uk[:, column % NOPE, column] = draw.normal(size=HEADS)
    integers = {"token_x": draw.integers(-15, 16, (TOKENS, 8)), "w_dq": w_dq, "w_dkv_kr": w_dkv_kr, "w_uk": w_uk}
    gammas = {"gamma_cq": draw.normal(size=compressed), "gamma_ckv": draw.normal(size=rank)}
    tables = {name: draw.normal(size=(TOKENS, WIDTH)) for name in ("cos", "sin")}
    return {
        **{name: torch.tensor(value).to(dtype) for name, value in (integers | gammas | tables).items()},
        "w_uq_qr": torch.tensor(draw.integers(-128, 128, (compressed, columns)), dtype=torch.int8),
        "dequant_scale": torch.tensor(draw.uniform(0.001, 0.002, (columns, 1))).float(),
        "cache_index": torch.tensor(draw.permutation(3 * 5)[:TOKENS]),
        "kv_cache": torch.zeros(3, 5, 1, rank, dtype=torch.int8),
        "kr_cache": torch.zeros(3, 5, 1, WIDTH, dtype=dtype),
        "k_scale_cache": torch.zeros(3, 5, 1, 4),
        "smooth_scales_cq": torch.tensor(draw.uniform(0.5, 2, compressed)).float(),
        "epsilon_cq": 700.0,
        "epsilon_ckv": 300.0,
        **options,
    }


def to_int8(x):
    return np.clip(np.rint(np.nan_to_num(x, nan=0, posinf=128, neginf=-128)), -128, 127).astype(np.int8)


def emulated_norm(x, gamma, epsilon, divide=False, mean_last=False):
    factor = FLOAT(1 / x.shape[-1])
    mean = (
        (x * x).sum(-1, keepdims=True, dtype=FLOAT) * factor if mean_last else (x * x * factor).sum(-1, keepdims=True)
    )
    root = np.sqrt(mean + FLOAT(epsilon))
    return gamma * (x / root if divide else x * (FLOAT(1) / root))


def emulated_codes(x, scale_of_max=False):
    with np.errstate(divide="ignore", invalid="ignore"):
        largest = np.abs(x).max(-1, keepdims=True)
        factor = FLOAT(127) / largest
        return to_int8(x * factor), largest / FLOAT(127) if scale_of_max else FLOAT(1) / factor


def emulated_rope(x, cos, sin):
    first, second, half = x[..., 0::2], x[..., 1::2], WIDTH // 2
    one = first * cos[..., :half] + -second * sin[..., :half]
    other = second * cos[..., half:] + first * sin[..., half:]
    return np.concatenate((one, other), -1)


def emulated_projections(a, r, one_product_each):
    """token_x through w_dq and w_dkv_kr."""
    x = a["token_x"]
    if a.get("dequant_scale_w_dq") is not None:
        codes, scale = emulated_codes(x)
        weights = (("w_dq", "dequant_scale_w_dq"), ("w_dkv_kr", "dequant_scale_w_dkv_kr"))
        sums = [(codes.astype(np.int64) @ a[name].astype(np.int64)).astype(FLOAT) for name, _ in weights]
        return [r(total * scale * a[columns]) for total, (_, columns) in zip(sums, weights, strict=True)]
    first, second = (x[:, half] @ a["w_dq"][half] for half in (slice(0, 4), slice(4, 8)))
    return r(r(first) + r(second) if one_product_each else first + second), r(x @ a["w_dkv_kr"])


def emulated(arguments, *, one_product_each=False, rope_unrounded=False, scale_of_max=False, **norm):
    """All results but the caches' untouched slots. The options take the other side of a contradiction each."""
    r = bf16 if arguments["token_x"].dtype == torch.bfloat16 else np.asarray
    a = {key: value.float().numpy() if torch.is_tensor(value) else value for key, value in arguments.items()}
    compressed, key = emulated_projections(a, r, one_product_each)
    z = r(emulated_norm(compressed, a["gamma_cq"], a["epsilon_cq"], **norm))
    if a["smooth_scales_cq"] is not None:
        z = z * a["smooth_scales_cq"]
    if a.get("is_symmetry", True):
        codes, scale = emulated_codes(z, scale_of_max)
        product = codes.astype(np.int64) @ a["w_uq_qr"].astype(np.int64)
    else:
        largest, smallest = z.max(-1, keepdims=True), z.min(-1, keepdims=True)
        scale = np.maximum((largest - smallest) / FLOAT(255), FLOAT(1e-12))
        offset = FLOAT(127) - largest / scale
        codes = to_int8(z / scale + offset)
        weight = a["w_uq_qr"].astype(np.float64)
        product = codes.astype(np.float64) @ weight - offset.astype(np.float64) * weight.sum(0)
    wide = (product.astype(FLOAT) * scale * a["dequant_scale"][:, 0]).reshape(TOKENS, HEADS, NOPE + WIDTH)
    up = r(wide)
    nope = r(np.einsum("tnd,ndr->tnr", up[..., :NOPE], a["w_uk"]))
    tables = a["cos"][:, None], a["sin"][:, None]
    query_rope = r(emulated_rope((wide if rope_unrounded else up)[..., NOPE:], *tables))
    rank = len(a["gamma_ckv"])
    latent = r(emulated_norm(key[:, :rank], a["gamma_ckv"], a["epsilon_ckv"], **norm))
    latent, k_scale = emulated_codes(latent.reshape(TOKENS, 4, rank // 4), scale_of_max)
    rows = {"kv_cache": latent.reshape(TOKENS, rank), "k_scale_cache": k_scale[..., 0]}
    rows["kr_cache"] = r(emulated_rope(key[:, rank:], a["cos"], a["sin"]))
    outputs = {"q_norm_out": codes, "q_norm_scale_out": scale, "query_nope_out": nope, "query_rope_out": query_rope}
    return outputs | {name + "_out": row for name, row in rows.items()}


def differing(arguments, **options):
    """The results in which the operator and the emulation differ anywhere, caches at the tokens' slots."""
    wanted = emulated(arguments, **options)
    results = functional(arguments)
    for name in ("kv_cache_out", "kr_cache_out", "k_scale_cache_out"):
        results[name] = results[name].flatten(0, 2)[arguments["cache_index"]]
    return {name for name, value in results.items() if not np.array_equal(value.double().numpy(), wanted[name], True)}


@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize("smooth", [True, False])
@pytest.mark.parametrize("is_symmetry", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_bit(dense, smooth, is_symmetry, dtype):
    for seed in range(20):
        arguments = integer_arguments(dense, seed, dtype, is_symmetry=is_symmetry)
        arguments["smooth_scales_cq"] = arguments["smooth_scales_cq"] if smooth else None
        assert differing(arguments) == set()


def with_int8_tokens(arguments, seed=0):
    """The arguments of `integer_arguments` that are not dense: the sums of the norms have one answer still."""
    draw = np.random.default_rng(seed)
    scales = {f"dequant_scale_{name}": torch.tensor(draw.uniform(0.5, 2, (1, arguments[name].shape[1]))).float()
              for name in ("w_dq", "w_dkv_kr")}  # fmt: skip
    codes = {name: arguments[name].to(torch.int8) for name in ("w_dq", "w_dkv_kr")}
    return arguments | codes | scales


@pytest.mark.parametrize("is_symmetry", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_int8_tokens_are_never_set_by_the_source_but_taken(is_symmetry, dtype):
    """quant_a of pre_compute_2d() makes token_x int8; mla_prolog_quant_compute never passes its scales on."""
    for seed in range(20):
        arguments = with_int8_tokens(integer_arguments(False, seed, dtype, is_symmetry=is_symmetry), seed)
        assert differing(arguments) == set()


def test_tokens_are_made_int8_before_their_products():
    """The largest value of each token becomes 127, and what lies below half a step of that is lost."""
    arguments = with_int8_tokens(integer_arguments(False))
    arguments["token_x"][:, 0] = 127
    lost = arguments | {"token_x": arguments["token_x"].clone()}
    lost["token_x"][:, 1:] += 0.25
    same_tensors(functional(lost).values(), functional(arguments).values())


def test_int32_sums_are_exact_where_float32_no_longer_is():
    """1536 products of 127 and more than 100 pass 2^24; their sum is rounded once, as an int32 becomes a float32."""
    arguments = integer_arguments(dtype=torch.float32, smooth_scales_cq=None)
    draw, columns = np.random.default_rng(0), HEADS * (NOPE + WIDTH)
    weight = draw.integers(101, 128, (1536, columns))
    arguments["w_dq"] = arguments["w_dq"][:, :1].expand(-1, 1536)
    arguments["gamma_cq"] = torch.ones(1536)
    arguments["w_uq_qr"] = torch.tensor(weight, dtype=torch.int8)
    arguments["cos"], arguments["sin"] = torch.ones(TOKENS, WIDTH), torch.zeros(TOKENS, WIDTH)
    results = functional(arguments)
    codes, scale = results["q_norm_out"].numpy().astype(np.int64), results["q_norm_scale_out"].numpy()
    assert set(np.abs(codes).flatten()) == {127}
    up = (codes @ weight).astype(FLOAT) * scale * arguments["dequant_scale"][:, 0].numpy()
    rope = up.reshape(TOKENS, HEADS, -1)[..., NOPE:]
    assert np.array_equal(results["query_rope_out"].numpy(), rope[..., [0, 2, 1, 3]])


def test_both_halves_of_the_first_product_are_summed_before_rounding():
    """The source casts the sum of two float32 matmuls, not each of them."""
    arguments = integer_arguments()
    assert "q_norm_out" in differing(arguments, one_product_each=True)


def test_script_divides_by_the_root_but_the_code_multiplies_by_its_reciprocal():
    """pypto's test script writes x / sqrt(..), its kernel x * (1 / sqrt(..))."""
    assert any(differing(integer_arguments(seed=seed, dtype=torch.float32), divide=True) for seed in range(20))


def test_mean_factor_comes_before_the_sum():
    """Unlike in npu_mla_prolog, whose kernels sum the squares first."""
    assert any(differing(integer_arguments(False, seed, torch.float32), mean_last=True) for seed in range(20))


def test_scale_is_the_reciprocal_of_the_rounded_factor():
    """The docstring of quant() says max / 127, its code 1 / (127 / max)."""
    assert {"q_norm_scale_out", "k_scale_cache_out"} <= differing(integer_arguments(), scale_of_max=True)


def test_query_rope_is_rounded_before_rotation_unlike_mla_prolog_v3():
    """aclnnMlaPrologV3 rotates the float32 product; the pypto function rounds it to bfloat16 first."""
    assert differing(integer_arguments(), rope_unrounded=True) == {"query_rope_out"}


def test_script_omits_epsilon_but_it_is_added():
    """pypto's test script normalises without epsilon, its kernel with it."""
    arguments = integer_arguments()
    assert differing(arguments) == set()
    without = functional(arguments | {"epsilon_cq": 0.0, "epsilon_ckv": 0.0})
    given = functional(arguments)
    for name in ("q_norm_scale_out", "query_nope_out", "k_scale_cache_out"):
        assert not torch.equal(given[name], without[name])


def test_docstrings_of_decode_and_prefill_are_swapped_but_the_maths_is_one():
    """mla_prolog_quant_d says prefill, _p says decode; a token's results do not depend on how many come with it."""
    arguments = integer_arguments()
    together = functional(arguments)
    for token in range(TOKENS):
        own = {name: arguments[name][token : token + 1] for name in ("token_x", "cos", "sin", "cache_index")}
        alone = functional(arguments | own)
        slot = divmod(int(own["cache_index"]), 5)
        for name, result in alone.items():
            place, other = (slot, slot) if "cache" in name else (0, token)
            same_tensors([result[place]], [together[name][other]])


def test_k_scale_cache_is_documented_as_float16_but_is_float32():
    """The docstrings of pypto say FP16, its signature and code DT_FP32."""
    arguments = integer_arguments()
    assert functional(arguments)["k_scale_cache_out"].dtype == torch.float32
    half = arguments | {"k_scale_cache": arguments["k_scale_cache"].half()}
    refuses(OPERATOR, (), half, "k_scale_cache has dtype torch.float16; allowed: torch.float32")


def test_pa_nz_is_documented_but_refused():
    """The docstrings of pypto allow "PA_NZ", its code never reads cache_mode and scatters rows as "PA_BSND"."""
    refuses(OPERATOR, (), integer_arguments(cache_mode="PA_NZ"), "cache_mode is 'PA_NZ'; it must be 'PA_BSND'")


def test_key_scales_are_called_per_channel_but_belong_to_a_token_and_tile():
    """The docstrings of pypto say "per-channel, 4 channels", its code takes one maximum for each token and tile."""
    arguments = integer_arguments(cache_index=torch.arange(TOKENS))
    louder = arguments | {"token_x": arguments["token_x"].clone(), "gamma_ckv": arguments["gamma_ckv"].clone()}
    louder["gamma_ckv"][4:8] *= 2
    louder["token_x"][3] *= -1
    scale, changed = (functional(a)["k_scale_cache_out"].view(-1, 4)[:TOKENS] for a in (arguments, louder))
    assert torch.equal(changed[:, 1], 2 * scale[:, 1])
    assert torch.equal(changed[:, [0, 2, 3]], scale[:, [0, 2, 3]])
    assert len(set(scale.flatten().tolist())) > 3 * TOKENS


def test_asymmetric_code_is_inconsistent_but_its_docstring_is_followed():
    """The code of quant() multiplies by 1 / max and forgets its offset; the docstring gives (max - min) / 255."""
    arguments = integer_arguments(is_symmetry=False)
    results = functional(arguments)
    assert results["q_norm_out"].amin(-1).tolist() == [-128] * TOKENS
    assert results["q_norm_out"].amax(-1).tolist() == [127] * TOKENS
    symmetric = functional(arguments | {"is_symmetry": True})
    for name in ("query_nope_out", "query_rope_out"):
        assert not torch.equal(results[name], symmetric[name])
        difference = (results[name].float() - symmetric[name].float()).norm() / symmetric[name].float().norm()
        assert difference < 0.02  # both are int8 approximations of one product
    same_tensors(list(results.values())[4:], list(symmetric.values())[4:])


def test_smooth_scales_are_never_set_by_the_source_but_are_honoured():
    """quant() documents the factor, and mla_prolog_quant_compute never passes one on."""
    arguments = integer_arguments()
    plain = arguments | {"smooth_scales_cq": None}
    ones = arguments | {"smooth_scales_cq": torch.ones(1, 16)}
    same_tensors(functional(ones).values(), functional(plain).values())
    assert not torch.equal(functional(arguments)["q_norm_out"], functional(plain)["q_norm_out"])
