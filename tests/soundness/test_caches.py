"""Near twins of cache writes: the content of a cache, and what its readers see, is what the program says."""

import pytest
import torch
from lib.layers import FUSED, QUIET, Layer, Sizes, arguments, check, variant

pytestmark = [pytest.mark.filterwarnings(line) for line in QUIET]
ATTENTION = "latent_attention"


# --- where rows go ---------------------------------------------------------------------------------------------------


class Unmasked(Layer):
    def mask(self, position):
        return torch.zeros(self.sizes.tokens, self.sizes.context, dtype=self.o.dtype)


class Put(Unmasked):
    def store(self, latent, k_rope, position, kv_cache, kr_cache):
        kv_cache[:, :, position] = latent
        kr_cache[:, :, position] = k_rope
        return kv_cache, kr_cache


class PutBySequence(Unmasked):
    """Each sequence is written at its own positions."""

    def store(self, latent, k_rope, position, kv_cache, kr_cache):
        where = self.sequences()[:, None], 0, position - 2 * torch.arange(self.sizes.batch)[:, None]
        kv_cache[where] = latent.squeeze(1)
        kr_cache[where] = k_rope.squeeze(1)
        return kv_cache, kr_cache

    def sequences(self):
        return torch.arange(self.sizes.batch)


class PutFlat(Unmasked):
    """Rows of all sequences are written to slots of one flat cache."""

    def store(self, latent, k_rope, position, kv_cache, kr_cache):
        slots = (position + self.sizes.context * torch.arange(self.sizes.batch)[:, None]).flatten()
        for cache, rows in ((kv_cache, latent), (kr_cache, k_rope)):
            cache.view(-1, cache.shape[-1])[slots] = rows.reshape(-1, rows.shape[-1])
        return kv_cache, kr_cache


class Assigned(Layer):
    """A slice counted from the end."""

    def store(self, latent, k_rope, position, kv_cache, kr_cache):
        kv_cache[:, :, -4:-1] = latent
        kr_cache[:, :, -4:-1] = k_rope
        return kv_cache, kr_cache


class AssignedToTheEnd(Layer):
    def store(self, latent, k_rope, position, kv_cache, kr_cache):
        kv_cache[:, :, -3:] = latent
        kr_cache[:, :, -3:] = k_rope
        return kv_cache, kr_cache


@pytest.mark.slow
@pytest.mark.parametrize("first", [-3, -1, -5, 4, 13])
@pytest.mark.parametrize("kind", [Put, PutBySequence, PutFlat])
def test_positions_from_the_end(kind, first):
    """PyTorch's assignment counts negative positions from the end; a fused write that skips them must not replace
    it."""
    report = check(kind(), arguments(first=first))
    assert first < 0 or report.fused.get(ATTENTION)


@pytest.mark.parametrize("kind", [Assigned, AssignedToTheEnd])
def test_slices_from_the_end(kind):
    assert check(kind()).fused == FUSED


class PositionsTurned(Put):
    """Positions are a multiple of the program's argument."""

    def __init__(self, change):
        super().__init__(Sizes(tokens=3))
        self.change = change

    def store(self, latent, k_rope, position, *caches):
        return super().store(latent, k_rope, self.change(position), *caches)


POSITIONS = {
    "negative": lambda position: -position,
    "doubled": lambda position: position * 2 - 12,
    "halved": lambda position: position // 2 * 2 % 3 + position - 8,
    "flipped": lambda position: position.flip(0),
    "narrow": lambda position: position.int(),
    "of floats": lambda position: (position / 2 * 2 - 1).long(),
    "counted": lambda position: torch.arange(3) * 5,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", POSITIONS)
def test_positions_computed(name, outcome):
    outcome(check(PositionsTurned(POSITIONS[name])))


SEQUENCES = {
    "minus": lambda count: -torch.arange(count),
    "none": lambda count: 0 * torch.arange(count),
    "doubled": lambda count: 2 * torch.arange(count) % count,
    "later": lambda count: (torch.arange(count) + 1) % count,
    "from one": lambda count: torch.arange(1, count + 1) - 1,
    "backwards": lambda count: torch.arange(count).flip(0),
    "steps": lambda count: torch.arange(0, 2 * count, 2) // 2,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SEQUENCES)
def test_sequences_computed(name, outcome):
    class Twin(PutBySequence):
        def sequences(self):
            return SEQUENCES[name](self.sizes.batch)

    outcome(check(Twin(Sizes(batch=3)), arguments(Sizes(batch=3), first=6)))


class TwoPositions(Layer):
    def store(self, latent, k_rope, position, kv_cache, kr_cache):
        kv_cache.index_copy_(2, position, latent)
        kr_cache.index_copy_(2, position - 1, k_rope)
        return kv_cache, kr_cache


class AddedTo(Layer):
    def store(self, latent, k_rope, position, kv_cache, kr_cache):
        kv_cache.index_add_(2, position, latent)
        kr_cache.index_put_((torch.tensor([0]), torch.tensor([0]), position[:1]), k_rope[:1, 0, :1].squeeze(0), True)
        return kv_cache, kr_cache


def stored(name, change):
    """Other rows are stored."""

    def store(self, latent, k_rope, position, *caches):
        return Layer.store(self, *change(latent, k_rope, position), *caches)

    return variant(name, store=store)


Turned = stored("Turned", lambda latent, k_rope, position: (latent, k_rope.flip(2), position))
ScaledRows = stored("ScaledRows", lambda latent, k_rope, position: (-latent, 1.5 * k_rope, position))
HalfTheRows = stored(
    "HalfTheRows", lambda latent, k_rope, position: (latent[:, :, 1:], k_rope[:, :, 1:], position[1:])
)


class ScaledContext(Layer):
    """The caches hold plain rows, attention reads them scaled."""

    def store(self, *given):
        latent, k_rope = super().store(*given)
        return latent * 1.5, -k_rope


@pytest.mark.parametrize("kind", [TwoPositions, AddedTo, HalfTheRows, Turned, ScaledRows, ScaledContext])
def test_other_rows(kind, outcome):
    outcome(check(kind()))


# --- the old cache, and copies of it ---------------------------------------------------------------------------------


class CopiedBackReadBefore(Layer):
    """Caches are cloned, the clones written, and copied back."""

    def store(self, latent, k_rope, position, *caches):
        written = super().store(latent, k_rope, position, *(cache.clone() for cache in caches))
        self.copy_back(*caches, *written)
        return self.read(caches, written)

    def copy_back(self, kv_cache, kr_cache, latents, keys):
        kv_cache.copy_(latents)
        kr_cache.copy_(keys)

    def read(self, caches, written):
        return written


class HalfCopiedBack(CopiedBackReadBefore):
    def copy_back(self, kv_cache, kr_cache, latents, keys):
        kv_cache.copy_(latents)
        kr_cache[:, :, :8].copy_(keys[:, :, :8])


class CopiedAcross(CopiedBackReadBefore):
    """Each half of the cache is copied back into the other."""

    def copy_back(self, kv_cache, kr_cache, latents, keys):
        kv_cache.copy_(latents.roll(8, 2))
        kr_cache.copy_(keys.flip(0))


class CopiedScaled(CopiedBackReadBefore):
    def copy_back(self, kv_cache, kr_cache, latents, keys):
        kv_cache.copy_(latents * -2)
        kr_cache.copy_(keys * -2)


CopiedBack = variant("CopiedBack", CopiedBackReadBefore, read=lambda my, caches, _: caches)
NotCopiedBack = variant("NotCopiedBack", CopiedBackReadBefore, copy_back=lambda *_: None)  # caches stay unchanged
COPIES = [CopiedBack, CopiedBackReadBefore, NotCopiedBack, HalfCopiedBack, CopiedAcross, CopiedScaled]


@pytest.mark.slow
@pytest.mark.parametrize("kind", COPIES)
def test_copies_of_a_cache(kind, outcome):
    outcome(check(kind()))


LATE = {
    "split": lambda cache: cache.split(8, dim=2)[1],
    "chunk": lambda cache: cache.chunk(2, dim=2)[1],
    "unbind": lambda cache: cache.unbind(0)[1],
    "unbind tokens": lambda cache: cache.unbind(2)[12],
    "unfold": lambda cache: cache.unfold(2, 4, 4),
    "as_strided": lambda cache: cache.as_strided((4, 3), (5, 1), cache.storage_offset()),
    "diagonal": lambda cache: cache.diagonal(dim1=0, dim2=2),
    "slice": lambda cache: cache[:, :, 8:],
    "select": lambda cache: cache[1],
    "expand": lambda cache: cache.expand(-1, 3, -1, -1),
    "transpose": lambda cache: cache.transpose(-1, -2),
    "view": lambda cache: cache.view(-1, cache.shape[-1]),
    "bits": lambda cache: cache.view(torch.int64),
    "complex": lambda cache: torch.view_as_complex(cache.unflatten(-1, (-1, 2))).imag,
    "whole": lambda cache: cache,
}


class ReadLate(Layer):
    """The old caches are read last, through a view taken first; the new ones are copied over them after that."""

    def __init__(self, look):
        super().__init__()
        self.look = look

    def forward(self, x, tables, position, caches):
        old, new = [self.look(cache) for cache in caches], []
        out = super().forward(x, tables, position, (*caches, new))
        seen = [view + 1 for view in old]
        for cache, written in zip(caches, new, strict=True):
            cache.copy_(written)
        return out, seen

    def store(self, latent, k_rope, position, kv_cache, kr_cache, new):
        new += kv_cache.index_copy(2, position, latent), kr_cache.index_copy(2, position, k_rope)
        return new


@pytest.mark.slow
@pytest.mark.parametrize("name", LATE)
def test_late_reads_of_the_old_cache(name):
    assert check(ReadLate(LATE[name])).fused.get(ATTENTION)
