"""mla_prolog where it is quantised or paged as NZ; its other modes are in test_unquantised.py."""

import inspect
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lib.operators.harness import by_name, cases, changed, compiles_once, refuses, same_tensors, twin_call
from lib.operators.prolog_oracle import CACHES, V1, V3, call, expect, stored

pytestmark = pytest.mark.filterwarnings("ignore:npu_mla_prolog documents")

NAMES = list(inspect.signature(V1.body).parameters)
V3_NAMES = list(inspect.signature(V3.body).parameters)
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
MODES = [(weights, caches, mode) for weights, caches in ((0, 0), (1, 0), (1, 2))
         for mode in ("PA_BSND", "PA_NZ", "BSND", "TND")]  # fmt: skip


def as_v1(a):
    """The arguments of v3 that this interface has too."""
    return {name: value for name, value in a.items() if name in NAMES}


def without_modes(weights, caches, mode, tokens=(2, 3), **options):
    return as_v1(call(weights, caches, mode, tokens, **options))


def expect_as_v3(a):
    """This interface and v3, which is compared with the oracle, give the same."""
    found = V1.overload(**as_v1(a))
    wanted = V3.overload(**a)
    expect(a, wanted)
    same_tensors(found, (*wanted[:2], *wanted[5:]))


def own_cases():
    """The samples that test_unquantised.py leaves to this file."""
    for case in cases(DTYPES, ("mla_prolog",)):
        operator, args, kwargs = case.values
        a = by_name(operator, args, kwargs)
        if a["weight_uq_qr"].dtype == torch.int8 or a["cache_mode"] == "PA_NZ":
            yield case


@pytest.mark.parametrize(("operator", "args", "kwargs"), list(own_cases()))
def test_sample_against_oracle(operator, args, kwargs):
    a = by_name(operator, args, kwargs)
    integers = {name: int(a[name].dtype == torch.int8) for name in ("weight_uq_qr", "kv_cache")}
    modes = {"weight_quant_mode": integers["weight_uq_qr"], "kv_cache_quant_mode": 2 * integers["kv_cache"]}
    common = {name: value for name, value in a.items() if name in V3_NAMES}
    expect_as_v3(by_name(V3, (), common | modes | {"query_norm_flag": True}))


@settings(max_examples=15, deadline=None, derandomize=True)
@given(st.sampled_from(MODES), st.integers(0, 3), st.integers(0, 5), st.integers(1, 5))
def test_any_size_against_oracle(mode, batch, steps, blocks):
    expect_as_v3(call(*mode, (batch, steps), torch.float64, blocks=blocks))


@pytest.mark.parametrize("layout", ["interleave_half", "half_half", "interleave_interleave"])
@pytest.mark.parametrize("change", [{}, {"gamma_after_cast": True}, {"rope_sin": None, "rope_cos": None},
                                    {"weight_dq": None, "rmsnorm_gamma_cq": None}])  # fmt: skip
def test_nz_pages_hold_what_plain_pages_hold(change, layout):
    a = without_modes(0, 0, "PA_NZ") | change | {"rope_layout": layout}
    if "weight_dq" in change:
        a["weight_uq_qr"] = torch.cat((a["weight_uq_qr"], a["weight_uq_qr"][:16]))
    nz, plain = V1.overload(**a), V1.overload(**(a | {"cache_mode": "PA_BSND"}))
    same_tensors(nz[:2], plain[:2])
    where = a["cache_index"].flatten().tolist()
    for name, cache, other in zip(CACHES, nz[2:], plain[2:], strict=True):
        assert torch.equal(stored(cache, a[name], where, "PA_NZ"), stored(other, a[name], where, "PA_BSND"))


def test_nz_caches_may_have_gaps_between_pages():
    a = without_modes(0, 0, "PA_NZ")
    wanted = V1.overload(**a)
    buffers = [torch.stack((a[name], torch.full_like(a[name], 77)), 1) for name in CACHES]
    a |= {name: buffer[:, 0] for name, buffer in zip(CACHES, buffers, strict=True)}
    same_tensors(V1.overload(**a), wanted)
    V1.inplace(**a)
    for buffer, cache in zip(buffers, wanted[2:], strict=True):
        same_tensors((buffer[:, 0], buffer[:, 1]), (cache, torch.full_like(cache, 77)))


def test_nz_write_is_one_index_put_each():
    """Views of the caches are read and written, and nothing of their size is copied."""
    a = without_modes(0, 0, "PA_NZ", dtype=torch.float32)
    caches = {name: a.pop(name) for name in CACHES}
    trace = torch.fx.experimental.proxy_tensor.make_fx
    graph = trace(lambda kv, kr: V1.body(**(a | {"kv_cache": kv, "kr_cache": kr})))(*caches.values())
    sizes = {cache.numel() for cache in caches.values()}
    big = [node.target for node in graph.graph.nodes
           if node.op == "call_function" and node.meta["val"].numel() in sizes]  # fmt: skip
    assert big.count(torch.ops.aten.index_put.default) == 2
    assert set(big) == {torch.ops.aten.index_put.default, torch.ops.aten.view.default}


@pytest.mark.parametrize(("weights", "caches", "mode"), MODES)
def test_a_compiler_may_trace_the_body_in_place_of_a_call(weights, caches, mode):
    a = without_modes(weights, caches, mode)
    given = {name: value for name, value in a.items() if torch.is_tensor(value)}
    trace = torch.fx.experimental.proxy_tensor.make_fx
    graph = trace(lambda *values: V1.body(**(a | dict(zip(given, values, strict=True)))))(*given.values())
    same_tensors(graph(*given.values()), V1.overload(**a))


@pytest.mark.parametrize("index", [[[-1, -1, -1], [-1, -1, -1]], [[63, -1, 0], [-1, 15, 16]]])
@pytest.mark.parametrize(("weights", "caches", "mode"), [each for each in MODES if each[2].startswith("PA")])
def test_negative_index_stores_nothing(weights, caches, mode, index):
    expect_as_v3(call(weights, caches, mode) | {"cache_index": torch.tensor(index)})


@pytest.mark.parametrize(("weights", "caches", "mode"), MODES)
def test_no_token_one_token_no_block(weights, caches, mode):
    for tokens in ((0, 3), (2, 0), (1, 1)):
        expect_as_v3(call(weights, caches, mode, tokens))
    if mode.startswith("PA"):
        a = call(weights, caches, mode)
        a |= {name: a[name][:0] for name in CACHES}
        expect_as_v3(a)
        same_tensors(V1.inplace(**as_v1(a)), V1.overload(**as_v1(a))[:2])


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_token_that_is_not_finite_spoils_no_other(value):
    a = without_modes(1, 2, "PA_NZ")
    clean = V1.overload(**a)
    a["token_x"] = a["token_x"].clone()
    a["token_x"][0, 1] = value
    query, query_rope, *caches = V1.overload(**a)
    for result, wanted in ((query, clean[0]), (query_rope, clean[1])):
        assert result[0, 1].isnan().all()
        others = torch.tensor([[True, False, True], [True, True, True]])
        assert torch.equal(result[others], wanted[others])
    where = a["cache_index"].flatten().tolist()
    for name, cache, wanted in zip(CACHES, caches, clean[2:], strict=True):
        rows, before = (stored(each, a[name], where, "PA_NZ") for each in (cache, wanted))
        assert (rows[1] == 0).all()
        assert torch.equal(rows[2:], before[2:])


# Where the sources disagree


def test_scales_documented_as_reserved_quantise_with_a_warning():
    """1: npu_mla_prolog's page calls all seven scales reserved; its kernel reads four of them."""
    plain, partly = without_modes(0, 0, "PA_BSND"), without_modes(1, 2, "PA_BSND", smooth=True)
    with pytest.warns(UserWarning, match="documents .*smooth_scales_cq as reserved; they are used here") as caught:
        V1.overload(**partly)
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        V1.overload(**plain)
    for name in ("dequant_scale_x", "dequant_scale_w_dq", "dequant_scale_w_dkv_kr"):
        message = f"{name} is given; it must be None with this interface; mla_prolog_v3 takes it in weight_quant_mode 2"
        refuses(V1, (), partly | {name: torch.ones(1)}, message)


@pytest.mark.parametrize("tokens", [(2, 17), (34,)])
def test_documented_for_rank_3_and_16_steps_but_takes_any(tokens):
    """2: npu_mla_prolog's page has token_x [B, S, He] and S to 16; the kernel [T, He] too, and any S."""
    expect_as_v3(call(1, 2, "PA_BSND", tokens))


@pytest.mark.slow
@pytest.mark.parametrize(("weights", "caches", "mode"), [(0, 0, "PA_NZ"), (0, 0, "TND"), (1, 2, "PA_BSND")])
def test_documented_for_graphs_of_pytorch_2_1_but_compiles_once(weights, caches, mode):
    """3: npu_mla_prolog's page allows graph mode with PyTorch 2.1 alone; here there is one graph for all sizes."""
    calls = [without_modes(weights, caches, mode, sizes, blocks=blocks)
             for *sizes, blocks in ((2, 5, 9), (6, 7, 11), (7, 9, 12))]  # fmt: skip
    varying = ("token_x", "rope_sin", "rope_cos", "cache_index", *CACHES)
    names = [name for name in varying if calls[0][name] is not None]
    rest = {name: value for name, value in calls[0].items() if not isinstance(value, float)}

    def layer(*tensors):
        return torch.ops.mla_fx.mla_prolog(**(rest | dict(zip(names, tensors, strict=True))))

    compiles_once(layer, [[a[name] for name in names] for a in calls])


def test_caches_documented_as_results_are_written_by_the_twin_alone():
    """40: npu_mla_prolog and its v2 claim to write nothing, and their kernel writes the caches."""
    a = without_modes(1, 2, "PA_NZ")
    before = {name: a[name].clone() for name in CACHES}
    results = V1.overload(**a)
    same_tensors([a[name] for name in CACHES], before.values())
    returned, written = twin_call(V1, (), a)
    assert list(returned) == ["query", "query_rope"]
    same_tensors([written[name] for name in CACHES], results[2:])
    assert not any(torch.equal(written[name], before[name]) for name in CACHES)


# Refusals

PLAIN, PARTLY = (0, 0, "PA_NZ"), (1, 2, "PA_NZ")
REFUSALS = [
    (PLAIN, "cache_mode", "PA_BLK_NZ", "cache_mode is 'PA_BLK_NZ'; allowed: 'PA_BSND', 'PA_NZ', 'Norm'"),
    (PLAIN, "kv_cache", lambda c: torch.cat((c, c), -1)[..., :64], "kv_cache has .* strides .*; only axis 0"),
    (PLAIN, "kv_cache", torch.Tensor.char, "kv_cache has dtype torch.int8; it must be torch.bfloat16"),
    (PLAIN, "cache_index", None, "cache_index is None; it must be a tensor with cache_mode 'PA_NZ'"),
    (PLAIN, "cache_index", lambda i: i + 64, "cache_index holds .*; it must be below 64"),
    (PLAIN, "dequant_scale_w_uq_qr", torch.ones(1, 120), "dequant_scale_w_uq_qr is given; it must be None with a"),
    (PLAIN, "smooth_scales_cq", torch.ones(1, 24), "smooth_scales_cq is given; .* weight_uq_qr of torch.bfloat16"),
    (PLAIN, "quant_scale_ckv", torch.ones(1, 64), "quant_scale_ckv is given; it must be None"),
    (PARTLY, "token_x", torch.Tensor.char, "token_x has dtype torch.int8; it must be torch.bfloat16"),
    (PARTLY, "dequant_scale_w_uq_qr", None, "dequant_scale_w_uq_qr is None; .* a tensor with weight_quant_mode 1"),
    (PARTLY, "quant_scale_ckr", None, "quant_scale_ckr is None"),
    (PARTLY, "kr_cache", torch.Tensor.bfloat16, "kr_cache has dtype torch.bfloat16; it must be torch.int8"),
    (PARTLY, "kv_cache", torch.Tensor.bfloat16, "kr_cache has dtype torch.int8; it must be torch.bfloat16"),
    (PARTLY, "rope_layout", "half_half", "rope_layout is 'half_half'; allowed: 'interleave_half'"),
    (PARTLY, "gamma_after_cast", True, "gamma_after_cast is True; it must be False with an int8 weight_uq_qr"),
    (PARTLY, "weight_dq", None, "weight_dq is None; it must be a tensor with an int8 weight_uq_qr"),
    (PARTLY, "rope_sin", None, "rope_sin is None; it must be a tensor with an int8 weight_uq_qr"),
    (PARTLY, "cache_mode", "Norm", "cache_mode is 'Norm'; allowed: 'PA_BSND', 'PA_NZ', 'BSND', 'TND'"),
    (PARTLY, "cache_mode", "PA_BLK_NZ", "cache_mode is 'PA_BLK_NZ'; allowed: 'PA_BSND', 'PA_NZ', 'BSND', 'TND'"),
]


@pytest.mark.parametrize(("mode", "name", "change", "message"), REFUSALS)
def test_refusal_writes_nothing(mode, name, change, message):
    a = by_name(V1, (), without_modes(*mode))
    refuses(V1, (), changed(a, name, change), message)


@pytest.mark.parametrize("mode", [PLAIN, PARTLY, (1, 2, "PA_BSND")])
@pytest.mark.parametrize("size", [8, 1040])
def test_nz_pages_and_int8_pages_have_the_sizes_of_the_vendor(mode, size):
    a = without_modes(*mode)
    a |= {name: torch.zeros(70, size, *a[name].shape[2:], dtype=a[name].dtype) for name in CACHES}
    message = f"BlockSize, axis 1 of kv_cache, is {size}; it must be a multiple of 16 from 16 to 1024"
    refuses(V1, (), by_name(V1, (), a), message)


@pytest.mark.parametrize("size", [1, 7, 1040])
def test_plain_pages_of_the_unquantised_form_have_any_size(size):
    """The compiler fuses models with whatever pages they have."""
    a = without_modes(0, 0, "PA_BSND")
    caches = {name: torch.zeros(70, size, *a[name].shape[2:]).bfloat16() for name in CACHES}
    kept = V1.overload(**(a | caches))[2:]
    where = a["cache_index"].flatten().tolist()
    for name, cache, other in zip(CACHES, kept, V1.overload(**a)[2:], strict=True):
        assert torch.equal(stored(cache, caches[name], where, "PA_BSND"), stored(other, a[name], where, "PA_BSND"))


# Calls by name of the operator alone


def arguments_of_both(weights, caches, cache_mode="PA_NZ"):
    """The arguments that mla_prolog and mla_prolog_v3 both take, by name."""
    a = call(weights, caches, cache_mode)
    return {name: a[name] for name in (*V3_NAMES[:12], "dequant_scale_w_uq_qr", "cache_mode")}


def test_keywords_do_not_decide_which_operator_is_called():
    """npu_mla_prolog and npu_mla_prolog_v3 share most arguments, and return 4 and 7 results."""
    a = arguments_of_both(0, 0)
    v1, v3 = torch.ops.mla_fx.mla_prolog(**a), torch.ops.mla_fx.mla_prolog_v3(**a)
    assert (len(v1), len(v3)) == (4, 7)
    same_tensors(v1, (*v3[:2], *v3[5:]))


def test_positions_are_those_of_each_page():
    """npu_mla_prolog has cache_index before the caches, npu_mla_prolog_v3 behind them."""
    a = arguments_of_both(1, 0)
    *leading, kv_cache, kr_cache, index = [a[name] for name in V3_NAMES[:12]]
    rest = {name: a[name] for name in ("dequant_scale_w_uq_qr", "cache_mode")}
    v1 = torch.ops.mla_fx.mla_prolog(*leading, index, kv_cache, kr_cache, **rest)
    v3 = torch.ops.mla_fx.mla_prolog_v3(*leading, kv_cache, kr_cache, index, weight_quant_mode=1, **rest)
    same_tensors(v1, (*v3[:2], *v3[5:]))


@pytest.mark.parametrize("name", ["mla_prolog", "mla_prolog_", "mla_prolog_v3", "mla_prolog_v3_"])
def test_an_unknown_keyword_is_reported_under_the_name_that_was_called(name):
    with pytest.raises(RuntimeError, match=rf"mla_fx::{name}\(") as error:
        getattr(torch.ops.mla_fx, name)(**arguments_of_both(0, 0), query_norm=True)
    assert "query_norm" in str(error.value)
