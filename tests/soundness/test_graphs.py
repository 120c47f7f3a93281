"""Graphs of several layers, caches and kinds of shapes: one odd part keeps nothing else from fusing."""

import contextlib
import signal

import pytest
import torch
from lib.layers import FUSED, QUIET, Complex, Layer, Sizes, arguments, arguments_of, check, variant
from torch import nn

pytestmark = [pytest.mark.filterwarnings(line) for line in QUIET]
ATTENTION = "latent_attention"


# --- layers side by side ----------------------------------------------------------------------------------------------


class Beside(nn.Module):
    """A layer and an ordinary one in one graph: whatever happens to the first, the second fuses."""

    def __init__(self, odd):
        super().__init__()
        self.odd, self.plain = odd, Layer()

    def forward(self, odd, plain):
        return self.odd(*odd), self.plain(*plain)


def check_beside(odd, given=None):
    report = check(Beside(odd), (arguments_of(odd) if given is None else given, arguments()))
    assert all(report.fused.get(name, 0) >= 1 for name in FUSED), str(report)


class TwoSteps(Layer):
    """Two steps over one cache."""

    def forward(self, x, tables, position, caches):
        return super().forward(x, tables, position, caches), super().forward(x * 0.7, tables, position - 3, caches)


class TwoLayers(nn.Module):
    """Two layers over one cache."""

    sizes = Sizes()

    def __init__(self):
        super().__init__()
        self.first, self.second = Layer(), Layer()

    def forward(self, x, tables, position, caches):
        return self.second(self.first(x, tables, position, caches), tables, position - 3, caches)


class OneBuffer(Layer):
    """Both caches are slices of one buffer."""

    def forward(self, x, tables, position, buffer):
        caches = buffer[..., : self.sizes.rank], buffer[..., self.sizes.rank :]
        return super().forward(x, tables, position, caches)


class OneBufferByTokens(Layer):
    """Latents come before rotary keys in one flat buffer."""

    def forward(self, x, tables, position, buffer):
        z = self.sizes
        latents, keys = buffer.view(z.batch, 1, -1).split([z.context * z.rank, z.context * z.rope], -1)
        caches = latents.unflatten(-1, (z.context, -1)), keys.unflatten(-1, (z.context, -1))
        return super().forward(x, tables, position, caches)


class SharedByLayers(Layer):
    """The caches are one layer of a tensor for all layers."""

    def forward(self, x, tables, position, caches):
        return super().forward(x, tables, position, [cache[1] for cache in caches])


def read_to(name, rows):
    return variant(name, store=lambda my, *given: tuple(cache[:, :, rows] for cache in Layer.store(my, *given)))


ReadFarther, ReadPastTheEnd = read_to("ReadFarther", slice(-32, None)), read_to("ReadPastTheEnd", slice(99))  # of 16
NoScale = variant("NoScale", scores=lambda my, query, key: Layer.scores(my, query, key) * 0.0)
NoScaleOfKeys = variant("NoScaleOfKeys", rotate_key=lambda my, *given: Layer.rotate_key(my, *given) * 0.0)


class Conjugated(Complex):
    def turned(self, freqs):
        return freqs.conj()


def given_buffer(sizes, kind):
    x, tables, position, (latents, keys) = arguments(sizes)
    flat = torch.cat((latents.flatten(1), keys.flatten(1)), -1)
    return x, tables, position, torch.cat((latents, keys), -1) if kind is OneBuffer else flat


def stacked(given):
    x, tables, position, caches = given
    return x, tables, position, tuple(torch.stack((cache, -cache, cache * 2)) for cache in caches)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [ReadFarther, ReadPastTheEnd, NoScale, NoScaleOfKeys, Conjugated, TwoSteps])
def test_one_odd_layer_costs_no_other_its_fusion(kind):
    check_beside(kind())


def test_two_layers_over_one_cache():
    check_beside(TwoLayers(), arguments())


@pytest.mark.parametrize("kind", [OneBuffer, OneBufferByTokens])
def test_caches_in_one_buffer(kind):
    check_beside(kind(), given_buffer(Sizes(), kind))


def test_caches_of_all_layers_in_one():
    check_beside(SharedByLayers(), stacked(arguments()))


# --- latent and rotary key in one cache ------------------------------------------------------------------------------


class Combined(Layer):
    """One cache, [B,1,T,R+Dr]; its two parts are written separately."""

    def forward(self, x, tables, position, cache):
        return super().forward(x, tables, position, [cache])

    def store(self, latent, k_rope, position, cache):
        self.write(cache[..., : self.sizes.rank], latent, position)
        self.write(cache[..., self.sizes.rank :], k_rope, position)
        return cache.split([self.sizes.rank, self.sizes.rope], -1)

    def write(self, part, rows, position):
        part.index_copy_(2, position, rows)


CombinedSlices = variant("CombinedSlices", Combined, write=lambda my, part, rows, _: part[:, :, 4:7].copy_(rows))


class CombinedPut(Combined):
    def write(self, part, rows, position):
        part[:, :, position] = rows


class CombinedByRow(Combined):
    """One row after the other."""

    def write(self, part, rows, position):
        for row in range(rows.shape[2]):
            part[:, 0, 4 + row] = rows[:, 0, row]


class CombinedInOne(Combined):
    def store(self, latent, k_rope, position, cache):
        cache.index_copy_(2, position, torch.cat((latent, k_rope), -1))
        return cache.split([self.sizes.rank, self.sizes.rope], -1)


class CombinedStacked(Combined):
    """Both parts in one tensor of two planes."""

    def store(self, latent, k_rope, position, cache):
        planes = cache.view(2, *cache.shape[:-1], -1)
        self.write(planes[0, ..., : self.sizes.rank], latent, position)
        self.write(planes[1, ..., : self.sizes.rope], k_rope, position)
        return planes[0, ..., : self.sizes.rank], planes[1, ..., : self.sizes.rope]


COMBINED = [Combined, CombinedSlices, CombinedPut, CombinedByRow, CombinedInOne, CombinedStacked]


@pytest.mark.slow
@pytest.mark.parametrize("kind", COMBINED)
def test_combined_cache(kind):
    x, tables, position, caches = arguments()
    cache = torch.cat(caches, -1)
    check_beside(kind(), (x, tables, position, torch.cat((cache, cache), -1) if kind is CombinedStacked else cache))


# --- graphs that are long to read ------------------------------------------------------------------------------------


@contextlib.contextmanager
def time_limit(seconds):
    """Fail after this many seconds, from inside any function: a compiler would catch an exception of a test."""

    def stop(*_):
        pytest.fail(f"took more than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


class Doubled(Layer):
    """A value added to itself again and again: as a sum it has two to the power of so many terms."""

    def __init__(self, times):
        super().__init__()
        self.times = times

    def doubled(self, value):
        for _ in range(self.times):
            value = value + value
        return value * 0.5**self.times


class DoubledMask(Doubled):
    def mask(self, position):
        return self.doubled(super().mask(position) + torch.arange(self.sizes.context, dtype=self.o.dtype).cos())


DoubledScores = variant(
    "DoubledScores", Doubled, scores=lambda my, query, key: my.doubled(Layer.scores(my, query, key))
)
DoubledKey = variant("DoubledKey", Doubled, rotate_key=lambda my, *given: my.doubled(Layer.rotate_key(my, *given)))


class DoubledLatent(Doubled):
    def rows(self, x):
        latent, k_rope = super().rows(x)
        return self.doubled(latent), k_rope


class Squared(DoubledMask):
    """The same with products: of values next to one, or they would leave the range of numbers."""

    def doubled(self, value):
        value = 1 + value.clamp(min=-1e-6) * 1e-9
        for _ in range(self.times):
            value = value * value
        return value


DOUBLED = [DoubledMask, DoubledScores, DoubledLatent, DoubledKey, Squared]


@pytest.mark.slow
@pytest.mark.parametrize("times", [20, 60])
@pytest.mark.parametrize("kind", DOUBLED)
def test_doubling(kind, times):
    if kind is Squared and times > 20:
        pytest.skip("2 ** 60 factors of anything but one are zero or infinite")
    with time_limit(10):
        check_beside(kind(times))


# --- sizes that are not known ----------------------------------------------------------------------------------------


def dynamic_arguments(batch, tokens, context):
    return arguments(Sizes(batch=batch, tokens=tokens, context=context))


class AnySize(Layer):
    def mask(self, position):
        later = torch.arange(self.context) > position[:, None]
        return torch.zeros(later.shape, dtype=self.o.dtype).masked_fill(later, -torch.inf)

    def store(self, latent, k_rope, position, kv_cache, kr_cache):
        self.context = kv_cache.shape[2]
        return super().store(latent, k_rope, position, kv_cache, kr_cache)


class Linear(AnySize):
    """The same projections by torch's linear."""

    def query(self, x):
        q = nn.functional.linear(self.norm(nn.functional.linear(x, self.q_a), self.q_gamma), self.q_b)
        return q.unflatten(-1, (self.sizes.heads, self.sizes.query)).transpose(1, 2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AnySize, Linear])
def test_everything_dynamic(kind):
    """Projections by `@`: everything that does not depend on the number of tokens fuses, or the report says why not."""
    report = check(kind(), dynamic_arguments(2, 3, 16), dynamic=True)
    assert report.fused == {"kv_rmsnorm_rope_cache": 1, "mla_attention": 1}, str(report)
