"""A decode step of every MLA family in transformers: what fuses, and that results and caches never change."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import pytest
import torch
from lib.families import (
    COUNTS_FLAGS,
    EXACT,
    FAMILIES,
    Recorder,
    check_same_caches,
    empty_cache,
    tiny_model,
    tokens,
)

import mla_fx

QUICK = ("youtu", "glm4_moe_lite", "axk1", "minicpm3")
QUICKEST = ("youtu",)
PROMPT = 12


@dataclass(frozen=True)
class Expected:
    """What fuses in the two layers of a tiny model, and part of the reason for everything that does not."""

    static: dict[str, int]
    dynamic: dict[str, int]
    reasons: tuple[str, ...] = ()


def whole(layers: int, *reasons: str) -> Expected:
    fused = {"mla_prolog": layers, "latent_attention": layers}
    return Expected(fused, fused, reasons)


def attention_and_cache(layers: int, *reasons: str) -> Expected:
    """No prolog: the query is not computed as in an MLA prolog."""
    fused = {"kv_rmsnorm_rope_cache": layers, "latent_attention": layers}
    return Expected(fused, fused, reasons)


def attention_only(layers: int, *reasons: str) -> Expected:
    return Expected({"latent_attention": layers}, {"latent_attention": layers}, reasons)


def sparse(layers: int, key_side: str, *reasons: str) -> Expected:
    """Attention to the keys that an indexer chose, where they are few."""
    beside = {key_side: layers, "lightning_index": layers}
    few, many = {**beside, "sparse_latent_attention": layers}, {**beside, "latent_attention": layers}
    return Expected(few, many, (*reasons, "costs less than to 4 chosen ones"))


GLM5_NEXT = {"mla_prolog": 1, "lightning_index": 1, "latent_attention": 1}
DOTS3_NOTE = {"kv_rmsnorm_rope_cache": 2, "lightning_index": 1}
EXPECTED = {
    "deepseek_v2": whole(2),
    "deepseek_v3": whole(2),
    "deepseek_v32": sparse(2, "mla_prolog"),
    "kimi_linear": whole(1),  # and a layer of linear attention
    "longcat_flash": whole(2),
    "minicpm3": whole(2),
    "mistral4": whole(2),
    "mistral_large4": sparse(2, "mla_prolog"),  # one of its layers has no rotary part
    "youtu": whole(2),
    "glm4_moe_lite": whole(2),
    "glm_moe_dsa": sparse(2, "mla_prolog"),
    "glm5_next": Expected(  # and a layer of linear attention
        GLM5_NEXT, GLM5_NEXT, ("it may name a key twice", "NaN among the attention probabilities is replaced")
    ),
    "hy_v4": sparse(2, "mla_prolog"),
    "axk1": whole(2),
    "axk2": sparse(2, "kv_rmsnorm_rope_cache", "the query is computed from a normalised latent joined with something"),
    "bailing_hybrid": whole(1),
    "dots3_note": Expected(  # one of its layers has a window, and no indexer
        {**DOTS3_NOTE, "latent_attention": 1, "sparse_latent_attention": 1},
        {**DOTS3_NOTE, "latent_attention": 2},
        ("k_rope is normalised, which", "costs less than to 4 chosen ones"),
    ),
}


def at_each_family(quick=QUICK):
    return [pytest.param(family, marks=() if family in quick else pytest.mark.campaign) for family in FAMILIES]


def prefilled(model, kind):
    cache = empty_cache(model, kind)
    model(tokens(2, PROMPT), past_key_values=cache)
    return cache


@pytest.mark.slow
@pytest.mark.every
@pytest.mark.parametrize("kind", ["static", "dynamic"])
@pytest.mark.parametrize("family", at_each_family())
@torch.no_grad()
def test_decode_step(family, kind):
    model = tiny_model(family)
    theirs = prefilled(model, kind)
    ours = copy.deepcopy(theirs)
    step = tokens(2, 1)
    recorder = Recorder()
    compiled = torch.compile(model, backend=recorder)
    expected = model(step, past_key_values=theirs)[0]
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=family in COUNTS_FLAGS):
        torch.testing.assert_close(compiled(step, past_key_values=ours)[0], expected, **EXACT)
    check_same_caches(ours, theirs)
    check_fused(recorder.report, EXPECTED[family], kind)


def check_fused(report, expected, kind):
    assert report.fused == getattr(expected, kind), str(report)
    for miss in report.misses:
        assert any(reason in miss.reason for reason in expected.reasons), str(report)


STEPS = {  # the kind of cache, tokens before, tokens, and whether all sizes are symbols
    "prompt": ("static", 0, PROMPT, None),
    "chunk": ("static", PROMPT, 5, None),
    "decode": ("static", PROMPT, 1, None),
    "growing cache": ("dynamic", PROMPT, 5, None),
    "dynamic": ("static", PROMPT, 3, True),
}


def each_step():
    """Symbols take a minute."""
    return [
        pytest.param(step, id=name, marks=pytest.mark.campaign if step[-1] else ()) for name, step in STEPS.items()
    ]


# Inductor cannot compile a product whose number of keys depends on data.
TARGETS = {"glm5_next": "reference"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::mla_fx.MlaWarning")
@pytest.mark.parametrize("step", each_step())
@pytest.mark.parametrize("family", at_each_family(QUICKEST))
@torch.no_grad()
def test_nothing_is_unchecked(family, step):
    """Neither what rules do nor what Inductor's target makes of it, which is not compiled."""
    kind, before, count, dynamic = step
    model = tiny_model(family)
    cache = empty_cache(model, kind)
    if before:
        model(tokens(2, before), past_key_values=cache)
    given = {"capture_dynamic_output_shape_ops": family in COUNTS_FLAGS, "assume_static_by_default": not dynamic}
    with torch._dynamo.config.patch(given):
        report = mla_fx.explain(model, target=TARGETS.get(family, "inductor"))(tokens(2, count), past_key_values=cache)
    assert report.checked and (report.unchecked, report.refuted) == ([], []), str(report)
