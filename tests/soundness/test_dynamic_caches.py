"""Caches of symbolic sizes: sizes that happen to be equal in one run are not equal in the program."""

import copy
from dataclasses import replace

import pytest
import torch
from lib.layers import CLOSE, QUIET, Reporting
from lib.zoo.caches import BlocksAndOffsets, Slots, SlotsOfTable
from lib.zoo.entries import DEFAULT, Entry
from lib.zoo.rows import Written
from lib.zoo.sizes import Step, converted

pytestmark = [pytest.mark.filterwarnings(line) for line in QUIET]


class InTurn(Slots):
    """Neighbouring rows belong to different sequences."""

    def store(self, cache, rows, place):
        super().store(cache, rows, place)
        return None, cache.view(-1, rows.shape[0], rows.shape[-1]).transpose(0, 1)


class OtherOffsets(BlocksAndOffsets):
    """Offsets count to one less than a block has rows."""

    def write(self, cache, rows, place):
        cache[place // cache.shape[1], place % (cache.shape[1] - 1)] = rows


class OtherBlocks(BlocksAndOffsets):
    """Blocks count for one row more than they have."""

    def write(self, cache, rows, place):
        cache[place // (cache.shape[1] + 1), place % cache.shape[1]] = rows


class Overlapping(SlotsOfTable):
    """Blocks begin before those in front of them end."""

    def read(self, cache, table):
        slots = table.unsqueeze(-1) * (cache.shape[1] - 1) + torch.arange(cache.shape[1])
        return cache.flatten(0, 1)[slots.flatten(1)]


class WhereTrue(Written):
    """The cache is written by a boolean mask: the number of rows is that of the mask, not the length of the cache."""

    def place(self, sizes, step):
        return torch.arange(sizes.context).expand(step.batch, -1) < step.tokens

    def write(self, cache, rows, place):
        cache[place] = rows.flatten(0, 1)


TWINS = {InTurn: "slots", OtherOffsets: "blocks_and_offsets", OtherBlocks: "blocks_and_offsets"}
TWINS |= {Overlapping: "slots_of_table", WhereTrue: "index_put"}


@pytest.mark.slow
@pytest.mark.parametrize("kind", TWINS, ids=lambda kind: kind.__name__)
def test_near_twins_of_dynamic_caches(kind, no_gradients):
    cache, backend = kind(), Reporting()
    entry = Entry(replace(DEFAULT, cache=TWINS[kind]))
    module = entry.build().double()
    module.cache = cache
    run = torch.compile(module, backend=backend, dynamic=True)
    for batch, tokens in ((5, 7), (3, 4)):
        step = Step("few", tokens, 9, batch)
        *given, _ = entry.arguments(step)
        theirs = converted((*given, cache.place(entry.spelling.sizes, step)), torch.float64)
        ours = copy.deepcopy(theirs)
        torch.testing.assert_close((run(*ours), ours), (module(*theirs), theirs), **CLOSE)
    assert "paged_context" not in {rule for record in backend.report.passes for rule in record.fired}
