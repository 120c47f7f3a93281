"""Positions that each write computes anew: equal ones are one, near twins are not."""

import pytest
import torch
from lib.layers import FUSED, QUIET, Layer, arguments, check, variant

pytestmark = [pytest.mark.filterwarnings(line) for line in QUIET]
LAST = 14


class Twice(Layer):
    def store(self, latent, k_rope, position, *caches):
        for cache, rows, number in zip(caches, (latent, k_rope), (0, 1), strict=True):
            cache.index_copy_(2, self.place(position, number), rows)
        return caches

    def place(self, position, number):
        return position.clamp(max=LAST)


def placed(name, place):
    return variant(name, Twice, place=lambda my, *given: place(*given))


def bounded(position, by=LAST):
    return position.clamp(max=by)


Chosen = placed("Chosen", lambda position, _: torch.where(position > LAST, 0, position))
Added = placed("Added", lambda position, _: 2 * bounded(position) - bounded(position))
OtherBound = placed("OtherBound", lambda position, number: bounded(position, LAST - number))
# Each write adds a number that is drawn, from zeros alone.
Drawn = placed("Drawn", lambda position, _: position + torch.randint(0, 1, position.shape))
WrittenBetween = placed("WrittenBetween", lambda position, number: bounded(position.sub_(number)))
# The same two terms, once with other factors.
OtherSum = placed("OtherSum", lambda position, number: bounded(position) - (1 + number) * bounded(position, 2))


class Assigned(Twice):
    def store(self, latent, k_rope, position, *caches):
        for cache, rows in zip(caches, (latent, k_rope), strict=True):
            cache[:, :, self.place(position, 0)] = rows
        return caches


class Pages(Twice):
    """Block and offset of each row are computed from its slot, and the slot from the position."""

    def store(self, latent, k_rope, position, *caches):
        for cache, rows in zip(caches, (latent, k_rope), strict=True):
            pages = cache.view(-1, 8, cache.shape[-1])
            block, offset = self.place(self.slots(position), 0) // 8, self.place(self.slots(position), 0) % 8
            pages[block, offset] = rows.flatten(0, 2)
        return caches

    def slots(self, position):
        return (torch.arange(self.sizes.batch)[:, None] * self.sizes.context + position).flatten()

    def place(self, slots, number):
        return slots.clamp(max=30)


class BlocksAndOffsets(Pages):
    """The offset is not the rest of a division, so it is compared by itself."""

    def store(self, latent, k_rope, position, *caches):
        for number, (cache, rows) in enumerate(zip(caches, (latent, k_rope), strict=True)):
            pages, slots = cache.view(-1, 8, cache.shape[-1]), self.slots(position)
            pages[(slots // 8).clamp(max=3), self.offset(slots % 8, number)] = rows.flatten(0, 2)
        return caches

    def offset(self, rest, number):
        return rest.clamp(max=6)


class OtherOffset(BlocksAndOffsets):
    def offset(self, rest, number):
        return rest.clamp(max=6 - number)


EQUAL = [Twice, Chosen, Added, Assigned, Pages, BlocksAndOffsets]
UNLIKE = [OtherBound, Drawn, WrittenBetween, OtherSum, OtherOffset]


@pytest.mark.parametrize("kind", EQUAL, ids=lambda kind: kind.__name__)
def test_positions_computed_twice_are_one(kind):
    report = check(kind())
    assert report.fused == FUSED, str(report)


@pytest.mark.parametrize("kind", UNLIKE, ids=lambda kind: kind.__name__)
def test_near_twins_are_two(kind):
    report = check(kind())
    assert report.fused == {"latent_attention": 1}, str(report)
    assert "latent and rotary key are written to different positions" in str(report)


@pytest.mark.slow
def test_positions_of_a_dynamic_shape():
    twice, once = (check(layer, arguments(), dynamic=True) for layer in (Twice(), Layer()))
    assert "kv_rmsnorm_rope_cache" in once.fused
    assert twice.fused == once.fused, str(twice)
