"""No pass changes a graph for an NPU before the change was proved; a refused one costs nothing else."""

import pytest
import torch
from lib.watched import Watch

import mla_fx
from mla_fx.driver.compilation import Compilation
from mla_fx.passes import hoist
from mla_fx.passes.pipeline import PIPELINE
from npu import models
from npu.converted import types

pytestmark = pytest.mark.parametrize("target", ["ge", "aclgraph"])
STEPS = [models.prompt(1, seed=seed) for seed in range(2)]


def check(module, target, dynamic=False):
    """The report of some steps, whose states and caches are as exact as eager's."""
    torch.compiler.reset()
    run = torch.compile(module, backend=mla_fx.get_backend(target=target, soc="Ascend910B3"), dynamic=dynamic)
    models.check_as_exact_as_eager(module, run, models.static_cache, STEPS)
    return mla_fx.last_report()


@pytest.mark.parametrize("dynamic", [False, True])
def test_every_pass_proves_before_it_changes(captured, monkeypatch, target, dynamic):
    watch, rewrite, views = Watch(monkeypatch), Compilation.rewrite, []

    def watched(compilation, gm, **options):
        compilation.passes = tuple(map(watch.step, PIPELINE))
        run = rewrite(compilation, gm, **options)
        views.append(len(run.hoisted.views))
        return run

    monkeypatch.setattr(Compilation, "rewrite", watched)
    report = check(models.model(), target, dynamic)
    assert report.fused == {"mla_prolog": 1, "latent_attention": 1} and not report.unchecked, str(report)
    assert watch.passes >= {"recognise prolog", "lower", "hoist"}
    assert views[-1] == 2, "both caches are passed as pages"


class Halved(torch.nn.Module):
    """A model whose steps halve what they have written to a cache."""

    def __init__(self):
        super().__init__()
        self.model = models.model()
        self.config = self.model.config

    def forward(self, ids, past_key_values):
        output = self.model(ids, past_key_values=past_key_values)
        past_key_values.layers[0].keys.mul_(0.5)
        return output


@pytest.mark.refutes
@pytest.mark.filterwarnings("ignore::mla_fx.MlaWarning")
def test_an_input_keeps_its_shape_where_another_value_is_written_back(converted, captured, monkeypatch, target):
    """A pass that overlooks the product would write what it found behind it."""
    monkeypatch.setattr(hoist, "FLAT", hoist.FLAT | {torch.ops.aten.mul.Tensor})
    report = check(Halved(), target)
    assert report.fused["latent_attention"] == 1
    assert any(reason.startswith("hoisting would change copy_") for reason in report.refuted), str(report)
    found = types(converted.graphs[-1]) if target == "ge" else []
    assert target == "aclgraph" or "FusedInferAttentionScore" in found
