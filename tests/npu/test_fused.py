"""The vendor's fused operators, called as a user calls them: converted, run, and compared with those of `mla_fx`."""

import pytest
import torch
import torch_npu
from lib.operators.harness import by_name, cases

pytestmark = pytest.mark.usefixtures("any_size")  # samples are small
NZ = 29
WEIGHTS = ("weight_dq", "weight_uq_qr", "weight_dkv_kr")
# What `mla_fx` has beyond the vendor's.
OWN = {"rope_layout": "interleave_half", "gamma_after_cast": False, "rounds_first": False}
OWN_MODES = {"mla_prolog": ("Norm",), "mla_prolog_v3": ("Norm",), "kv_rmsnorm_rope_cache": ("BNSD",)}
NUMBERS = {"mla_prolog": ("qc_qr_scale", "kc_scale"), "kv_rmsnorm_rope_cache": ("kc_scale",)}


def vendor_cases(operator):
    """Those samples of the operator that the vendor's has too, as arguments by name."""
    own = OWN | dict.fromkeys(NUMBERS.get(operator, ()), 1.0)
    for case in cases([torch.bfloat16], [operator]):
        arguments = by_name(*case.values)
        is_vendors = all(arguments.pop(name, default) == default for name, default in own.items())
        is_vendors &= arguments.get("cache_mode") not in OWN_MODES[operator]
        caches = [arguments[name] for name in ("k_cache", "ckv_cache") if name in arguments]
        is_vendors &= arguments.get("cache_mode") != "Norm" or all(cache.is_floating_point() for cache in caches)
        is_rotated = all(arguments[name] is not None for name in ("cos", "rope_cos") if name in arguments)
        if is_vendors and is_rotated:
            yield pytest.param(arguments, id=case.id)


def paged_cases(operator):
    """Those with pages as devices have them, and an index of tokens."""
    for case in vendor_cases(operator):
        (arguments,) = case.values
        if arguments["cache_mode"] in ("PA_BSND", "PA_NZ") and arguments["kv_cache"].shape[1] % 16 == 0:
            yield case


def tensors_and_options(arguments):
    """Fresh tensors, weights in FRACTAL_NZ, and what else is given."""
    given = {name: value for name, value in arguments.items() if value is not None}
    tensors = {name: value.clone() for name, value in given.items() if isinstance(value, torch.Tensor)}
    options = {name: value for name, value in given.items() if name not in tensors}
    return {name: torch_npu.npu_format_cast(x, NZ) if name in WEIGHTS else x for name, x in tensors.items()}, options


def check_equal(actual, expected):
    torch.testing.assert_close(list(actual), list(expected), rtol=0, atol=0)


@pytest.mark.parametrize("arguments", list(vendor_cases("mla_prolog_v3")))
def test_mla_prolog_v3(converted, arguments):
    tensors, options = tensors_and_options(arguments)

    def step(tensors):
        *results, kv_cache, kr_cache = torch.ops.npu.npu_mla_prolog_v3_functional(**tensors, **options)
        tensors["kv_cache"].copy_(kv_cache)
        tensors["kr_cache"].copy_(kr_cache)
        return results

    results = converted.compiled(step)(tensors)
    check_equal([*results, tensors["kv_cache"], tensors["kr_cache"]], torch.ops.mla_fx.mla_prolog_v3(**arguments))
    copies = ["TensorMove"] if arguments["kr_cache"].numel() == 0 else []  # of an empty cache, which costs nothing
    assert converted.types(converted.graphs[0]) == [*copies, "MlaPrologV3", "NetOutput"]


def test_one_graph_serves_any_number_of_tokens(converted):
    whole = next(case.values[0] for case in vendor_cases("mla_prolog_v3") if case.values[0]["token_x"].ndim == 2)

    def step(tensors):
        query, *_, kv_cache, kr_cache = torch.ops.npu.npu_mla_prolog_v3_functional(**tensors, **options)
        tensors["kv_cache"].copy_(kv_cache)
        tensors["kr_cache"].copy_(kr_cache)
        return query

    run = converted.compiled(step, dynamic=True)
    for count in (5, 4, 2):
        tokens = {name: whole[name][:count] for name in ("token_x", "rope_sin", "rope_cos", "cache_index")}
        tensors, options = tensors_and_options({**whole, **tokens})
        expected = torch.ops.mla_fx.mla_prolog_v3(**{**whole, **tokens})
        check_equal([run(tensors), tensors["kv_cache"], tensors["kr_cache"]], [expected[0], *expected[-2:]])
    assert len(converted.graphs) == 1
    assert converted.types(converted.graphs[0]) == ["MlaPrologV3", "NetOutput"]


@pytest.mark.parametrize("arguments", list(paged_cases("mla_prolog")))
@pytest.mark.parametrize("version", ["npu_mla_prolog", "npu_mla_prolog_v2"])
def test_mla_prolog_and_v2(converted, arguments, version):
    """Their graphs write the caches, though their schemas say otherwise."""
    tensors, options = tensors_and_options(arguments)
    run = converted.compiled(lambda tensors: getattr(torch.ops.npu, version)(**tensors, **options))
    results = run(tensors)[:4]
    expected = torch.ops.mla_fx.mla_prolog(**arguments)
    check_equal(results, expected)
    check_equal([tensors["kv_cache"], tensors["kr_cache"]], expected[2:])


def test_mla_prolog_v2_in_int8(converted):
    """Everything is int8, which version 2 sees by the dtypes."""
    modes = {"weight_quant_mode": 2, "kv_cache_quant_mode": 1, "cache_mode": "PA_NZ"}
    samples = (case.values[0] for case in vendor_cases("mla_prolog_v3"))
    arguments = next(sample for sample in samples if modes.items() <= sample.items())
    tensors, _ = tensors_and_options(arguments)
    run = converted.compiled(lambda tensors: torch.ops.npu.npu_mla_prolog_v2(**tensors, cache_mode="PA_NZ"))
    query, query_rope, kv_cache, kr_cache, scale = run(tensors)
    expected = torch.ops.mla_fx.mla_prolog_v3(**arguments)
    check_equal([query, query_rope, scale, kv_cache, kr_cache], [*expected[:3], *expected[-2:]])
    check_equal([tensors["kv_cache"], tensors["kr_cache"]], expected[-2:])


@pytest.mark.parametrize("arguments", list(vendor_cases("kv_rmsnorm_rope_cache")))
def test_kv_rmsnorm_rope_cache(converted, arguments):
    tensors, options = tensors_and_options(arguments)

    def step(tensors):
        *rows, k_cache, ckv_cache = torch.ops.npu.npu_kv_rmsnorm_rope_cache_v2_functional(**tensors, **options)
        tensors["k_cache"].copy_(k_cache)
        tensors["ckv_cache"].copy_(ckv_cache)
        return rows

    rows = converted.compiled(step)(tensors)
    k_cache, ckv_cache, *expected = torch.ops.mla_fx.kv_rmsnorm_rope_cache(**arguments)
    check_equal([tensors["k_cache"], tensors["ckv_cache"]], [k_cache, ckv_cache])
    if arguments["is_output_kv"]:
        check_equal(rows, expected)
    else:
        assert all(row.isnan().all() for row in rows), "a device leaves them undefined"
    assert converted.types(converted.graphs[0]) == ["KvRmsNormRopeCache", "NetOutput"]


def test_norm_and_rotation(converted):
    torch.manual_seed(0)
    x, cos, sin = (torch.randn(2, heads, 5, 64) for heads in (3, 1, 1))
    gamma = 1 + 0.3 * torch.randn(64)

    def step(x, gamma, cos, sin):
        normed, _ = torch_npu.npu_rms_norm(x, gamma, epsilon=1e-5)
        return normed, torch_npu.npu_interleave_rope(normed, cos, sin)

    normed, rotated = converted.compiled(step)(*(tensor.bfloat16() for tensor in (x, gamma, cos, sin)))
    wide = [tensor.bfloat16().double() for tensor in (x, gamma, cos, sin)]
    expected = wide[0] / (wide[0].square().mean(-1, keepdim=True) + 1e-5).sqrt() * wide[1]
    pairs = torch.view_as_complex(normed.double().unflatten(-1, (-1, 2)).contiguous())
    halves, turned = torch.cat([pairs.real, pairs.imag], -1), torch.cat([-pairs.imag, pairs.real], -1)
    close = {"rtol": 1e-2, "atol": 1e-2}
    torch.testing.assert_close(normed, expected.bfloat16(), **close)
    torch.testing.assert_close(rotated, (halves * wide[2] + turned * wide[3]).bfloat16(), **close)


def test_weights_must_be_in_fractal_nz(converted):
    arguments = next(vendor_cases("mla_prolog_v3")).values[0]
    tensors, options = tensors_and_options(arguments)
    run = converted.compiled(lambda tensors: torch.ops.npu.npu_mla_prolog_v3_functional(**tensors, **options))
    tensors["weight_uq_qr"] = torch_npu.npu_format_cast(tensors["weight_uq_qr"], 2)
    with pytest.raises(ValueError, match=r"MlaPrologV3 reads weight_uq_qr in FRACTAL_NZ \(format 29\), but .* is ND"):
        run(tensors)
