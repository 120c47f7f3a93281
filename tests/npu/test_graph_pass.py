"""MlaPass inside of torchair's own backend, as its `post_grad_custom_pre_pass`."""

import torch
import torchair

import mla_fx
from npu import models
from npu.converted import types


def compiled(model, graph_pass):
    config = torchair.CompilerConfig()
    config.post_grad_custom_pre_pass = graph_pass
    config.experimental_config.enable_view_optimize = False  # in 2.13 it loses transpositions
    return torch.compile(model, backend=torchair.get_npu_backend(compiler_config=config), dynamic=False)


def test_key_side_and_attention_fuse(converted):
    """A pass hoists no weights out of a graph, so the prolog, which reads them in FRACTAL_NZ, does not fuse."""
    model, graph_pass = models.model(layers=2), mla_fx.MlaPass(target="ge")
    prompts = [models.prompt(1, seed=seed) for seed in range(3)]
    models.check_as_exact_as_eager(model, compiled(model, graph_pass), models.static_cache, prompts)
    (graph,) = converted.graphs
    found = [types(graph).count(name) for name in ("KvRmsNormRopeCache", "FusedInferAttentionScore", "MlaPrologV3")]
    assert found == [2, 2, 0]
    assert graph_pass.report.fused == {"kv_rmsnorm_rope_cache": 2, "latent_attention": 2}
    assert any("reads weights in FRACTAL_NZ" in miss.reason for miss in graph_pass.report.misses)


def test_prompt(converted):
    model, graph_pass = models.model(), mla_fx.MlaPass(target="ge")
    models.check_as_exact_as_eager(model, compiled(model, graph_pass), models.static_cache, [models.prompt(20)])
    (graph,) = converted.graphs
    assert [types(graph).count(name) for name in ("KvRmsNormRopeCache", "FusedInferAttentionScore")] == [1, 1]
