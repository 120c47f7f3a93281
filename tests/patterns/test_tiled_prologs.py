"""DeepSeek-V3.2's prolog in plain PyTorch: an int8 query projection, and latents that are written as codes and scales.

Codes, scales and rotary keys in caches must be those of eager mode, bit for bit."""

import copy

import pytest
import torch
from lib.comparing import Stack
from lib.layers import Rewritten
from lib.tiled_prologs import BF16, CACHES, F32, HCQ, SLOTS, Tiled, by_a_true_quotient, given, largest, quantised

import mla_fx

pytestmark = [pytest.mark.usefixtures("no_gradients"), pytest.mark.filterwarnings("ignore::mla_fx.MlaWarning")]

PROLOG, ATTENTION = "mla_prolog_quant", "latent_attention"
BOTH = {PROLOG: 1, ATTENTION: 1}


def fused(layer, *inputs, **options):
    """The report on a layer, after its output and its caches were compared with those of eager mode. Caches are equal,
    unless the vendor's codes are asked for."""
    theirs = copy.deepcopy(layer)
    wanted = theirs(*inputs)
    run = Rewritten(layer, **options)
    found = run(*inputs)
    assert (found - wanted).norm() <= (2e-2 if found.dtype == BF16 else 1e-5) * wanted.norm()
    for name in CACHES if options.get("quant") != "vendor" else ():
        assert torch.equal(getattr(layer, name), getattr(theirs, name)), name
    return run.report


def reasons(report):
    return [miss.reason for miss in report.misses if miss.pattern == PROLOG]


# --- layers that fuse ------------------------------------------------------------------------------------------------


class IndexPut(Tiled):
    def write(self, cache, slots, rows):
        cache[slots] = rows[0]


class Pages(Tiled):
    """Pages of 16 slots, written by block and offset."""

    def __init__(self, dtype=F32):
        super().__init__(dtype)
        for name in CACHES:
            setattr(self, name, getattr(self, name).unflatten(0, (-1, 16)).unsqueeze(2))

    def write(self, cache, slots, rows):
        cache[slots // 16, slots % 16] = rows[0].unsqueeze(1)


class FlatPages(Pages):
    """The same, written as slots."""

    def write(self, cache, slots, rows):
        cache.view(SLOTS, -1).index_copy_(0, slots, rows[0])


class Wandering(Tiled):
    """Codes go through other types on the way, between bounds that none of them reaches."""

    def tiles(self, latent):
        x = latent.unflatten(-1, (4, -1))
        factor = torch.full_like(largest(x), 127.0) / x.float().abs().max(-1, keepdim=True)[0]
        codes = (factor * x).round().clamp(-128, 127).to(torch.int32).to(torch.float16).to(torch.int8)
        return codes.flatten(-2), factor.reciprocal().squeeze(-1)


class Smoothed(Tiled):
    """The query's latent is multiplied by a factor per column before it is quantised."""

    def quantise_query(self, x):
        return by_a_true_quotient(x * torch.linspace(0.5, 1.5, HCQ))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [F32, BF16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("kind", [Tiled, IndexPut, Pages, FlatPages, Wandering, Smoothed])
def test_one_prolog(kind, dtype):
    report = fused(kind(dtype), *given(dtype))
    assert report.fused == BOTH and not report.misses and not report.notes, str(report)


def normed(name, norm):
    """The norm is a function of the value, the same in float32 and gamma."""
    return type(name, (Tiled,), {"norm": lambda my, x, gamma: norm(x, x.float(), gamma)})


def mean(x):
    return x.pow(2).mean(-1, keepdim=True)


# In bfloat16, the last bit of a float32 is rounded away.
UsualNorm = normed("UsualNorm", lambda x, wide, g: (g.float() * (wide * torch.rsqrt(mean(wide) + 1e-6))).to(x.dtype))
# As Hugging Face's.
RoundedTwice = normed("RoundedTwice", lambda x, wide, g: g * (wide * torch.rsqrt(mean(wide) + 1e-6)).to(x.dtype))
DividedNorm = normed("DividedNorm", lambda x, wide, g: (g.float() * (wide / (mean(wide) + 1e-6).sqrt())).to(x.dtype))


class Narrow(Tiled):
    """The statistic of the norm is rounded to the dtype of the model."""

    def norm(self, x, gamma):
        mean = (x * x).mean(-1, keepdim=True).float()
        return (gamma.float() * (x.float() * torch.rsqrt(mean + 1e-6))).to(x.dtype)


def test_a_norm_that_is_rounded():
    assert fused(UsualNorm(BF16), *given(BF16)).fused == BOTH


def test_slots_that_count_from_the_end():
    *rest, slots = given()
    assert fused(Pages(), *rest, slots - SLOTS).fused == BOTH


@pytest.mark.slow
def test_layers_that_are_nearly_alike():
    kinds = Tiled, ScalesOneSlotLater, divided, Tiled, Pages, Pages
    layers = Stack(*(layer_of(kind, BF16) for kind in kinds))
    torch.compile(layers, backend="mla", options={"target": "reference"})(*given(BF16))
    report = mla_fx.last_report()
    assert report.fused == {PROLOG: 4, ATTENTION: 6}, str(report)
    assert reasons(report) == [TWINS[ScalesOneSlotLater], f"{FACTOR}; {SCALE}; {ON_REQUEST}"]


@pytest.mark.slow
def test_a_target_that_multiplies_int8_projections_one_by_one():
    report = mla_fx.explain(Tiled(BF16), target="inductor")(*given(BF16))
    assert report.fused == {ATTENTION: 1}, str(report)
    assert reasons(report) == [f"target 'inductor': int8 projections are faster one by one than in {PROLOG}"]


# --- other codes and scales than the operator's ----------------------------------------------------------------------

FACTOR = "codes are computed otherwise than as value * (127 / largest) with a true quotient, as a kernel does"
SCALE = "scales are computed otherwise than as 1 / (127 / largest) with a true quotient, as a kernel does"
ON_REQUEST = "quant='vendor' takes the operator's codes"


def divided(x):
    scales = largest(x) / 127
    return (x.float() / scales).round().to(torch.int8), scales


def by_a_reciprocal(x):
    """PyTorch divides a number by a tensor as the number times the reciprocal, which rounds twice."""
    factor = 127 / largest(x)
    return quantised(x, factor, 1 / factor)


def with_a_scale_of_its_own(x):
    return by_a_true_quotient(x)[0], largest(x) / 127


def guarded(x):
    factor = torch.full_like(largest(x), 127.0) / largest(x).clamp_min(1e-7)
    return quantised(x, factor, 1 / factor)


class Unrounded(Tiled):
    """The latent is quantised before it is rounded to the dtype of the model."""

    def norm(self, x, gamma):
        return super().norm(x.float() if gamma is self.kv_gamma else x, gamma)


DIFFERENCES = {
    divided: [FACTOR, SCALE],
    by_a_reciprocal: [FACTOR, SCALE],
    with_a_scale_of_its_own: [SCALE],
    guarded: ["the largest value of a token counts as 1e-07 at least, in a kernel as it is"],
    Unrounded: ["the latent is quantised in torch.float32, a kernel rounds it to torch.bfloat16 before"],
    RoundedTwice: [
        f"{what} is rounded before and after gamma multiplies it, in a kernel only after"
        for what in ("the query's latent", "the latent")
    ],
    DividedNorm: ["the latent is normalised otherwise than as gamma * (value * (1 / root)), as a kernel does"],
    Narrow: [
        f"the norm of {what} is computed in torch.bfloat16, in a kernel in torch.float32"
        for what in ("the query's latent", "the latent")
    ],
}


def layer_of(kind, dtype):
    return kind(dtype) if isinstance(kind, type) else Tiled(dtype, kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", DIFFERENCES)
def test_other_codes_are_taken_on_request(kind):
    report = fused(layer_of(kind, BF16), *given(BF16))
    assert PROLOG not in report.fused, str(report)
    assert reasons(report) == [f"{'; '.join(DIFFERENCES[kind])}; {ON_REQUEST}"]
    torch._dynamo.reset()
    layer, theirs = layer_of(kind, BF16), layer_of(kind, BF16)
    report = fused(layer, *given(BF16), quant="vendor")
    assert report.fused == BOTH, str(report)
    assert report.notes == [f"{PROLOG}: {difference}" for difference in DIFFERENCES[kind]]
    theirs(*given(BF16))
    assert (layer.kv_cache.int() - theirs.kv_cache.int()).abs().max() <= 1
    torch.testing.assert_close(layer.scale_cache, theirs.scale_cache, rtol=2e-2, atol=1e-8)


# --- near twins ------------------------------------------------------------------------------------------------------


def with_scales_of_the_neighbour(x):
    codes, scales = by_a_true_quotient(x)
    return codes, scales[..., [1, 2, 3, 0], :]


def truncated(x):
    scales = by_a_true_quotient(x)[1]
    return (x.float() / scales).to(torch.int8), scales


class OneScale(Tiled):
    def tiles(self, latent):
        codes, scales = by_a_true_quotient(latent)
        return codes, scales.expand(-1, -1, 4)


class ThreeTiles(Tiled):
    rank, tile_count = 96, 3


class ScalesOneSlotLater(Tiled):
    later = "scale_cache"

    def write(self, cache, slots, rows):
        super().write(cache, slots + 1 if cache is getattr(self, self.later) else slots, rows)


class KeysOneSlotLater(ScalesOneSlotLater):
    later = "kr_cache"


TWINS = {
    with_scales_of_the_neighbour: (
        "codes or scales of tokens are computed from index, expected from a value and the largest one"
    ),
    truncated: "expected codes rounded to the nearest whole number, found div",
    OneScale: "the scale of 32 adjacent codes is not that of these",
    ThreeTiles: "latents have 3 scales; mla_prolog_quant writes 4",
    ScalesOneSlotLater: "the codes and scales of latents are written to different positions",
    KeysOneSlotLater: "latent and rotary key are written to different positions",
}


@pytest.mark.slow
@pytest.mark.parametrize("quant", ["exact", "vendor"])
@pytest.mark.parametrize("kind", TWINS)
def test_near_twins(kind, quant):
    report = fused(layer_of(kind, F32), *given(), quant=quant)
    assert PROLOG not in report.fused, str(report)
    assert reasons(report) == [TWINS[kind]]


class OldScales(Tiled):
    def dequantised(self, codes, scales, old_scales):
        return super().dequantised(codes, old_scales, old_scales)


def test_attention_reads_old_scales():
    report = fused(OldScales(), *given())
    assert report.fused == {ATTENTION: 1} and not reasons(report), str(report)


class TwoSequences(Tiled):
    def __init__(self):
        super().__init__()
        for name in CACHES:
            setattr(self, name, getattr(self, name).expand(2, -1, -1).clone())

    def write(self, cache, slots, rows):
        cache.index_copy_(1, slots, rows)


def test_caches_with_a_batch():
    report = fused(TwoSequences(), *given(batch=2))
    wanted = "a cache has a batch of 2; mla_prolog_quant writes pages without a batch"
    assert report.fused == {ATTENTION: 1} and reasons(report) == [wanted], str(report)
