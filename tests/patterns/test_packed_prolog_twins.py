"""Near twins of packed rows: no prolog writes them, and the reason names the part that differs."""

import pytest
import torch
from lib import packed_prologs
from lib.comparing import Stack
from lib.packed_prologs import BF16, DR, PROLOG, RANK, Packed, bytes_of, fused, given, reasons, variant
from torch.nn.functional import linear

import mla_fx

pytestmark = [pytest.mark.usefixtures("no_gradients"), pytest.mark.filterwarnings("ignore::mla_fx.MlaWarning")]


def tiles_of(name, scales_of, codes_of=lambda my, x, scales: x * scales.reciprocal()):
    """Packed rows with scales that are a function of the values, and codes that are one of both."""

    def tiles(self, x):
        scales = scales_of(self, x)
        return codes_of(self, x, scales).round().clamp(-128, 127).to(torch.int8), scales

    return variant(name, tiles=tiles)


def largest(x):
    return x.abs().amax(-1, keepdim=True)


def clipped(x, bound, scales):
    return x.clamp(-bound, bound) * scales.reciprocal()


ScalesFirst = variant("ScalesFirst", order=("codes", "scales", "keys"))  # as FlashMLA's
WideKeys = variant("WideKeys", key_dtype=torch.float32)
NarrowTiles = variant("NarrowTiles", tile=64)
ScaleBeforeTheClip = tiles_of(
    "ScaleBeforeTheClip",
    lambda my, x: largest(x) * (1 / 127),
    lambda my, x, scales: clipped(x, largest(x) * my.alpha, scales),
)
ScaleBeforeTheClipByNumber = tiles_of(
    "ScaleBeforeTheClipByNumber",
    lambda my, x: largest(x) * (1 / 127),
    lambda my, x, scales: clipped(x, largest(x) * 0.75, scales),
)
Unclipped = tiles_of("Unclipped", lambda my, x: largest(x) * my.alpha * (1 / 127))
ClippedAbove = tiles_of(
    "ClippedAbove",
    lambda my, x: largest(x) * my.alpha * (1 / 127),
    lambda my, x, scales: x.minimum(largest(x) * my.alpha) * scales.reciprocal(),
)
AlphaOfEachTile = tiles_of(
    "AlphaOfEachTile",
    lambda my, x: largest(x) * my.alphas * (1 / 127),
    lambda my, x, scales: clipped(x, largest(x) * my.alphas, scales),
)


class ScalesOfTheNeighbour(Packed):
    def tiles(self, x):
        codes, scales = super().tiles(x)
        return codes, self.other(scales)

    def other(self, scales):
        return scales.flip(-2)


class ScalesOfAnotherToken(ScalesOfTheNeighbour):
    def other(self, scales):
        return scales.roll(1, -3)


class Truncated(Packed):
    def tiles(self, x):
        scales = largest(x) * (1 / 127)
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


HalfScales = variant("HalfScales", scale_dtype=BF16)


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


def placed(name, part, change, kind=Packed):
    """The bytes of one part are in another order."""
    return variant(name, kind=kind, placed=lambda my, parts: {**parts, part: change(parts[part])})


def of_the_other_end(size):
    return lambda part: part.unflatten(-1, (-1, size)).flip(-1).flatten(-2)


def by_columns(part):
    """Bytes as in a square."""
    return part.unflatten(-1, (4, 4)).mT.flatten(-2)


KeysOfTheOtherEnd = placed("KeysOfTheOtherEnd", "keys", of_the_other_end(2))
ScalesOfTheOtherEnd = placed("ScalesOfTheOtherEnd", "scales", of_the_other_end(4))
KeysInterleaved = placed("KeysInterleaved", "keys", by_columns)
ScalesInterleaved = placed("ScalesInterleaved", "scales", by_columns, NarrowTiles)
CodesFlipped = placed("CodesFlipped", "codes", lambda part: part.flip(-1))
NO_KEY = "behind 256 codes, rows hold torch.int8, expected a rotary key in 16 bits"
COMPUTED_FROM = "codes or scales of tokens are computed from {}, expected from a value and the largest one"
TWINS = {
    ScalesFirst: "behind 256 codes, rows hold torch.float32, expected a rotary key in 16 bits",
    WideKeys: "behind 256 codes, rows hold torch.float32, expected a rotary key in 16 bits",
    NarrowTiles: "rows have one scale for 64 latents; mla_prolog_v3 writes one for 128",
    ScalesOfTheNeighbour: COMPUTED_FROM.format("flip"),
    ScalesOfAnotherToken: COMPUTED_FROM.format("roll"),
    ScaleBeforeTheClip: "values are clipped to another part of their largest one than that of their scale",
    ScaleBeforeTheClipByNumber: "the largest code of a token is 95, expected 127",
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


@pytest.mark.slow
@pytest.mark.parametrize("quant", ["exact", "vendor"])
@pytest.mark.parametrize("kind", TWINS)
def test_near_twins(kind, quant):
    report = fused(kind(), *given(), quant=quant)
    assert PROLOG not in report.fused, str(report)
    assert reasons(report) == [TWINS[kind]]


@pytest.mark.slow
def test_layers_that_are_nearly_alike():
    kinds = Packed, ScalesFirst, packed_prologs.ClippedByNumber, Packed, packed_prologs.Pages
    layers = Stack(*(kind() for kind in kinds))
    torch.compile(layers, backend="mla", options={"target": "reference"})(*given())
    report = mla_fx.last_report()
    assert report.fused == {PROLOG: 4, packed_prologs.ATTENTION: 5}, str(report)
    assert reasons(report) == [TWINS[ScalesFirst]]
