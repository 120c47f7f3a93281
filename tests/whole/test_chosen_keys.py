"""Families whose indexer chooses keys: attention reads no others, and `generate` says what eager mode says."""

import pytest
import torch
from lib.families import tiny_model
from transformers import DynamicCache, StaticCache

import mla_fx

CHOSEN, STEPS, MOST = 4, 64, 72  # keys, decode steps, the length of a cache
SPARSE = ("deepseek_v32", "glm_moe_dsa", "axk2", "mistral_large4", "dots3_note", "hy_v4")


def generated(model, step, cache, prompt=CHOSEN - 3):
    """Greedy tokens of a prompt and of decode steps that cross the number of keys that a token may choose."""
    torch._dynamo.reset()
    tokens, found = torch.randint(3, 100, (2, prompt), generator=torch.Generator().manual_seed(0)), []
    with torch.no_grad():
        for _ in range(STEPS):
            tokens = step(input_ids=tokens, past_key_values=cache)[0][:, -1:].argmax(-1)  # of logits or hidden states
            found.append(tokens)
    return torch.cat(found, 1)


def stored(cache):
    """All caches, those of indexers, too."""
    names = ("keys", "values", "indexer_keys")
    found = (getattr(layer, name, None) for layer in cache.layers for name in names)
    return [value for value in found if value is not None]


def check(model, cache_of, prompt=CHOSEN - 3, **options):
    caches = cache_of(), cache_of()
    backend = mla_fx.get_backend(target="reference")
    wanted = generated(model, model, caches[0], prompt)
    with mla_fx.report() as report:
        found = generated(model, torch.compile(model, backend=backend, **options), caches[1], prompt)
    assert torch.equal(found, wanted)
    torch.testing.assert_close(stored(caches[1]), stored(caches[0]))
    assert any(hasattr(layer, "indexer_keys") for layer in caches[0].layers)
    return report


@pytest.mark.slow
@pytest.mark.parametrize("family", SPARSE)
def test_static_caches(family):
    model = tiny_model(family, index_topk=CHOSEN)
    report = check(model, lambda: StaticCache(config=model.config, max_cache_len=MOST), dynamic=False)
    assert report.fused["sparse_latent_attention"] == report.fused["lightning_index"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("prompt", [CHOSEN - 2, CHOSEN, CHOSEN + 1, 5 * CHOSEN])
def test_prompts(prompt):
    model = tiny_model(SPARSE[0], index_topk=CHOSEN)
    report = check(model, lambda: StaticCache(config=model.config, max_cache_len=2 * MOST), prompt, dynamic=False)
    assert report.fused["lightning_index"] > 0


@pytest.mark.parametrize(
    ("target", "dynamic"),
    [
        ("reference", False),
        pytest.param("reference", True, marks=pytest.mark.slow),
        pytest.param("inductor", False, marks=pytest.mark.slow),
        pytest.param("inductor", True, marks=(pytest.mark.slow, pytest.mark.interpreted)),
    ],
)
def test_prompts_without_earlier_tokens(target, dynamic):
    """Keys would be expanded."""
    model = tiny_model(SPARSE[0], index_topk=CHOSEN)
    tokens = torch.randint(3, 100, (2, 20 * CHOSEN), generator=torch.Generator().manual_seed(0))
    caches = [DynamicCache(config=model.config) for _ in range(2)]
    step = torch.compile(model, backend=mla_fx.get_backend(target=target), dynamic=dynamic)
    torch._dynamo.reset()
    with torch.no_grad(), mla_fx.report() as report:
        wanted, found = (way(tokens, past_key_values=caches[at]).logits for at, way in enumerate((model, step)))
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(stored(caches[1]), stored(caches[0]))
    assert report.fused["sparse_mla_attention"] == report.fused["lightning_index"] > 0


@pytest.mark.slow
def test_all_keys_are_chosen():
    """Nothing chooses then, and the indexer's keys are stored all the same."""
    model = tiny_model(SPARSE[0], index_topk=MOST)
    report = check(model, lambda: StaticCache(config=model.config, max_cache_len=MOST), dynamic=False)
    assert report.fused["latent_attention"] > 0
    assert not report.fused.keys() & {"sparse_latent_attention", "lightning_index"}


@pytest.mark.slow
@pytest.mark.parametrize("family", [SPARSE[0], "hy_v4"])
def test_growing_caches(family):
    model = tiny_model(family, index_topk=CHOSEN)
    report = check(model, lambda: DynamicCache(config=model.config))
    assert min(report.fused["sparse_latent_attention"], report.fused["lightning_index"]) > 0


@pytest.mark.slow
def test_the_lowest_number_hides_what_is_not_chosen():
    """Eager mode adds it. A decode step sees all keys of a cache that grows, so no other mask hides any."""
    model = tiny_model(SPARSE[0], index_topk=CHOSEN)
    model.set_attn_implementation("eager")
    report = check(model, lambda: DynamicCache(config=model.config), 5 * CHOSEN)
    assert report.fused["sparse_latent_attention"] > 0


@pytest.mark.slow
def test_rows_that_see_no_key_beside_sinks():
    """Hunyuan 4 hides by the lowest number, and the first tokens of a padded prompt see nothing but their sinks."""
    model = tiny_model("hy_v4", index_topk=CHOSEN)
    draw = torch.Generator().manual_seed(0)
    tokens, seen = torch.randint(3, 100, (2, 20), generator=draw), torch.ones(2, 20, dtype=torch.long)
    seen[1, :9] = 0
    caches = [StaticCache(config=model.config, max_cache_len=MOST) for _ in range(2)]
    fast = torch.compile(model, backend=mla_fx.get_backend(target="reference"), dynamic=False)
    with torch.no_grad(), mla_fx.report() as report:
        wanted, found = (
            step(tokens, attention_mask=seen, past_key_values=cache)[0]
            for step, cache in zip((model, fast), caches, strict=True)
        )
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(stored(caches[1]), stored(caches[0]), rtol=1e-4, atol=1e-5)
    assert report.fused["sparse_latent_attention"] == report.fused["lightning_index"] == 2
