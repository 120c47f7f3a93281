"""mla_prolog_quant against the float64 computation of prolog_quant_oracle.py, at the edges of sizes and values."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lib.operators.harness import by_name, cases, compiles_once, fake_with_free_sizes, hints, same_tensors
from lib.operators.prolog_quant_oracle import CACHES, OPERATOR, expect, functional

from mla_fx.ops.common.sample import Sampler
from mla_fx.ops.emitted import mla_prolog_quant as _prolog

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
MODES = {
    "quantised": {},
    "smooth": {"smooth": (24,)},
    "asymmetric": {"is_symmetry": False},
    "asymmetric, smooth": {"smooth": (1, 24), "is_symmetry": False},
    "unquantised": {"quantised": False},
    "int8 tokens": {"int8_tokens": True},
    "int8 tokens, asymmetric": {"int8_tokens": True, "is_symmetry": False},
    "int8 tokens, unquantised": {"int8_tokens": True, "quantised": False},
}


@pytest.mark.parametrize(("operator", "args", "kwargs"), cases(DTYPES, ["mla_prolog_quant"]))
def test_sample_against_oracle(operator, args, kwargs):
    dtype = args[0].dtype
    results = functional(args, kwargs)
    codes = torch.int8 if args[3].numel() else dtype
    wanted = (codes, torch.float32, dtype, dtype, codes, dtype, torch.float32)
    assert tuple(result.dtype for result in results.values()) == wanted
    expect(args, kwargs)


def named_sample(dtype=torch.float64, mode="quantised", seed=11, **options):
    """One sample's arguments by name."""
    args, kwargs = _prolog.sample(dtype, seed, **MODES[mode], **options)
    return by_name(OPERATOR, args, kwargs)


SKIPS = {
    "slot 0 and skipped": [0, -1, -1, -1, 5, -7],
    "skipped before slot 0": [-1, -1, 0, -1, -1, -1],
    "all skipped": [-1] * 6,
    "none skipped": [0, 1, 2, 7, 8, 14],
    "both sides of a block's edge": [4, 5, -1, 9, 10, 14],
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("skip", SKIPS)
def test_negative_index_is_not_handled_by_the_source_but_skips(skip, mode):
    """The pypto function scatters whatever index it is given; the other operators of the family skip negative ones."""
    arguments = named_sample(torch.bfloat16, mode)
    expect((), arguments | {"cache_index": torch.tensor(SKIPS[skip])})


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("tokens", [0, 1])
def test_no_token_and_one_token(mode, tokens):
    expect((), named_sample(torch.float32, mode, tokens=tokens))


@pytest.mark.parametrize("mode", MODES)
def test_cache_without_blocks(mode):
    arguments = named_sample(torch.float32, mode) | {"cache_index": torch.full((6,), -1)}
    expect((), arguments | {name: arguments[name][:0] for name in CACHES})


@pytest.mark.parametrize("mode", MODES)
def test_hidden_size_may_be_odd(mode):
    """No column of an odd token_x is lost between the two halves."""
    arguments = named_sample(mode=mode)
    odd = {"token_x": arguments["token_x"][:, 1:]} | {name: arguments[name][1:] for name in ("w_dq", "w_dkv_kr")}
    expect((), arguments | odd)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gammas_and_tables_of_another_dtype(dtype):
    arguments = named_sample(torch.bfloat16)
    free = {name: arguments[name].to(dtype) for name in ("gamma_cq", "gamma_ckv", "cos", "sin")}
    same_tensors(functional((), arguments | free).values(), functional((), arguments).values())


def test_caches_that_share_their_slots_only():
    """A page may have any size, one slot included."""
    arguments = named_sample(torch.float32)
    flat = {name: arguments[name].flatten(0, 1).unsqueeze(1) for name in ("kv_cache", "kr_cache", "k_scale_cache")}
    paged, unpaged = functional((), arguments), functional((), arguments | flat)
    for name, result in paged.items():
        same_tensors([unpaged[name].view(result.shape)], [result])


def test_caches_may_be_views_of_larger_buffers():
    arguments = named_sample(torch.bfloat16)
    wanted = functional((), arguments)
    buffers = {name: torch.cat([arguments[name]] * 2, -1) for name in CACHES}
    views = {name: buffer[..., : arguments[name].shape[-1]] for name, buffer in buffers.items()}
    OPERATOR.inplace(**(arguments | views))
    for name, buffer in buffers.items():
        same_tensors([buffer], [torch.cat((wanted[name + "_out"], arguments[name]), -1)])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_nan_and_inf_stay_with_their_token(mode, poison):
    """Codes are 0 there, a rotated key is not finite, all else is NaN, scales included; other rows are as they were."""
    arguments = named_sample(torch.bfloat16, mode)
    clean = functional((), arguments)
    spoiled = arguments["token_x"].clone()
    spoiled[2, 7] = poison
    results = functional((), arguments | {"token_x": spoiled})
    slot = int(arguments["cache_index"][2])
    for name, result in results.items():
        if result.numel() == 0 or (name == "k_scale_cache_out" and "unquantised" in mode):
            same_tensors([result], [clean[name]])
            continue
        rows, wanted = (value.flatten(0, 1) if "cache" in name else value for value in (result, clean[name]))
        place = slot if "cache" in name else 2
        lost = rows[place].isfinite().logical_not() if name == "kr_cache_out" else rows[place].isnan()
        assert bool((rows[place] == 0).all() if result.dtype == torch.int8 else lost.all())
        others = [row for row in range(len(rows)) if row != place]
        same_tensors([rows[others]], [wanted[others]])


@pytest.mark.parametrize("skip", [0, 3, 6])
def test_garbage_in_the_caches_and_in_skipped_tokens_reaches_nothing(skip):
    arguments = named_sample(torch.bfloat16, skip=skip)
    garbage = {name: torch.full_like(arguments[name], math.nan) for name in CACHES[1:]}
    spoiled = arguments["token_x"].clone()
    spoiled[:skip] = math.nan
    wanted = functional((), arguments)
    results = functional((), arguments | garbage | {"token_x": spoiled})
    written = arguments["cache_index"][skip:]
    for name, result in results.items():
        if "cache" not in name:
            same_tensors([result[skip:]], [wanted[name][skip:]])
            continue
        same_tensors([result.flatten(0, 1)[written]], [wanted[name].flatten(0, 1)[written]])
        if name != "kv_cache_out":
            assert int(result.isnan().all(-1).sum()) == 15 - len(written)
    same_tensors([results["kv_cache_out"]], [wanted["kv_cache_out"]])


@pytest.mark.parametrize(("mode", "code", "scale"), [("quantised", 0, 0.0), ("asymmetric", 127, 1e-12)])
def test_a_token_of_zeros_is_zeros(mode, code, scale):
    """Nothing guards 127 / 0 in the symmetric form; 1e-12 is the least scale of the other."""
    arguments = named_sample(torch.bfloat16, mode)
    arguments["token_x"][3] = 0
    results = functional((), arguments)
    slot = divmod(int(arguments["cache_index"][3]), 5)
    assert bool((results["q_norm_out"][3] == code).all())
    assert results["q_norm_scale_out"][3].tolist() == torch.tensor([scale]).tolist()
    for name in ("query_nope", "query_rope", *CACHES):
        assert bool((results[name + "_out"][slot if name in CACHES else 3] == 0).all())


def test_asymmetric_codes_of_a_constant_token_still_give_its_value_back():
    """Scale 1e-12 makes an offset of about -1e12, which only an exact product with it survives."""
    arguments = named_sample(torch.float32, "asymmetric")
    arguments["w_dq"] = arguments["w_dq"][:, :1].expand(-1, 24)
    arguments["gamma_cq"] = torch.ones(24)
    results = functional((), arguments)
    wanted = functional((), arguments | {"is_symmetry": True})
    assert bool((results["q_norm_scale_out"] == torch.tensor(1e-12)).all())
    for name in ("query_nope_out", "query_rope_out"):
        torch.testing.assert_close(results[name], wanted[name], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_compiles_once_for_all_sizes(mode):
    # Without the epsilons: as floats of a closure they would be inputs of the graph, and compile it twice.
    fixed = {name: value for name, value in named_sample(torch.bfloat16, mode).items() if not isinstance(value, float)}
    moving = ("token_x", "cos", "sin", "cache_index", *CACHES)

    def layer(*tensors):
        return torch.ops.mla_fx.mla_prolog_quant(**(fixed | dict(zip(moving, tensors, strict=True))))

    compiles_once(layer, [sized(mode, *sizes) for sizes in ((7, 11, 13), (9, 6, 17), (19, 23, 14))])


def sized(mode, tokens, blocks, block_size, dtype=torch.bfloat16):
    """Those tensors of a sample whose sizes a decoder changes."""
    a = named_sample(dtype, mode, tokens=tokens)
    draw = torch.Generator().manual_seed(tokens)
    a["cache_index"] = torch.randperm(blocks * block_size, generator=draw)[:tokens]
    a["cache_index"][::3] = -1
    caches = [a[name][:1, :1].expand(blocks, block_size, 1, -1).contiguous() for name in CACHES]
    return [a["token_x"], a["cos"], a["sin"], a["cache_index"], *caches]


SIZES = {
    "tokens": st.integers(0, 5),
    "hidden": st.integers(2, 9),
    "compressed": st.integers(1, 9),
    "heads": st.integers(1, 3),
    "nope": st.integers(1, 5),
    "quarter": st.integers(1, 3),
    "half": st.integers(1, 3),
    "blocks": st.integers(1, 4),
    "block_size": st.integers(2, 5),
    "seed": st.integers(0, 99),
}


def drawn(mode, tokens, hidden, compressed, heads, nope, quarter, half, blocks, block_size, seed, dtype=torch.float64):
    """Arguments of the given sizes."""
    draw = Sampler(dtype, seed)
    rank, width, columns = 4 * quarter, 2 * half, heads * (nope + 2 * half)
    options = MODES[mode]
    quantised = options.get("quantised", True)
    int8_tokens = options.get("int8_tokens", False)

    def down(width):
        weight = draw.normal(hidden, width)
        return (40 * weight).round().clamp(-128, 127).to(torch.int8) if int8_tokens else weight

    weight, lead = draw.normal(compressed, columns), (blocks, block_size, 1)
    slots = draw.slots(min(tokens, blocks * block_size), blocks * block_size)
    return {
        "token_x": draw.normal(tokens, hidden),
        "w_dq": down(compressed),
        "w_uq_qr": (40 * weight).round().clamp(-128, 127).to(torch.int8) if quantised else weight,
        "dequant_scale": draw.normal(columns, 1).abs().float() if quantised else torch.empty(0, 1),
        "w_uk": draw.normal(heads, nope, rank),
        "w_dkv_kr": down(rank + width),
        "gamma_cq": draw.gamma(compressed),
        "gamma_ckv": draw.gamma(rank),
        **dict(zip(("cos", "sin"), draw.tables(tokens, width), strict=True)),
        "cache_index": torch.cat((slots, torch.full((tokens - len(slots),), -2))),
        "kv_cache": torch.full((*lead, rank), 3, dtype=torch.int8 if quantised else dtype),
        "kr_cache": draw.normal(*lead, width),
        "k_scale_cache": draw.normal(*lead, 4).float(),
        "smooth_scales_cq": draw.gamma(compressed).float() if "smooth" in options else None,
        "dequant_scale_w_dq": draw.normal(1, compressed).abs().float() if int8_tokens else None,
        "dequant_scale_w_dkv_kr": draw.normal(1, rank + width).abs().float() if int8_tokens else None,
        "is_symmetry": options.get("is_symmetry", True),
    }


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@given(sizes=st.fixed_dictionaries(SIZES))
@settings(max_examples=15, deadline=None, derandomize=True)
def test_any_size_agrees_with_the_oracle_and_with_its_fake(mode, sizes):
    arguments = drawn(mode, **sizes)
    expect((), arguments)
    fakes, guards = fake_with_free_sizes(OPERATOR, (), arguments)
    assert guards == []
    for fake, real in zip(fakes, OPERATOR.overload(**arguments), strict=True):
        assert (hints(fake.shape), fake.dtype) == (tuple(real.shape), real.dtype)
        assert real.is_contiguous()
