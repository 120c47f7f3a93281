"""DeepSeek-V3 of transformers, quantised by torchao: attention fuses, and results and caches stay the same."""

import copy
import itertools
import math

import pytest
import torch
from lib.families import cache_tensors, empty_cache, tiny_model, tokens
from lib.quantised_models import CONFIGS, OF_TOKENS, quantise

import mla_fx

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::mla_fx.MlaWarning"),
    pytest.mark.usefixtures("no_gradients", "seeded"),
]
LENGTH, PROMPT = 37, 12


def quantised(name, dtype=torch.float32):
    """A model with the projections of its attention quantised.

    Where tokens are quantised, the last bit of a value may decide about a code: with 127.5 steps, the largest value of
    a token lies halfway between two. So what is quantised again is not fused where results are compared closely: one
    layer, with a plain projection behind its attention, and no key side (`EXACT`)."""
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
EXACT = {"options": {"target": "reference", "disable": ("kv_rmsnorm_rope_cache", "mla_prolog")}}


def options_of(name):
    return EXACT if name in OF_TOKENS else REFERENCE


def fused(model, name=""):
    operators = ("latent_attention",) if name in OF_TOKENS else ("kv_rmsnorm_rope_cache", "latent_attention")
    return dict.fromkeys(operators, model.config.num_hidden_layers)


@pytest.mark.parametrize("name", CONFIGS)
def test_decode(name):
    model = quantised(name)
    report = report_of_step(model, prefilled(model), **options_of(name))
    assert report.fused == fused(model, name), str(report)


@pytest.mark.parametrize("quant", ["exact", "vendor"])
@pytest.mark.parametrize("name", OF_TOKENS)
def test_what_is_quantised_again_may_fuse(name, quant):
    """The distance from eager mode is small beside what the quantisation itself does. With the vendor's quantiser, int8
    projections are one prolog, and the report says in what it differs."""
    model, plain = tiny_model("deepseek_v3", num_hidden_layers=1), tiny_model("deepseek_v3", num_hidden_layers=1)
    plain.load_state_dict(model.state_dict())
    quantise(model, name, but=("kv_b_proj", "o_proj"))
    held, ids = prefilled(model), tokens(2, 1)
    ours, theirs = copy.deepcopy(held), copy.deepcopy(held)
    unquantised = plain(ids, past_key_values=copy.deepcopy(held)).logits
    compiled = torch.compile(model, backend="mla", options={"target": "reference", "quant": quant})
    found, expected = compiled(ids, past_key_values=ours).logits, model(ids, past_key_values=theirs).logits
    report = mla_fx.last_report()
    is_prolog = quant == "vendor" and name == "int8 weights and tokens"
    own = "mla_prolog_v3" if is_prolog else "kv_rmsnorm_rope_cache"
    assert report.fused == {own: 1, "latent_attention": 1}, str(report)
    said = "mla_prolog: the largest code of a token is 127.5, of a kernel 127"
    assert (said in report.notes) == is_prolog
    assert (found - expected).norm() <= (expected - unquantised).norm()


@pytest.mark.parametrize(
    "name",
    ["int8 weights", *(pytest.param(name, marks=pytest.mark.campaign) for name in ("float8 weights", "int4 groups"))],
)
def test_decode_under_inductor(name):
    """Inductor computes scales of tokens with other roundings than eager mode, fused or not."""
    model = quantised(name)
    assert report_of_step(model, prefilled(model)).fused == fused(model)


def each_once(*axes):
    """All values of the other axes with the first value of the first one, which has its other values with their last
    ones; every combination in the campaign."""
    (first, *_), *others = axes
    last = tuple(values[-1] for values in others)
    for case in itertools.product(*axes):
        marks = () if case[0] == first or case[1:] == last else pytest.mark.campaign
        yield pytest.param(*case, marks=marks)


@pytest.mark.parametrize(("name", "kind", "dynamic"), list(each_once([*CONFIGS], ["dynamic", "static"], [True, False])))
def test_few_tokens(name, kind, dynamic):
    model = quantised(name)
    report = report_of_step(model, prefilled(model, kind), count=3, dynamic=dynamic, **options_of(name))
    attention = report.fused.get("mla_attention", 0) + report.fused.get("latent_attention", 0)
    assert attention == model.config.num_hidden_layers, str(report)


@pytest.mark.parametrize(("name", "kind"), list(each_once([*CONFIGS], ["dynamic", "static"])))
def test_prompt(name, kind):
    model = quantised(name)
    report = report_of_step(model, empty_cache(model, kind, LENGTH), count=PROMPT, **options_of(name))
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
