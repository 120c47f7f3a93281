"""Near twins of scores that are filled with a number: all of the logits are that number, or nothing fuses."""

import math

import pytest
import torch
from lib.layers import QUIET, LeftPadded, arguments, check, check_no_further, in_type
from lib.log_sums import Attention, compiled
from lib.log_sums import arguments as paged

pytestmark = [pytest.mark.filterwarnings(line) for line in QUIET]


class Parts(LeftPadded):
    """The two products apart, so that either can be filled before they are added."""

    def __init__(self, fill):
        super().__init__()
        self.fill = fill

    def attend(self, q_nope, q_rope, latent, k_rope, mask):
        key, value = self.keys(latent, k_rope)
        nope, rope = key.split([q_nope.shape[-1], q_rope.shape[-1]], dim=-1)
        return self.combine(self.logits(self.scores(q_nope, nope), self.scores(q_rope, rope), mask), value)


class Both(Parts):
    def logits(self, nope, rope, mask):
        return (nope + rope).masked_fill(mask, self.fill)


class OnlyNope(Parts):
    def logits(self, nope, rope, mask):
        return nope.masked_fill(mask, self.fill) + rope


class OnlyRope(Parts):
    def logits(self, nope, rope, mask):
        return nope + rope.masked_fill(mask, self.fill)


class EachOfThem(Parts):
    def logits(self, nope, rope, mask):
        return nope.masked_fill(mask, self.fill) + rope.masked_fill(mask, self.fill)


class Enlarged(Parts):
    """What the lowest number of the type becomes is minus infinity."""

    def logits(self, nope, rope, mask):
        return (nope + rope).masked_fill(mask, self.fill) * 2


class ThereAndBack(Parts):
    """One factor cancels the other, but not what became minus infinity in between."""

    def logits(self, nope, rope, mask):
        return (nope + rope).masked_fill(mask, self.fill) * 2 / 2


def test_fill_that_is_infinite_on_its_way():
    assert "latent_attention" in check(ThereAndBack(-1e4)).fused
    report = check(ThereAndBack(torch.finfo(torch.float64).min))
    assert any("which is infinite before the scale is applied" in miss.reason for miss in report.misses), str(report)


@pytest.mark.slow
@pytest.mark.parametrize("fill", [-1.5, -1e4])
@pytest.mark.parametrize("kind", [Both, OnlyNope, OnlyRope, EachOfThem, Enlarged])
def test_what_is_filled(kind, fill):
    report = check(kind(fill))
    assert ("latent_attention" in report.fused) == (kind in (Both, Enlarged))


def test_part_of_the_scores_is_filled():
    reasons = [miss.reason for miss in check(OnlyNope(-1.5)).misses]
    assert reasons == ["only part of the attention scores is filled with a number"]


def test_lowest_number_enlarged(outcome):
    """Rows that see nothing are NaN in eager mode and zeros here, so every row sees something."""

    class Seeing(Enlarged):
        def mask(self, position):
            return torch.arange(self.sizes.context) > position[:, None]

    assert check(Seeing(torch.finfo(torch.float64).min)).fused
    outcome(check_no_further(Seeing(torch.finfo(torch.float32).min).float(), in_type(arguments(), torch.float32)))


@pytest.mark.parametrize("fill", [-3.3, -0.1, -1e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_fill_that_the_type_rounds(fill, dtype):
    """The operator takes the number as the program writes it, so both are the same in float64."""
    report = check_no_further(Both(fill).to(dtype), in_type(arguments(), dtype), strict=True)
    assert report.fused["latent_attention"] == 1 and (report.unchecked, report.refuted) == ([], [])


class Stretched(Parts):
    """The product of both factors is just above 1."""

    def logits(self, nope, rope, mask):
        return (nope + rope).masked_fill(mask, self.fill) * 0.1 * math.nextafter(10, 11)


def test_a_fill_just_beyond_the_lowest_number():
    """PyTorch fills with no number beyond the range of the type."""
    fill = torch.finfo(torch.float32).min
    report = check_no_further(Stretched(fill).float(), in_type(arguments(), torch.float32), strict=True)
    assert report.fused["latent_attention"] == 1


class Hidden(Attention):
    """The first position sees nothing."""

    def masked(self, scores, positions):
        seen = positions.unsqueeze(-1) * torch.arange(scores.shape[-1]) % 5 > 2
        return scores.masked_fill(~seen.unsqueeze(1), -1e30)


def test_a_log_sum_exp_of_fills():
    found, report = compiled(Hidden(), paged(torch.float32), strict=True)
    assert report.fused == {"latent_attention": 1} and (report.unchecked, report.refuted) == ([], [])
    for one, wanted in zip(found, Hidden()(*paged(torch.float32)), strict=True):
        torch.testing.assert_close(one, wanted, rtol=1e-5, atol=1e-5)
