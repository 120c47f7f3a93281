"""What each release of CANN takes as a prolog, and the sentences of what it refuses, without torch_npu.

The interpreter of GE graphs has a second opinion, by code of its own."""

import random

import pytest
import torch
from lib.ascend_calls import DR, HE, B, S, caches, calls, index, lower, make, of, prolog_weights
from mla_fx.lowering.ascend.limits import RELEASES
from npu.ge_ops import prolog_rules

pytestmark = pytest.mark.usefixtures("mode")

FIRST, PAGED, NINE, WIDE = RELEASES
A5 = "Ascend950PR"


def of_tokens(*lead):
    return {"token_x": make(*lead, HE), "cache_index": index(*lead)} | {
        name: make(*lead, DR) for name in ("rope_sin", "rope_cos")
    }


# A change, and the sentence of each release that refuses it: what behind the kernel's name.
OLD_WIDTHS, WIDTHS = "takes 6144, 7168 or 7680", "takes 1024, 2048, 3072, 4096, 5120, 6144, 7168, 7680 or 8192"
OLD_MODES, STEPS = "takes PA_BSND or PA_NZ", "takes multiples of 16 up to 1024"
CASES = {
    "the base": (dict, "", {}),
    "He": (lambda: prolog_weights(he=4096), "weight_dq has He = 4096", {FIRST: OLD_WIDTHS}),
    "another He": (
        lambda: prolog_weights(he=7000),
        "weight_dq has He = 7000",
        {FIRST: OLD_WIDTHS} | dict.fromkeys((PAGED, NINE, WIDE), WIDTHS),
    ),
    "Hcq": (
        lambda: prolog_weights(hcq=2048),
        "weight_dq has Hcq = 2048",
        dict.fromkeys((FIRST, PAGED, NINE), "takes 1536"),
    ),
    "another Hcq": (
        lambda: prolog_weights(hcq=1024),
        "weight_dq has Hcq = 1024",
        dict.fromkeys((FIRST, PAGED, NINE), "takes 1536") | {WIDE: "takes 1536 or 2048"},
    ),
    "D": (lambda: prolog_weights(d=192), "weight_uk has D = 192", dict.fromkeys((FIRST, PAGED, NINE), "takes 128")),
    "another D": (
        lambda: prolog_weights(d=64),
        "weight_uk has D = 64",
        dict.fromkeys((FIRST, PAGED, NINE), "takes 128") | {WIDE: "takes 128 or 192"},
    ),
    "16 tokens": (lambda: of_tokens(B, 16), "", {}),
    "17 tokens": (lambda: of_tokens(B, 17), "", {}),
    "17 requests as one sequence": (lambda: of_tokens(1, 17), "", {}),
    "17 requests": (lambda: of_tokens(17), "", {}),
    "pages of 16": (lambda: caches(8, 16, 1), "", {}),
    "pages of 32": (lambda: caches(8, 32, 1), "kv_cache has BlockSize = 32", {FIRST: "takes 16 or 128"}),
    "pages of 24": (
        lambda: caches(8, 24, 1),
        "kv_cache has BlockSize = 24",
        {FIRST: "takes 16 or 128"} | dict.fromkeys((PAGED, NINE, WIDE), STEPS),
    ),
    "pages of 1024": (lambda: caches(8, 1024, 1), "kv_cache has BlockSize = 1024", {FIRST: "takes 16 or 128"}),
    "pages of 1040": (
        lambda: caches(8, 1040, 1),
        "kv_cache has BlockSize = 1040",
        {FIRST: "takes 16 or 128"} | dict.fromkeys((PAGED, NINE, WIDE), STEPS),
    ),
    "PA_NZ": (lambda: {"cache_mode": "PA_NZ"}, "", {}),
    "PA_BLK_NZ": (lambda: {"cache_mode": "PA_BLK_NZ"}, "cache_mode is 'PA_BLK_NZ'", {FIRST: OLD_MODES}),
    "BSND": (lambda: fresh("BSND", B, S), "cache_mode is 'BSND'", {FIRST: OLD_MODES}),
    "TND": (lambda: of_tokens(17) | fresh("TND", 17), "cache_mode is 'TND'", {FIRST: OLD_MODES}),
    "int8 weights": (lambda: {"weight_quant_mode": 2}, "", {}),
    "MXFP8 weights": (
        lambda: {"weight_quant_mode": 3},
        "weight_quant_mode is 3",
        dict.fromkeys(RELEASES, "takes 0, 1 or 2"),
    ),
    "int8 caches by column": (lambda: quantised(1, 2), "", {}),
    "int8 latents": (lambda: quantised(2, 1), "kv_cache_quant_mode is 1", {FIRST: "takes 0 or 2"}),
    "int8 tiles": (
        lambda: quantised(1, 3),
        "kv_cache_quant_mode is 3",
        {FIRST: "takes 0 or 2", WIDE: "writes the scales of a token without a slot before the first page"},
    ),
    "new int8 tiles": (
        lambda: fresh("BSND", B, S) | quantised(1, 3) | {"kv_cache": make(B, S, 1, 656, dtype=torch.int8)},
        "cache_mode is 'BSND'",
        {FIRST: OLD_MODES},
    ),
    "another kind of caches": (
        lambda: {"kv_cache_quant_mode": 4},
        "kv_cache_quant_mode is 4",
        {FIRST: "takes 0 or 2"} | dict.fromkeys((PAGED, NINE, WIDE), "takes 0, 1, 2 or 3"),
    ),
    "query_norm": (lambda: {"query_norm_flag": True}, "query_norm_flag is True", {FIRST: "takes False"}),
}


def fresh(cache_mode, *lead):
    return {"cache_mode": cache_mode, "cache_index": None} | caches(*lead, 1)


def quantised(weights, kind):
    """The modes, and a cache of the width of their rows."""
    rows = {"kv_cache": make(8, 128, 1, 656 if kind == 3 else 512, dtype=torch.int8)}
    return rows | {"weight_quant_mode": weights, "kv_cache_quant_mode": kind}


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("case", CASES)
def test_limits_by_release(case, release):
    change, has, sentences = CASES[case]
    found = lower("mla_prolog_v3", of(release), **change())
    if release in sentences:
        assert found == f"{has}; MlaPrologV3 of CANN {release} {sentences[release]}"
    else:
        assert callable(found), found


CHIPS = "exists on Ascend910B or Ascend910_93"
ON_A5 = {
    "the base": (dict, "", {FIRST: CHIPS, PAGED: CHIPS}),
    "He": (lambda: prolog_weights(he=4096), "weight_dq has He = 4096", {NINE: "takes 7168"}),
    "PA_NZ": (lambda: {"cache_mode": "PA_NZ"}, "", {}),
    "BSND": (lambda: fresh("BSND", B, S), "cache_mode is 'BSND'", {NINE: OLD_MODES}),
    "int8 weights": (lambda: {"weight_quant_mode": 1}, "weight_quant_mode is 1", {NINE: "takes 0"}),
    "int8 tiles": (lambda: quantised(1, 3), "weight_quant_mode is 1", {NINE: "takes 0"}),
}


@pytest.mark.parametrize("case", ON_A5)
def test_limits_on_950(case):
    change, has, sentences = ON_A5[case]
    for release in RELEASES:
        found = lower("mla_prolog_v3", of(release, chip=A5), **change())
        if release in (FIRST, PAGED):
            assert found == f"the chip is {A5}; MlaPrologV3 of CANN {release} {CHIPS}"
        elif release in sentences:
            assert found == f"{has}; MlaPrologV3 of CANN {release} {sentences[release]}"
        else:
            assert callable(found), found


# --- two opinions ----------------------------------------------------------------------------------------------------

LEGAL = {"he": 7168, "hcq": 1536, "n": 32, "d": 128, "hckv": 512, "dr": 64}
LEGAL |= {"lead": (2, 3), "page": 128, "cache_mode": "PA_BSND", "kinds": (0, 0), "flag": False}
OTHERS = {
    "he": (7680, 6144, 1024, 8192, 7000, 9216),
    "hcq": (2048, 1024),
    "n": (128, 16, 1, 40, 256),
    "d": (192, 64),
    "hckv": (256,),
    "dr": (32,),
    "lead": ((1, 16), (1, 17), (2, 20), (20,)),
    "page": (16, 32, 1024, 24, 1040),
    "cache_mode": ("PA_NZ", "PA_BLK_BSND", "BSND", "TND"),
    "kinds": ((1, 0), (1, 2), (1, 3), (2, 0), (2, 1), (2, 3)),  # those that the operator takes
    "flag": (True,),
}
SIZES = ("he", "hcq", "n", "d", "hckv", "dr")


def drawn(draw, version):
    """A call of a prolog, which differs from a legal one in up to two ways."""
    own = [name for name in OTHERS if version == "v3" or name not in ("kinds", "flag")]
    one = LEGAL | {name: draw.choice(OTHERS[name]) for name in draw.sample(own, draw.randrange(3))}
    lead, cache_mode, (weights, kind) = one["lead"], one["cache_mode"], one["kinds"]
    rows = (8, one["page"]) if cache_mode.startswith("PA") else lead
    call = prolog_weights(**{name: one[name] for name in SIZES})
    call |= {"token_x": make(*lead, one["he"]), "cache_mode": cache_mode, "cache_index": index(*lead)}
    call |= {name: make(*lead, one["dr"]) for name in ("rope_sin", "rope_cos")}
    call |= caches(*rows, 1, hckv=656 if kind == 3 else one["hckv"], dr=one["dr"])
    modes = {"weight_quant_mode": weights, "kv_cache_quant_mode": kind, "query_norm_flag": one["flag"]}
    return call | modes if version == "v3" else call


KERNELS = {"v1": "MlaProlog", "v2": "MlaPrologV2", "v3": "MlaPrologV3"}


@pytest.mark.slow
@pytest.mark.parametrize("version, release", [("v1", PAGED), ("v2", PAGED), *(("v3", release) for release in RELEASES)])
def test_lowering_and_interpreter_agree(version, release):
    draw, operator = random.Random(0), "mla_prolog_v3" if version == "v3" else "mla_prolog"
    taken = []
    for _ in range(100):
        call = drawn(draw, version)
        found = lower(operator, of(release, prolog=version), **call)
        if version == "v3" and call["cache_mode"].startswith("PA"):
            call["token_x"] = call["token_x"].flatten(0, -2)  # as longer sequences are passed
        complaints = prolog_rules.complaints(KERNELS[version], calls()[operator] | call, release)
        assert callable(found) == (not complaints), (found, complaints)
        taken.append(not complaints)
    assert 20 <= sum(taken) <= 80
