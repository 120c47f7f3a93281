"""Values at the edge of a dtype's range, seen and hidden: if eager gives numbers, so does the compiled code."""

import copy
import math

import pytest
import torch
from lib.layers import QUIET, Absorbed, Layer, Reporting, arguments, in_type
from torch.utils._pytree import tree_leaves

pytestmark = [pytest.mark.filterwarnings(line) for line in QUIET]
TARGETS = ["reference", pytest.param("inductor", marks=pytest.mark.campaign)]


def check_range(module, given, target="reference"):
    """Check that results are finite where eager's are, and at most twice as far from a float64 run as eager, plus
    rounding."""
    exact, theirs, ours = in_type(given, torch.float64), copy.deepcopy(given), copy.deepcopy(given)
    backend = Reporting(target=target)
    with torch.no_grad():
        truth = tree_leaves((copy.deepcopy(module).double()(*exact), exact[3]))
        eager = tree_leaves((module(*theirs), theirs[3]))
        found = tree_leaves((torch.compile(module, backend=backend)(*ours), ours[3]))
    for true, near, own in zip(truth, eager, found, strict=True):
        finite = near.isfinite() & true.isfinite()
        assert bool(own[finite].isfinite().all())
        scale = float(true[finite].abs().max())
        allowed = 2 * (near.double() - true)[finite].abs().max() + 4 * torch.finfo(own.dtype).eps * scale
        assert float((own.double() - true)[finite].abs().max()) <= float(allowed)
    assert bool(eager[0].isfinite().all()), "an answer of numbers is what is compared"
    return backend.report


class Filled(Layer):
    """Hidden scores are filled, whatever they were."""

    def mask(self, position):
        return torch.arange(self.sizes.context) > position[:, None]

    def attend(self, q_nope, q_rope, latent, k_rope, mask):
        key, value = self.keys(latent, k_rope)
        scores = self.scores(torch.cat((q_nope, q_rope), dim=-1), key)
        return self.combine(scores.masked_fill(mask, -torch.inf), value)


class FilledAndBiased(Filled):
    def attend(self, q_nope, q_rope, latent, k_rope, mask):
        key, value = self.keys(latent, k_rope)
        bias = torch.linspace(0, 1, self.sizes.context, dtype=key.dtype)
        scores = self.scores(torch.cat((q_nope, q_rope), dim=-1), key) + bias
        return self.combine(scores.masked_fill(mask, -torch.inf), value)


class FilledByAnyMask(Filled):
    """Not provably causal."""

    def mask(self, position):
        return super().mask(position) | (torch.arange(self.sizes.context) == 3)


@pytest.mark.slow
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 3e38])
@pytest.mark.parametrize("kind", [Filled, FilledAndBiased, FilledByAnyMask])
@pytest.mark.parametrize("target", TARGETS)
def test_hidden_slots_may_hold_anything(kind, garbage, target):
    """A cache made by torch.empty; values of every slot are read, so only rotary keys may be NaN."""
    x, tables, position, caches = in_type(arguments(), torch.float32)
    caches[1][:, :, int(position[-1]) + 1 :] = garbage
    report = check_range(kind().float(), (x, tables, position, caches), target)
    assert "latent_attention" in report.fused, str(report)


class AbsorbedFilled(Absorbed):
    def mask(self, position):
        return torch.arange(self.sizes.context) > position[:, None]

    def over_latents(self, query, key, latent, mask):
        return self.combine(self.scores(query, key).masked_fill(mask, -torch.inf), latent)


@pytest.mark.parametrize("target", TARGETS)
def test_hidden_latents_may_be_huge(target):
    x, tables, position, caches = in_type(arguments(), torch.float32)
    for cache in caches:
        cache[:, :, int(position[-1]) + 1 :] = 3e38
    assert check_range(AbsorbedFilled().float(), (x, tables, position, caches), target).fused


class ScaledFirst(Layer):
    """The query is scaled before the product, which would leave float16 otherwise."""

    def scores(self, query, key):
        return (query * 1e-3) @ key.transpose(-1, -2)


@pytest.mark.parametrize("target", TARGETS)
def test_query_that_is_scaled_before_the_product(target):
    module = ScaledFirst()
    module.q_b.data.mul_(4000)
    module.kv_b.data.mul_(20)
    report = check_range(module.half(), in_type(arguments(), torch.float16), target)
    assert "mla_attention" in report.fused, str(report)


class FactorsApart(Layer):
    """Nope and rotary scores have different factors."""

    def __init__(self, nope, rope):
        super().__init__()
        self.factors = nope, rope

    def attend(self, q_nope, q_rope, latent, k_rope, mask):
        key, value = self.keys(latent, k_rope)
        nope, rope = key.split([q_nope.shape[-1], q_rope.shape[-1]], dim=-1)
        one, other = self.factors
        scores = (q_nope @ nope.transpose(-1, -2)) * one + (q_rope @ rope.transpose(-1, -2)) * other
        return self.combine(scores + mask, value)


@pytest.mark.slow
@pytest.mark.parametrize(("nope", "rope"), [(1.0, 1e-6), (1e-6, 1.0), (30.0, 0.1), (0.1, 30.0), (1e-3, 300.0)])
def test_factors_of_nope_and_rotary_scores_in_float16(nope, rope):
    module = FactorsApart(nope, rope).half()
    report = check_range(module, in_type(arguments(), torch.float16))
    assert bool(report.fused.get("mla_attention")) == (min(nope, rope) / max(nope, rope) > 1e-3), str(report)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("target", TARGETS)
def test_values_of_1e38(dtype, target):
    """Sixteen equal scores."""

    class Equal(AbsorbedFilled):
        def query(self, x):
            return super().query(x) * 0

    x, tables, position, caches = in_type(arguments(), dtype)
    caches[0].fill_(1e38)
    module = Equal()
    module.kv_b.data.abs_().mul_(0.05)
    module.o.data.mul_(0.01)
    assert check_range(module.to(dtype), (x, tables, position, caches), target).fused
