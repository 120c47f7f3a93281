"""Int8 caches with scales that are given: norm, rotation and write fuse if every code is the program's."""

import copy

import pytest
import torch
from lib.comparing import Stack
from lib.layers import Rewritten, variant
from torch import nn

import mla_fx
from mla_fx.cases import DR, HCKV, B, Layer, S, T, inputs

pytestmark = [pytest.mark.usefixtures("no_gradients"), pytest.mark.filterwarnings("ignore::mla_fx.MlaWarning")]
KEY_SIDE = "kv_rmsnorm_rope_cache"
ONE_EACH = {KEY_SIDE: 1, "latent_attention": 1}
DTYPES = (torch.float32, torch.bfloat16)
CLOSE = {torch.float32: {"rtol": 1e-4, "atol": 1e-4}, torch.bfloat16: {"rtol": 5e-2, "atol": 5e-2}}


def int8(x):
    return x.clamp(-128, 127).to(torch.int8)


def coded(x, scale):
    return int8((x.float() * scale).round())


class OneScale(Layer):
    """Latents as int8 codes, one scale for all; rotary keys as they are. Values are computed in float32 and rounded
    once."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.to(dtype)
        generator = torch.Generator().manual_seed(2)

        def scales(*shape):
            return nn.Buffer(25 + 30 * torch.rand(shape, generator=generator))

        self.one, self.in_one, self.of_tokens = scales(), scales(1), scales(S, 1)
        self.of_latents, self.of_keys = scales(HCKV), scales(DR)
        self.kv_codes = nn.Buffer(coded(self.kv_cache, self.one))
        self.kr_codes = nn.Buffer(coded(self.kr_cache, self.one))

    def norm(self, x, gamma):
        wide = x.float()
        return self.weighted(wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6), gamma)

    def weighted(self, wide, gamma):
        return (gamma.float() * wide).to(gamma.dtype)

    def rotate(self, x, cos, sin):
        return super().rotate(x.float(), cos.float(), sin.float()).to(x.dtype)

    def attend(self, q_nope, q_rope, latent, k_rope, mask):
        return super().attend(q_nope, q_rope, latent, k_rope, mask.to(latent.dtype))

    def store(self, latent, k_rope, position):
        return self.stored(latent, position), self.stored_key(k_rope, position)

    def stored(self, latent, position):
        self.kv_codes.index_copy_(2, position, self.codes(latent))
        return self.dequantised(self.kv_codes, self.one)

    def stored_key(self, k_rope, position):
        self.kr_cache.index_copy_(2, position, k_rope)
        return self.kr_cache

    def codes(self, latent):
        return coded(latent, self.one)

    def dequantised(self, codes, scale):
        return (codes.float() / scale).to(self.kv_a.dtype)


def with_codes(name, codes):
    return variant(name, OneScale, codes=codes)


InOneDimension = with_codes("InOneDimension", lambda my, x: coded(x, my.in_one))
Number = with_codes("Number", lambda _, x: coded(x, 31.3))
Reciprocal = with_codes("Reciprocal", lambda my, x: coded(x, 1 / (my.of_latents * 1e-3)))
ClampedFirst = with_codes("ClampedFirst", lambda my, x: (my.one * x.float()).clamp(-128, 127).round().char())


ByInt16 = with_codes("ByInt16", lambda my, x: int8((x.float() * my.one).round().clamp(-300, 300).short().half()))


class Indexed(OneScale):
    """Rows are assigned at positions."""

    def stored(self, latent, position):
        self.kv_codes[:, :, position] = self.codes(latent)
        return self.dequantised(self.kv_codes, self.one)

    def stored_key(self, k_rope, position):
        self.kr_cache[:, :, position] = k_rope
        return self.kr_cache


class Channels(OneScale):
    """A scale for each column of both caches."""

    def stored(self, latent, position):
        self.kv_codes.index_copy_(2, position, coded(latent, self.of_latents))
        return self.dequantised(self.kv_codes, self.of_latents)

    def stored_key(self, k_rope, position):
        self.kr_codes.index_copy_(2, position, coded(k_rope, self.of_keys))
        return self.dequantised(self.kr_codes, self.of_keys)


# The normalised value is rounded before it is weighted.
HuggingFace = variant("HuggingFace", Channels, weighted=lambda my, wide, gamma: gamma * wide.to(gamma.dtype))
Unrotated = variant("Unrotated", Channels, rotate_key=lambda my, x, *tables: x)
# The rotation rounds more than the operator does, and stays as it is.
RotationIn16Bits = variant("RotationIn16Bits", Channels, rotate=lambda my, *given: Layer.rotate(my, *given))


class Unrounded(Channels):
    """Latents and rotary keys are quantised before they are rounded, as kernels do it."""

    def rows(self, x):
        latent, k_rope = torch.split(x @ self.kv_a.T, [HCKV, DR], dim=-1)
        return self.wide_norm(latent).unsqueeze(1), k_rope.unsqueeze(1)

    def wide_norm(self, x):
        return super().norm(x.float(), self.kv_gamma.float())

    def rotate_key(self, x, cos, sin):
        return super().rotate(x.float(), cos, sin)


class OnlyKeysRounded(Unrounded):
    """The operator rounds both or none. The rotation stays as it is."""

    def rotate_key(self, x, cos, sin):
        return super().rotate_key(x, cos, sin).to(x.dtype)


class Appended(Channels):
    """Caches that grow by cat."""

    def store(self, latent, k_rope, position):
        new = {"kv": coded(latent, self.of_latents), "kr": coded(k_rope, self.of_keys)}
        self.grown = {name: torch.cat((getattr(self, f"{name}_codes")[:, :, : T - S], new[name]), 2) for name in new}
        latents, keys = self.grown.values()
        return self.dequantised(latents, self.of_latents), self.dequantised(keys, self.of_keys)


KINDS = (
    OneScale, InOneDimension, Number, Reciprocal, ClampedFirst, ByInt16, Indexed, Channels, HuggingFace, Unrounded,
    Unrotated, RotationIn16Bits, OnlyKeysRounded,
)  # fmt: skip


def steps(dtype, number=2):
    """Arguments of several calls."""
    x, cos, sin, position = inputs()
    for step in range(number):
        yield x.roll(step, -1).to(dtype), cos.to(dtype), sin.to(dtype), position - step


def caches_of(layer):
    return {**dict(layer.named_buffers()), **getattr(layer, "grown", {})}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", (*KINDS, pytest.param(Appended, marks=pytest.mark.compiled)))
def test_the_key_side_writes_the_programs_codes(kind, dtype):
    ours, theirs = kind(dtype), kind(dtype)
    fused = Rewritten(ours)
    for arguments in steps(dtype):
        torch.testing.assert_close(fused(*arguments), theirs(*arguments), **CLOSE[dtype])
        mine, others = caches_of(ours), caches_of(theirs)
        for name, cache in others.items():
            is_equal = torch.equal(mine[name], cache)
            assert is_equal if cache.dtype == torch.int8 else torch.allclose(mine[name], cache, rtol=1e-2, atol=1e-2)
    report = mla_fx.last_report()
    assert report.fused == ONE_EACH, str(report)
    assert not any("codes" in note for note in report.notes)


@pytest.mark.parametrize("rows", [1, 3])
def test_a_single_token(rows):
    """Then a scale for each column has the axes of the value itself."""
    ours, theirs = Channels(torch.bfloat16), Channels(torch.bfloat16)
    _, *rest = next(steps(torch.bfloat16))
    x = torch.randn(B, rows, 32, generator=torch.Generator().manual_seed(3)).bfloat16()
    arguments = (x, *(part[-rows:] for part in rest))
    torch.testing.assert_close(Rewritten(ours)(*arguments), theirs(*arguments), **CLOSE[torch.bfloat16])
    assert torch.equal(ours.kv_codes, theirs.kv_codes)
    assert torch.equal(ours.kr_codes, theirs.kr_codes)
    assert mla_fx.last_report().fused == ONE_EACH


@pytest.mark.slow
def test_equal_layers_fuse_alike_and_agree_in_float64():
    """The second layer's tokens come from a fused attention, so its codes may differ."""
    ours, theirs = (Stack(*(Unrounded(torch.bfloat16) for _ in range(2))) for _ in range(2))
    fused = torch.compile(ours, backend="mla", options={"target": "reference", "verify": "always"})
    for arguments in steps(torch.bfloat16):
        torch.testing.assert_close(fused(*arguments), theirs(*arguments), **CLOSE[torch.bfloat16])
    assert torch.equal(ours.layers[0].kv_codes, theirs.layers[0].kv_codes)
    assert torch.equal(ours.layers[0].kr_codes, theirs.layers[0].kr_codes)
    assert mla_fx.last_report().fused == dict.fromkeys(ONE_EACH, 2)


# --- near twins ------------------------------------------------------------------------------------------------------


Truncated = with_codes("Truncated", lambda my, x: int8(x.float() * my.one))
Divided = with_codes("Divided", lambda my, x: int8((x.float() / (1 / my.one)).round()))
DividedByNumber = with_codes("DividedByNumber", lambda _, x: int8((x.float() / 0.03).round()))
Symmetric = with_codes("Symmetric", lambda my, x: (x.float() * my.one).round().clamp(-127, 127).char())
Unclamped = with_codes("Unclamped", lambda my, x: (x.float() * my.one).round().char())
CastFirst = with_codes("CastFirst", lambda my, x: (x.float() * my.one).round().char().clamp(-128, 127))
CastToInt16First = with_codes("CastToInt16First", lambda my, x: int8((x.float() * my.one * 500).round().short()))
CastToInt32First = with_codes("CastToInt32First", lambda my, x: int8((x.float() * my.one).round().int()))
ClampedTooLate = with_codes("ClampedTooLate", lambda my, x: int8((x.float() * my.one).clamp(-300, 300).round().char()))
ZeroPoint = with_codes("ZeroPoint", lambda my, x: int8((x.float() * my.one).round() + 3))
ZeroPointFirst = with_codes("ZeroPointFirst", lambda my, x: int8((x.float() * my.one + my.in_one).round()))
ScalesOfTokens = with_codes("ScalesOfTokens", lambda my, x: coded(x, my.of_tokens))
WideScale = with_codes("WideScale", lambda my, x: coded(x, my.one.double() / 3))
ProductIn16Bits = with_codes("ProductIn16Bits", lambda my, x: int8((x * my.one).round()))
RoundedProduct = with_codes("RoundedProduct", lambda my, x: int8((x.float() * my.one).to(x.dtype).round()))


def old(name, kind, method, read):
    """Attention reads a cache as it is before the write."""

    def stored(self, rows, position):
        before = read(self)
        getattr(kind, method)(self, rows, position)
        return before

    return variant(name, kind, **{method: stored})


OldCodes = old("OldCodes", OneScale, "stored", lambda my: my.dequantised(my.kv_codes, my.one))
OldKeys = old("OldKeys", Channels, "stored_key", lambda my: my.dequantised(my.kr_codes, my.of_keys))


class CachedScales(OneScale):
    """Scales that are computed from each token, and cached."""

    def __init__(self, dtype=torch.float32):
        super().__init__(dtype)
        self.cached = nn.Buffer(torch.rand(B, 1, T, 1, generator=torch.Generator().manual_seed(4)) / 50 + 0.01)

    def stored(self, latent, position):
        scales = latent.float().abs().amax(-1, keepdim=True) / 127
        self.kv_codes.index_copy_(2, position, coded(latent, 1 / scales))
        self.cached.index_copy_(2, position, scales)
        return (self.kv_codes.float() * self.cached).to(latent.dtype)


class TruncatedKeys(Channels):
    def stored_key(self, k_rope, position):
        codes = (k_rope.float() * self.of_keys).clamp(-128, 127).to(torch.int8)
        self.kr_codes.index_copy_(2, position, codes)
        return self.dequantised(self.kr_codes, self.of_keys)


OtherPosition = variant(
    "OtherPosition", Channels, stored_key=lambda my, k_rope, position: Channels.stored_key(my, k_rope, position - 1)
)
NormIn16Bits = variant("NormIn16Bits", OneScale, norm=lambda my, x, gamma: Layer.norm(my, x, gamma))
WHOLE = "expected codes rounded to the nearest whole number, found mul"
ZERO_POINT = "the codes have a zero point, expected none"
WRAPS = "codes from -inf to inf are cast to integers and not clamped before, so {:.6g} wraps"
TAKES = "; quant='vendor' takes the operator's codes"
DIVIDES = f"codes are divided by a scale; the operator multiplies{TAKES}"
REASONS = {
    Truncated: WHOLE,
    TruncatedKeys: WHOLE,
    Divided: DIVIDES,
    DividedByNumber: DIVIDES,
    Symmetric: "the codes are clamped to -127 and 127, expected -128 and 127",
    Unclamped: WRAPS.format(2**7),
    CastFirst: WRAPS.format(2**7),
    CastToInt16First: WRAPS.format(2**15),
    CastToInt32First: WRAPS.format(2**31),
    ClampedTooLate: WRAPS.format(2**7),
    ZeroPoint: ZERO_POINT,
    ZeroPointFirst: ZERO_POINT,
    OldCodes: "attention reads kv_codes as it is before new rows are written",
    OldKeys: "latent and rotary key are not both cached as attention reads them",
    ScalesOfTokens: "codes have scales of tokens, expected one scale or one for each column",
    CachedScales: "the scales of an int8 cache are written with its rows, expected scales that are given",
    WideScale: "a value in torch.float64 would be rounded to torch.float32 by the operator",
    OtherPosition: "latent and rotary key are written to different positions",
}
COMPUTED = f"computed in torch.bfloat16, by the operator in torch.float32{TAKES}"
REASONS_IN_16_BITS = {
    ProductIn16Bits: f"codes are {COMPUTED}",
    RoundedProduct: f"codes are {COMPUTED}",
    NormIn16Bits: f"the latent is {COMPUTED}",
}
OF_KEYS = {
    RotationIn16Bits: f"the rotary key is {COMPUTED}",
    OnlyKeysRounded: f"only one of latent and rotary key is rounded to torch.bfloat16; the operator rounds both{TAKES}",
}
TWINS = [(kind, torch.float32, because) for kind, because in REASONS.items()]
TWINS += [(kind, torch.bfloat16, because) for kind, because in REASONS_IN_16_BITS.items()]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "dtype", "because"), TWINS)
def test_a_near_twin_keeps_its_codes(kind, dtype, because):
    ours, theirs = kind(dtype), kind(dtype)
    fused = Rewritten(ours)
    for arguments in steps(dtype):
        torch.testing.assert_close(fused(*arguments), theirs(*arguments), **CLOSE[dtype])
        for mine, other in zip(ours.buffers(), theirs.buffers(), strict=True):
            assert torch.equal(mine, other)
    report = mla_fx.last_report()
    assert report.fused == {"latent_attention": 1}, str(report)
    reasons = [miss.reason for miss in report.misses if miss.pattern == KEY_SIDE]
    assert len(reasons) == 1
    assert because in reasons[0]


@pytest.mark.parametrize("kind", [Divided, DividedByNumber, *REASONS_IN_16_BITS, *OF_KEYS])
def test_the_vendors_codes_are_taken_on_request(kind):
    dtype = torch.float32 if kind in REASONS else torch.bfloat16
    ours, theirs = kind(dtype), kind(dtype)
    fused = Rewritten(ours, quant="vendor")
    for arguments in steps(dtype, 1):
        torch.testing.assert_close(fused(*arguments), theirs(*arguments), rtol=0.1, atol=0.1)
    report = mla_fx.last_report()
    assert report.fused == ONE_EACH, str(report)
    because = {**REASONS, **REASONS_IN_16_BITS, **OF_KEYS}[kind].removesuffix(TAKES)
    assert f"{KEY_SIDE}: {because}" in report.notes
    for name in ("kv_codes", "kr_codes"):
        mine, other = (getattr(layer, name).int() for layer in (ours, theirs))
        assert (mine - other).abs().max() <= 2  # a norm in 16 bits rounds several times


# --- other targets --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_inductor_keeps_the_programs_own_write():
    """Its compiler would not keep the roundings of the operator."""
    ours, arguments = Channels(torch.bfloat16), next(steps(torch.bfloat16))
    theirs = copy.deepcopy(ours)
    theirs(*arguments)
    torch.compile(ours, backend="mla", options={"target": "inductor"})(*arguments)
    report = mla_fx.last_report()
    assert report.fused == {"latent_attention": 1}
    reasons = [miss.reason for miss in report.misses if miss.pattern == KEY_SIDE]
    assert reasons == ["target 'inductor': it is quantised, and compilers do not keep its intermediate roundings"]
