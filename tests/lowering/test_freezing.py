"""Inductor's freezing packs weights before it calls the inner compiler: the graph is fused before that."""

import copy

import pytest
import torch
from lib.families import cache_tensors, empty_cache, tiny_model, tokens
from lib.packed_weights import by_halves, in_halves, multiplied
from lib.quantised import Quantised
from torch._inductor.utils import run_and_get_code

import mla_fx
from mla_fx.cases import inputs

pytestmark = pytest.mark.usefixtures("no_gradients")


@pytest.fixture
def freezing():
    with torch._inductor.config.patch(freezing=True, force_disable_caches=True):
        yield


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 2])
def test_frozen_models_fuse_and_answer_as_before(freezing, batch):
    model, token = tiny_model("deepseek_v3", num_hidden_layers=1), tokens(batch, 1)
    cache = empty_cache(model, "static")
    model(tokens(batch, 12), past_key_values=cache)
    frozen = copy.deepcopy(cache)
    expected = [model(token, past_key_values=cache).logits, *cache_tensors(cache)]
    step = torch.compile(model, backend=mla_fx.mla_backend, fullgraph=True)
    found = [step(token, past_key_values=frozen).logits, *cache_tensors(frozen)]
    torch.testing.assert_close(found, expected)
    report = mla_fx.last_report()
    assert report.fused == {"mla_prolog": 1, "latent_attention": 1}
    (memory,) = report.memory
    assert memory.weights > 0  # buffers of a library, which may be larger than weights this small


@pytest.mark.slow
@pytest.mark.parametrize("is_frozen", [False, True])
def test_packed_weights_are_unpacked_at_each_step_unless_frozen(is_frozen):
    layer = Quantised(multiplied(by_halves), in_halves, "kv_b").eval()
    theirs = copy.deepcopy(layer)
    with torch._inductor.config.patch(freezing=is_frozen, force_disable_caches=True):
        out, codes = run_and_get_code(torch.compile(layer, backend=mla_fx.mla_backend), *inputs())
    torch.testing.assert_close(out, theirs(*inputs()), rtol=1e-4, atol=1e-5)
    assert mla_fx.last_report().fused == {"mla_prolog": 1, "latent_attention": 1}
    assert (">>" in "".join(codes)) != is_frozen
