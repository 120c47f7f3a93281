"""The report names what chooses keys for fused attention, and nothing else that chooses."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import mla_fx.ops  # noqa: F401  registers torch.ops.mla_fx
from mla_fx.__main__ import main
from mla_fx.passes.chosen_keys import chosen_keys

KEYS, EXPERTS = 6, 5
SAID = "is not fused, and fused attention reads all keys under a mask of the chosen ones"
INDEXERS = "layers.0.attn.indexer", "layers.1.attn.indexer"


def scattered(scores, hidden):
    return torch.zeros(1, KEYS, dtype=torch.bool).scatter(-1, scores.topk(2).indices, True)


def added(scores, hidden):
    chosen = torch.full((1, KEYS), -torch.inf).scatter(-1, scores.topk(2, dim=1).indices, 0.0)
    return chosen + torch.full((1, KEYS), -torch.inf).triu(1)


def at_least_the_last(scores, hidden):
    return scores >= scores.topk(2).values[:, -1:]


def of_experts(scores, hidden):
    """Tokens are hidden by their values, which the best experts of an earlier layer have added to."""
    best, _ = torch.topk(hidden, 2)
    return scores + best.sum() > 0


def behind_a_product(scores, hidden):
    best, _ = torch.topk(scores, 2)
    return torch.mm(best, hidden[:2, :1]) + scores > 0


def without_a_choice(scores, hidden):
    return scores > 0


def found(mask_of, *modules):
    def function(q, q_rope, kv, k_rope, scores, hidden):
        for _ in modules:
            mask = mask_of(scores, hidden)
            q = q + torch.ops.mla_fx.attention(q, q_rope, kv, k_rope, mask, scale=0.5)[0]
        return q

    shapes = (1, 1, 2, 4), (1, 1, 2, 2), (1, KEYS, 4), (1, KEYS, 2), (1, KEYS), (3, EXPERTS)
    graph = make_fx(function, tracing_mode="fake")(*map(torch.randn, shapes)).graph
    calls = graph.find_nodes(op="call_function", target=torch.ops.aten.topk.default)
    for node, module in zip(calls, modules, strict=False):
        node.meta["nn_module_stack"] = {"a": (module, object)}
    return list(chosen_keys(graph))


@pytest.mark.parametrize("mask_of", [scattered, added, at_least_the_last])
def test_what_chooses_keys_is_named(mask_of):
    assert found(mask_of, *INDEXERS) == [f"what chooses keys by topk in layers.*.attn.indexer {SAID}"]


def test_a_choice_outside_of_modules():
    assert found(scattered, "") == [f"what chooses keys by topk in the model itself {SAID}"]


@pytest.mark.parametrize("mask_of", [of_experts, behind_a_product, without_a_choice])
def test_what_chooses_no_keys_is_not_named(mask_of):
    assert found(mask_of, *INDEXERS) == []


@pytest.mark.slow
def test_the_indexer_of_deepseek_v32_is_fused_and_not_named(capsys):
    assert main(["explain", "deepseek_v32", "--full", "--layers", "4"]) == 0
    said = capsys.readouterr().out
    assert "lightning_index x4" in said
    assert SAID not in said
