"""Projections of every kind: which parts of a layer fuse, and why the rest does not."""

import re

import pytest
import torch
from lib.layers import FUSED, QUIET, Absorbed, Layer, check
from torch import nn
from torch.nn.functional import linear

import mla_fx
from mla_fx import cases

pytestmark = [pytest.mark.filterwarnings(line) for line in QUIET]

KEY_SIDE = {"kv_rmsnorm_rope_cache": 1, "latent_attention": 1}
PROJECTIONS = ("q_a", "q_b", "kv_a", "kv_b")


class Projected(Layer):
    """Every product with a weight is made by `project`."""

    def __init__(self, changed):
        super().__init__()
        self.changed = changed

    def project(self, name, x):
        weight = getattr(self, name)
        return self.change(x, weight) if name == self.changed else linear(x, weight)

    def query(self, x):
        q = self.project("q_b", self.norm(self.project("q_a", x), self.q_gamma))
        return q.unflatten(-1, (self.sizes.heads, self.sizes.query)).transpose(1, 2)

    def rows(self, x):
        latent, k_rope = self.project("kv_a", x).split([self.sizes.rank, self.sizes.rope], dim=-1)
        return self.norm(latent, self.kv_gamma).unsqueeze(1), k_rope.unsqueeze(1)

    def keys(self, latent, k_rope):
        z = self.sizes
        expanded = self.project("kv_b", latent.squeeze(1)).unflatten(-1, (z.heads, z.nope + z.value)).transpose(1, 2)
        k_nope, value = expanded.split([z.nope, z.value], dim=-1)
        return torch.cat((k_nope, k_rope.expand(-1, z.heads, -1, -1)), dim=-1), value


class Bias(Projected):
    def __init__(self, changed):
        super().__init__(changed)
        self.bias = nn.Parameter(torch.linspace(-1, 1, len(getattr(self, changed)), dtype=torch.float64))

    def change(self, x, weight):
        return linear(x, weight, self.bias)


class AddedBias(Bias):
    def change(self, x, weight):
        return x @ weight.T + self.bias


class Lora(Projected):
    def __init__(self, changed):
        super().__init__(changed)
        out, inner = getattr(self, changed).shape
        numbers = torch.arange(4 * (out + inner), dtype=torch.float64).sin() / 2
        self.down, self.up = (nn.Parameter(part) for part in numbers.view(4, -1).split([inner, out], dim=1))

    def change(self, x, weight):
        return linear(x, weight) + linear(linear(x, self.down), self.up.T) * 0.7


REASONS = {Bias: "has a bias", AddedBias: "has a bias", Lora: r"a second product is added .*\(a LoRA branch, "}


@pytest.mark.slow
@pytest.mark.parametrize("changed", PROJECTIONS)
@pytest.mark.parametrize("kind", REASONS, ids=lambda kind: kind.__name__)
def test_something_added_to_a_projection(kind, changed):
    """The prolog has no operand for it, the key side needs none; with it, keys and values are not latent attention."""
    report = check(kind(changed))
    assert report.fused == ({} if changed == "kv_b" else KEY_SIDE), str(report)
    assert re.search(REASONS[kind], str(report)), str(report)


class TwoKeyWeights(Layer):
    """Latent and rotary key have separate parameters."""

    def __init__(self):
        super().__init__()
        self.latent, self.key = (nn.Parameter(part.detach().clone()) for part in self.kv_a.split(self.sizes.rank))

    def rows(self, x):
        return self.norm(x @ self.latent.T, self.kv_gamma).unsqueeze(1), (x @ self.key.T).unsqueeze(1)


class TwoQueryWeights(Layer):
    def __init__(self):
        super().__init__()
        parts = self.q_b.detach().unflatten(0, (self.sizes.heads, -1)).split([self.sizes.nope, self.sizes.rope], dim=1)
        self.nope, self.rope = (nn.Parameter(part.flatten(0, 1).clone()) for part in parts)

    def query(self, x):
        latent = self.norm(x @ self.q_a.T, self.q_gamma)
        parts = [(latent @ weight.T).unflatten(-1, (self.sizes.heads, -1)) for weight in (self.nope, self.rope)]
        return torch.cat(parts, dim=-1).transpose(1, 2)


@pytest.mark.parametrize("kind", [TwoKeyWeights, TwoQueryWeights])
def test_two_parameters_where_the_operator_takes_one(kind):
    report = check(kind())
    assert report.fused == KEY_SIDE, str(report)
    assert "are two parameters; the operator takes one matrix, which would be a copy of both" in str(report)


class Presplit(Absorbed):
    """The up projection comes as two parameters, one for keys and one for values."""

    def __init__(self):
        super().__init__()
        z = self.sizes
        parts = self.kv_b.detach().unflatten(0, (z.heads, -1)).split([z.nope, z.value], dim=1)
        self.w_kc, self.w_vc = nn.Parameter(parts[0].clone()), nn.Parameter(parts[1].transpose(1, 2).clone())

    def attend(self, q_nope, q_rope, latent, k_rope, mask):
        key = torch.cat((latent, k_rope), -1)
        return self.over_latents(torch.cat((q_nope @ self.w_kc, q_rope), -1), key, latent, mask) @ self.w_vc


class Folded(Presplit):
    """weight_uq times weight_uk, and weight_uv times weight_o, each as one parameter."""

    def __init__(self):
        super().__init__()
        z = self.sizes
        nope, rope = self.q_b.detach().unflatten(0, (z.heads, -1)).split([z.nope, z.rope], dim=1)
        out = torch.einsum("ncv,hnv->hnc", self.w_vc, self.o.unflatten(1, (z.heads, -1)))
        self.q_b = nn.Parameter(torch.cat((torch.einsum("ndq,ndc->ncq", nope, self.w_kc), rope), dim=1).detach())
        self.o = nn.Parameter(out.flatten(1).detach())

    def attended(self, x, tables, position, caches):
        latent = self.norm(x @ self.q_a.T, self.q_gamma)
        q = torch.einsum("bsq,ncq->bnsc", latent, self.q_b)
        query, q_rope = q.split([self.sizes.rank, self.sizes.rope], dim=-1)
        latent, k_rope = self.rows(x)
        q_rope, k_rope = self.rotate(q_rope, *tables), self.rotate_key(k_rope, *tables)
        latent, k_rope = self.store(latent, k_rope, position, *caches)
        key = torch.cat((latent, k_rope), -1)
        return self.over_latents(torch.cat((query, q_rope), -1), key, latent, self.mask(position))


@pytest.mark.parametrize("kind, fused", [(Presplit, FUSED), (Folded, KEY_SIDE)])
def test_weights_prepared_by_hand(kind, fused):
    report = check(kind())
    assert report.fused == fused, str(report)


def test_two_layers_with_the_same_weights():
    class Tied(Layer):
        def forward(self, x, tables, position, caches):
            again = tuple(cache.flip(0) for cache in caches)
            return super().forward(super().forward(x, tables, position, caches), tables, position, again)

    assert check(Tied()).fused == {"mla_prolog": 2, "latent_attention": 2}


class Widened(cases.Layer):
    """Hidden states and weights are multiplied and summed in float32, and the sum is rounded to bfloat16."""

    def query(self, x):
        return self.norm(self.product(x, self.q_a), self.q_gamma) @ self.q_b.T

    def rows(self, x):
        latent, k_rope = self.product(x, self.kv_a).split([cases.HCKV, cases.DR], dim=-1)
        return self.norm(latent, self.kv_gamma).unsqueeze(1), k_rope.unsqueeze(1)

    def product(self, x, weight):
        return (x.float().unsqueeze(-2) * weight.float()).sum(-1).to(torch.bfloat16)

    def attend(self, q_nope, q_rope, latent, k_rope, mask):
        return super().attend(q_nope, q_rope, latent, k_rope, mask.to(latent.dtype))


def widened(dtype):
    x, cos, sin, position = cases.inputs()
    layer = Widened().to(torch.bfloat16)
    tables = cos.to(torch.bfloat16), sin.to(torch.bfloat16)
    return mla_fx.explain(layer, target="reference")(x.to(dtype), *tables, position)


def test_a_product_of_16_bits_taken_apart():
    """So Inductor does with a thin product, where it tunes."""
    assert widened(torch.bfloat16).fused == {"mla_prolog": 1, "latent_attention": 1}


def test_tokens_of_32_bits_are_not_taken_for_16():
    report = widened(torch.float32)
    assert report.fused == KEY_SIDE
    assert "token_x is torch.float32, the cache torch.bfloat16" in str(report), str(report)
