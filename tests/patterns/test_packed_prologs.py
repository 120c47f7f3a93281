"""Caches of packed rows in plain PyTorch: int8 latents, the bytes of rotary keys and those of scales of tiles.

Rows must be those of eager mode, byte for byte, unless the vendor's codes are asked for."""

import pytest
import torch
from lib import packed_prologs as packed
from lib.packed_prologs import BOTH, DR, PROLOG, RANK, RULE, Packed, fused, given, reasons, variant

import mla_fx

pytestmark = [pytest.mark.usefixtures("no_gradients"), pytest.mark.filterwarnings("ignore::mla_fx.MlaWarning")]


class IndexPut(Packed):
    def write(self, rows, slots):
        self.cache[slots] = rows[0]


class Batch(Packed):
    """Two sequences, a row for each."""

    def __init__(self, dtype=packed.BF16):
        super().__init__(dtype)
        self.cache = self.cache.expand(2, 1, -1, -1).clone()

    def write(self, rows, slots):
        self.cache.index_copy_(2, slots, rows.unsqueeze(1))


class IntoAnEmptyRow(Packed):
    """Parts are written into the columns of a new row."""

    def joined(self, parts):
        codes, keys, scales = parts.values()
        row = codes.new_empty(*codes.shape[:-1], sum(part.shape[-1] for part in parts.values()))
        row[..., :RANK] = codes
        row[..., RANK : RANK + 2 * DR] = keys
        row[..., RANK + 2 * DR :] = scales
        return row


class ClippedByNegativeParameter(packed.ClippedByParameter):
    """The bound is negative, and values are minus that: the limit from below comes last, as in the operator."""

    def __init__(self, dtype=packed.BF16):
        super().__init__(dtype)
        self.alpha.neg_()


class HalvesRotated(Packed):
    def rotate(self, x, cos, sin):
        first, second = x.float().chunk(2, -1)
        cos, sin = (table.float().chunk(2, -1) for table in (cos, sin))
        return torch.cat((first * cos[0] - second * sin[0], second * cos[1] + first * sin[1]), -1).to(self.q_a.dtype)


KINDS = Packed, IndexPut, packed.Pages, IntoAnEmptyRow, HalvesRotated, ClippedByNegativeParameter, packed.AllInt8
KINDS += packed.ClippedByNumber, packed.ClippedByParameter


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_one_prolog(kind):
    report = fused(kind(), *given())
    assert report.fused == BOTH and not report.misses and not report.notes, str(report)


def test_float16_has_no_prolog():
    """There attention absorbs its query inside the operator."""
    assert fused(Packed(packed.F16), *given(packed.F16)).fused == {"mla_attention": 1}


def test_a_batch():
    assert fused(Batch(), *given(batch=2)).fused == BOTH


class AllInt8Clipped(packed.AllInt8, packed.ClippedByParameter):
    """Both of them."""


def test_all_int8_and_clipped():
    assert fused(AllInt8Clipped(), *given()).fused == BOTH


@pytest.mark.slow
def test_a_target_that_multiplies_int8_projections_one_by_one():
    report = mla_fx.explain(Packed(), target="inductor")(*given())
    assert report.fused == {packed.ATTENTION: 1}, str(report)
    assert reasons(report) == [f"target 'inductor': int8 projections are faster one by one than in {PROLOG}"]


def test_as_exact_as_eager_mode():
    """The others multiply in 64 bits; rows hold keys in 16 all the same."""
    ours, theirs, exact = (packed.ClippedByParameter() for _ in range(3))
    for value in exact.buffers():
        value.data = value.data.double() if value.is_floating_point() else value.data
    found = torch.compile(ours, backend="mla", options={"target": "reference"})(*given())
    assert mla_fx.last_report().fused == BOTH
    eager, wanted = theirs(*given()), exact(*(x.double() if x.is_floating_point() else x for x in given()))
    assert (found.double() - wanted).norm() <= 2 * (eager.double() - wanted).norm()


# --- other codes and scales than the operator's ----------------------------------------------------------------------

CODES = "codes are computed otherwise than as clipped value * (1 / scale), as a kernel does"
SCALES = "scales are computed otherwise than as bound * (1/127), as a kernel does"
ORDER = "the latent is normalised otherwise than as value / root * gamma, as a kernel does"


def tiles_of(name, scales_of, codes_of=lambda x, scales: x * scales.reciprocal()):
    def tiles(self, x):
        scales = scales_of(x.abs().amax(-1, keepdim=True))
        return codes_of(x, scales).round().to(torch.int8), scales

    return variant(name, tiles=tiles)


Divided = tiles_of("Divided", lambda largest: largest * (1 / 127), lambda x, scales: x / scales)
QuotientScales = tiles_of("QuotientScales", lambda largest: largest / 127, lambda x, scales: x * (1 / scales))
Guarded = tiles_of("Guarded", lambda largest: largest.clamp_min(1e-6) * (1 / 127))


class Rounded(Packed):
    def rows(self, latent, keys):
        return super().rows(latent.to(self.q_a.dtype).float(), keys)


class ReciprocalRoots(Packed):
    def norm(self, x, gamma):
        wide = x.float()
        return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6) * gamma.float()


class BoundOfTheScale(Packed):
    """The bound is rounded once more than in a kernel."""

    def tiles(self, x):
        scales = x.abs().amax(-1, keepdim=True) * self.alpha * (1 / 127)
        bound = scales * 127
        return (x.clamp(-bound, bound) * scales.reciprocal()).round().to(torch.int8), scales


class ClippedFromBelowFirst(Packed):
    """Where the bound is negative, values are the bound, in a kernel minus that."""

    def tiles(self, x):
        bound = x.abs().amax(-1, keepdim=True) * self.alpha
        scales = bound * (1 / 127)
        return (self.clipped(x, bound) * scales.reciprocal()).round().clamp(-128, 127).to(torch.int8), scales

    def clipped(self, x, bound):
        return x.clamp(-bound, bound)


class MaximumFirst(ClippedFromBelowFirst):
    def clipped(self, x, bound):
        return x.maximum(-bound).minimum(bound)


class RoundedProducts(packed.AllInt8):
    def product(self, x, name):
        return super().product(x, name).to(self.kv_b.dtype)


FROM_BELOW = (
    "values are clipped from below first, in a kernel from above: it matters where the graph input alpha is negative"
)
DEQUANTISED = "the latent is dequantised otherwise than as integers * token scale * column scale in torch.float32"
DIFFERENCES = {
    Divided: [CODES],
    QuotientScales: [CODES, SCALES],
    Rounded: ["the latent is rounded to torch.bfloat16 before it is quantised, in a kernel it is not"],
    Guarded: ["the largest value of a token counts as 1e-06 at least, in a kernel as it is"],
    ReciprocalRoots: [ORDER],
    BoundOfTheScale: [FROM_BELOW, CODES],
    RoundedProducts: [DEQUANTISED],
    ClippedFromBelowFirst: [FROM_BELOW],
    MaximumFirst: [FROM_BELOW],
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", DIFFERENCES)
def test_other_codes_are_taken_on_request(kind):
    report = fused(kind(), *given())
    assert PROLOG not in report.fused, str(report)
    assert reasons(report) == [f"{'; '.join(DIFFERENCES[kind])}; quant='vendor' takes the operator's codes"]
    torch._dynamo.reset()
    layer, theirs = kind(), kind()
    report = fused(layer, *given(), quant="vendor")
    assert report.fused == BOTH, str(report)
    assert report.notes == [f"{RULE}: {difference}" for difference in DIFFERENCES[kind]]
    theirs(*given())
    mine, others = (one.unpacked()[0] for one in (layer, theirs))
    torch.testing.assert_close(mine, others, rtol=0, atol=0.06)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [ClippedFromBelowFirst, MaximumFirst])
def test_the_order_of_two_limits_counts_where_the_bound_is_negative(kind):
    layer = kind()
    layer.alpha.neg_()
    assert reasons(fused(layer, *given())) == [f"{FROM_BELOW}; quant='vendor' takes the operator's codes"]
