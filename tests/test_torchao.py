"""DeepSeek-V3 of transformers, quantised by torchao: attention fuses, and results and caches stay the same."""

import copy
import math

import pytest
import torch
from families import cache_tensors, empty_cache, tiny_model, tokens
from quantised_models import CONFIGS, OF_TOKENS, quantise

import mla_fx

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::mla_fx.MlaWarning")]
LENGTH, PROMPT = 37, 12


@pytest.fixture(autouse=True)
def no_gradients():
    torch._dynamo.reset()
    torch.manual_seed(0)
    with torch.no_grad():
        yield


def quantised(name, dtype=torch.float32):
    """A model with the projections of its attention quantised.

    Where tokens are quantised, the last bit of a value may decide about a code. So nothing that is fused is quantised
    again there: one layer, with a plain projection behind its attention."""
    is_of_tokens = name in OF_TOKENS
    model = tiny_model("deepseek_v3", dtype, num_hidden_layers=1 if is_of_tokens else 2)
    quantise(model, name, but=("o_proj",) if is_of_tokens else ())
    return model


def prefilled(model, kind="static"):
    held = empty_cache(model, kind, LENGTH)
    model(tokens(2, PROMPT), past_key_values=held)
    return held


def report_of_step(model, theirs, count=1, **options):
    """The report of one step, after logits and caches were compared with eager mode."""
    ours, ids = copy.deepcopy(theirs), tokens(2, count)
    expected = model(ids, past_key_values=theirs).logits
    compiled = torch.compile(model, backend="mla", **options)
    torch.testing.assert_close(compiled(ids, past_key_values=ours).logits, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(cache_tensors(ours), cache_tensors(theirs), rtol=1e-4, atol=1e-5)
    return mla_fx.last_report()


REFERENCE = {"options": {"target": "reference"}}


def fused(name):
    return {"latent_attention": 1} if name in OF_TOKENS else {"kv_rmsnorm_rope_cache": 2, "latent_attention": 2}


@pytest.mark.parametrize("name", CONFIGS)
def test_decode(name):
    model = quantised(name)
    report = report_of_step(model, prefilled(model), **REFERENCE)
    assert report.fused == fused(name), str(report)


@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in OF_TOKENS])
def test_decode_under_inductor(name):
    """Inductor computes scales of tokens with other roundings than eager mode, fused or not."""
    model = quantised(name)
    assert report_of_step(model, prefilled(model)).fused == fused(name)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("kind", ["static", "dynamic"])
@pytest.mark.parametrize("dynamic", [False, True], ids=["fixed sizes", "symbols"])
def test_few_tokens(name, kind, dynamic):
    model = quantised(name)
    report = report_of_step(model, prefilled(model, kind), count=3, dynamic=dynamic, **REFERENCE)
    attention = report.fused.get("mla_attention", 0) + report.fused.get("latent_attention", 0)
    assert attention == model.config.num_hidden_layers, str(report)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_prompt(name, kind):
    model = quantised(name)
    report = report_of_step(model, empty_cache(model, kind, LENGTH), count=PROMPT, **REFERENCE)
    assert report.fused.get("mla_attention") == model.config.num_hidden_layers, str(report)


@pytest.mark.parametrize("name", CONFIGS)
def test_keys_and_values_are_not_expanded(name):
    model = quantised(name)
    held, ids = prefilled(model), tokens(2, 1)
    compiled = torch.compile(model, backend="mla", **REFERENCE)
    compiled(ids, past_key_values=held)
    with torch.profiler.profile(record_shapes=True) as profile:
        compiled(ids, past_key_values=held)
    shapes = [math.prod(shape) for event in profile.events() for shape in event.input_shapes]
    config = model.config
    expanded = 2 * LENGTH * config.num_attention_heads * (config.qk_nope_head_dim + config.v_head_dim)
    assert 2 * LENGTH * config.kv_lora_rank in shapes and expanded not in shapes
