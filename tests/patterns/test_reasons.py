"""The reason why a layer fused less: the cause in its author's words, not the symptom."""

import pytest
import torch
from lib.layers import QUIET, Layer, Sizes, arguments, check
from torch import nn

import mla_fx

pytestmark = [pytest.mark.filterwarnings(line) for line in QUIET]

KEY_SIDE = {"kv_rmsnorm_rope_cache": 1, "latent_attention": 1}
ATTENTION = {"latent_attention": 1}


class SoftCap(Layer):
    def scores(self, query, key):
        return torch.tanh(super().scores(query, key) / 30) * 30


class Temperature(Layer):
    """Each head has its own learnt scale."""

    def __init__(self):
        super().__init__()
        self.temperature = nn.Parameter(torch.linspace(0.1, 0.4, self.sizes.heads, dtype=torch.float64).view(-1, 1, 1))

    def scores(self, query, key):
        return query @ key.transpose(-1, -2) * self.temperature


class NormedHeads(Layer):
    def __init__(self):
        super().__init__()
        self.gamma = nn.Parameter(torch.linspace(0.7, 1.3, self.sizes.nope, dtype=torch.float64))


class NormedKeys(NormedHeads):
    def keys(self, latent, k_rope):
        key, value = super().keys(latent, k_rope)
        nope = self.norm(key[..., : self.sizes.nope], self.gamma)
        return torch.cat((nope, key[..., self.sizes.nope :]), -1), value


class NormedQuery(NormedHeads):
    def query(self, x):
        query = super().query(x)
        nope = self.norm(query[..., : self.sizes.nope], self.gamma)
        return torch.cat((nope, query[..., self.sizes.nope :]), -1)


class LayerNormedQuery(Layer):
    def query(self, x):
        latent = nn.functional.layer_norm(x @ self.q_a.T, self.q_gamma.shape, self.q_gamma)
        return (latent @ self.q_b.T).unflatten(-1, (self.sizes.heads, self.sizes.query)).transpose(1, 2)


class GatedLatent(Layer):
    def norm(self, x, gamma):
        normed = super().norm(x, gamma)
        return normed * x.sum(-1, keepdim=True).sigmoid() if gamma is self.kv_gamma else normed


class WrittenWhere(Layer):
    """The cache is written without positions, for accelerators without scatter."""

    def store(self, latent, k_rope, position, kv_cache, kr_cache):
        is_here = torch.arange(self.sizes.context)[:, None] == position
        kv_cache.copy_(torch.where(is_here, latent, kv_cache))
        kr_cache.copy_(torch.where(is_here, k_rope, kr_cache))
        return kv_cache, kr_cache


class TwoWaysToWrite(Layer):
    def store(self, latent, k_rope, position, kv_cache, kr_cache):
        kv_cache[:, :, position] = latent
        kr_cache.index_copy_(2, position, k_rope)
        return kv_cache, kr_cache


ONE_TOKEN = Sizes(tokens=1)
REASONS = {
    SoftCap: ({}, "the attention scores go through tanh before the softmax, expected a product"),
    Temperature: ({}, "the attention scores are multiplied by the graph input temperature, expected a number"),
    NormedKeys: ({}, "keys are normalised per head after the up-projection, which therefore cannot be absorbed"),
    NormedQuery: (KEY_SIDE, "q_nope is normalised, which mla_prolog does not support"),
    LayerNormedQuery: (KEY_SIDE, "expected an RMSNorm, found a LayerNorm"),
    GatedLatent: (ATTENTION, "an RMSNorm is multiplied by one weight, found the graph input kv_gamma, sigmoid"),
    WrittenWhere: (ATTENTION, "the cache is written by a boolean mask, not at positions"),
    TwoWaysToWrite: (ATTENTION, "negative positions are written for only one of latent and rotary key"),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", REASONS, ids=lambda kind: kind.__name__)
def test_the_cause_is_named(kind):
    layer = kind()
    layer.sizes = ONE_TOKEN
    fused, reason = REASONS[kind]
    report = check(layer, arguments(ONE_TOKEN))
    assert report.fused == fused, str(report)
    assert {miss.reason for miss in report.misses} == {reason}


class Float8Latents(Layer):
    """Latents are cast to float8 and back before they are multiplied."""

    def store(self, latent, k_rope, position, kv_cache, kr_cache):
        kr_cache.index_copy_(2, position, k_rope)
        kv_cache.index_copy_(2, position, latent)
        return kv_cache.to(torch.float8_e4m3fn).to(latent.dtype), kr_cache


def test_latents_that_went_through_eight_bits():
    """That cast is an operation: attention is over its results, and the prolog writes the cache before it."""
    report = check(Float8Latents())
    assert report.fused == {"mla_prolog": 1, "latent_attention": 1}, str(report)
    assert not report.notes


class Model(nn.Module):
    def __init__(self, number):
        super().__init__()
        self.layers = nn.ModuleList([GatedLatent() for _ in range(number)])

    def forward(self, x, tables, position, caches):
        for layer, pair in zip(self.layers, caches, strict=True):
            x = layer(x, tables, position, pair)
        return x


def test_layers_that_differ_in_their_numbers_are_told_once():
    x, tables, position, caches = arguments()
    with torch.no_grad():
        report = mla_fx.explain(Model(3), target="reference")(x, tables, position, [caches] * 3)
    told = [line for line in str(report).splitlines() if ": an RMSNorm" in line]
    assert len(told) == 1 and "found the graph input layers.0.kv_gamma, sigmoid" in told[0], str(report)
    assert told[0].endswith("; 3 times, the last in layers.2")


class Broken(Layer):
    def store(self, *given):
        torch._dynamo.graph_break()
        return super().store(*given)


@pytest.mark.compiled
def test_an_input_from_before_a_graph_break_is_called_so():
    assert "found the graph input from before a graph break" in str(check(Broken()))
