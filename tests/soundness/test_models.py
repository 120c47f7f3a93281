"""Whole models whose caches grow from empty: attention fuses in every graph, and every token is eager's."""

import copy

import pytest
import torch
from lib.families import cache_tensors, empty_cache, tiny_model, tokens
from lib.layers import QUIET, Reporting

pytestmark = [pytest.mark.usefixtures("seeded", "no_gradients"), *(pytest.mark.filterwarnings(line) for line in QUIET)]
EXACT = {"rtol": 1e-4, "atol": 1e-5}
LAYERS = 1


def pair(family="deepseek_v3", dynamic=None):
    """A model, the same one with its forward pass compiled, and its reports."""
    model = tiny_model(family, num_hidden_layers=LAYERS, first_k_dense_replace=LAYERS)
    other, backend = copy.deepcopy(model), Reporting()
    other.forward = torch.compile(other.forward, backend=backend, dynamic=dynamic)
    return model, other, backend


def step(models, ids, caches, **options):
    expected, found = (
        model(ids, past_key_values=cache, **options).logits for model, cache in zip(models, caches, strict=True)
    )
    torch.testing.assert_close(found, expected, **EXACT)
    theirs, ours = map(cache_tensors, caches)
    torch.testing.assert_close(ours, theirs, **EXACT)


def check_all_fused(backend):
    """Check that attention fused in each graph that has any."""
    looked_at = [report for report in backend.reports if report.has_attention]
    assert looked_at
    for report in looked_at:
        assert sum(report.fused.get(name, 0) for name in ("mla_attention", "latent_attention")) == LAYERS, str(report)


@pytest.mark.slow
@pytest.mark.parametrize("family", [pytest.param("deepseek_v2", marks=pytest.mark.campaign), "deepseek_v3"])
def test_prompts_of_other_lengths(family):
    """A growing cache is empty at first; the second prompt's length is a symbol."""
    *models, backend = pair(family)
    for prompt in (5, 9, 12):
        caches = [empty_cache(models[0], "dynamic") for _ in models]
        for count in (prompt, 1, 1):
            step(models, tokens(2, count), caches)
    check_all_fused(backend)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dynamic", pytest.param("static", marks=pytest.mark.campaign)])
def test_everything_dynamic(kind):
    *models, backend = pair(dynamic=True)
    caches = [empty_cache(models[0], kind) for _ in models]
    for count in (6, 1, 3, 1):
        step(models, tokens(2, count), caches)
    check_all_fused(backend)


@pytest.mark.slow
def test_chunks_on_a_growing_cache():
    *models, backend = pair()
    caches = [empty_cache(models[0], "dynamic") for _ in models]
    for count in (7, 4, 3, 5, 1, 2):
        step(models, tokens(1, count), caches)
    check_all_fused(backend)


def generated(model, prompt, **options):
    return model.generate(prompt, min_new_tokens=8, max_new_tokens=8, do_sample=False, **options)


@pytest.mark.slow
def test_generate_by_default():
    model, other, backend = pair()
    for prompt in (tokens(2, 5), tokens(2, 8)):
        assert torch.equal(generated(other, prompt), generated(model, prompt))
    assert backend.report.fused.get("latent_attention")


ASSISTED = {
    "lookup": lambda: {"prompt_lookup_num_tokens": 3},
    "assistant": lambda: {"assistant_model": tiny_model("deepseek_v3", num_hidden_layers=1, first_k_dense_replace=1)},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param("lookup", marks=pytest.mark.campaign), "assistant"])
def test_assisted_generation(name):
    """Several candidates are verified at a time, with a cache that is cropped if they are rejected."""
    model, other, _ = pair()
    for prompt in (tokens(1, 4).repeat(1, 3), tokens(1, 5).repeat(1, 2)):
        expected, found = (generated(run, prompt, **ASSISTED[name]()) for run in (model, other))
        assert torch.equal(found, expected)


@pytest.mark.slow
def test_left_padded_generation():
    model, other, _ = pair()
    mask = torch.ones(3, 9, dtype=torch.long)
    mask[0, :4] = mask[1, :1] = 0
    prompt = tokens(3, 9)
    options = {"attention_mask": mask}
    assert torch.equal(generated(other, prompt, **options), generated(model, prompt, **options))
