"""Caches of packed rows in plain PyTorch: int8 latents, the bytes of rotary keys and those of scales of tiles.

Rows must be those of eager mode, byte for byte, unless the vendor's codes are asked for."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import linear

import mla_fx

pytestmark = [pytest.mark.usefixtures("no_gradients"), pytest.mark.filterwarnings("ignore::mla_fx.MlaWarning")]
PROLOG, RULE, ATTENTION = "mla_prolog_v3", "mla_prolog_packed", "latent_attention"
BOTH = {PROLOG: 1, ATTENTION: 1}
SLOTS, TOKENS, HEADS, RANK = 48, 3, 4, 256
HE, HCQ, D, DR, DV = 64, 48, 16, 8, 12
BF16, F16 = torch.bfloat16, torch.float16


def by_rows(weight):
    scales = weight.float().abs().amax(1) / 127
    return (weight.float() / scales.unsqueeze(1)).round().to(torch.int8), scales


def bytes_of(x):
    return x.contiguous().view(torch.int8)


class Packed(nn.Module):
    """One layer with an int8 query projection; tests override methods."""

    lead, tile, key_dtype, order = (), 128, None, ("codes", "keys", "scales")
    scale_dtype = torch.float32

    def __init__(self, dtype=BF16):
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def dense(*sizes, fan_in=1):
            return (torch.randn(*sizes, generator=generator) * fan_in**-0.5).to(dtype)

        self.key_dtype = self.key_dtype or dtype
        parts = {
            "q_a": dense(HCQ, HE, fan_in=HE),
            "kv_a": dense(RANK + DR, HE, fan_in=HE),
            "kv_b": dense(HEADS * (D + DV), RANK, fan_in=RANK),
            "o": dense(HE, HEADS * DV, fan_in=HEADS * DV),
            "q_gamma": 1 + 0.3 * dense(HCQ),
            "kv_gamma": 1 + 0.3 * dense(RANK),
            "alpha": torch.tensor([0.8125]),
            "alphas": torch.tensor([[0.9], [0.7]]),
        }
        parts["q_b"], parts["q_b_scales"] = by_rows(dense(HEADS * (D + DR), HCQ, fan_in=HCQ))
        for name, value in parts.items():
            self.register_buffer(name, value)
        rows = self.rows(dense(SLOTS, RANK).float(), dense(SLOTS, DR).to(self.key_dtype))
        self.cache = nn.Buffer(rows.view(*self.lead, *rows.shape) if self.lead else rows)

    def forward(self, x, cos, sin, slots):
        batch = len(x)
        q_nope, q_rope = self.query(x).view(batch, -1, HEADS, D + DR).split([D, DR], dim=-1)
        latent, k_rope = self.down(x).split([RANK, DR], dim=-1)
        q_rope = self.rotate(q_rope, cos.unsqueeze(1), sin.unsqueeze(1))
        k_rope = self.rotate(k_rope, cos, sin).to(self.key_dtype)
        self.write(self.rows(self.norm(latent, self.kv_gamma), k_rope), slots)
        latents, keys = self.unpacked()
        latents, keys = latents.reshape(batch, SLOTS, -1).to(x.dtype), keys.reshape(batch, SLOTS, 1, DR).to(x.dtype)
        key, value = linear(latents, self.kv_b).view(batch, SLOTS, HEADS, D + DV).split([D, DV], dim=-1)
        key = torch.cat((key, keys.expand(-1, -1, HEADS, -1)), -1)
        scores = torch.einsum("bsnd,btnd->bnst", torch.cat((q_nope, q_rope), -1), key) * (D + DR) ** -0.5
        scores = scores.masked_fill(torch.arange(SLOTS) > slots[:, None], -torch.inf)
        return linear(torch.einsum("bnst,btnv->bsnv", scores.softmax(-1), value).flatten(2), self.o)

    def query(self, x):
        return self.product(self.norm(linear(x, self.q_a), self.q_gamma), "q_b").to(x.dtype)

    def product(self, x, name):
        scales = x.float().abs().amax(-1, keepdim=True) / 127
        codes = (x.float() / scales).round().to(torch.int8)
        return (codes.int() @ getattr(self, name).int().t()).float() * scales * getattr(self, f"{name}_scales")

    def down(self, x):
        return linear(x, self.kv_a)

    def norm(self, x, gamma):
        wide = x.float()
        return wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * gamma.float()

    def rotate(self, x, cos, sin):
        even, odd = x.float()[..., ::2], x.float()[..., 1::2]
        cos, sin = (table.float().chunk(2, -1) for table in (cos, sin))
        return torch.cat((even * cos[0] - odd * sin[0], odd * cos[1] + even * sin[1]), -1).to(self.q_a.dtype)

    def rows(self, latent, keys):
        codes, scales = self.tiles(latent.unflatten(-1, (-1, self.tile)))
        scales = bytes_of(scales.squeeze(-1).to(self.scale_dtype))
        return self.joined(self.placed({"codes": codes.flatten(-2), "keys": bytes_of(keys), "scales": scales}))

    def placed(self, parts):
        """The parts with their bytes in another order; doing it twice undoes it."""
        return parts

    def joined(self, parts):
        return torch.cat([parts[name] for name in self.order], -1)

    def tiles(self, x):
        scales = x.abs().amax(-1, keepdim=True) * (1 / 127)
        return (x * scales.reciprocal()).round().to(torch.int8), scales

    def write(self, rows, slots):
        self.cache.index_copy_(0, slots, rows[0])

    def unpacked(self):
        widths = {"codes": RANK, "keys": self.key_dtype.itemsize * DR}
        widths["scales"] = self.scale_dtype.itemsize * RANK // self.tile
        pieces = self.cache.split([widths[name] for name in self.order], -1)
        parts = self.placed(dict(zip(self.order, pieces, strict=True)))
        scales = parts["scales"].view(self.scale_dtype).float().unsqueeze(-1)
        values = self.numbers(parts["codes"].unflatten(-1, (-1, self.tile))) * scales
        return values.flatten(-2), parts["keys"].view(self.key_dtype)

    def numbers(self, codes):
        return codes.float()


def given(dtype=BF16, batch=1):
    generator = torch.Generator().manual_seed(1)
    angle = torch.rand(TOKENS, DR // 2, generator=generator).repeat(1, 2) * 6
    x = torch.randn(batch, TOKENS, HE, generator=generator)
    x[:, 1] = 0  # a row without a largest value
    return *(value.to(dtype) for value in (x, angle.cos(), angle.sin())), torch.arange(38, 38 + TOKENS)


def fused(layer, *inputs, **options):
    """The report on a layer, after its output and its cache were compared with those of eager mode. Rows are equal,
    unless the vendor's codes are asked for."""
    theirs = copy.deepcopy(layer)
    wanted = theirs(*inputs)
    found = torch.compile(layer, backend="mla", options={"target": "reference", **options})(*inputs)
    assert (found - wanted).norm() <= 2e-2 * wanted.norm()
    if options.get("quant") != "vendor":
        assert torch.equal(layer.cache, theirs.cache)
    return mla_fx.last_report()


def reasons(report):
    return [miss.reason for miss in report.misses if miss.pattern == RULE]


# --- layers that fuse ------------------------------------------------------------------------------------------------


class AllInt8(Packed):
    """q_a and kv_a are int8, too; latents stay in float32 until they are quantised."""

    def __init__(self, dtype=BF16):
        super().__init__(dtype)
        for name in ("q_a", "kv_a"):
            codes, scales = by_rows(getattr(self, name))
            setattr(self, f"{name}_codes", nn.Buffer(codes))
            setattr(self, f"{name}_codes_scales", nn.Buffer(scales))

    def query(self, x):
        return self.product(self.norm(self.product(x, "q_a_codes"), self.q_gamma), "q_b").to(x.dtype)

    def down(self, x):
        return self.product(x, "kv_a_codes")


class IndexPut(Packed):
    def write(self, rows, slots):
        self.cache[slots] = rows[0]


class Pages(Packed):
    """Pages of 16 slots, written by block and offset."""

    def __init__(self, dtype=BF16):
        super().__init__(dtype)
        self.cache = self.cache.unflatten(0, (-1, 16)).unsqueeze(2)

    def write(self, rows, slots):
        self.cache[slots // 16, slots % 16] = rows[0].unsqueeze(1)


class Batch(Packed):
    """Two sequences, a row for each."""

    def __init__(self, dtype=BF16):
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


class ClippedByNumber(Packed):
    def tiles(self, x):
        bound = x.abs().amax(-1, keepdim=True) * 0.8125
        scales = bound * (1 / 127)
        return (x.clamp(-bound, bound) * (1 / scales)).round().to(torch.int8), scales


class ClippedByParameter(Packed):
    def tiles(self, x):
        bound = x.abs().amax(-1, keepdim=True) * self.alpha
        scales = bound * (1 / 127)
        clipped = torch.minimum(x, bound).maximum(-bound)
        return (clipped * scales.reciprocal()).round().clamp(-128, 127).to(torch.int8), scales


class ClippedByNegativeParameter(ClippedByParameter):
    """The bound is negative, and values are minus that: the limit from below comes last, as in the operator."""

    def __init__(self, dtype=BF16):
        super().__init__(dtype)
        self.alpha.neg_()


class HalvesRotated(Packed):
    def rotate(self, x, cos, sin):
        first, second = x.float().chunk(2, -1)
        cos, sin = (table.float().chunk(2, -1) for table in (cos, sin))
        return torch.cat((first * cos[0] - second * sin[0], second * cos[1] + first * sin[1]), -1).to(self.q_a.dtype)


KINDS = Packed, AllInt8, IndexPut, Pages, IntoAnEmptyRow, ClippedByNumber, ClippedByParameter, HalvesRotated
KINDS += (ClippedByNegativeParameter,)


@pytest.mark.parametrize("kind", KINDS)
def test_one_prolog(kind):
    report = fused(kind(), *given())
    assert report.fused == BOTH and not report.misses and not report.notes, str(report)


def test_float16_has_no_prolog():
    """There attention absorbs its query inside the operator."""
    assert fused(Packed(F16), *given(F16)).fused == {"mla_attention": 1}


def test_a_batch():
    assert fused(Batch(), *given(batch=2)).fused == BOTH


class AllInt8Clipped(AllInt8, ClippedByParameter):
    """Both of them."""


def test_all_int8_and_clipped():
    assert fused(AllInt8Clipped(), *given()).fused == BOTH


def test_layers_that_are_nearly_alike():
    layers = [kind() for kind in (Packed, ScalesFirst, ClippedByNumber, Packed, Pages)]

    def stack(x, *rest):
        for layer in layers:
            x = x + layer(x, *rest)
        return x

    torch.compile(stack, backend="mla", options={"target": "reference"})(*given())
    report = mla_fx.last_report()
    assert report.fused == {PROLOG: 4, ATTENTION: 5}, str(report)
    assert reasons(report) == [TWINS[ScalesFirst]]


def test_a_target_that_multiplies_int8_projections_one_by_one():
    report = mla_fx.explain(Packed(), target="inductor")(*given())
    assert report.fused == {ATTENTION: 1}, str(report)
    assert reasons(report) == [f"target 'inductor': int8 projections are faster one by one than in {PROLOG}"]


def test_as_exact_as_eager_mode():
    """The others multiply in 64 bits; rows hold keys in 16 all the same."""
    ours, theirs, exact = (ClippedByParameter() for _ in range(3))
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


class Divided(Packed):
    def tiles(self, x):
        scales = x.abs().amax(-1, keepdim=True) * (1 / 127)
        return (x / scales).round().to(torch.int8), scales


class QuotientScales(Packed):
    def tiles(self, x):
        scales = x.abs().amax(-1, keepdim=True) / 127
        return (x * (1 / scales)).round().to(torch.int8), scales


class Rounded(Packed):
    def rows(self, latent, keys):
        return super().rows(latent.to(self.q_a.dtype).float(), keys)


class Guarded(Packed):
    def tiles(self, x):
        scales = x.abs().amax(-1, keepdim=True).clamp_min(1e-6) * (1 / 127)
        return (x * scales.reciprocal()).round().to(torch.int8), scales


class ReciprocalRoots(Packed):
    def norm(self, x, gamma):
        wide = x.float()
        return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6) * gamma.float()


class BoundOfTheScale(Packed):
    """The bound is rounded once more than the scale."""

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


class RoundedProducts(AllInt8):
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
    Guarded: ["the largest value of a token counts as 1e-06 at least, in a kernel as it is", CODES, SCALES],
    ReciprocalRoots: [ORDER],
    BoundOfTheScale: [FROM_BELOW, CODES, SCALES],
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


@pytest.mark.parametrize("kind", [ClippedFromBelowFirst, MaximumFirst])
def test_the_order_of_two_limits_counts_where_the_bound_is_negative(kind):
    layer = kind()
    layer.alpha.neg_()
    assert reasons(fused(layer, *given())) == [f"{FROM_BELOW}; quant='vendor' takes the operator's codes"]


# --- near twins ------------------------------------------------------------------------------------------------------


class ScalesFirst(Packed):
    """FlashMLA's order."""

    order = ("codes", "scales", "keys")


class WideKeys(Packed):
    key_dtype = torch.float32


class NarrowTiles(Packed):
    tile = 64


class ScalesOfTheNeighbour(Packed):
    def tiles(self, x):
        codes, scales = super().tiles(x)
        return codes, scales.flip(-2)


class ScalesOfAnotherToken(Packed):
    def tiles(self, x):
        codes, scales = super().tiles(x)
        return codes, scales.roll(1, -3)


class ScaleBeforeTheClip(Packed):
    def tiles(self, x):
        largest = x.abs().amax(-1, keepdim=True)
        scales, bound = largest * (1 / 127), largest * self.alpha
        return (x.clamp(-bound, bound) * scales.reciprocal()).round().to(torch.int8), scales


class ScaleBeforeTheClipByNumber(Packed):
    def tiles(self, x):
        largest = x.abs().amax(-1, keepdim=True)
        scales, bound = largest * (1 / 127), largest * 0.75
        return (x.clamp(-bound, bound) * scales.reciprocal()).round().to(torch.int8), scales


class Unclipped(Packed):
    def tiles(self, x):
        scales = x.abs().amax(-1, keepdim=True) * self.alpha * (1 / 127)
        return (x * scales.reciprocal()).round().clamp(-128, 127).to(torch.int8), scales


class ClippedAbove(Packed):
    def tiles(self, x):
        bound = x.abs().amax(-1, keepdim=True) * self.alpha
        scales = bound * (1 / 127)
        return (x.minimum(bound) * scales.reciprocal()).round().clamp(-128, 127).to(torch.int8), scales


class AlphaOfEachTile(Packed):
    def tiles(self, x):
        bound = x.abs().amax(-1, keepdim=True) * self.alphas
        scales = bound * (1 / 127)
        return (x.clamp(-bound, bound) * scales.reciprocal()).round().to(torch.int8), scales


class Truncated(Packed):
    def tiles(self, x):
        scales = x.abs().amax(-1, keepdim=True) * (1 / 127)
        return (x * scales.reciprocal()).to(torch.int8), scales


class PlainQuery(Packed):
    def query(self, x):
        weight = (self.q_b.float() * self.q_b_scales.unsqueeze(1)).to(x.dtype)
        return linear(self.norm(linear(x, self.q_a), self.q_gamma).to(x.dtype), weight)


class Unsigned(Packed):
    """Bytes without a sign: the same rows."""

    def joined(self, parts):
        return super().joined(parts).view(torch.uint8)

    def numbers(self, codes):
        return codes.contiguous().view(torch.int8).float()


class Float8(Packed):
    def tiles(self, x):
        scales = x.abs().amax(-1, keepdim=True).clamp_min(1e-6) * (1 / 127)
        return bytes_of((x * scales.reciprocal()).to(torch.float8_e4m3fn)), scales

    def numbers(self, codes):
        return codes.view(torch.float8_e4m3fn).float()


class HalfScales(Packed):
    scale_dtype = BF16


class HalfScale(HalfScales):
    """Its row ends with two bytes."""

    tile = RANK


class Together(Packed):
    """Latent and rotary key are quantised together, as one tile."""

    tile = RANK + DR

    def rows(self, latent, keys):
        return super().rows(torch.cat((latent, keys.float()), -1), keys)

    def joined(self, parts):
        return torch.cat((parts["codes"], parts["scales"]), -1)

    def unpacked(self):
        codes, scales = self.cache.split([self.tile, 4], -1)
        return (codes.float() * scales.view(torch.float32)).split([RANK, DR], -1)


class KeysOfTheOtherEnd(Packed):
    """The two bytes of each number are exchanged."""

    def placed(self, parts):
        return {**parts, "keys": parts["keys"].unflatten(-1, (-1, 2)).flip(-1).flatten(-2)}


class ScalesOfTheOtherEnd(Packed):
    def placed(self, parts):
        return {**parts, "scales": parts["scales"].unflatten(-1, (-1, 4)).flip(-1).flatten(-2)}


class KeysInterleaved(Packed):
    """Bytes as in a square, by columns."""

    def placed(self, parts):
        return {**parts, "keys": parts["keys"].unflatten(-1, (4, 4)).mT.flatten(-2)}


class ScalesInterleaved(NarrowTiles):
    def placed(self, parts):
        return {**parts, "scales": parts["scales"].unflatten(-1, (4, 4)).mT.flatten(-2)}


class CodesFlipped(Packed):
    def placed(self, parts):
        return {**parts, "codes": parts["codes"].flip(-1)}


NO_KEY = "behind 256 codes, rows hold torch.int8, expected a rotary key in 16 bits"
NEIGHBOUR = "the codes of tokens are multiplied by a scale that they were not divided by"
TWINS = {
    ScalesFirst: "behind 256 codes, rows hold torch.float32, expected a rotary key in 16 bits",
    WideKeys: "behind 256 codes, rows hold torch.float32, expected a rotary key in 16 bits",
    NarrowTiles: "rows have one scale for 64 latents; mla_prolog_v3 writes one for 128",
    ScalesOfTheNeighbour: NEIGHBOUR,
    ScalesOfAnotherToken: NEIGHBOUR,
    ScaleBeforeTheClip: "values are clipped to another part of their largest one than that of their scale",
    ScaleBeforeTheClipByNumber: "the largest code of a token is 95.25, expected 127",
    Unclipped: "a scale is that of a part of the largest value, to which no value is clipped",
    ClippedAbove: "values are clipped to two bounds, expected plus and minus one",
    AlphaOfEachTile: "tiles are clipped to different parts of their largest values, expected one",
    Truncated: "expected codes rounded to the nearest whole number, found mul",
    Unsigned: "packed rows are in torch.uint8; mla_prolog_v3 writes torch.int8",
    Float8: "rows begin with torch.float8_e4m3fn, expected codes in torch.int8",
    HalfScales: "behind the rotary key, rows hold torch.bfloat16, expected scales in torch.float32",
    HalfScale: "rows have 2 bytes behind the rotary key, expected 4 for each scale",
    Together: NO_KEY,
    KeysOfTheOtherEnd: NO_KEY,
    ScalesOfTheOtherEnd: "behind the rotary key, rows hold torch.int8, expected scales in torch.float32",
    KeysInterleaved: "the bytes of a rotary key are not in order",
    ScalesInterleaved: "the bytes of the scales of a row are not in order",
    CodesFlipped: "expected codes rounded to the nearest whole number, found flip",
    PlainQuery: "no projection is int8; mla_prolog_v3 packs rows beside int8 weights alone",
}


@pytest.mark.parametrize("quant", ["exact", pytest.param("vendor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", TWINS)
def test_near_twins(kind, quant):
    report = fused(kind(), *given(), quant=quant)
    assert PROLOG not in report.fused, str(report)
    assert reasons(report) == [TWINS[kind]]
