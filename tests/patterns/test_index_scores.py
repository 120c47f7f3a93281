"""What reads the scores of an indexer, and the values of its top-k: dtypes and rounding stay the program's."""

import copy

import pytest
import torch
from lib.comparing import Stack
from lib.layers import QUIET, Reporting
from mla_fx.patterns.lightning_index import CHOSEN, HEADS, LightningIndex

from mla_fx.cases import B, Layer, S, T, inputs

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("no_gradients"),
    *(pytest.mark.filterwarnings(line) for line in QUIET),
]
TARGETS = "reference", "inductor"
Indexed = LightningIndex.accepts[0].build


class Thresholds(Indexed):
    """llama.cpp and MLX: keys whose scores are below the last chosen one are hidden."""

    def attend(self, q_nope, q_rope, latent, k_rope, mask):
        raw = self.scores(*self.indexed)
        hidden = self.hidden(raw, (raw + mask).topk(CHOSEN, dim=-1), mask).unsqueeze(1)
        return Layer.attend(self, q_nope, q_rope, latent, k_rope, mask.masked_fill(hidden, -torch.inf))

    def hidden(self, raw, chosen, mask):
        return raw + mask < chosen.values[..., -1:]


class OfRawScores(Thresholds):
    def hidden(self, raw, chosen, mask):
        return raw < chosen.values[..., -1:]


class OfGatheredScores(Thresholds):
    def hidden(self, raw, chosen, mask):
        return raw + mask < (raw + mask).gather(-1, chosen.indices[..., -1:])


class Returned(Indexed):
    """In a layer of 16 bits, scores of float32, whose values are returned."""

    def forward(self, x, cos, sin, position):
        return super().forward(x, cos, sin, position), self.values

    def scores(self, query, keys, weights):
        products = (query.float() @ keys.float().mT.unsqueeze(1)).relu()
        return ((weights.float() * HEADS**-0.5).unsqueeze(-2) @ products).squeeze(-2)

    def attend(self, q_nope, q_rope, latent, k_rope, mask):
        self.values, chosen = (self.scores(*self.indexed) + mask).topk(CHOSEN, dim=-1)
        hidden = mask.new_ones(B, S, T, dtype=torch.bool).scatter(-1, chosen, False).unsqueeze(1)
        mask = mask.to(q_nope.dtype).masked_fill(hidden, -torch.inf)
        return Layer.attend(self, q_nope, q_rope, latent, k_rope, mask)


class Unsorted(Indexed):
    def attend(self, q_nope, q_rope, latent, k_rope, mask):
        chosen = (self.scores(*self.indexed) + mask).topk(CHOSEN, dim=-1, sorted=False).indices
        hidden = mask.new_ones(B, S, T, dtype=torch.bool).scatter(-1, chosen, False).unsqueeze(1)
        return Layer.attend(self, q_nope, q_rope, latent, k_rope, mask.masked_fill(hidden, -torch.inf))


def run(layer, target, **options):
    """What both return, the report, and both layers, which have written their caches."""
    layer, given, backend = layer.eval(), inputs(), Reporting(target=target, **options)
    dtype, other = next(layer.parameters()).dtype, copy.deepcopy(layer)
    given = [value.to(dtype) if value.is_floating_point() else value for value in given]
    torch._dynamo.reset()
    return layer(*given), torch.compile(other, backend=backend)(*given), backend.reports[-1], (layer, other)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("build", [Thresholds, OfRawScores, OfGatheredScores])
def test_a_threshold_hides_what_it_hid(build, target):
    expected, found, report, layers = run(build(), target)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    for name in ("kv_cache", "kr_cache", "index_keys"):
        torch.testing.assert_close(*(getattr(layer, name) for layer in layers))
    assert report.fused == {"mla_prolog": 1, "latent_attention": 1}, str(report)
    (reason,) = (miss.reason for miss in report.misses if miss.pattern == "lightning_index")
    reader = {Thresholds: "add", OfRawScores: "lt", OfGatheredScores: "add"}[type(layers[0])]
    assert reason == f"index scores are also read by {reader}, and the chosen ones would be rounded otherwise"


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_values_have_the_programs_digits(dtype, target):
    (_, expected), (_, found), report, _ = run(Returned().to(dtype), target)
    assert found.dtype == expected.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert report.fused["lightning_index"] == 1, str(report)
    assert not report.refuted, str(report)


@pytest.mark.parametrize("target", TARGETS)
def test_the_order_of_unsorted_keys_means_nothing(target):
    expected, found, report, _ = run(Unsorted(), target, strict=True)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert report.fused == {"mla_prolog": 1, "lightning_index": 1, "sparse_latent_attention": 1}, str(report)


class OfAnother(Indexed):
    """Values are read, scores are not. No row is hidden as a whole, whatever the scores are."""

    def attend(self, q_nope, q_rope, latent, k_rope, mask):
        chosen = (self.scores(*self.indexed) + mask).topk(CHOSEN, dim=-1)
        hidden = (mask < chosen.values[..., -1:].clamp(max=-1.0)).unsqueeze(1)
        return Layer.attend(self, q_nope, q_rope, latent, k_rope, mask.masked_fill(hidden, -torch.inf))


@pytest.mark.parametrize("layers", [(OfAnother, OfRawScores), (OfRawScores, OfAnother)])
def test_a_rewrite_is_not_repeated_where_scores_are_compared(layers):
    """The second layer compares its scores, or the first one does."""
    expected, found, report, _ = run(Stack(*(layer() for layer in layers)), "reference")
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert report.fused["lightning_index"] == 1, str(report)
