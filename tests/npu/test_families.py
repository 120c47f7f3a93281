"""A decode step of every MLA family in transformers, converted to GE: which of the vendor's operators it gets, and that
outputs and caches are as exact as eager's."""

import copy
from statistics import median

import pytest
import torch
from lib.families import FAMILIES, cache_tensors, empty_cache, tiny_model, tokens

import mla_fx
from npu.converted import types
from npu.models import errors
from npu.sizes import CONFIG, CONTEXT

pytestmark = pytest.mark.usefixtures("no_gradients")

QUICK = ("youtu", "mistral4")
WITHOUT_CONVERTER = ("glm5_next",)  # nan_to_num of None, which torchair converts wrongly
DRAWS = 5  # the median counts: where keys or experts score almost alike, any rounding may choose others
OPERATORS = (
    "MlaPrologV3", "KvRmsNormRopeCache", "FusedInferAttentionScore", "LightningIndexer", "SparseFlashAttention"
)  # fmt: skip

WHOLE, PROLOG, ATTENTION = [2, 0, 2, 0, 0], [2, 0, 0, 0, 0], [0, 0, 2, 0, 0]
SPARSE = [2, 0, 0, 2, 2]
EXPECTED = {
    "deepseek_v2": ATTENTION,  # it leaves neighbours in the cache, where the kernels leave halves
    "deepseek_v3": WHOLE,
    "deepseek_v32": SPARSE,
    "kimi_linear": [0, 0, 1, 0, 0],  # without rotation, and a layer of linear attention
    "longcat_flash": PROLOG,  # its experts break the graph, so that masks come from outside
    "minicpm3": WHOLE,
    "mistral4": WHOLE,
    "mistral_large4": [0, 1, 0, 2, 2],  # and a layer without a rotary part
    "youtu": WHOLE,
    "glm4_moe_lite": WHOLE,
    "glm_moe_dsa": SPARSE,
    "hy_v4": PROLOG,  # with sinks, and rows that may see no key average over all
    "axk1": WHOLE,
    "axk2": [0, 2, 0, 2, 2],  # sparse, too
    "bailing_hybrid": [0, 1, 1, 0, 0],  # and a layer of linear attention
    "dots3_note": [0, 0, 0, 0, 1],  # and a layer of other sizes
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


def errors_of_a_draw(model, compiled, double):
    """How far each value is from float64, fused and eager."""
    theirs = empty_cache(model, "static", CONTEXT)
    model(tokens(1, 12), past_key_values=theirs)
    ours, exact, ids = copy.deepcopy(theirs), in_double(theirs), tokens(1, 1)
    wanted = step(double, exact, ids)
    return errors(step(compiled, ours, ids), wanted), errors(step(model, theirs, ids), wanted)


@pytest.mark.parametrize("family", at_each_family())
def test_decode_step(converted, family):
    model = tiny_model(family, torch.bfloat16, **CONFIG)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("batched_mm")  # the way to run experts that torchair converts
    compiled = torch.compile(model, backend=mla_fx.get_backend(target="ge"))
    double = copy.deepcopy(model).double()
    drawn = [errors_of_a_draw(model, compiled, double) for _ in range(DRAWS)]
    fused, eager = ([median(of_value) for of_value in zip(*found, strict=True)] for found in zip(*drawn, strict=True))
    assert all(error <= 2 * limit + 1e-6 for error, limit in zip(fused, eager, strict=True)), (fused, eager)
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
