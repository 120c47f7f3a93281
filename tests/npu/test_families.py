"""A decode step of every MLA family in transformers, converted to GE: which of the vendor's operators it gets, and that
outputs and caches are as exact as eager's."""

import copy

import pytest
import torch
from families import FAMILIES, cache_tensors, empty_cache, tiny_model, tokens

import mla_fx
from npu.converted import types
from npu.models import errors
from npu.sizes import CONFIG, CONTEXT

pytestmark = pytest.mark.usefixtures("no_gradients")

QUICK = ("youtu", "mistral4")
WITHOUT_CONVERTER = ("glm5_next",)  # nan_to_num of None, which torchair converts wrongly
TIES = ("hy_v4",)  # of the first token that is drawn its indexer scores several keys alike: the next one is taken
OPERATORS = ("MlaPrologV3", "KvRmsNormRopeCache", "FusedInferAttentionScore")

WHOLE, PROLOG, ATTENTION, BODIES = [2, 0, 2], [2, 0, 0], [0, 0, 2], [0, 0, 0]
SPARSE = PROLOG  # a mask that is computed hides all but some keys; attention stays the model's
EXPECTED = {
    "deepseek_v2": ATTENTION,  # it leaves neighbours in the cache, where the kernels leave halves
    "deepseek_v3": WHOLE,
    "deepseek_v32": SPARSE,
    "kimi_linear": [0, 0, 1],  # without rotation, and a layer of linear attention
    "longcat_flash": PROLOG,  # its experts break the graph, so that masks come from outside
    "minicpm3": WHOLE,
    "mistral4": WHOLE,
    "mistral_large4": [0, 1, 0],  # and a layer without a rotary part
    "youtu": WHOLE,
    "glm4_moe_lite": WHOLE,
    "glm_moe_dsa": SPARSE,
    "hy_v4": SPARSE,  # with sinks, too
    "axk1": WHOLE,
    "axk2": [0, 2, 0],  # sparse, too
    "bailing_hybrid": [0, 1, 1],  # and a layer of linear attention
    "dots3_note": BODIES,
}


def at_each_family():
    known = (family for family in FAMILIES if family not in WITHOUT_CONVERTER)
    return [pytest.param(family, marks=() if family in QUICK else pytest.mark.campaign) for family in known]


def step(model, cache, ids):
    """The logits, or hidden states, and then the caches."""
    return [model(ids, past_key_values=cache)[0], *filter(torch.numel, cache_tensors(cache))]


def in_double(cache):
    double = copy.deepcopy(cache)
    for layer in double.layers:
        for name, value in vars(layer).items():
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                setattr(layer, name, value.double())
    return double


@pytest.mark.parametrize("family", at_each_family())
def test_decode_step(converted, family):
    model = tiny_model(family, torch.bfloat16, **CONFIG)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("batched_mm")  # the way to run experts that torchair converts
    theirs, ids = empty_cache(model, "static", CONTEXT), tokens(1, 2 if family in TIES else 1)[:, -1:]
    model(tokens(1, 12), past_key_values=theirs)
    ours, double = copy.deepcopy(theirs), in_double(theirs)
    found = step(torch.compile(model, backend=mla_fx.get_backend(target="ge")), ours, ids)
    exact = step(copy.deepcopy(model).double(), double, ids)
    allowed = [2 * error + 1e-6 for error in errors(step(model, theirs, ids), exact)]
    assert all(error <= limit for error, limit in zip(errors(found, exact), allowed, strict=True)), allowed
    operators = [name for graph in converted.graphs for name in types(graph)]
    assert [operators.count(name) for name in OPERATORS] == EXPECTED[family], str(mla_fx.last_report())


@pytest.mark.campaign
@pytest.mark.parametrize("family", WITHOUT_CONVERTER)
def test_families_that_torchair_does_not_convert(converted, family):
    model = tiny_model(family)
    model.set_experts_implementation("batched_mm")
    cache = empty_cache(model, "static")
    model(tokens(1, 12), past_key_values=cache)
    with pytest.raises(Exception, match="nan_to_num"):
        step(torch.compile(model, backend=mla_fx.get_backend(target="ge")), cache, tokens(1, 1))
