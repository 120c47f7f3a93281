"""Rows gathered out of pages, in every spelling, against what the program gathers."""

import pytest
import torch
from lib.traced import Traced, agree, dense

from mla_fx.errors import NoMatch
from mla_fx.readings.axes import axes_of, extent, without_digits
from mla_fx.readings.element import resolve
from mla_fx.readings.paged import paged
from mla_fx.readings.reading import renamed
from mla_fx.readings.views import fresh_index

BLOCKS, SIZE, WIDTH = 5, 4, 3
TABLE = torch.tensor([[3, 0, -1], [1, 4, 3]])


def rows():
    return torch.arange(SIZE)


def slots(table, size=SIZE):
    return table.unsqueeze(-1) * size + rows()


# pages [BLOCKS, SIZE, WIDTH] and a table [2, 3] to [2, 3, SIZE, WIDTH], and how many rows a block has that is looked up
GATHERED = {
    "looked up": (SIZE, lambda pages, table: pages[table]),
    "selected": (SIZE, lambda pages, table: pages.index_select(0, table.flatten() % BLOCKS).view(2, 3, SIZE, WIDTH)),
    "embedded": (
        SIZE,
        lambda pages, table: torch.embedding(pages.flatten(1), table % BLOCKS).view(2, 3, SIZE, WIDTH),
    ),
    "slots": (SIZE, lambda pages, table: pages.flatten(0, 1)[slots(table)]),
    "slots of 32 bits": (SIZE, lambda pages, table: pages.flatten(0, 1)[slots(table.int().long())]),
    "offsets": (SIZE, lambda pages, table: pages[table.unsqueeze(-1), rows()]),
    "heads first": (SIZE, lambda pages, table: pages.mT[:, None][table][:, :, 0].mT),
    "slots of smaller pages": (1, lambda pages, table: pages.flatten(0, 1)[slots(table, 3)]),
    "slots from one before": (1, lambda pages, table: pages.flatten(0, 1)[slots(table) - 1]),
    "slots added up": (1, lambda pages, table: pages.flatten(0, 1)[(slots(table) + table.unsqueeze(-1)) % 20]),
    "rows in reverse, from one before": (1, lambda pages, table: pages.flatten(0, 1)[slots(table) + 2 - 2 * rows()]),
    "rows in reverse": (1, lambda pages, table: pages.flatten(0, 1)[slots(table) + 3 - 2 * rows()]),
}


def read(function):
    traced = Traced(function, dense(BLOCKS, SIZE, WIDTH), TABLE)
    return traced, fresh_index(traced.out)


@pytest.mark.parametrize("name", GATHERED)
def test_gathered_rows_are_read(name):
    """Each row is that of the block that its own table names, once the block is looked up."""
    size, function = GATHERED[name]
    traced, index = read(function)
    found = paged(resolve(traced.out, index))
    parted = without_digits((*found.pages.index, *found.table.index)) or {}
    found, index = renamed(found, parted), [renamed(part, parted) for part in index]
    lead = [axis for part in index[:3] for axis in axes_of(part)]
    block, sizes = axes_of(found.block), [axis.size for axis in lead]
    assert extent(found.block) == BLOCKS * SIZE // size
    table = traced.read(found.table, *lead).long().expand(sizes)
    pages = traced.read(found.pages, *block, *lead, index[3]).flatten(0, len(block) - 1)
    pages = pages.expand(BLOCKS * SIZE // size, *sizes, WIDTH)
    where = torch.meshgrid(*[torch.arange(axis.size) for axis in lead], indexing="ij")
    agree(pages[(table, *where)].view(2, 3, SIZE, WIDTH), traced.values[traced.out])


REFUSED = {
    "expected gathered rows, found add": lambda pages, table: pages + 1.0,
    "rows are gathered by 2 tables": lambda pages, table: pages[table.unsqueeze(-1), table[:, :1, None] % SIZE],
    "rows are gathered by 0 tables": lambda pages, table: pages[torch.arange(3)],
    "by a boolean mask, not by index": lambda pages, table: pages[torch.ones(BLOCKS).bool()],
    "cast to torch.float64": lambda pages, table: pages[table].double(),
    "is multiplied by a number": lambda pages, table: pages[table] * 2.0,
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_is_no_gather_is_refused_with_a_reason(reason):
    traced, index = read(REFUSED[reason])
    with pytest.raises(NoMatch, match=reason):
        paged(resolve(traced.out, index))
