"""Contexts gathered through a block table: none is copied, and near twins give the program's results."""

import functools
import warnings
from dataclasses import replace

import pytest
import torch
from lib import layers
from lib.comparing import check_same
from lib.layers import FUSED, QUIET, Absorbed, Layer, arguments, check
from lib.zoo.entries import DEFAULT, Entry
from lib.zoo.mla import Spelling
from lib.zoo.sizes import DECODE, Step

import mla_fx

pytestmark = [pytest.mark.filterwarnings(line) for line in QUIET]
GATHERS = ("index.Tensor", "index_select", "embedding")
SPELLINGS = [replace(DEFAULT, cache="paged"), Spelling(cache="blocks_selected", keys="absorbed_einsum", attend="eager")]


@pytest.fixture(autouse=True)
def forget_compilations():
    torch._dynamo.reset()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error", mla_fx.MlaWarning)
        yield


def gathered(graph, size):
    """The lines of a graph that gather a whole context."""
    lines = [line for line in graph.splitlines() if any(name in line for name in GATHERS)]
    return [line for line in lines if f"[2, {size // 16}, 16, " in line or f"[{2 * size // 16}, 16, " in line]


@pytest.mark.parametrize("target", ["reference", pytest.param("inductor", marks=pytest.mark.campaign)])
@pytest.mark.parametrize("spelling", SPELLINGS, ids=["looked up", "selected"])
def test_no_context_is_gathered(spelling, target, tmp_path):
    entry = Entry(spelling)
    run = torch.compile(entry.build(), backend=mla_fx.get_backend(target=target, dump=str(tmp_path)))
    check_same(entry.build(), entry.arguments(DECODE), run)
    report, (folder,) = mla_fx.last_report(), tmp_path.iterdir()
    assert report.fused == FUSED, str(report)
    captured, *_, lowered = (path.read_text() for path in sorted(folder.glob("*.py")))
    assert gathered(captured, 32) and not gathered(lowered, 32)
    assert not any("in place" in note for note in report.notes), report.notes


@pytest.mark.slow
def test_one_graph_for_all_sizes():
    """Batch, tokens and blocks are symbols; readers of the pages see the write, which is in place."""
    spelling = replace(DEFAULT, cache="paged")
    module = Entry(spelling).build()
    run = torch.compile(module, backend=mla_fx.get_backend(target="reference"), dynamic=True, fullgraph=True)
    shapes = ((3, 5, 32), (4, 9, 96), (3, 11, 64), (5, 6, 96))
    given = [
        Entry(replace(spelling, sizes=replace(spelling.sizes, context=context))).arguments(Step("", tokens, 6, batch))
        for batch, tokens, context in shapes
    ]
    check_same(module, given[0], run)
    report = mla_fx.last_report()
    with torch.compiler.set_stance("fail_on_recompile"):
        for one in given[1:]:
            check_same(module, one, run)
    assert report.fused == {"kv_rmsnorm_rope_cache": 1, "mla_attention": 1}, str(report)
    assert "paged_context" in {rule for record in report.passes for rule in record.fired}
    assert not any("in place" in note for note in report.notes), report.notes


# --- near twins ------------------------------------------------------------------------------------------------------


class Pages(Layer):
    """Caches [B, 1, T, width] as pages of 4 rows, read through a table that tests override."""

    size, fires = 4, True

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        blocks = self.sizes.batch * self.sizes.context // self.size
        self.register_buffer("table", torch.randperm(blocks, generator=generator).view(self.sizes.batch, -1))

    def store(self, latent, k_rope, position, *caches):
        written, where = super().store(latent, k_rope, position, *caches), self.where()
        pages = (cache.view(-1, self.size, cache.shape[-1]) for cache in self.chosen(caches, written))
        z = self.sizes
        return tuple(self.read(page, where).reshape(z.batch, 1, z.context, page.shape[-1]) for page in pages)

    def chosen(self, caches, written):
        return written

    def where(self):
        return self.table

    def read(self, pages, where):
        return pages[where]


variant = functools.partial(layers.variant, kind=Pages)

OtherOrder = variant("OtherOrder", where=lambda my: my.table.flip(0))  # of the sequences
FromTheEnd = variant("FromTheEnd", where=lambda my: my.table - my.table.numel())


class OldPages(Pages):
    """The rows that are read were there before the write."""

    def chosen(self, caches, written):
        return self.old

    def store(self, latent, k_rope, position, *caches):
        self.old = tuple(cache.clone() for cache in caches)
        return super().store(latent, k_rope, position, *caches)


class ByRow(Pages):
    """Rows are looked up one by one, in slots computed from the table."""

    def where(self):
        return self.table.unsqueeze(-1) * 4 + torch.arange(4)

    def read(self, pages, where):
        return pages.flatten(0, 1)[where]


def by_slots(name, slots):
    return variant(name, kind=ByRow, where=lambda my: slots(my.table.unsqueeze(-1)))


RowsTwice = by_slots("RowsTwice", lambda table: table * 4 + torch.arange(4) // 2)  # the first two rows of each page
OtherSize = by_slots("OtherSize", lambda table: table * 3 + torch.arange(4))
LargerSize = by_slots("LargerSize", lambda table: table // 2 * 8 + torch.arange(4))  # the first halves of larger pages
BeforeThePage = by_slots("BeforeThePage", lambda table: table * 4 + torch.arange(-1, 3))
# A context reads all first rows of its blocks, then all second rows.
RowsFirst = variant("RowsFirst", fires=False, read=lambda my, pages, where: pages[where].transpose(1, 2))
Scaled = variant("Scaled", read=lambda my, pages, where: pages[where] * 1.5)  # attention has factors for that
Rounded = variant("Rounded", fires=False, read=lambda my, pages, where: pages[where].bfloat16().double())


class TablesOfTheirOwn(Pages):
    fires = False

    def read(self, pages, where):
        return pages[where if pages.shape[-1] == self.sizes.rank else where.flip(1)]


class WrittenBehind(Pages):
    """The cache is written again after attention has read it."""

    def forward(self, x, tables, position, caches):
        out = super().forward(x, tables, position, caches)
        for cache in caches:
            cache[:, :, 3] = 7.0
        return out


TWINS = [Pages, OtherOrder, FromTheEnd, OldPages, ByRow, RowsTwice, OtherSize, LargerSize, BeforeThePage]
TWINS += [RowsFirst, TablesOfTheirOwn, Scaled, Rounded, WrittenBehind]


@pytest.mark.slow
@pytest.mark.parametrize("base", [Layer, Absorbed], ids=["expanded", "absorbed"])
@pytest.mark.parametrize("kind", TWINS, ids=lambda kind: kind.__name__)
def test_near_twins_of_pages(kind, base):
    made = type(kind.__name__, (kind, base), {})()
    warnings.simplefilter("ignore", mla_fx.MlaWarning)
    report = check(made, arguments(made.sizes))
    assert report.fused.get("latent_attention") or not kind.fires
    fired = {rule for record in report.passes for rule in record.fired}
    assert ("paged_context" in fired) == kind.fires, str(report)
