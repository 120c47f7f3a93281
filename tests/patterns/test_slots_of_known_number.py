"""Rows whose number is a symbol, written at slots of a known number: a refusal names both numbers and the remedy."""

import copy

import pytest
import torch
from lib.layers import CLOSE, FUSED, QUIET, Absorbed, Reporting, Sizes, arguments

pytestmark = [*(pytest.mark.filterwarnings(mark) for mark in QUIET), pytest.mark.usefixtures("no_gradients")]
SIZES = Sizes(batch=4, tokens=4)


class Slots(Absorbed):
    """Sequences share a cache of rows [B*T, width]."""

    def store(self, latent, k_rope, slots, *caches):
        for cache, rows in zip(caches, (latent, k_rope), strict=True):
            self.write(cache, slots, rows.reshape(-1, rows.shape[-1]))
        return tuple(cache.view(self.sizes.batch, 1, self.sizes.context, -1) for cache in caches)

    def write(self, cache, slots, rows):
        cache[slots] = rows

    def mask(self, slots):
        return torch.zeros(1, dtype=torch.float64)


class InBlocks(Slots):
    def write(self, cache, slots, rows):
        cache.view(-1, 8, cache.shape[-1])[slots // 8, slots % 8] = rows


class Scattered(Slots):
    def write(self, cache, slots, rows):
        cache.scatter_(0, slots[:, None].expand(-1, cache.shape[-1]), rows)


class Checked(Scattered):
    def write(self, cache, slots, rows):
        torch._check(slots.shape[0] == rows.shape[0])
        super().write(cache, slots, rows)


def report(module, *marked):
    """Compiled for any number of tokens, of slots, or of both."""
    x, tables, _, caches = arguments(SIZES)
    slots = (torch.arange(SIZES.batch)[:, None] * SIZES.context + torch.arange(SIZES.tokens)).flatten()
    theirs = x, tables, slots, tuple(cache.flatten(0, 2) for cache in caches)
    ours, backend = copy.deepcopy(theirs), Reporting()
    if "tokens" in marked:
        for tensor, dim in ((ours[0], 1), *((table, 0) for table in ours[1])):
            torch._dynamo.mark_dynamic(tensor, dim)
    if "slots" in marked:
        torch._dynamo.maybe_mark_dynamic(ours[2], 0)
    found, expected = torch.compile(module, backend=backend)(*ours), module(*theirs)
    torch.testing.assert_close((found, ours), (expected, theirs), **CLOSE)
    return backend.report


@pytest.mark.slow
@pytest.mark.parametrize("layer", [Slots, InBlocks, Scattered])
def test_a_known_number_of_slots(layer):
    found = report(layer(SIZES), "tokens")
    assert found.fused == {"latent_attention": 1}
    reasons = {miss.reason for miss in found.misses if miss.pattern in ("mla_prolog", "kv_rmsnorm_rope_cache")}
    (reason,) = reasons
    assert reason.startswith("position has 16 rows, but 4*s"), reason
    assert reason.endswith(" being x.size()[1]: torch._dynamo.mark_dynamic(position, 0) makes both dynamic"), reason


@pytest.mark.slow
@pytest.mark.parametrize("layer", [Slots, InBlocks, Checked])
def test_the_remedy(layer):
    assert report(layer(SIZES), "tokens", "slots").fused == FUSED


def test_a_scatter_may_leave_out_rows():
    """Two symbols that no write requires to be equal."""
    found = report(Scattered(SIZES), "tokens", "slots")
    assert found.fused == {"latent_attention": 1}
    assert "the rows written may not fill their places in the cache" in str(found)
    assert "torch._check(position.size()[0] == (4*x.size()[1])) in the model says so" in str(found)


def test_slots_whose_number_becomes_known():
    """PyTorch then has a symbol that is a number, and the check of a rewrite reads it."""
    found = report(Slots(SIZES), "slots")
    assert (found.fused, found.notes) == (FUSED, [])
