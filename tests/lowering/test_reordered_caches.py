"""Inductor mixes an update of a cache with what reorders it afterwards, as beams do: our target goes around that."""

import copy

import pytest
import torch
from mla_fx.lowering.inductor import Inductor

import mla_fx
from mla_fx import cases

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_gradients", "seeded")]
NOTE = "writes a copy, which Inductor would reorder while it reads it"
BEAMS = torch.tensor([1, 0])


ORDERS = {
    "beams": lambda cache: cache.copy_(cache[BEAMS]),
    "roll": lambda cache: cache.copy_(cache.roll(1, 2)),
    "scaled": lambda cache: cache.copy_(cache[BEAMS] * 0.5),
}


class Reordered(cases.Layer):
    """A layer whose caches are reordered after each step."""

    def __init__(self, order):
        super().__init__()
        self.order = order

    def forward(self, x, *rest):
        out = super().forward(x, *rest)
        self.order(self.kv_cache)
        self.order(self.kr_cache)
        return out


class Slices(Reordered):
    """Rows are written at a place that is known, and a library reads them."""

    def store(self, latent, k_rope, position):
        self.kv_cache[:, :, 5:8] = latent
        self.kr_cache[:, :, 5:8] = k_rope
        return self.kv_cache, self.kr_cache


def check(model, target="inductor", **options):
    """Two steps, each with the results and caches of eager mode. Returns the report."""
    plain, (x, cos, sin, position) = copy.deepcopy(model), cases.inputs()
    step = torch.compile(model, backend="mla", options={"target": target, **options})
    for place in (position, position - 3):
        torch.testing.assert_close(step(x, cos, sin, place), plain(x, cos, sin, place), rtol=1e-4, atol=1e-5)
        for name, cache in plain.named_buffers():
            torch.testing.assert_close(model.get_buffer(name), cache, rtol=1e-4, atol=1e-5)
    report = mla_fx.last_report()
    assert report.fused, str(report)
    return report


@pytest.mark.parametrize("target", ["inductor", "reference"])
@pytest.mark.parametrize(
    ("order", "layer"),
    [
        ("beams", Reordered),
        ("beams", Slices),
        ("roll", Reordered),
        pytest.param("roll", Slices, marks=pytest.mark.campaign),
        pytest.param("scaled", Reordered, marks=pytest.mark.campaign),
        ("scaled", Slices),
    ],
)
def test_caches_are_reordered_after_their_update(order, layer, target):
    report = check(layer(ORDERS[order]), target)
    assert any(NOTE in note for note in report.notes) == (target == "inductor"), str(report)


class WrittenAgain(cases.Layer):
    """Rows are written after the step, too, which depend on what was read: at a number in a tensor, and in slices."""

    def forward(self, x, *rest):
        out = super().forward(x, *rest)
        row = out[:, :1, : cases.HCKV].unsqueeze(1)
        self.kv_cache.index_copy_(2, torch.tensor([15]), row)
        self.kv_cache[:, :, 14:15] = row * 0.5
        self.kv_cache[..., :4].index_copy_(2, torch.tensor([13]), row[..., :4])
        return out


@pytest.mark.parametrize("layer", [cases.Layer, WrittenAgain])
def test_updates_alone_write_no_copy(layer):
    report = check(layer())
    assert not any(NOTE in note for note in report.notes), str(report)


def beams(cache, position, row):
    cache.index_copy_(2, position, row)
    ORDERS["beams"](cache)
    return cache.sum()


def test_inductor_has_the_fault_still():
    """If this fails, `Inductor.mended` may go. A graph in which nothing fuses is stock Inductor's."""
    layer = cases.Layer()
    given = torch.tensor([3]), torch.randn(cases.B, 1, 1, cases.HCKV)
    found = {}
    for name, compile_by in (("eager", lambda step: step), ("stock", torch.compile), ("ours", mla_fx.mla_backend)):
        found[name] = layer.kv_cache.clone()
        torch._dynamo.reset()
        step = torch.compile(beams, backend=compile_by) if name == "ours" else compile_by(beams)
        step(found[name], *given)
    assert float((found["stock"] - found["eager"]).abs().max()) > 1
    assert torch.equal(found["ours"], found["stock"]) and not mla_fx.last_report().fused


def test_verify_compares_with_stock(monkeypatch):
    """It names no rewrite where Inductor's code of the original graph is as wrong."""
    monkeypatch.setattr(Inductor, "mended", lambda *given: iter(()), raising=False)
    sentence = r"input kv_cache of the .* Stock Inductor differs here, too: from the unfused graph it makes 1\."
    with pytest.raises(mla_fx.VerificationError, match=sentence) as found:
        check(Reordered(ORDERS["roll"]), verify="first")
    assert "mla_prolog" not in str(found.value)
