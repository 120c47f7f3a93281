"""Prompts that fill whole pages: plain code writes these by their numbers, operators row by row."""

import copy
import re
import warnings
from dataclasses import replace

import pytest
import torch
from lib.comparing import check_same
from lib.layers import FUSED, QUIET, Absorbed, Layer, Sizes, arguments, check
from torch.nn.functional import pad

import mla_fx

pytestmark = [pytest.mark.usefixtures("no_gradients"), *(pytest.mark.filterwarnings(line) for line in QUIET)]
SIZES = Sizes(tokens=6, context=18)
KEY_SIDE = {"kv_rmsnorm_rope_cache": 1, "mla_attention": 1}


class Pages(Layer):
    """Caches [B, 1, T, width] as pages of 3 rows that lie anywhere. Tokens 6 to 11 are the third and fourth of each
    sequence."""

    size = 3

    def __init__(self):
        super().__init__(SIZES)
        pages = 2 * SIZES.context // self.size
        self.register_buffer("table", torch.randperm(pages, generator=torch.Generator().manual_seed(5)).view(2, -1))

    def store(self, latent, k_rope, position, *caches):
        pages = [cache.view(-1, self.size, cache.shape[-1]) for cache in caches]
        for page, rows in zip(pages, (latent, k_rope), strict=True):
            where = self.where(position).flatten()
            self.write(page, rows.reshape(len(where), self.size, rows.shape[-1]), where)
        return tuple(page[self.table].view(2, 1, SIZES.context, -1) for page in pages)

    def where(self, position):
        return self.table[:, 6 // self.size : 12 // self.size]

    def write(self, pages, rows, where):
        pages[where] = rows


def written(name, write, **parts):
    """Pages, rows and their places are written by a function."""
    return type(name, (Pages,), {"write": lambda my, *given: write(*given), **parts})


def put(pages, rows, where):
    pages[where] = rows


def beside_heads(dim):
    """Pages [BlockNum, 1, BlockSize, width] or [BlockNum, BlockSize, 1, width]."""
    return lambda pages, rows, where: put(pages.unsqueeze(dim), rows.unsqueeze(dim), where)


def by_scatter(pages, rows, where):
    pages.scatter_(0, where.view(-1, 1, 1).expand_as(rows), rows)


ByIndexCopy = written("ByIndexCopy", lambda pages, rows, where: pages.index_copy_(0, where, rows))
ByScatter = written("ByScatter", by_scatter)
# The numbers have a dimension of sequences, and so do the pages.
OfSequences = written("OfSequences", lambda pages, rows, where: put(pages, rows.unflatten(0, (2, 2)), where.view(2, 2)))
HeadsBeforeRows = written("HeadsBeforeRows", beside_heads(1))
RowsBeforeHeads = written("RowsBeforeHeads", beside_heads(2))
FromTheEnd = written("FromTheEnd", put, where=lambda my, position: Pages.where(my, position) - 12)


class OnePageEach(Pages):
    """Pages as long as the step."""

    size = 6


SPELLINGS = [Pages, ByIndexCopy, ByScatter, OfSequences, HeadsBeforeRows, RowsBeforeHeads, FromTheEnd]
SPELLINGS += [OnePageEach]


@pytest.mark.slow
@pytest.mark.parametrize("base", [Layer, Absorbed], ids=["expanded", "absorbed"])
@pytest.mark.parametrize("kind", SPELLINGS, ids=lambda kind: kind.__name__)
def test_whole_pages(kind, base):
    report = check(type(kind.__name__, (kind, base), {})(), arguments(SIZES, first=6))
    assert report.fused == FUSED, str(report)
    assert not any("in place" in note for note in report.notes), report.notes


def test_the_key_side():
    report = check(Pages(), arguments(SIZES, first=6), absorb="never")
    assert report.fused == KEY_SIDE, str(report)
    assert not any("in place" in note for note in report.notes), report.notes


def test_one_cache_for_both():
    class Combined(Pages):
        def store(self, latent, k_rope, position, *caches):
            self.joined = torch.cat(caches, -1)
            pages = self.joined.view(-1, self.size, self.joined.shape[-1])
            rows = torch.cat((latent, k_rope), -1)
            self.write(pages, rows.reshape(-1, self.size, rows.shape[-1]), self.where(position).flatten())
            context = pages[self.table].view(2, 1, SIZES.context, -1)
            return context.split([SIZES.rank, SIZES.rope], -1)

        def forward(self, *given):
            return super().forward(*given), self.joined

    report = check(Combined(), arguments(SIZES, first=6))
    assert report.fused == FUSED, str(report)


class Given(Pages):
    """The caller says which pages."""

    def forward(self, x, tables, position, caches, pages):
        self.pages = pages
        return super().forward(x, tables, position, caches)

    def where(self, position):
        return self.pages


@pytest.mark.slow
def test_any_number_of_pages():
    """The number of tokens is a symbol, and so is that of the pages. What PyTorch then computes as the size of a page
    is not known to be that of the cache's."""
    module, given = Given(), []
    for tokens, first in ((6, 6), (9, 3), (12, 6)):
        x, tables, position, caches = arguments(replace(SIZES, tokens=tokens), first=first)
        pages = module.table[:, first // 3 : (first + tokens) // 3].flatten()
        given.append((x, tables, position, caches, pages))
        for tensor, dim in ((x, 1), (position, 0), (pages, 0), *((table, 0) for table in tables)):
            torch._dynamo.mark_dynamic(tensor, dim)
    run = torch.compile(module, backend=mla_fx.get_backend(target="reference"), fullgraph=True)
    check_same(module, given[0], run)
    report = mla_fx.last_report()
    with torch.compiler.set_stance("fail_on_recompile"):
        for one in given[1:]:
            check_same(module, one, run)
    assert report.fused == {"mla_attention": 1}, str(report)
    (blamed,) = [miss.reason for miss in report.misses if not miss.by_design]
    assert blamed.startswith("the rows written may not fill their places in the cache: 3 == "), blamed


@pytest.mark.parametrize("kind", [Pages, ByIndexCopy], ids=lambda kind: kind.__name__)
def test_a_page_outside_the_cache_is_refused(kind):
    module, given = kind(), arguments(SIZES, first=6)
    run = torch.compile(module, backend=mla_fx.get_backend(target="reference"))
    run(*copy.deepcopy(given))
    assert mla_fx.last_report().fused == FUSED
    for wrong in (12, -13):
        module.table[1, 3] = wrong
        for function in (module, run):
            with pytest.raises((IndexError, RuntimeError, ValueError)):
                function(*copy.deepcopy(given))


# --- near twins ------------------------------------------------------------------------------------------------------


def is_latent(pages):
    return pages.shape[-1] == SIZES.rank


def keys_in_larger_pages(pages, rows, where):
    if is_latent(pages):
        pages[where] = rows
    else:
        pages.view(6, 6, -1)[where[:2] // 2] = rows.view(2, 6, -1)


def keys_by_slot(pages, rows, where):
    """The keys of the same pages, one by one."""
    if is_latent(pages):
        pages[where] = rows
    else:
        slots = where.unsqueeze(-1) * 3 + torch.arange(3)
        pages.flatten(0, 1)[slots.flatten()] = rows.flatten(0, 1)


def across(rows):
    """Rows of neighbouring tokens lie in neighbouring pages."""
    return rows.flatten(0, 1).view(3, 4, -1).transpose(0, 1)


OTHER_POSITIONS = "latent and rotary key are written to different positions"
TWINS = {
    "other pages": (
        OTHER_POSITIONS, lambda pages, rows, where: put(pages, rows, where if is_latent(pages) else (where + 1) % 12),
    ),
    "the same pages in another order": (
        OTHER_POSITIONS, lambda pages, rows, where: put(pages, rows, where if is_latent(pages) else where.flip(0)),
    ),
    "pages of another size": (
        "the caches of latent and rotary key have different numbers of rows or slots", keys_in_larger_pages,
    ),
    "keys by slot": ("only one of latent and rotary key is cached by blocks and offsets", keys_by_slot),
    "one page for all, where the last one stays": (
        "all tokens of a sequence are written to one position",
        lambda pages, rows, where: put(pages, rows, where[:1].expand(4)),
    ),
    "rows of keys across": (
        "expected a rotary embedding, found view",
        lambda pages, rows, where: put(pages, rows if is_latent(pages) else across(rows), where),
    ),
    "rows of both across": (
        "expected an RMSNorm, found view", lambda pages, rows, where: put(pages, across(rows), where),
    ),
    "the last row of a page first": (".", lambda pages, rows, where: put(pages, rows.roll(1, 1), where)),
    "a last page that is filled in part, with zeros": (
        ".", lambda pages, rows, where: put(pages, pad(rows[:, :2], (0, 0, 0, 1)), where),
    ),
}


@pytest.mark.parametrize("name", TWINS)
def test_near_twins(name):
    warnings.simplefilter("ignore", mla_fx.MlaWarning)
    because, write = TWINS[name]
    report = check(type("Twin", (written("Twin", write), Absorbed), {})(), arguments(SIZES, first=6))
    assert "mla_prolog" not in report.fused, str(report)
    reasons = [miss.reason for miss in report.misses]
    assert any(re.search(because, reason) for reason in reasons), reasons
