"""`explain` traces one layer of each kind of a model on meta tensors, and counts it for all of them."""

import pytest
import torch
from lib.families import tiny_model, tokens
from torch import nn
from transformers import StaticCache

import mla_fx
from mla_fx.debug.layer_kinds import one_of_each_kind

LAYERS = {"num_hidden_layers": 5, "first_k_dense_replace": 2, "mlp_layer_types": ["dense"] * 2 + ["sparse"] * 3}


def decode(model):
    cache = StaticCache(config=model.config, max_cache_len=16)
    with torch.no_grad():
        model(tokens(1, 4).to(model.device), past_key_values=cache)
    return (tokens(1, 1).to(model.device),), {"past_key_values": cache}


@pytest.mark.slow
def test_layers_are_counted_by_their_kind():
    model = tiny_model("deepseek_v3", torch.bfloat16, **LAYERS).to("meta")
    args, kwargs = decode(model)
    report = mla_fx.explain(model, target="inductor")(*args, **kwargs)
    assert report.fused == {"mla_prolog": 5, "latent_attention": 5}
    assert report.modules["mla_prolog"] == [f"model.layers.{place}.self_attn" for place in range(5)]
    assert list(report.layers) == [f"model.layers.{place}" for place in range(5)]
    assert report.notes[0] == (
        "traced one of each group of equal layers: model.layers.0 for 2, model.layers.2 for 3"
    )
    assert not any("forward" in vars(layer) or layer._forward_hooks for layer in model.model.layers)


@pytest.mark.slow
def test_what_is_expected_is_expected_of_every_layer():
    model = tiny_model("deepseek_v3", num_hidden_layers=3, first_k_dense_replace=3).to("meta")
    args, kwargs = decode(model)
    expected = {"mla_prolog": 3, "latent_attention": 3}
    assert mla_fx.explain(model, target="reference", expect=expected)(*args, **kwargs).fused == expected


def test_values_are_computed_by_every_layer():
    with one_of_each_kind(tiny_model("deepseek_v3", **LAYERS)) as layers:
        assert layers == {}


class Part(nn.Module):
    def __init__(self, place, width=8, factor=1.0):
        super().__init__()
        self.place, self.factor = place, factor
        self.up, self.down = nn.Linear(8, width), nn.Linear(width, 8)

    def forward(self, positions, hidden, residual=None):
        residual = hidden if residual is None else hidden + residual
        return self.down(self.up(residual)) * self.factor, residual


class Parts(nn.Module):
    def __init__(self, *parts):
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, hidden):
        positions, residual = torch.arange(8, device=hidden.device, dtype=hidden.dtype), None
        for part in self.parts:
            hidden, residual = part(positions, hidden, residual)
        return hidden + residual


def paths(*places):
    return [f"parts.{place}" for place in places]


@pytest.mark.parametrize("others", [{"width": 9}, {"factor": 2.0}, {"place": 7}], ids=["size", "attribute", "no place"])
def test_what_differs_in_anything_is_of_another_kind(others):
    parts = [Part(**{"place": place, **(others if place == 1 else {})}) for place in range(4)]
    with one_of_each_kind(Parts(*parts).to("meta")) as layers:
        assert layers == {"parts.0": paths(0, 2, 3)}


def test_what_shares_weights_within_is_of_another_kind():
    with torch.device("meta"):
        parts = [Part(place) for place in range(4)]
        parts[1].down.weight = parts[1].up.weight
        parts[2].down.weight = nn.Parameter(parts[2].up.weight.data)  # two parameters, one memory
    with one_of_each_kind(Parts(*parts)) as layers:
        assert layers == {"parts.0": paths(0, 3), "parts.1": paths(1, 2)}


def test_a_layer_passes_on_what_it_would_change():
    model = Parts(*map(Part, range(3))).to("meta")
    seen = []
    model.parts[1].down.register_forward_hook(lambda *_: seen.append("down"))
    with one_of_each_kind(model) as layers, torch.no_grad():
        assert layers == {"parts.0": paths(0, 2)}  # a hook makes a difference
        model(torch.empty(3, 8, device="meta"))
    assert seen == ["down"]


def test_a_list_of_projections_is_no_list_of_layers():
    class Projections(nn.Module):
        def __init__(self):
            super().__init__()
            self.each = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    with one_of_each_kind(Projections().to("meta")) as layers:
        assert layers == {}
