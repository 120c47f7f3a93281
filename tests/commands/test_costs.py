"""Bytes and FLOPs of attention: by hand, and as PyTorch counts them."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from lib.families import tiny_model
from torch.utils.flop_counter import FlopCounterMode

from mla_fx.commands import costs
from mla_fx.commands.costs import Cost, LayerSizes, Machine, Step
from mla_fx.commands.demo import ATTENTION

V3 = LayerSizes.of(SimpleNamespace(**ATTENTION))
SMALL = LayerSizes(hidden=64, heads=4, query_rank=48, rank=32, nope=16, rope=8, value=16)
STEPS = [Step(1, 1, 16), Step(3, 2, 9), Step(2, 5, 5)]


def test_deepseek_v3_by_hand():
    query, key, heads, output = 7168 * 1536 + 1536 * 128 * 192, 7168 * 576, 512 * 128 * 256, 128 * 128 * 7168
    assert V3.weights == 2 * (query + key + heads + output) == 374_210_560
    assert V3.cache_per_token == 1152
    assert V3.caches_read(Step(2, 1, 4096)) == 2 * 4096 * 1152


def test_one_token_of_deepseek_v3_by_hand():
    step = Step(1, 1, 4096)
    absorbed, expanded = V3.absorbed(step), V3.expanded(step)
    projections = 2 * (374_210_560 // 2)
    assert absorbed.flops == projections + 2 * 128 * 4096 * (576 + 512)
    assert absorbed.bytes == 374_210_560 + 4096 * 1152 + 1152
    assert expanded.flops == projections + 2 * 4095 * 512 * 128 * 256 + 2 * 128 * 4096 * (192 + 128)
    assert expanded.bytes == absorbed.bytes + 2 * 2 * 4096 * 128 * (192 + 128)


def test_an_indexer_is_named():
    sparse = LayerSizes.of(SimpleNamespace(**ATTENTION, index_topk=2048))
    told = costs.told(sparse, 61, Step(), Machine())
    assert "the indexer, which chooses 2048 keys for each query, is not counted, and all 4096 keys count" in told
    assert costs.to_dict(sparse, 61, Step(), Machine())["keys_chosen"] == 2048
    assert "indexer" not in costs.told(V3, 61, Step(), Machine())


def test_a_query_without_a_low_rank():
    direct = replace(SMALL, query_rank=0)
    assert direct.weights - SMALL.weights == 2 * (64 * 4 * 24 - 48 * (64 + 4 * 24))
    assert LayerSizes.of(SimpleNamespace(**{**ATTENTION, "q_lora_rank": None})).query_rank == 0


@pytest.mark.parametrize("step", STEPS, ids=str)
@pytest.mark.parametrize("query_rank", [48, None])
def test_the_expanded_form_as_pytorch_counts_it(step, query_rank):
    """The layer of transformers, in eager mode."""
    model = tiny_model("deepseek_v3", q_lora_rank=query_rank)
    layer, config = model.model.layers[0].self_attn, model.config
    config._attn_implementation = "eager"  # a fused kernel leaves out what a causal mask hides
    hidden = torch.randn(step.batch, step.tokens, config.hidden_size)
    tables = model.model.rotary_emb(hidden, torch.arange(step.tokens).unsqueeze(0))

    class Cache:
        """Has as many latents and rotary keys as a step reads."""

        def update(self, latent, rope, layer_idx):
            return (torch.randn(step.batch, 1, step.context, part.shape[-1]) for part in (latent, rope))

    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        layer(hidden, tables, None, past_key_values=Cache())
    assert counter.get_total_flops() == LayerSizes.of(config).expanded(step).flops


@pytest.mark.parametrize("step", STEPS, ids=str)
def test_the_absorbed_form_as_pytorch_counts_it(step):
    """The formula that the operators follow is written here."""
    rows, keys, heads = step.rows, step.context, SMALL.heads

    def attention(hidden, latent, rope):
        down = hidden @ torch.randn(64, 48)
        query = (down @ torch.randn(48, heads * 24)).view(step.batch, step.tokens, heads, 24)
        hidden @ torch.randn(64, 40)
        absorbed = torch.einsum("bsnd,ndc->bsnc", query[..., :16], torch.randn(heads, 16, 32)).flatten(1, 2)
        scores = absorbed @ latent.mT + query[..., 16:].flatten(1, 2) @ rope.mT
        context = (scores.softmax(-1) @ latent).view(step.batch, step.tokens, heads, 32)
        value = torch.einsum("bsnc,ncv->bsnv", context, torch.randn(heads, 32, 16))
        return value.flatten(2) @ torch.randn(heads * 16, 64)

    given = torch.randn(step.batch, step.tokens, 64), *(torch.randn(step.batch, keys, width) for width in (32, 8))
    with FlopCounterMode(display=False) as counter:
        assert attention(*given).shape == (step.batch, step.tokens, 64)
    assert rows == step.batch * step.tokens
    assert counter.get_total_flops() == SMALL.absorbed(step).flops


def test_the_weights_are_those_of_the_layer():
    """Without norms."""
    model = tiny_model("deepseek_v3")
    matrices = (weight for weight in model.model.layers[0].self_attn.parameters() if weight.dim() == 2)
    assert 2 * sum(weight.numel() for weight in matrices) == LayerSizes.of(model.config).weights


def test_a_roofline():
    machine = Machine(bandwidth=2.0, flops=3.0)
    assert machine.seconds(Cost(bytes=4_000_000_000, flops=3_000_000_000_000)) == 2.0
    assert machine.seconds(Cost(bytes=1, flops=6_000_000_000_000)) == 2.0
    assert machine.is_bound_by_memory(Cost(4_000_000_000, 1)) and not machine.is_bound_by_memory(Cost(1, 10**12))


def test_text():
    absorbed, expanded = "378.9 MB moved, 1.515 GFLOP per layer", "1.05 GB moved, 138.1 GFLOP per layer"
    assert costs.told(V3, 61, Step(1, 1, 4096), Machine()).splitlines() == [
        "attention of 61 layers, new tokens 1 x 1, 4096 tokens in the cache",
        "  per layer: weights 374.2 MB, cache 1152 B per token, caches read 4.719 MB",
        f"  absorbed: {absorbed}; at least 378.9 us, 23.11 ms for all layers, bound by memory",
        f"  expanded: {expanded}; at least 1381.2 us, 84.25 ms for all layers, bound by arithmetic",
        "  at 1000 GB/s and 100 TFLOP/s",
    ]
