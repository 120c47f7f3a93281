"""Int8 caches in pages or slots, with scales that are given: the key side fuses, and attention over what is read."""

import copy

import pytest
import torch
from lib.coded_pages import CodedPages, OneScale, RoundedFirst, coded, given
from lib.layers import Rewritten

pytestmark = [pytest.mark.usefixtures("no_gradients"), pytest.mark.filterwarnings("ignore::mla_fx.MlaWarning")]
KEY_SIDE = "kv_rmsnorm_rope_cache"
ONE_EACH = {KEY_SIDE: 1, "latent_attention": 1}
DTYPES = (torch.float32, torch.bfloat16)


def report_of(layer):
    """After the output and the caches were compared with those of eager mode."""
    ours, theirs = given(layer), given(layer)
    wanted = copy.deepcopy(layer)(*theirs)
    run = Rewritten(layer)
    found = run(*ours)
    assert (found - wanted).norm() <= (2e-2 if found.dtype == torch.bfloat16 else 1e-5) * wanted.norm()
    for mine, other in zip(ours[-1], theirs[-1], strict=True):
        is_codes = other.dtype == torch.int8
        assert torch.equal(mine, other) if is_codes else torch.allclose(mine, other, rtol=1e-2, atol=1e-2)
    return run.report


def reasons(report):
    return [miss.reason for miss in report.misses if miss.pattern == KEY_SIDE]


class IndexCopy(CodedPages):
    def write(self, cache, slots, rows):
        cache.view(-1, cache.shape[-1]).index_copy_(0, slots, rows.flatten(0, 2))


class BlocksAndOffsets(CodedPages):
    def write(self, cache, slots, rows):
        cache[slots // self.block, slots % self.block] = rows.flatten(0, 2).unsqueeze(1)


class TablesOfTokens(CodedPages):
    """Each token has its own row of the rotary tables."""

    def rotate(self, x, cos, sin):
        lead = x.shape[0], 1, *cos.shape
        return super().rotate(x, *(table.repeat(x.shape[0], 1).view(lead) for table in (cos, sin)))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [CodedPages, OneScale, RoundedFirst, IndexCopy, BlocksAndOffsets, TablesOfTokens])
def test_the_key_side_writes_the_programs_codes(kind, dtype):
    report = report_of(kind(dtype))
    assert report.fused == ONE_EACH and not report.notes, str(report)


# --- near twins ------------------------------------------------------------------------------------------------------


class ScalesOfTheOther(CodedPages):
    """Its own program: keys have the scales of some latents. The operator is given these."""

    def stored_key(self, k_rope, slots, cache):
        scale = self.of_latents[: self.sizes.rope]
        self.write(cache, slots, coded(k_rope, scale))
        return self.dequantised(cache, scale.reciprocal())


class AnotherDescale(CodedPages):
    """What is read is multiplied by other numbers. Attention is over the result."""

    def dequantised(self, cache, by):
        return super().dequantised(cache, by.flip(0))


@pytest.mark.parametrize("kind", [ScalesOfTheOther, AnotherDescale])
def test_a_near_twin_fuses_as_it_is(kind):
    assert report_of(kind()).fused == ONE_EACH


class KeysElsewhere(CodedPages):
    def stored_key(self, k_rope, slots, cache):
        return super().stored_key(k_rope, slots + 1, cache)


class RunningMaximum(CodedPages):
    """The graph updates its scale from the tokens, and quantises these by it."""

    def stored(self, latent, slots, cache):
        self.of_latents.copy_(torch.minimum(self.of_latents, 127 / latent.float().abs().amax((0, 1, 2))))
        return super().stored(latent, slots, cache)


class SlotsOfScales(CodedPages):
    """The scale is that of the slot, not of the column."""

    def stored(self, latent, slots, cache):
        of_slots = self.of_latents[slots % len(self.of_latents)].view(latent.shape[0], 1, -1, 1)
        self.write(cache, slots, coded(latent, of_slots))
        return self.dequantised(cache, self.of_latents.reciprocal())


TWINS = {
    KeysElsewhere: "latent and rotary key are written to different positions",
    RunningMaximum: "the scale of codes is computed from the rows that it multiplies, expected a scale that is given",
    SlotsOfScales: "codes have scales of tokens, expected one scale or one for each column",
}


@pytest.mark.parametrize("kind", TWINS)
def test_a_near_twin_keeps_its_codes(kind):
    report = report_of(kind())
    assert report.fused == {"latent_attention": 1}, str(report)
    assert reasons(report) == [TWINS[kind]]


class OldCodes(CodedPages):
    def stored(self, latent, slots, cache):
        old = self.dequantised(cache, self.of_latents.reciprocal())
        super().stored(latent, slots, cache)
        return old


def test_attention_reads_old_codes():
    report = report_of(OldCodes())
    assert report.fused == {"latent_attention": 1} and not reasons(report), str(report)
