"""One way to change a graph: a plan is proved, then applied as a whole; a refusal costs that plan alone."""

from __future__ import annotations

import pytest
import torch
from comparing import check_same, with_backend
from torch import nn

import mla_fx
from mla_fx import cases
from mla_fx.passes import prove

pytestmark = pytest.mark.usefixtures("no_gradients")
OPS = torch.ops.mla_fx


class Three(nn.Module):
    """Three layers, whose plans are of one kind."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(cases.Layer() for _ in range(3))

    def forward(self, x, *rest):
        for layer in self.layers:
            x = x + layer(x, *rest)
        return x


def refusing(patch, name, is_refused):
    """Plans of the pass or rule of that name are refuted where `is_refused` says so."""
    known = prove._known

    def refused(run, what, plan):
        if name in what and is_refused(plan):
            run.report.refuted.append(f"{what} would change a test")
            return run.report.refuted[-1]
        return known(run, what, plan)

    patch.setattr(prove, "_known", refused)


def in_the_second_layer(plan):
    return any("layers.1" in prove.placed_name(old) for old in plan.olds)


def fused(**options):
    """The report of three layers whose outputs and caches are eager's."""
    module = Three().eval()
    with pytest.warns(mla_fx.MlaWarning, match="a rewrite was wrong and was not made"):
        check_same(module, cases.inputs(), with_backend(module, **options))
    return mla_fx.last_report()


@pytest.mark.refutes
def test_a_refused_absorption_leaves_the_other_layers_absorbed(monkeypatch):
    refusing(monkeypatch, "absorb", in_the_second_layer)
    report = fused()
    assert report.modules["latent_attention"] == ["layers.0", "layers.2"]
    assert report.modules["mla_attention"] == ["layers.1"]
    assert report.notes.count("mla_attention stays expanded: absorb would change a test") == 1


@pytest.mark.refutes
def test_a_refuted_write_in_place_stays_a_copy_and_all_else_stays_fused(monkeypatch):
    refusing(monkeypatch, "writing in place", in_the_second_layer)
    report = fused()
    assert report.fused == {"mla_prolog": 3, "latent_attention": 3}
    [note] = report.notes
    assert note.startswith("mla_prolog does not write its caches in place: writing in place by mla_prolog")
