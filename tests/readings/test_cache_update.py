"""Cache updates in every spelling against an independent oracle."""

import pytest
import torch
from lib.traced import B, D, S, T, Traced, agree, dense, refused

from mla_fx.errors import NoMatch
from mla_fx.readings.axes import Digit, Index, axes_of, fresh, shifted
from mla_fx.readings.cache_places import Appended, At, From, WholeBlocks
from mla_fx.readings.cache_update import cache_update, cache_updates
from mla_fx.readings.element import element_of, resolve
from mla_fx.readings.views import fresh_index

SLOTS = torch.tensor([4, 0, 3])
SEQUENCES = torch.arange(B)[:, None]
PLACES = torch.tensor([[4, 0, 3], [1, 2, 0]])


def written(cache, where, values):
    cache = cache.clone()
    cache[where] = values
    return cache


def in_pages(slots, size=T):
    return slots // size, slots % size


def by_scatter(cache, r):
    return cache.scatter(2, SLOTS.view(1, 1, S, 1).expand_as(r), r)


UPDATES = {  # a cache [B, 1, T, D], rows [B, 1, S, D]
    "index_copy": lambda cache, r: cache.index_copy(2, SLOTS, r),
    "index_copy, negative dim": lambda cache, r: cache.index_copy(-2, SLOTS, r),
    "assigned": lambda cache, r: written(cache, (slice(None), slice(None), SLOTS), r),
    "scattered": by_scatter,
    "appended": lambda cache, r: torch.cat([cache, r], 2),
    "sliced": lambda cache, r: written(cache, (slice(None), slice(None), slice(1, 1 + S)), r),
    "one row": lambda cache, r: torch.select_scatter(cache, r[:, :, 0], 2, -2),
    "per sequence": lambda cache, r: written(cache[:, 0], (torch.arange(B)[:, None], PLACES), r[:, 0]),
    "per sequence, one token": lambda cache, r: written(cache[:, 0], (torch.arange(B), PLACES[:, 0]), r[:, 0, 0]),
    "new rows first": lambda cache, r: torch.cat([r, cache], 2),
}
# a cache [B, T, D] whose first dimension is read as blocks
IN_BLOCKS = {
    "blocks and offsets": lambda cache, r: written(cache[:, 0], (torch.tensor([1, 0, -1]), SLOTS - 2), r[0, 0]),
    "sequences in reverse": lambda cache, r: written(cache[:, 0], (SEQUENCES.flip(0), PLACES), r[:, 0]),
    "slots": lambda cache, r: written(cache[:, 0], in_pages(SLOTS + 2), r[0, 0]),
    "slots of each sequence": lambda cache, r: written(cache[:, 0], in_pages(PLACES - SEQUENCES * T), r[:, 0]),
    "slots, towards zero": lambda cache, r: written(
        cache[:, 0], ((SLOTS - 4).div(T, rounding_mode="trunc"), (SLOTS - 4) % T), r[0, 0]
    ),
    "slots in pages of another size": lambda cache, r: written(cache[:, 0], in_pages(SLOTS + 0, 4), r[0, 0]),
    "other slots": lambda cache, r: written(cache[:, 0], (SLOTS // T, (SLOTS + 1) % T), r[0, 0]),
}


def replayed(traced, found):
    """The updated cache, rebuilt from nothing but what was read."""
    lead = (*found.index[: found.dim], found.token, *found.index[found.dim + 1 :])
    rows = traced.read(found.row, *lead).movedim(found.dim, 0)
    old = traced.values[found.old].clone()
    if isinstance(found.where, Appended):
        return torch.cat([old, rows.movedim(0, found.dim)], found.dim)
    new = old.movedim(found.dim, 0)
    if isinstance(found.where, From):
        new[found.where.start : found.where.start + len(rows)] = rows
        return new.movedim(0, found.dim)
    outer = (found.index[0],) if found.where.slot.axes & set(found.index[0].axes) else ()
    positions = traced.read(found.where.slot, *outer, found.token).long()
    for token, row in enumerate(rows):
        for sequence, slot in enumerate(positions[..., token].expand(len(row))):
            assert slot >= 0, "a negative position means skip"
            new[slot, sequence] = row[sequence]
    return new.movedim(0, found.dim)


def read_update(function):
    traced = Traced(function, dense(B, 1, T, D), dense(B, 1, S, D))
    return traced, cache_update(element_of(traced.out))


@pytest.mark.parametrize("name", UPDATES)
def test_a_cache_update_is_read(name):
    traced, found = read_update(UPDATES[name])
    agree(replayed(traced, found), traced.values[found.node])


@pytest.mark.parametrize("name", IN_BLOCKS)
def test_an_update_in_blocks_is_read(name):
    """Several rows may go to one slot, as in PyTorch's own write: here none do."""
    traced, found = read_update(IN_BLOCKS[name])
    assert found.is_paged
    by_slots = isinstance(found.where, At)
    assert by_slots == (name in ("slots", "slots of each sequence"))
    new, lead = traced.values[found.old].clone(), axes_of(found.token)
    position, *offset = (traced.read(part, *lead).long() for part in found.where.elements)
    position = position.expand([axis.size for axis in lead])
    rows = traced.read(found.row, *lead, found.index[-1])
    if by_slots:
        assert found.where.wraps
        new.flatten(0, 1)[position] = rows
    else:
        new[(position, *offset)] = rows
    agree(new, traced.values[found.node])


WHOLE_BLOCKS = {  # a cache [B, 1, T, D] as blocks of T rows, or of half as many
    "assigned": lambda cache, r: written(cache[:, 0], torch.tensor([1, 0]), torch.cat([r[:, 0], r[:, 0, :2]], 1)),
    "one block": lambda cache, r: written(cache[:, 0], torch.tensor([1]), torch.cat([r[:1, 0], r[:1, 0, :2]], 1)),
    "copied": lambda cache, r: cache.index_copy(0, torch.tensor([1]), torch.cat([r[:1], r[:1, :, :2]], 2)),
    "scattered": lambda cache, r: cache[:, 0].scatter(
        0, torch.tensor([1, 0]).view(B, 1, 1).expand(B, T, D), torch.cat([r[:, 0], r[:, 0, :2]], 1)
    ),
}


@pytest.mark.parametrize("name", WHOLE_BLOCKS)
def test_an_update_of_whole_blocks_is_read(name):
    traced = Traced(WHOLE_BLOCKS[name], dense(B, 1, T, D), dense(B, 1, S, D))
    found, by_rows = cache_updates(element_of(traced.out))
    assert isinstance(found.where, WholeBlocks) and isinstance(by_rows.where, At)
    agree(replayed(traced, by_rows), traced.values[found.node])
    assert found.where.offset == Index(0, ((Digit(found.token.axis, 1, T), 1),))
    new = traced.values[found.old].clone()
    block = traced.read(found.where.block, found.token).long()
    offset = torch.arange(len(block)) % T
    rows = traced.read(found.row, found.token, found.index[-1])
    new.view(B, T, D)[block, offset] = rows
    agree(new, traced.values[found.node])


COLUMNS = {  # rows that are put together of two, [B, 1, S, 5] and [B, 1, S, 3]
    "copied": lambda cache, r: cache.index_copy(2, SLOTS, torch.cat([r[..., :5] * 2, r[..., 5:] * 3], -1)),
    "appended": lambda cache, r: torch.cat([cache, torch.cat([r[..., :5] * 2, r[..., 5:] * 3], -1)], 2),
    "flat": lambda cache, r: written(
        cache.flatten(0, 2), SLOTS, torch.cat([r[0, 0, :, :5] * 2, r[0, 0, :, 5:] * 3], -1)
    ),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_some_columns_of_an_update_are_read(name):
    """The rows of these columns alone; where the whole rows go is nobody else's matter."""
    traced = Traced(COLUMNS[name], dense(B, 1, T, D), dense(B, 1, S, D))
    whole, factor = fresh_index(traced.out), {0: 2.0, 5: 3.0}
    for start, stop in ((0, 5), (5, D)):
        found = cache_update(resolve(traced.out, (*whole[:-1], shifted(fresh(stop - start), start))))
        assert isinstance(found.where, Appended) and found.rows.target is torch.ops.aten.mul.Tensor
        rows = factor[start] * traced.inputs[1][..., start:stop]
        agree(traced.values[found.rows], rows[0, 0] if name == "flat" else rows)
    with pytest.raises(NoMatch, match="not a concatenation of latent and rotary key"):
        cache_update(resolve(traced.out, (*whole[:-1], shifted(fresh(5), 2))))


ONE_CAT = "expected one cat of the old and the new rows"
BROADCAST = "the rows written are broadcast into the cache"
PART = "only some of the rows are scattered into the cache"
UNCOUNTED = "the cache is written at sequences that are not 0, 1, 2, ..."
NO_UPDATES = {
    "rows of one sequence": (BROADCAST, lambda cache, r: written(cache, (slice(None), slice(None), SLOTS), r[:1])),
    "one row for all slots": (
        BROADCAST,
        lambda cache, r: written(cache, (slice(None), slice(None), SLOTS), r[:, :, :1]),
    ),
    "one column for all": (BROADCAST, lambda cache, r: written(cache, (slice(None), slice(None), SLOTS), r[..., :1])),
    "only the first sequence": (PART, lambda cache, r: cache.scatter(2, SLOTS.view(1, 1, S, 1).expand(1, 1, S, D), r)),
    "fewer positions than rows": (
        PART,
        lambda cache, r: cache.scatter(2, SLOTS[:2].view(1, 1, 2, 1).expand(B, 1, 2, D), r),
    ),
    "only the first columns": (PART, lambda cache, r: cache.scatter(2, SLOTS.view(1, 1, S, 1).expand(B, 1, S, 4), r)),
    "positions per column": (
        "the elements of one row are scattered to different positions",
        lambda cache, r: cache.scatter(2, torch.arange(D).expand(B, 1, S, D) % T, r),
    ),
    "a condition": (
        "the cache is written by a boolean mask, not at positions",
        lambda cache, r: written(cache, (slice(None), slice(None), torch.tensor([True, False, True, True, False])), r),
    ),
    "sequences along the tokens": (
        UNCOUNTED,
        lambda cache, r: written(cache[:, 0], (torch.arange(B)[None], PLACES[:, :B]), r[:, 0, :B]),
    ),
    "positions in two dimensions apart": (
        "the cache is written at positions along several dimensions",
        lambda cache, r: written(cache, (torch.tensor([0, 1]), slice(None), torch.tensor([3, 4])), r[:, :, 0]),
    ),
    "one row for each sequence": (
        BROADCAST,
        lambda cache, r: written(cache[:, 0], (torch.arange(B)[:, None], PLACES), r[:, 0, :1]),
    ),
    "every other slot": (
        "the cache is written in steps of 2, expected consecutive rows",
        lambda cache, r: written(cache, (slice(None), slice(None), slice(0, 5, 2)), r),
    ),
    "three pieces": (ONE_CAT, lambda cache, r: torch.cat([cache, r, r], 2)),
    "columns beside the old ones": (ONE_CAT, lambda cache, r: torch.cat([cache, r[:, :, :1].expand_as(cache)], -1)),
    "added": ("the cache is added to", lambda cache, r: cache.index_put((SLOTS[1:2],), r[:1, :, :1], accumulate=True)),
    "a sum": ("expected a cache that is written, found add", lambda cache, r: cache + r[:, :, :1]),
}


@pytest.mark.parametrize("name", NO_UPDATES)
def test_what_is_no_cache_update_is_refused_with_a_reason(name):
    reason, function = NO_UPDATES[name]
    with pytest.raises(NoMatch, match=reason):
        read_update(function)


def at(position):
    """Rows written over a slice that begins at a number made of the symbols of the cache [B, 1, T, D]."""

    def write(cache, r):
        start = position(cache)
        return torch.slice_scatter(cache, r, 2, start, start + r.shape[2])

    return write


def read_dynamic(function):
    traced = Traced(function, dense(B, 1, T, D), dense(B, 1, S, D), dynamic=True)
    return traced, cache_update(element_of(traced.out))


def test_a_slice_may_begin_at_a_symbol():
    traced, found = read_dynamic(at(lambda cache: cache.shape[0]))
    assert traced.number(found.where.start) == B and not isinstance(found.where.start, int)
    assert found.row.node.name == "r"


@pytest.mark.parametrize("position", [lambda cache: cache.shape[2] - 4, lambda cache: -cache.shape[0] - 2])
def test_a_symbol_may_be_negative(position):
    """What is not known to be zero or more may count from the end."""
    with pytest.raises(NoMatch, match="from a position that may be negative, which counts from the end"):
        read_dynamic(at(position))


ALL = slice(None)


def test_one_row_at_a_position_that_may_be_negative():
    def function(cache, row, positions):
        return torch.select_scatter(cache, row, 2, positions.shape[0] - 4)

    traced = Traced(function, dense(B, 1, T, D), dense(B, 1, D), dense(6), dynamic=True)
    with refused("from a position that may be negative"):
        cache_update(element_of(traced.out))


def joined(function, *shapes):
    """Two updates, the second read together with the first."""
    traced = Traced(function, *(dense(*shape) for shape in shapes))
    first, second = (cache_update(element_of(value)) for value in traced.out)
    return second.beside(first)


def test_two_caches_of_different_layouts():
    with refused("only one of latent and rotary key is cached by blocks and offsets"):
        joined(
            lambda a, r: (written(a, (ALL, SLOTS), r), written(a.unsqueeze(2), (ALL, SLOTS, 0 * SLOTS), r)),
            *((B, T, D), (B, S, D)),
        )


def test_two_caches_of_different_numbers_of_rows():
    with refused("have different numbers of rows or slots"):
        joined(lambda a, r, p: (torch.cat([a, r], 1), torch.cat([a, p], 1)), (B, T, D), (B, 1, D), (B, 2, D))
