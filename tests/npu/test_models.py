"""Hugging Face models with the target "ge": what they convert to, and that results and caches are right."""

import functools

import pytest
import torch

import mla_fx
from npu import models
from npu.converted import count
from npu.models import compiled


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.campaign)


@pytest.mark.parametrize("layers, dynamic", [(1, False), slow(4, False), (1, True), slow(4, True)])
def test_decode_step(converted, layers, dynamic):
    model = models.model(layers=layers)
    prompts = [models.prompt(1, seed=seed) for seed in range(3)]
    models.check_as_exact_as_eager(model, compiled(model, dynamic=dynamic), models.static_cache, prompts)
    for graph in converted.graphs:
        assert count(graph, "MlaPrologV3", "FusedInferAttentionScore", "TensorMove") == [layers, layers, 0]


class Given:
    """A model that is given its mask, as `generate` does where it compiles."""

    def __init__(self, run, is_bool):
        self.run, self.is_bool, self.first = run, is_bool, 0

    def __call__(self, ids, past_key_values):
        tokens = ids.shape[1]
        seen = torch.arange(models.CONTEXT) <= torch.arange(self.first, self.first + tokens)[:, None]
        added = torch.zeros(seen.shape, dtype=torch.bfloat16).masked_fill(~seen, torch.finfo(torch.bfloat16).min)
        self.first += tokens
        mask = (seen if self.is_bool else added)[None, None]
        return self.run(ids, attention_mask=mask, past_key_values=past_key_values)


@pytest.mark.parametrize("word, is_bool", [(True, True), slow(True, False), slow(False, True), slow(False, False)])
def test_a_mask_that_is_given(converted, word, is_bool):
    """Declared causal, its last row gives the length of the context."""
    model = models.model()
    prompts = [models.prompt(tokens, seed=tokens) for tokens in (20, 1, 1, 3)]
    run = compiled(model, causal_masks=word)
    models.check_as_exact_as_eager(model, run, models.static_cache, prompts, lambda step: Given(step, is_bool))
    assert [count(graph, "FusedInferAttentionScore") for graph in converted.graphs] == [[int(word)]] * 3


@pytest.mark.parametrize("tokens", [1, slow(20)])
def test_a_mask_of_a_padded_sequence_that_is_declared_causal(converted, tokens):
    """It gives NaN, and the sequence beside it what it should."""
    model, ids, first = models.model(), models.prompt(tokens, batch=2), 4
    seen = torch.arange(models.CONTEXT) <= torch.arange(first, first + tokens)[:, None]
    padded = seen & (torch.arange(models.CONTEXT) > 0)
    run = compiled(model, causal_masks=True)
    with torch.no_grad():
        right, found = (
            run_behind(first, model, run, ids, torch.stack((seen, other))) for other in (seen, padded)
        )
    torch.testing.assert_close(found[0], right[0], rtol=0, atol=0)
    assert found[1].isnan().all() and not right.isnan().any()


def run_behind(first, model, run, ids, masks):
    cache = models.static_cache(model, batch=2)
    model(models.prompt(first, batch=2), past_key_values=cache)
    return run(ids, attention_mask=masks[:, None], past_key_values=cache).last_hidden_state


@pytest.mark.parametrize("dynamic", [False, slow(True)])
def test_prefill(converted, dynamic):
    model = models.model(layers=2)
    prompts = [models.prompt(20), models.prompt(24, seed=1)]
    models.check_as_exact_as_eager(model, compiled(model, dynamic=dynamic), models.static_cache, prompts)
    for graph in converted.graphs:
        assert count(graph, "KvRmsNormRopeCache", "FusedInferAttentionScore", "TensorMove") == [2, 2, 0]


@pytest.mark.parametrize("dynamic", [False, slow(True)])
def test_several_prompts(converted, dynamic):
    """Each leaves a part of its cache unseen."""
    model = models.model()
    make_cache = functools.partial(models.static_cache, batch=2)
    prompts = [models.prompt(20, batch=2), models.prompt(24, batch=2, seed=1)]
    models.check_as_exact_as_eager(model, compiled(model, dynamic=dynamic), make_cache, prompts)
    for graph in converted.graphs:
        assert count(graph, "KvRmsNormRopeCache", "FusedInferAttentionScore", "TensorMove") == [1, 1, 0]


def test_growing_cache(converted):
    """A prompt, then steps on one graph for every length."""
    model = models.model(layers=2)
    prompts = [models.prompt(32), *(models.prompt(1, seed=seed) for seed in range(3))]
    models.check_as_exact_as_eager(model, compiled(model, dynamic=True), models.dynamic_cache, prompts)
    assert [count(graph, "MlaPrologV3", "FusedInferAttentionScore") for graph in converted.graphs] == [[0, 2], [2, 2]]


@pytest.mark.campaign
def test_query_of_full_rank(converted):
    """The key side is one operator; the query is made and rotated by the model's own."""
    model = models.model(layers=2, q_lora_rank=None)
    prompts = [models.prompt(1, seed=seed) for seed in range(3)]
    models.check_as_exact_as_eager(model, compiled(model), models.static_cache, prompts)
    graph = converted.graphs[0]
    assert count(graph, "KvRmsNormRopeCache", "FusedInferAttentionScore", "TensorMove") == [2, 2, 0]


def test_halves_are_rotated_through_reordered_weights(converted):
    model = models.model("minicpm3", 2)
    prompts = [models.prompt(1, seed=seed) for seed in range(3)]
    models.check_as_exact_as_eager(model, compiled(model), models.static_cache, prompts)
    print(mla_fx.last_report())
    assert count(converted.graphs[0], "MlaPrologV3", "FusedInferAttentionScore") == [2, 2]


@pytest.mark.campaign
def test_rotation_of_complex_numbers(converted):
    """It leaves neighbours in the cache, where the kernels leave halves."""
    model = models.model("deepseek_v2", 2)
    prompts = [models.prompt(1, seed=seed) for seed in range(3)]
    models.check_as_exact_as_eager(model, compiled(model), models.static_cache, prompts)
    assert count(converted.graphs[0], "MlaPrologV3", "FusedInferAttentionScore") == [0, 2]


def test_reloaded_weights_are_followed(converted):
    model, prompts = models.model(), [models.prompt(1)]
    run = compiled(model)
    models.steps(run, models.static_cache(model), prompts)
    with torch.no_grad():
        model.load_state_dict({name: weight * 0.7 for name, weight in model.state_dict().items()})
    models.check_as_exact_as_eager(model, run, models.static_cache, prompts)
    assert len(converted.graphs) == 1


def test_real_sizes(converted):
    """One layer of DeepSeek-V3: three steps after a prompt."""
    model = models.model(**models.REAL)
    prompts = [models.prompt(20), *(models.prompt(1, seed=seed) for seed in range(3))]
    models.check_as_exact_as_eager(model, compiled(model), models.static_cache, prompts)
    prefill, decode = converted.graphs
    assert count(prefill, "KvRmsNormRopeCache", "FusedInferAttentionScore", "TensorMove") == [1, 1, 0]
    assert count(decode, "MlaPrologV3", "FusedInferAttentionScore", "TensorMove") == [1, 1, 0]
