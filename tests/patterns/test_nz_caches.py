"""Caches in FRACTAL_NZ in plain PyTorch: against float64, and what only looks like them and must not be written so."""

import copy
from dataclasses import replace

import pytest
import torch
from lib import comparing
from lib.comparing import compiled
from lib.layers import Rewritten, in_type
from lib.zoo import oracle
from lib.zoo.caches import CACHES, Nz, NzTransposed
from lib.zoo.entries import DEFAULT, WHOLE_FRACTALS, Entry
from lib.zoo.factors import FACTORS
from lib.zoo.ropes import ROPES
from lib.zoo.sizes import DECODE, FEW, PREFILL, Step, weights

import mla_fx

pytestmark = pytest.mark.usefixtures("no_gradients")
NAMES = [name for name in CACHES if name.startswith("nz")]
FLOAT32 = {"rtol": 1e-4, "atol": 1e-5}
LANES = 8  # of float32 in 32 bytes


def entry_of(name, **spelling):
    return Entry(replace(DEFAULT, **{"cache": name, "sizes": WHOLE_FRACTALS, **spelling}))


def same(entry, step, **options):
    """The report, after a comparison of results and caches with those of eager mode."""
    module = entry.build()
    comparing.check_same(module, entry.arguments(step), Rewritten(module, **options))
    return mla_fx.last_report()


@pytest.mark.slow
@pytest.mark.parametrize("step", [DECODE, FEW], ids=lambda step: step.name)
@pytest.mark.parametrize("name", NAMES)
def test_against_float64(name, step):
    """The rows, read back byte by byte: element (offset, column) of a page is lane `column % n0` of its band."""
    entry, cache = entry_of(name), CACHES[name]
    sizes, given = entry.spelling.sizes, entry.arguments(step)
    x, _, positions, _, caches, (slots, _) = given
    old = copy.deepcopy(cache.rows(caches, sizes, step))
    rope = ROPES[entry.spelling.rope]
    wanted, *new = oracle.latent_attention(
        *(weights(sizes), sizes, step, x, positions, old, (rope.read, rope.written), 1.3 * sizes.query**-0.5),
        FACTORS["none"],
    )
    before = copy.deepcopy(caches)
    (out,) = compiled(entry.build())(*given)
    assert mla_fx.last_report().fused == {"mla_prolog": 1, "latent_attention": 1}
    torch.testing.assert_close(out.double(), wanted, **FLOAT32)
    for held, kept, rows in zip(caches, before, new, strict=True):
        flat, rest, width = held.flatten(), kept.flatten(), held.shape[2]
        for slot, row in zip(slots.tolist(), rows.flatten(0, 1), strict=True):
            block, offset = divmod(slot, sizes.block)
            places = [
                block * sizes.block * width + column // LANES * sizes.block * LANES + offset * LANES + column % LANES
                for column in range(width)
            ]
            torch.testing.assert_close(flat[places].double(), row, **FLOAT32)
            rest[places] = flat[places]
        assert torch.equal(flat, rest), "nothing else is written"


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_key_side_of_a_prompt(name):
    report = same(entry_of(name), PREFILL, absorb="never")
    assert report.fused == {"kv_rmsnorm_rope_cache": 1, "mla_attention": 1}, str(report)


def test_caches_are_written_in_place():
    report = same(entry_of("nz"), FEW)
    assert not [note for note in report.notes if "in place" in note], str(report)


@pytest.mark.slow
def test_any_number_of_sequences():
    entry = entry_of("nz")
    x, tables, positions, mask, _, (slots, table) = given = entry.arguments(replace(FEW, batch=5))
    for value in (x, *tables, positions, mask, slots, table):
        torch._dynamo.mark_dynamic(value, 0)
    module = entry.build()
    comparing.check_same(module, given, compiled(module))
    assert mla_fx.last_report().fused == {"mla_prolog": 1, "latent_attention": 1}, str(mla_fx.last_report())


@pytest.mark.slow
def test_under_inductor():
    assert same(entry_of("nz"), FEW, target="inductor").fused == {"mla_prolog": 1, "latent_attention": 1}


class OfOnesOwn(Nz):
    """With a head of one in the caches themselves, which have the dimensions of FRACTAL_NZ."""

    def allocate(self, sizes, step, width):
        return self.form(super().allocate(sizes, step, width), width).unsqueeze(1)

    def store(self, cache, rows, place):
        (slots, table), width, size = place, rows.shape[-1], cache.shape[3]
        cache[slots // size, 0, :, slots % size] = rows.reshape(-1, width // LANES, LANES)
        return None, cache[table, 0].transpose(2, 3).reshape(rows.shape[0], -1, width)


class WholePages(Nz):
    """Blocks are written whole, by their numbers."""

    is_ragged = False

    def place(self, sizes, step):
        table, first = self.table(sizes, step), step.start // sizes.block
        return table[:, first : first + step.tokens // sizes.block].flatten(), table

    def store(self, cache, rows, place):
        (blocks, table), width = place, rows.shape[-1]
        nz = self.form(cache, width)
        nz[blocks] = rows.reshape(len(blocks), cache.shape[1], -1, LANES).transpose(1, 2)
        return None, self.read(nz, table).reshape(rows.shape[0], -1, width)


class OffsetsGiven(Nz):
    """Each token is looked up by its block and offset."""

    def read(self, cache, table):
        return cache[table.unsqueeze(-1), :, torch.arange(cache.shape[2])]


class InOneView(Nz):
    """The rows of all blocks are gathered first, and then those of the table."""

    def read(self, cache, table):
        return cache.transpose(1, 2).flatten(2)[table]


@pytest.mark.slow
@pytest.mark.parametrize(
    "cache, step",
    [(OfOnesOwn(), FEW), (WholePages(), Step("pages", 32, 32)), (OffsetsGiven(), FEW), (InOneView(), DECODE)],
    ids=lambda value: type(value).__name__ if isinstance(value, Nz) else value.name,
)
def test_other_spellings(monkeypatch, cache, step):
    monkeypatch.setitem(CACHES, "nz", cache)
    entry = entry_of("nz", sizes=replace(WHOLE_FRACTALS, block=16))
    report = same(entry, step, absorb="always")
    assert report.fused == {"mla_prolog": 1, "latent_attention": 1}, str(report)


class OfAnotherGraph(Nz):
    """Another graph has written the new rows."""

    def store(self, cache, rows, place):
        return None, self.read(self.form(cache, rows.shape[-1]), place[1]).reshape(rows.shape[0], -1, rows.shape[-1])


def test_caches_that_are_read_alone(monkeypatch):
    """The attention gets the pages as they are."""
    monkeypatch.setitem(CACHES, "nz", OfAnotherGraph())
    report = same(entry_of("nz"), FEW)
    assert report.fused == {"latent_attention": 1} and "paged_context" not in str(report), str(report)


# --- what only looks like it -----------------------------------------------------------------------------------------


def formed(name, form):
    return type(name, (Nz,), {"form": lambda my, cache, width: form(cache, cache.shape[0], cache.shape[1], width)})


# 16 columns side by side, which in float32 are 64 bytes.
OtherFactor = formed("OtherFactor", lambda cache, count, size, width: cache.view(count, width // 16, size, 16))
# The same dimensions, but in memory each row lies in one piece, or [n0, BlockSize, Columns/n0].
RowsInMemory = formed(
    "RowsInMemory", lambda cache, count, size, width: cache.view(count, size, width // LANES, LANES).transpose(1, 2)
)
LanesFirst = formed(
    "LanesFirst", lambda cache, count, size, width: cache.view(count, LANES, size, width // LANES).transpose(1, 3)
)


class LowerFirst(Nz):
    """Column `lower * bands + upper`, which is read as if it was `upper * n0 + lower`."""

    def put(self, nz, rows, block, offset):
        nz[block, :, offset] = rows.flatten(1).unflatten(1, (nz.shape[3], nz.shape[1])).transpose(1, 2)


class Swapped(NzTransposed):
    """There are as many bands as rows of a page: written as rows, and read in bands."""

    def put(self, nz, rows, block, offset):
        nz.view(nz.shape[0], nz.shape[2], nz.shape[1], nz.shape[3])[block, offset] = rows


class OnlyLatents(Nz):
    """The rotary keys are cached in rows."""

    def store_both(self, caches, latent, k_rope, place):
        (slots, table), keys = place, caches[1]
        _, latents = self.store(caches[0], latent, place)
        keys[slots // keys.shape[1], slots % keys.shape[1]] = k_rope.flatten(0, 1)
        return (), latents, keys[table].flatten(1, 2)


class OtherOffset(Nz):
    """Rotary keys are written to the offset before that of the latents."""

    def put(self, nz, rows, block, offset):
        super().put(nz, rows, block, offset - int(rows.shape[1] == 4))


SQUARE = replace(WHOLE_FRACTALS, kv_rank=128, block=16)  # as many bands of latents as rows of a page
TWINS = {
    OtherFactor: "16 columns of a row lie side by side in the cache; FRACTAL_NZ has 8 of torch.float32",
    LowerFirst: "the columns of a row enter the cache in another order than they have in the row",
    RowsInMemory: "the cache is not in FRACTAL_NZ, which lies in memory as [Blocks, Columns/8, BlockSize, 8]",
    LanesFirst: "the cache is not in FRACTAL_NZ, which lies in memory as [Blocks, Columns/8, BlockSize, 8]",
    Swapped: "the cache is not in FRACTAL_NZ, which lies in memory as [Blocks, Columns/8, BlockSize, 8]",
    OnlyLatents: "only one of latent and rotary key is cached in FRACTAL_NZ",
    OtherOffset: "latent and rotary key are written to different positions",
}


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [WHOLE_FRACTALS, SQUARE], ids=["apart", "square"])
@pytest.mark.parametrize("twin", TWINS)
def test_twins(monkeypatch, twin, sizes):
    monkeypatch.setitem(CACHES, "nz", twin())
    report = same(entry_of("nz", sizes=sizes), FEW)
    reasons = [miss.reason for miss in report.misses]
    assert "mla_prolog" not in report.fused, str(report)
    assert TWINS[twin] in reasons, reasons


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_verification_in_float64_keeps_the_lanes_of_the_caches(dtype):
    entry = entry_of("nz")
    module, given = entry.build().to(dtype), in_type(entry.arguments(FEW), dtype)
    compiled(module, verify="always", absorb="always")(*given)
    assert len(mla_fx.last_report().fused) == 2, str(mla_fx.last_report())
