"""Near twins of packed rows: no prolog writes them, and the reason names the part that differs."""

import pytest
import torch
from lib.packed_prologs import (
    ATTENTION,
    BF16,
    DR,
    PROLOG,
    RANK,
    ClippedByNumber,
    Packed,
    Pages,
    bytes_of,
    fused,
    given,
    reasons,
)
from torch.nn.functional import linear

import mla_fx

pytestmark = [pytest.mark.usefixtures("no_gradients"), pytest.mark.filterwarnings("ignore::mla_fx.MlaWarning")]


@pytest.mark.slow
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
