"""One cache for latents and rotary keys: one write, no copy of the cache, and near twins."""

import copy
from dataclasses import replace

import pytest
import torch
from lib.layers import FUSED, QUIET, Layer, arguments, check
from lib.zoo.entries import DEFAULT, Entry
from lib.zoo.sizes import DECODE

import mla_fx

pytestmark = [pytest.mark.filterwarnings(line) for line in (*QUIET, "ignore::mla_fx.MlaWarning")]


ATTENTION = {"latent_attention": 1}


class Combined(Layer):
    """A cache [B, 1, T, R + Dr + `spare`], in place of a layer's two caches."""

    spare, fused = 0, FUSED

    def store(self, latent, k_rope, position, cache, _):
        z = self.sizes
        self.write(cache, latent, k_rope, position)
        return self.read(cache).split([z.rank, z.rope], dim=-1)

    def write(self, cache, latent, k_rope, position):
        cache.index_copy_(2, position, torch.cat((latent, k_rope), -1))

    def read(self, cache):
        return cache[..., : self.sizes.rank + self.sizes.rope]


class InTwo(Combined):
    def write(self, cache, latent, k_rope, position):
        cache[:, :, position, : self.sizes.rank] = latent
        cache[:, :, position, self.sizes.rank :] = k_rope


class KeysFirst(InTwo):
    def write(self, cache, latent, k_rope, position):
        cache[..., self.sizes.rank :].index_copy_(2, position, k_rope)
        cache[..., : self.sizes.rank].index_copy_(2, position, latent)


class OfEachSequence(InTwo):
    def write(self, cache, latent, k_rope, position):
        where = torch.arange(2)[:, None], position - 2 * torch.arange(2)[:, None]
        cache[:, 0, :, : self.sizes.rank][where] = latent.squeeze(1)
        cache[:, 0, :, self.sizes.rank :][where] = k_rope.squeeze(1)

    def mask(self, position):
        return torch.zeros(self.sizes.tokens, self.sizes.context, dtype=self.o.dtype)


class AtNumber(InTwo):
    def write(self, cache, latent, k_rope, position):
        cache[:, :, 4:7, : self.sizes.rank] = latent
        cache[:, :, 4:7, self.sizes.rank :] = k_rope


class TwoPositions(InTwo):
    fused = ATTENTION

    def write(self, cache, latent, k_rope, position):
        cache[..., : self.sizes.rank].index_copy_(2, position, latent)
        cache[..., self.sizes.rank :].index_copy_(2, position - 1, k_rope)


class Overlapping(InTwo):
    """The keys also overwrite the last two columns of the latents."""

    fused = ATTENTION

    def write(self, cache, latent, k_rope, position):
        cache[..., : self.sizes.rank].index_copy_(2, position, latent)
        wide = torch.cat((k_rope[..., :2], k_rope), -1)
        cache[..., self.sizes.rank - 2 :].index_copy_(2, position, wide)


class Spare(InTwo):
    """Columns that nothing is written to."""

    spare, fused = 3, {"latent_attention": 1}

    def write(self, cache, latent, k_rope, position):
        z = self.sizes
        cache[..., : z.rank].index_copy_(2, position, latent)
        cache[..., z.rank : z.rank + z.rope].index_copy_(2, position, k_rope)


class SpareInOne(Combined):
    """Rows with zeros at the end, written at once."""

    spare = 3

    def write(self, cache, latent, k_rope, position):
        cache.index_copy_(2, position, torch.cat((latent, k_rope, torch.zeros_like(k_rope[..., :3])), -1))


class ReadBetween(InTwo):
    """The content of the cache between the two writes is returned."""

    def write(self, cache, latent, k_rope, position):
        cache[..., : self.sizes.rank].index_copy_(2, position, latent)
        self.between = cache * 2
        cache[..., self.sizes.rank :].index_copy_(2, position, k_rope)

    def forward(self, *given):
        return super().forward(*given), self.between


class OldRead(InTwo):
    def forward(self, x, tables, position, caches):
        old = caches[0][..., -8:].clone()
        return super().forward(x, tables, position, caches), old - caches[0][..., -8:]


class Turned(Combined):
    """Keys before latents, and the keys written twice."""

    fused = ATTENTION

    def write(self, cache, latent, k_rope, position):
        cache.index_copy_(2, position, torch.cat((latent[..., : self.sizes.rope], latent[..., 6:], k_rope), -1))


class LatentsShifted(InTwo):
    fused = ATTENTION

    def write(self, cache, latent, k_rope, position):
        super().write(cache, latent + 1.5, k_rope, position)


KINDS = [Combined, InTwo, KeysFirst, OfEachSequence, AtNumber, TwoPositions, Overlapping, Spare, SpareInOne]
KINDS += [ReadBetween, OldRead, Turned, LatentsShifted]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_near_twins_of_one_cache(kind):
    layer = kind()
    x, tables, position, (latents, keys) = arguments(layer.sizes, first=8)
    cache = torch.cat((latents, keys, keys[..., : kind.spare]), -1)
    report = check(layer, (x, tables, position, (cache, keys)))
    assert report.fused == kind.fused and bool(report.misses) == (kind.fused != FUSED), str(report)


class ValuesUnlikeLatents(InTwo):
    def combine(self, scores, value):
        return scores.softmax(-1) @ value.sin()


def test_two_writes_stay_where_attention_does_not_fuse():
    layer = ValuesUnlikeLatents()
    x, tables, position, caches = arguments(layer.sizes, first=8)
    report = check(layer, (x, tables, position, (torch.cat(caches, -1), caches[1])))
    assert report.fused == {} and report.misses
    assert not any(record.fired for record in report.passes), report.passes


@pytest.mark.slow
@pytest.mark.parametrize(
    "cache", [pytest.param("combined", marks=pytest.mark.campaign), "combined_in_two", "combined_paged"]
)
def test_inductor_copies_no_cache(cache):
    """Generated code allocates nothing as large as the cache."""
    from torch._inductor.utils import run_and_get_code

    entry = Entry(replace(DEFAULT, cache=cache, sizes=replace(DEFAULT.sizes, context=512)))
    module, given = entry.build(), entry.arguments(DECODE)
    theirs = copy.deepcopy(given)
    with torch.no_grad():
        run = torch.compile(module, backend=mla_fx.get_backend(target="inductor"))
        found, codes = run_and_get_code(run, *given)
        torch.testing.assert_close((found, given), (module(*theirs), theirs), rtol=1e-4, atol=1e-5)
    assert mla_fx.last_report().fused == FUSED
    sizes = [line for code in codes for line in code.splitlines() if "empty_strided" in line and "512" in line]
    assert not [line for line in sizes if ", 26)" in line or ", 20)" in line], sizes
