"""Layers that are nearly latent attention: results are right, and each refusal says why."""

import pytest
import torch
from lib.layers import QUIET, Layer, Reporting, Sizes, arguments_of, check, check_no_further, in_type, variant
from torch import nn

pytestmark = [pytest.mark.filterwarnings(line) for line in QUIET]


class OneAppended(Layer):
    def store(self, latent, k_rope, position, kv_cache, kr_cache):
        kv_cache.index_copy_(2, position, latent)
        return kv_cache, torch.cat((kr_cache[:, :, self.sizes.tokens :], k_rope), dim=2)


class ComputedQuery(Layer):
    def query(self, x):
        z, scale = self.sizes, torch.linspace(0.5, 1.5, len(self.q_b), dtype=torch.float64)
        q = self.norm(x @ self.q_a.T, self.q_gamma) @ (self.q_b * scale[:, None]).T
        return q.unflatten(-1, (z.heads, z.query)).transpose(1, 2)


ScaledStates = variant("ScaledStates", query=lambda my, x: Layer.query(my, x * torch.tensor(1.5, dtype=torch.float64)))
KeyAsItIs = variant("KeyAsItIs", rotate_key=lambda my, x, *tables: x)


class CrossedQuery(Layer):
    """The rotary columns of a head come before the others."""

    def query(self, x):
        q = super().query(x)
        return torch.cat((q[..., self.sizes.rope :], q[..., : self.sizes.rope]), dim=-1)


class ApartRows(Layer):
    """Latent and rotary key are projected by two matrices."""

    def __init__(self):
        super().__init__()
        latent, k_rope = self.kv_a.split([self.sizes.rank, self.sizes.rope])
        self.latent, self.k_rope = nn.Parameter(latent.clone()), nn.Parameter(k_rope.clone())

    def rows(self, x):
        return self.norm(x @ self.latent.T, self.kv_gamma).unsqueeze(1), (x @ self.k_rope.T).unsqueeze(1)


class CrossedRows(Layer):
    """The rotary key comes before the latent in their matrix."""

    def rows(self, x):
        k_rope, latent = (x @ self.kv_a.T).split([self.sizes.rope, self.sizes.rank], dim=-1)
        return self.norm(latent, self.kv_gamma).unsqueeze(1), k_rope.unsqueeze(1)


class KeyInPairs(Layer):
    def rotate_key(self, x, cos, sin):
        half = self.sizes.rope // 2
        first, second, cos, sin = x[..., ::2], x[..., 1::2], cos[..., :half], sin[..., :half]
        return torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2)


class TurnedCaches(Layer):
    """Caches in the layout [B,1,width,T]."""

    def __init__(self):
        super().__init__(Sizes(rank=6))

    def store(self, latent, k_rope, position, *caches):
        turned = [cache.transpose(2, 3).contiguous() for cache in caches]
        for cache, new in zip(turned, (latent, k_rope), strict=True):
            cache.index_copy_(3, position, new.transpose(2, 3))
        return [cache.transpose(2, 3) for cache in turned]


class GroupsOfOneWeight(Layer):
    """The latent is normalised in two groups of columns, each by the same weight."""

    def rows(self, x):
        latent, k_rope = (x @ self.kv_a.T).split([self.sizes.rank, self.sizes.rope], dim=-1)
        groups = self.norm(latent.unflatten(-1, (2, -1)), self.kv_gamma[: self.sizes.rank // 2])
        return groups.flatten(-2).unsqueeze(1), k_rope.unsqueeze(1)


class TwoMatrices(Layer):
    """The latent comes from one matrix, the rotary key from the same rows of another."""

    def __init__(self):
        super().__init__()
        self.other = nn.Parameter(self.kv_a.flip(0))

    def rows(self, x):
        latent, k_rope = x @ self.kv_a[: self.sizes.rank].T, x @ self.other[self.sizes.rank :].T
        return self.norm(latent, self.kv_gamma).unsqueeze(1), k_rope.unsqueeze(1)


class OneRow(Layer):
    """Every column of latent and rotary key is the same."""

    def __init__(self):
        super().__init__()
        self.kv_a = nn.Parameter(self.kv_a[:1].clone())

    def rows(self, x):
        z = self.sizes
        latent, k_rope = (x @ self.kv_a.expand(z.rank + z.rope, -1).T).split([z.rank, z.rope], dim=-1)
        return self.norm(latent, self.kv_gamma).unsqueeze(1), k_rope.unsqueeze(1)


class TurnedRows(Layer):
    """Sequences are cached as tokens, and tokens as sequences."""

    def __init__(self):
        super().__init__(Sizes(batch=3))

    def rows(self, x):
        return super().rows(x.transpose(0, 1))


class NarrowAttention(Layer):
    """Without caches, and in single precision after the projections."""

    def __init__(self):
        super().__init__(Sizes(context=3))

    def mask(self, position):
        return torch.zeros(len(position), len(position))

    def store(self, latent, k_rope, position, *caches):
        return latent.float(), k_rope.float()

    def attend(self, q_nope, q_rope, latent, k_rope, mask):
        return super().attend(q_nope.float(), q_rope.float(), latent, k_rope, mask.float()).double()

    def keys(self, latent, k_rope):
        z = self.sizes
        expanded = (latent.squeeze(1) @ self.kv_b.float().T).unflatten(-1, (z.heads, -1)).transpose(1, 2)
        k_nope, value = expanded.split([z.nope, z.value], dim=-1)
        return torch.cat((k_nope, k_rope.expand(-1, z.heads, -1, -1)), dim=-1), value


class OneContext(Layer):
    """Attention sees only the latent of one token."""

    def keys(self, latent, k_rope):
        return super().keys(latent[:, :, 3:4].expand_as(latent), k_rope)


class OneColumn(Layer):
    """A rotary part of one column, which cannot be rotated."""

    def __init__(self):
        super().__init__(Sizes(rope=1))

    def rotate(self, x, *tables):
        return x


class KeyByQuery(Layer):
    """Each query token has its own rotary keys."""

    def attend(self, q_nope, q_rope, latent, k_rope, mask):
        key, value = self.keys(latent, k_rope)
        times = torch.arange(1.0, 1 + self.sizes.tokens, dtype=torch.float64).view(-1, 1, 1)
        rotary = (q_rope.unsqueeze(3) * (k_rope.unsqueeze(2) * times)).sum(-1)
        scores = q_nope @ key[..., : self.sizes.nope].transpose(-1, -2) + rotary
        return self.combine(scores * self.sizes.query**-0.5 + mask, value)


LAYERS = {
    KeyByQuery: ("k_rope depends on more than its own dimensions",),
    OneAppended: ("are not cached in the same way", "latent and rotary key are written to different positions"),
    ComputedQuery: ("weight_uq is computed in the graph, expected a parameter",),
    ScaledStates: ("a projection of the prolog is multiplied by 1.5",),
    CrossedQuery: ("the weights of q_nope and q_rope are not adjacent in one matrix",),
    ApartRows: ("the weights of latent and rotary key are two parameters; the operator takes one matrix",),
    CrossedRows: ("the weights of latent and rotary key are not adjacent in one matrix",),
    KeyAsItIs: ("only one of query and key is rotated",),
    KeyInPairs: ("the query is rotated in layout half_half, the key in interleave_interleave",),
    TurnedCaches: ("the cache is written along the last dimension, expected whole rows",),
    GroupsOfOneWeight: ("the norm is not over the columns of a row",),
    TwoMatrices: ("the weights of latent and rotary key are two parameters; the operator takes one matrix",),
    OneRow: ("the weights of latent and rotary key are not adjacent in one matrix",),
    TurnedRows: ("query and cached rows are not computed from the same tokens",),
    OneContext: ("the latent is not along the context",),
    OneColumn: (),
}


@pytest.mark.parametrize("kind", LAYERS, ids=lambda kind: kind.__name__)
def test_near_twins_of_a_layer(kind):
    report = check(kind())
    reasons = {miss.reason for miss in report.misses}
    for reason in LAYERS[kind]:
        assert any(reason in told for told in reasons), reasons


def test_single_precision_behind_the_projections():
    layer = NarrowAttention()
    given, backend = arguments_of(layer), Reporting()
    with torch.no_grad():
        found, expected = torch.compile(layer, backend=backend)(*given), layer(*given)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert "token_x is torch.float64, the cache torch.float32" in {miss.reason for miss in backend.report.misses}


class NormsApart(Layer):
    """The query's norm rounds before its weight is multiplied, the latent's after it."""

    def norm(self, x, gamma):
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return gamma * normed.to(x.dtype) if gamma is self.q_gamma else (gamma.float() * normed).to(x.dtype)


def test_norms_that_round_in_different_places():
    layer = NormsApart().bfloat16()
    report = check_no_further(layer, in_type(arguments_of(layer), torch.bfloat16))
    assert "the two norms of the prolog round in different places" in {miss.reason for miss in report.misses}
