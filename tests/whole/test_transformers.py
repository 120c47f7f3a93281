"""DeepSeek-V2 and V3 of transformers, unmodified: what fuses, right results, caches in place, few compilations."""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from lib.families import Recorder, cache_tensors, check_same_caches, empty_cache, randomise, tiny_model, tokens
from torch._inductor.utils import run_and_get_code
from transformers import CompileConfig

import mla_fx

pytestmark = pytest.mark.usefixtures("seeded", "no_gradients")
EXACT = {"rtol": 1e-4, "atol": 1e-5}
PROMPT = 12
LENGTH = 37  # of static caches; no other size in these models
DECODE = {"mla_prolog": 2, "latent_attention": 2}
COLD_STATIC = {"kv_rmsnorm_rope_cache": 2, "mla_attention": 2}
COLD = {"mla_attention": 2}

MODELS = {
    "v3": ("deepseek_v3", {}),
    "v3-half": ("deepseek_v3", {"rope_interleave": False}),
    "v3-direct": ("deepseek_v3", {"q_lora_rank": None}),
    "v3-wide": ("deepseek_v3", {"v_head_dim": 24}),  # as wide as the query: an attention of its own in PyTorch
    "v2": ("deepseek_v2", {}),
    "v2-direct": ("deepseek_v2", {"q_lora_rank": None}),
}


@cache
def tiny(name="v3", attention="sdpa", dtype=torch.float32):
    family, overrides = MODELS[name]
    model = tiny_model(family, dtype, **overrides)
    model.set_attn_implementation(attention)
    return model


def prefilled(model, kind="static", batch=2, prompt=PROMPT, length=LENGTH):
    held = empty_cache(model, kind, length)
    model(tokens(batch, prompt), past_key_values=held)
    return held


def logits(model, ids, held=None, **kwargs):
    return model(ids, past_key_values=held, use_cache=held is not None, **kwargs).logits


def check_step(model, compiled, ids, theirs, ours, **kwargs):
    """One forward pass, eager and compiled: the same logits, the same caches."""
    expected = logits(model, ids, theirs, **kwargs)
    torch.testing.assert_close(logits(compiled, ids, ours, **kwargs), expected, **EXACT)
    if theirs is not None:
        check_same_caches(ours, theirs)


def addresses(held):
    return [tensor.data_ptr() for tensor in cache_tensors(held)]


# --- a static cache, token by token ----------------------------------------------------------------------------------


def test_explain_decode():
    model = tiny()
    report = mla_fx.explain(model, target="reference")(tokens(2, 1), past_key_values=prefilled(model))
    assert report.fused == DECODE, str(report)
    assert report.misses == []


@pytest.mark.parametrize("name", ["v3", pytest.param("v2", marks=pytest.mark.campaign)])
def test_sixteen_steps(name):
    model, recorder = tiny(name), Recorder()
    theirs = prefilled(model)
    ours = copy.deepcopy(theirs)
    compiled = torch.compile(model, backend=recorder, fullgraph=True)
    places = addresses(ours)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(16):
            check_step(model, compiled, tokens(2, 1), theirs, ours)
    assert addresses(ours) == places
    assert recorder.fused == DECODE


@pytest.mark.slow
@pytest.mark.parametrize("name", ["v3", "v2-direct"])
def test_no_copy_of_a_cache(name):
    model, recorder = tiny(name), Recorder()
    held = prefilled(model)
    sizes = {tensor.numel() for tensor in cache_tensors(held) if tensor.ndim == 4}
    torch.compile(model, backend=recorder)(tokens(2, 1), past_key_values=held)
    names = [operator for operator, _ in recorder.operators]
    assert names.count("mla_fx.mla_prolog_.default") == 2
    for operator, args in recorder.operators:
        is_copy = re.match(r"aten\.(copy_|clone|_to_copy|index_put|index_copy|empty)", operator)
        held_sizes = {value.numel() for value in args if isinstance(value, torch.Tensor)}
        assert not (is_copy and held_sizes & sizes), operator


V3, V2 = pytest.param("mla", "v3", id="v3"), pytest.param(mla_fx.mla_backend, "v2", id="v2", marks=pytest.mark.campaign)


@pytest.mark.slow
@pytest.mark.parametrize("backend, name", [V3, V2])
def test_inductor(backend, name):
    """Sixteen steps, and generated code that allocates nothing as long as a cache except the attention scores."""
    model = tiny(name)
    theirs = prefilled(model)
    ours = copy.deepcopy(theirs)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    places = addresses(ours)
    step = tokens(2, 1)
    expected = logits(model, step, theirs)
    found, code = run_and_get_code(logits, compiled, step, ours)
    torch.testing.assert_close(found, expected, **EXACT)
    assert mla_fx.last_report().fused == DECODE
    for _ in range(15):
        check_step(model, compiled, tokens(2, 1), theirs, ours)
    assert addresses(ours) == places
    heads, batch = 4, 2
    for shape in allocations("\n".join(code)):
        assert LENGTH not in shape or torch.Size(shape).numel() <= heads * batch * LENGTH, shape


def allocations(code):
    """The shapes of the buffers that generated code allocates."""
    shapes = re.findall(r"empty_strided\w*\(\(([\d, ]*)\)", code)
    assert shapes
    return [tuple(int(size) for size in shape.replace(" ", "").split(",") if size) for shape in shapes]


# --- low precision ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "dtype, target",
    [
        pytest.param(torch.bfloat16, "reference", id="bf16"),
        pytest.param(torch.float16, "reference", id="fp16"),
        pytest.param(torch.bfloat16, "inductor", id="bf16-inductor", marks=pytest.mark.campaign),
    ],
)
def test_low_precision_is_no_further_from_exact_than_eager(dtype, target):
    model = tiny_model("deepseek_v3", dtype, first_k_dense_replace=2)  # routing would turn roundings into jumps
    compiled = torch.compile(model, backend=mla_fx.get_backend(target=target))
    errors = [distances(model, compiled, seed) for seed in range(6)]
    # the float16 query is absorbed inside the operator, which has a wider range
    names = ("kv_rmsnorm_rope_cache", "mla_attention") if dtype == torch.float16 else tuple(DECODE)
    assert mla_fx.last_report().fused == dict(zip(names, DECODE.values(), strict=True))
    for place, (fused, eager) in enumerate(torch.tensor(errors).square().sum(0).sqrt()):
        assert eager > 0
        assert fused <= 2 * eager, f"result {place} is {fused:.3g} away, eager {eager:.3g}"


def distances(model, compiled, seed):
    """The distance of logits and caches of the fused and the eager step from a double precision one, as pairs."""
    torch.manual_seed(seed)
    randomise(model)
    exact = copy.deepcopy(model).double()
    theirs = prefilled(model)
    ours, best = copy.deepcopy(theirs), in_double(copy.deepcopy(theirs))
    step = tokens(2, 1)
    found = [[logits(run, step, held), *float_tensors(held)] for run, held in ((compiled, ours), (model, theirs))]
    truth = [logits(exact, step, best), *float_tensors(best)]
    return [[float((value - true).norm()) for value in pair] for *pair, true in zip(*found, truth, strict=True)]


def float_tensors(held):
    return [tensor for tensor in cache_tensors(held) if tensor.is_floating_point()]


def in_double(held):
    for layer in held.layers:
        layer.keys, layer.values = layer.keys.double(), layer.values.double()
    return held


# --- every way to call it --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scene:
    """How a model is called: `phase` is "prefill" from nothing, "decode" of one token, or a "chunk" of four, padded."""

    name: str
    attention: str
    kind: str
    phase: str
    batch: int = 2

    def __str__(self):
        return f"{self.name}-{self.attention}-{self.kind}-{self.phase}-{self.batch}"

    @property
    def fused(self):
        reads_whole_cache = self.kind == "static" and self.attention == "eager"  # so a short prompt is not a cold one
        if self.phase != "prefill" or reads_whole_cache:
            return DECODE
        return COLD_STATIC if self.kind == "static" else COLD


GRID = [
    Scene("v3", "sdpa", "static", "chunk", 2),
    Scene("v3", "sdpa", "dynamic", "decode", 1),
    Scene("v3", "eager", "dynamic", "prefill", 2),
    Scene("v3", "sdpa", "static", "prefill", 1),
    Scene("v3", "eager", "static", "decode", 1),
    Scene("v3-half", "sdpa", "dynamic", "chunk", 1),
    Scene("v3-half", "eager", "static", "prefill", 1),
    Scene("v3-half", "sdpa", "static", "decode", 2),
    Scene("v3-half", "eager", "none", "prefill", 2),
    Scene("v3-direct", "eager", "static", "chunk", 2),
    Scene("v3-direct", "sdpa", "static", "decode", 1),
    Scene("v3-direct", "sdpa", "none", "prefill", 1),
    Scene("v3-direct", "eager", "dynamic", "decode", 2),
    Scene("v3-wide", "sdpa", "static", "decode", 2),
    Scene("v3-wide", "sdpa", "dynamic", "prefill", 2),
    Scene("v2", "sdpa", "static", "prefill", 2),
    Scene("v2", "eager", "dynamic", "chunk", 2),
    Scene("v2", "sdpa", "dynamic", "decode", 2),
    Scene("v2", "eager", "static", "decode", 1),
    Scene("v2-direct", "eager", "static", "prefill", 2),
    Scene("v2-direct", "sdpa", "static", "chunk", 1),
    Scene("v2-direct", "sdpa", "dynamic", "prefill", 1),
]
QUICK = 3  # of the first tier; they have every attention, cache and phase


@pytest.mark.parametrize(
    "scene",
    [pytest.param(scene, marks=pytest.mark.slow if place >= QUICK else ()) for place, scene in enumerate(GRID)],
    ids=str,
)
def test_scene(scene):
    model, recorder = tiny(scene.name, scene.attention), Recorder()
    count = {"prefill": PROMPT, "decode": 1, "chunk": 4}[scene.phase]
    make = empty_cache if scene.phase == "prefill" else prefilled
    theirs = make(model, scene.kind, scene.batch) if make is prefilled else make(model, scene.kind, LENGTH)
    options = {"attention_mask": left_padded(scene.batch, PROMPT + 4)} if scene.phase == "chunk" else {}
    compiled = torch.compile(model, backend=recorder, fullgraph=True)
    check_step(model, compiled, tokens(scene.batch, count), theirs, copy.deepcopy(theirs), **options)
    assert recorder.fused == scene.fused, str(recorder.report)


def left_padded(batch, length):
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[0, :3] = 0
    return mask


def test_long_prompt_is_expanded():
    model, recorder = tiny(), Recorder()
    theirs = prefilled(model, length=400)
    compiled = torch.compile(model, backend=recorder, fullgraph=True)
    check_step(model, compiled, tokens(2, 300), theirs, copy.deepcopy(theirs))
    assert recorder.fused == COLD_STATIC


# --- shapes that change ----------------------------------------------------------------------------------------------


@pytest.fixture
def no_recompile():
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield


@pytest.mark.slow
@pytest.mark.usefixtures("no_recompile")
def test_dynamic_batch():
    model, recorder = tiny(), Recorder()
    compiled = torch.compile(model, backend=recorder, fullgraph=True)
    for batch in (2, 3, 5):
        theirs, step = prefilled(model, "dynamic", batch), tokens(batch, 1)
        ours = copy.deepcopy(theirs)
        for tensor in (step, *float_tensors(ours)):
            torch._dynamo.mark_dynamic(tensor, 0)
        check_step(model, compiled, step, theirs, ours)
    assert len(recorder.reports) == 1
    assert recorder.fused == DECODE, str(recorder.report)


@pytest.mark.slow
@pytest.mark.usefixtures("no_recompile")
def test_dynamic_context():
    model, recorder = tiny(), Recorder()
    compiled = torch.compile(model, backend=recorder, fullgraph=True)
    for prompt in (6, 9, 21):
        theirs = prefilled(model, "dynamic", prompt=prompt)
        ours = copy.deepcopy(theirs)
        for tensor in float_tensors(ours):
            torch._dynamo.mark_dynamic(tensor, 2)
        check_step(model, compiled, tokens(2, 1), theirs, ours)
    assert len(recorder.reports) == 1
    assert recorder.fused == DECODE, str(recorder.report)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["static", "none"])
@pytest.mark.usefixtures("no_recompile")
def test_dynamic_tokens(kind):
    """With an unknown number of query tokens, the form is chosen at run time: the prolog does not fuse."""
    model, recorder = tiny(), Recorder()
    compiled = torch.compile(model, backend=recorder, fullgraph=True)
    theirs = empty_cache(model, kind, LENGTH) if kind == "none" else prefilled(model)
    ours = copy.deepcopy(theirs)
    for count in (5, 3, 11):
        ids = tokens(2, count)
        torch._dynamo.mark_dynamic(ids, 1)
        check_step(model, compiled, ids, theirs, ours)
    assert len(recorder.reports) == 1
    assert recorder.fused == (COLD if kind == "none" else COLD_STATIC), str(recorder.report)


@pytest.mark.slow
@pytest.mark.usefixtures("no_recompile")
def test_everything_dynamic():
    """`dynamic=True` makes inputs even of the norms' epsilons."""
    model, recorder = tiny(), Recorder()
    compiled = torch.compile(model, backend=recorder, fullgraph=True, dynamic=True)
    for batch, prompt in ((2, 6), (3, 11), (3, 20)):
        theirs = prefilled(model, "dynamic", batch, prompt)
        check_step(model, compiled, tokens(batch, 1), theirs, copy.deepcopy(theirs))
    assert len(recorder.reports) == 1
    assert recorder.fused == DECODE, str(recorder.report)


@pytest.mark.slow
def test_growing_cache_compiles_twice():
    model, recorder = tiny(), Recorder()
    compiled = torch.compile(model, backend=recorder, fullgraph=True)
    theirs = prefilled(model, "dynamic")
    ours = copy.deepcopy(theirs)
    for _ in range(5):
        check_step(model, compiled, tokens(2, 1), theirs, ours)
    assert [report.fused for report in recorder.reports] == [DECODE, DECODE]


# --- generate --------------------------------------------------------------------------------------------------------


def compile_config(backend, **options):
    def kept(*args, **kwargs):  # transformers copies its configuration, but functions stay the same
        return backend(*args, **kwargs)

    config = CompileConfig(backend=kept, fullgraph=True, **options)
    config._compile_all_devices = True  # transformers would not compile on a CPU
    return config


def generated(model, prompt, count, **options):
    return model.generate(prompt, min_new_tokens=count, max_new_tokens=count, do_sample=False, **options)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["v3", pytest.param("v2-direct", marks=pytest.mark.campaign)])
@pytest.mark.usefixtures("no_recompile")
def test_generate(name):
    model, recorder = tiny_model(MODELS[name][0], **MODELS[name][1]), Recorder()
    prompt = tokens(2, 7)
    config = compile_config(recorder, mode="default")
    found = generated(model, prompt, 64, cache_implementation="static", compile_config=config)
    assert torch.equal(found, generated(model, prompt, 64))
    assert [report.fused for report in recorder.reports] == [DECODE]


@pytest.mark.campaign
@pytest.mark.usefixtures("no_recompile")
def test_generate_on_inductor_as_transformers_asks_for_it():
    model, prompt = tiny_model("deepseek_v3"), tokens(1, 7)
    config = compile_config(mla_fx.mla_backend)  # with mode="reduce-overhead"
    found = generated(model, prompt, 64, cache_implementation="static", compile_config=config)
    assert torch.equal(found, generated(model, prompt, 64))
    assert mla_fx.last_report().fused == DECODE


@pytest.mark.slow
def test_generate_with_a_cache_that_starts_empty():
    """transformers' default; the prompts differ in length, so that the second one's is a symbol, as is the context."""
    model, recorder = tiny_model("deepseek_v3"), Recorder()
    prompts = [tokens(2, length) for length in (7, 12, 5)]
    expected = [generated(model, prompt, 3) for prompt in prompts]
    model.forward = torch.compile(model.forward, backend=recorder)
    for prompt, wanted in zip(prompts, expected, strict=True):
        assert torch.equal(generated(model, prompt, 3), wanted)
    assert [report.fused for report in recorder.reports] == [DECODE, DECODE, DECODE, COLD]
