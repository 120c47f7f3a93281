"""Inductor's freezing packs weights before it calls the inner compiler: the graph is fused before that."""

from __future__ import annotations

import copy

import pytest
import torch
from families import cache_tensors, empty_cache, tiny_model, tokens

import mla_fx

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
