"""Layers of models that transformers does not have, restated: what fuses, and why the rest does not."""

import pytest
import torch
from lib.layers import FUSED, QUIET, Layer, Sizes, arguments, check
from torch import nn

pytestmark = [pytest.mark.filterwarnings(line) for line in QUIET]
ATTENTION = {"latent_attention": 1}
WITH_ROWS = {"kv_rmsnorm_rope_cache": 1, **ATTENTION}


def weight(out, inner, seed):
    drawn = torch.randn(out, inner, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return nn.Parameter(drawn * inner**-0.5)


class KimiK3(Layer):
    """The rotary columns are not rotated. A gate from the hidden states multiplies the output of all heads."""

    def __init__(self, sizes=None):
        super().__init__(sizes)
        z = self.sizes
        self.gate = weight(z.heads * z.value, z.hidden, 3)

    def forward(self, x, tables, position, caches):
        out = self.attended(x, tables, position, caches).transpose(1, 2).flatten(2)
        return (out * (x @ self.gate.T).sigmoid()) @ self.o.T

    def rotate(self, x, *tables):
        return x


class GigaChat35(Layer):
    """After both norms, whose weights count from zero, comes a gate of low rank and a factor."""

    ALPHA = 1.7

    def __init__(self, sizes=None):
        super().__init__(sizes)
        z = self.sizes
        self.q_down, self.q_up = weight(4, z.query_rank, 4), weight(z.query_rank, 4, 5)
        self.kv_down, self.kv_up = weight(4, z.rank, 6), weight(z.rank, 4, 7)

    def norm(self, x, gamma):
        normalised = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * (1 + gamma)
        down, up = (self.q_down, self.q_up) if gamma is self.q_gamma else (self.kv_down, self.kv_up)
        return self.ALPHA * normalised * torch.sigmoid(normalised @ down.T @ up.T)


class TransMLA(Layer):
    """Converted from grouped heads: no norms, biases, a scale by the columns without rotation, every second angle."""

    def __init__(self, sizes=None):
        super().__init__(sizes)
        z = self.sizes
        self.q_bias, self.q_a_bias, self.kv_a_bias = (
            nn.Parameter(weight(1, size, seed)[0].detach())
            for seed, size in ((8, z.heads * z.query), (9, z.query_rank), (10, z.rank + z.rope))
        )

    def query(self, x):
        q = (x @ self.q_a.T + self.q_a_bias) @ self.q_b.T + self.q_bias
        return q.unflatten(-1, (self.sizes.heads, self.sizes.query)).transpose(1, 2)

    def rows(self, x):
        latent, k_rope = (x @ self.kv_a.T + self.kv_a_bias).split([self.sizes.rank, self.sizes.rope], dim=-1)
        return latent.unsqueeze(1), k_rope.unsqueeze(1)

    def rotate(self, x, cos, sin):
        return super().rotate(x, cos[..., ::2], sin[..., ::2])

    def scores(self, query, key):
        return query @ key.transpose(-1, -2) * self.sizes.nope**-0.5


class Mha2Mla(Layer):
    """The rotary columns of a head are chosen by numbers."""

    def __init__(self, sizes=None):
        super().__init__(sizes)
        z = self.sizes
        columns = torch.randperm(z.query, generator=torch.Generator().manual_seed(11))
        self.register_buffer("rotary", columns[: z.rope].sort().values)
        self.register_buffer("others", columns[z.rope :].sort().values)

    def query(self, x):
        q = super().query(x)
        return torch.cat((self.chosen(q, self.others), self.chosen(q, self.rotary)), dim=-1)

    def chosen(self, q, columns):
        return q.index_select(-1, columns)


class Mha2MlaByIndexing(Mha2Mla):
    def chosen(self, q, columns):
        return q[..., columns]


class Mha2MlaGathered(Mha2Mla):
    def chosen(self, q, columns):
        return q.gather(-1, columns.expand(*q.shape[:-1], -1))


class SlidingWindow(Layer):
    """A token sees the last eight alone."""

    WINDOW = 8

    def mask(self, position):
        places = torch.arange(self.sizes.context)
        hidden = (places > position[:, None]) | (places <= position[:, None] - self.WINDOW)
        return torch.zeros(hidden.shape, dtype=self.o.dtype).masked_fill(hidden, -torch.inf)


class SlidingWindowOfRows(Layer):
    """The rows that no token sees are not read: a cache of fixed length gives its last ones."""

    WINDOW = 8

    def store(self, latent, k_rope, position, kv_cache, kr_cache):
        super().store(latent, k_rope, position, kv_cache, kr_cache)
        first = self.sizes.context - self.WINDOW - self.sizes.tokens
        return kv_cache[:, :, first:], kr_cache[:, :, first:]

    def mask(self, position):
        places = torch.arange(self.sizes.context)[self.sizes.context - self.WINDOW - self.sizes.tokens :]
        hidden = (places > position[:, None]) | (places <= position[:, None] - self.WINDOW)
        return torch.zeros(hidden.shape, dtype=self.o.dtype).masked_fill(hidden, -torch.inf)


class NoRotaryColumns(Layer):
    """Caches of rotary keys are there, without columns."""

    def __init__(self, sizes=None):
        super().__init__(sizes or Sizes(rope=0))

    def rotate(self, x, *tables):
        return x


def given(layer):
    """With twice as many angles for a layer that takes every second one."""
    x, tables, *rest = arguments(layer.sizes)
    if isinstance(layer, TransMLA):
        tables = tuple(torch.stack((table, -table), -1).flatten(-2) for table in tables)
    return x, tables, *rest


CASES = {
    KimiK3: (FUSED, ""),
    GigaChat35: (ATTENTION, "an RMSNorm is multiplied by one weight, found add, sigmoid"),
    TransMLA: (ATTENTION, "expected an RMSNorm, found add"),
    Mha2Mla: (WITH_ROWS, "expected a matrix product, found index_select"),
    Mha2MlaByIndexing: (WITH_ROWS, "expected a matrix product, found index"),
    Mha2MlaGathered: (WITH_ROWS, "expected a matrix product, found gather"),
    SlidingWindow: (FUSED, ""),
    SlidingWindowOfRows: (FUSED, ""),
    NoRotaryColumns: (FUSED, ""),
}


@pytest.mark.parametrize("kind", CASES)
def test_what_fuses(kind):
    layer, (fused, reason) = kind(), CASES[kind]
    report = check(layer, given(layer))
    assert report.fused == fused, str(report)
    assert not reason or reason in [miss.reason for miss in report.misses]


@pytest.mark.slow
@pytest.mark.parametrize("kind", CASES)
def test_symbolic_sizes(kind):
    """With any number of tokens, the query is absorbed at each call or not, so no prolog computes it."""
    layer, (fused, _) = kind(), CASES[kind]
    report = check(layer, given(layer), dynamic=True)
    rows = {"kv_rmsnorm_rope_cache": 1} if fused != ATTENTION else {}
    assert report.fused == {**rows, "mla_attention": 1}, str(report)
