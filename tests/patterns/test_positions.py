"""Positions out of range: what a program refuses to write or read stays an error, and no write leaves its cache."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lib.layers import CLOSE, FUSED, QUIET, Layer, Reporting, Sizes, arguments
from lib.zoo.caches import CACHES
from lib.zoo.entries import WHOLE_FRACTALS, Entry
from lib.zoo.mla import Spelling
from lib.zoo.sizes import SMALL
from torch import Tensor, nn

import mla_fx

pytestmark = [pytest.mark.filterwarnings(line) for line in QUIET]
CLOSE_HERE = {**CLOSE, "rtol": 1e-5, "atol": 1e-5}  # the zoo's tables are float32
T = Sizes().context


class Refused:
    """The results of a call that raises."""


def outcome(run: Callable[..., Any], given: Any) -> tuple[Any, Any]:
    """What a call returns, or that it raises; and its arguments afterwards."""
    mine = copy.deepcopy(given)
    try:
        return run(*mine), mine
    except Exception as error:
        assert isinstance(error, (IndexError, ValueError, RuntimeError)), error
        return Refused, mine


def compare(
    module: nn.Module,
    calls: dict[Any, Any],
    *,
    dynamic: bool | None = None,
    target: str = "reference",
    leaves_caches: bool = True,
) -> mla_fx.Report:
    """Check that each call raises if eager does, and otherwise has its results and caches. Return the report.

    With `leaves_caches`, a call that raises has written nothing, not even rows in range."""
    backend = Reporting(target=target)
    run = torch.compile(module, backend=backend, dynamic=dynamic)
    refused = []
    with torch.no_grad():
        for name, given in calls.items():
            (expected, theirs), (found, mine) = outcome(module, given), outcome(run, given)
            if expected is Refused:
                refused.append(name)
                assert found is Refused, f"{name} is refused by eager alone"
                if leaves_caches:
                    torch.testing.assert_close(mine, given, rtol=0, atol=0, msg=f"{name}: something was written")
                continue
            assert found is not Refused, f"{name} is refused by the compiled layer alone"
            torch.testing.assert_close((found, mine), (expected, theirs), **CLOSE_HERE)
    assert 0 < len(refused) < len(calls), "an edge has two sides"
    return backend.report


def edges(size: int) -> tuple[int, ...]:
    return -size - 1, -size, -1, 0, size - 1, size, size + 1, 2**62, -(2**62)


# --- one of the tokens goes to an edge --------------------------------------------------------------------------------

WRITTEN = [
    name
    for name, cache in CACHES.items()
    if "few" in cache.steps or name == "batched_one"
    if name not in ("none", "appended", "combined_appended")
    if isinstance(Entry(Spelling(cache=name)).arguments(Entry(Spelling(cache=name)).steps[-1])[-1], (Tensor, tuple))
]


def with_last(place: Any, value: int) -> Any:
    """Positions, or positions and a table of blocks, with another last position."""
    if isinstance(place, tuple):
        return with_last(place[0], value), *place[1:]
    changed = place.clone()
    changed.view(-1)[-1] = value
    return changed


def slots(name: str, cache: Tensor) -> int:
    """The number of positions in this spelling."""
    is_flat = any(word in name for word in ("slots", "blocks", "paged", "nz"))
    return cache.shape[0] * cache.shape[1] if is_flat else cache.shape[-2]


def written_at_edges(name: str) -> tuple[nn.Module, dict[int, Any]]:
    entry = Entry(Spelling(cache=name, sizes=WHOLE_FRACTALS if name.startswith("nz") else SMALL))
    *given, caches, place = entry.arguments(entry.steps[-1])
    calls = {edge: (*given, caches, with_last(place, edge)) for edge in edges(slots(name, caches[0]))}
    return entry.build(), calls


@pytest.mark.slow
@pytest.mark.parametrize("name", WRITTEN)
def test_positions_at_the_edges(name):
    assert compare(*written_at_edges(name)).fused == FUSED


@pytest.mark.slow
@pytest.mark.parametrize("name", ["scattered", "slots", "combined_slots_in_two"])
def test_positions_at_the_edges_by_inductor(name):
    assert compare(*written_at_edges(name), target="inductor", leaves_caches=False).fused == FUSED


# --- blocks and offsets ----------------------------------------------------------------------------------------------


class Blocks(Layer):
    """Block and offset of each row are arguments. The whole context is read."""

    def store(self, latent, k_rope, position, kv_cache, kr_cache):
        for cache, rows in ((kv_cache, latent), (kr_cache, k_rope)):
            self.write(cache.view(-1, 8, cache.shape[-1]), tuple(position), rows.reshape(-1, rows.shape[-1]))
        return kv_cache, kr_cache

    def write(self, pages, place, rows):
        pages[place] = rows

    def mask(self, position):
        return torch.zeros(self.sizes.tokens, self.sizes.context, dtype=self.o.dtype)


class BlocksSideBySide(Blocks):
    """Latents and rotary keys are columns of one cache, written in two parts."""

    def attended(self, x, tables, position, caches):
        (cache,) = caches
        rank = self.sizes.rank
        pages = cache.view(-1, 8, cache.shape[-1])
        self.pages = pages[..., :rank], pages[..., rank:]
        return super().attended(x, tables, position, (cache[..., :rank], cache[..., rank:]))

    def store(self, latent, k_rope, position, *caches):
        for pages, rows in zip(self.pages, (latent, k_rope), strict=True):
            pages[tuple(position)] = rows.reshape(-1, rows.shape[-1])
        return caches


BLOCKS, SIZE = 4, 8
PLACES = [
    *((block, 3) for block in edges(BLOCKS)),
    *((block, offset) for block in (0, 2, BLOCKS - 1) for offset in edges(SIZE)),
    *((-BLOCKS - 1, SIZE), (BLOCKS, -SIZE - 1), (-BLOCKS, -SIZE), (2**60, 0)),
]


def in_blocks(*caches: Tensor) -> dict[Any, Any]:
    x, tables, _, separate = arguments()
    token = torch.arange(x.shape[0] * x.shape[1])
    calls = {}
    for block, offset in PLACES:
        where = torch.stack((token % 2 + 1, token // 2))
        where[:, -1] = torch.tensor([block, offset])
        calls[block, offset] = x, tables, where, caches or separate
    return calls


@pytest.mark.slow
@pytest.mark.parametrize("target", ["reference", "inductor"])
def test_blocks_and_offsets_at_the_edges(target):
    calls = in_blocks()
    if target == "inductor":
        calls = {place: calls[place] for place in ((2, 7), (2, 8), (2, -9), (-5, 3), (-4, -8))}
    report = compare(Blocks(), calls, target=target, leaves_caches=target == "reference")
    assert report.fused == {"mla_prolog": 1, "latent_attention": 1}


def test_blocks_and_offsets_of_columns_at_the_edges():
    *_, caches = arguments()
    compare(BlocksSideBySide(), in_blocks(torch.cat(caches, -1)))


# --- positions that are numbers of the program ------------------------------------------------------------------------


class Numbered(Blocks):
    """A Python number says where the rows begin."""

    def __init__(self, write: Callable[..., None], tokens: int) -> None:
        super().__init__(Sizes(tokens=tokens))
        self.written = write

    def store(self, latent, k_rope, position, *caches):
        for cache, rows in zip(caches, (latent, k_rope), strict=True):
            self.written(cache, position, rows)
        return caches


def narrowed(cache, start, rows):
    cache.narrow(2, start, rows.shape[2]).copy_(rows)


def selected(cache, start, rows):
    cache[:, :, start] = rows[:, :, 0]


def slice_scattered(cache, start, rows):
    cache.copy_(torch.slice_scatter(cache, rows, 2, start, start + rows.shape[2]))


def counted(cache, start, rows):
    cache.index_copy_(2, start + torch.arange(rows.shape[2]), rows)


def put(cache, start, rows):
    cache[:, :, start + torch.arange(rows.shape[2])] = rows


OWN = (5, 6, T - 2, T, -1, -T - 1, 0)
# The others are refused during tracing, and each refusal traces anew.
NUMBERED = {
    (counted, 3): OWN,
    (put, 3): OWN,
    (slice_scattered, 3): (5, 6, T - 2),
    (narrowed, 1): (5, 6, T),
    (selected, 1): (5, 6, T),
}


@pytest.mark.slow
@pytest.mark.parametrize(("write", "tokens"), NUMBERED, ids=lambda value: getattr(value, "__name__", str(value)))
def test_numbers_at_the_edges(write, tokens):
    x, tables, _, caches = arguments(Sizes(tokens=tokens))
    calls = {start: (x, tables, start, caches) for start in NUMBERED[write, tokens]}
    assert compare(Numbered(write, tokens), calls, dynamic=True).fused


# --- reads -----------------------------------------------------------------------------------------------------------

READ = ["paged", "blocks_selected", "blocks_embedded", "slots_of_table", "offsets_in_blocks", "slots_given"]


@pytest.mark.slow
@pytest.mark.parametrize("name", READ)
def test_tables_at_the_edges(name):
    """An embedding and index_select do not count from the end; an index does. Rows are written before that."""
    entry = Entry(Spelling(cache=name))
    *given, caches, (place, table) = entry.arguments(entry.steps[-1])
    blocks = slots(name, caches[0]) if name == "slots_given" else caches[0].shape[0]
    calls = {edge: (*given, caches, (place, with_last(table, edge))) for edge in edges(blocks)[:7]}
    assert compare(entry.build(), calls, leaves_caches=False).fused == FUSED
