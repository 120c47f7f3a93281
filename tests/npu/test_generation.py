"""A prompt and steps of a Hugging Face model on a StaticCache, into its second page, through both kinds of graph."""

import torch

import mla_fx
from npu import models
from npu.converted import types
from npu.copies import check_nothing_is_copied

STEPS = 12


def prompts():
    return [models.prompt(121), *(models.prompt(1, seed=seed) for seed in range(1, STEPS + 1))]


def run(target):
    model = models.model(layers=2)
    backend = mla_fx.get_backend(target=target, soc="Ascend910B3", strict=True)
    compiled = torch.compile(model, backend=backend, dynamic=False)
    models.check_as_exact_as_eager(model, compiled, models.static_cache, prompts())


def test_ge(converted):
    run("ge")
    prompt, step = (types(graph) for graph in converted.graphs)
    assert [prompt.count(name) for name in ("KvRmsNormRopeCache", "FusedInferAttentionScore")] == [2, 2]
    assert [step.count(name) for name in ("MlaPrologV3", "FusedInferAttentionScore")] == [2, 2]
    assert "TensorMove" not in prompt + step


def test_aclgraph(captured):
    """The step is captured once. Attention of the prompt has a layout that is not captured."""
    run("aclgraph")
    prompt, step = captured.graphs
    assert prompt.calls("npu.npu_kv_rmsnorm_rope_cache_v2.default") == [2]
    assert step.calls("npu.npu_mla_prolog_v3.default", "npu.npu_fused_infer_attention_score_v2.out") == [2, 2]
    assert [len(graph.recordings) for graph in captured.graphs] == [1, 1]
    for graph in captured.graphs:
        check_nothing_is_copied(graph)
