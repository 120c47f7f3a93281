"""Attention over paged keys and values per head that are stored as int8 codes: spellings, precision and near twins."""

import copy

import pytest
import torch
from lib import paged_heads as plain
from lib.coded_heads import (
    Coded,
    InFloat32,
    KeysAlone,
    OfHeads,
    ScaledQuery,
    ZeroPoints,
    ZerosOfKeys,
    coded,
    given,
    in_codes,
)
from lib.layers import QUIET
from lib.paged_heads import (
    CLOSE,
    FLOAT32,
    GATHERS,
    HEADS,
    Eager,
    Grouped,
    PagesOfHeads,
    Sizes,
    Upcast,
    arguments,
    check,
    compared,
    file_of,
    fixed,
    heads_first,
)

import mla_fx

pytestmark = [pytest.mark.filterwarnings(line) for line in QUIET]

ONE = {"paged_attention": 1}


def sized(tokens, **others):
    """Keys and values of different widths."""
    return Sizes(**{"tokens": tokens, "columns": 6} | others)


def fuses(module, folder, **options):
    """Results are eager's, and the codes are read by the operator alone."""
    report = check(module, **{"given": given(module), "dump": str(folder)} | options)
    assert report.fused == ONE and report.checked, str(report)
    (dumped,) = folder.iterdir()
    captured, lowered = (file_of(dumped, stage) for stage in ("captured", "lower"))
    gathered = [sum(f"aten.{name}" in text for name in GATHERS) for text in (captured, lowered)]
    assert gathered[0] and not gathered[1], lowered


class Uncast(Coded):
    def numbers(self, codes, scale, zero):
        return scale * codes


class InOneDimension(Coded):
    def numbers(self, codes, scale, zero):
        return (codes.flatten(2).to(scale.dtype) * scale.flatten()).view(codes.shape)


class OfColumns(Coded):
    def numbers(self, codes, scale, zero):
        return codes.to(scale.dtype) * scale[0]


class OfGroups(Coded):
    """Two columns of a head share a scale."""

    def numbers(self, codes, scale, zero):
        return (codes.unflatten(-1, (-1, 2)).to(scale.dtype) * scale[:, ::2].unsqueeze(-1)).flatten(-2)


class OneNumber(Coded):
    def numbers(self, codes, scale, zero):
        return codes.to(scale.dtype) * scale[0, 0]


class Reciprocal(Coded):
    def numbers(self, codes, scale, zero):
        return codes.to(scale.dtype) * (1 / (3 * scale))


class Constant(Coded):
    """A number of the program is a factor of the scores and of the result."""

    def numbers(self, codes, scale, zero):
        return codes.to(scale.dtype) * 0.03


class AfterRepeat(Coded):
    """Each query head reads a copy of codes and scales."""

    def attend(self, query, key, value, positions):
        return Eager.attend(self, query, key, value, positions)

    fill, weights = Eager.fill, Eager.weights

    def keys(self, key):
        return key

    values = keys

    def repeated(self, codes):
        scale = self.key_scale if codes.shape[-1] == self.width else self.value_scale
        codes, scales = (rows.repeat_interleave(HEADS // self.kv_heads, -2) for rows in (codes, scale))
        return codes.to(scale.dtype) * scales


class AddedZeros(ZeroPoints):
    def numbers(self, codes, scale, zero):
        return scale * (-zero + codes.to(scale.dtype))


class UncastZeros(ZeroPoints):
    def numbers(self, codes, scale, zero):
        return (codes - zero) * scale


class ZerosAlone(ZeroPoints):
    def numbers(self, codes, scale, zero):
        return codes.to(scale.dtype) - zero


KINDS = [Coded, Uncast, InOneDimension, OfHeads, OfColumns, OfGroups, OneNumber, Reciprocal, Constant, AfterRepeat]
KINDS += [ZeroPoints, AddedZeros, UncastZeros, ZerosOfKeys, ZerosAlone, ScaledQuery]
LAYERS = [Eager, plain.Expanded, plain.Turned, Grouped, plain.BlocksSelected, plain.BlocksEmbedded, plain.Slots]
LAYERS += [plain.SlotOfEachToken, plain.HeadsFirst, plain.Padded, plain.Scaled, plain.Window]
QUICK = (Coded, OfGroups, AfterRepeat, AddedZeros)


@pytest.mark.parametrize("tokens", [1, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind in QUICK else pytest.mark.slow, id=kind.__name__) for kind in KINDS]
)
def test_spellings(kind, tokens, tmp_path):
    fuses(kind(sized(tokens)), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", LAYERS, ids=lambda kind: kind.__name__)
def test_layers(kind, tmp_path):
    fuses(coded(kind)(Sizes(tokens=3)), tmp_path)


@pytest.mark.slow
def test_values_that_are_no_codes(tmp_path):
    module = KeysAlone(sized(3))
    plain, codes = arguments(module.sizes), given(module)
    fuses(module, tmp_path, given=(*codes[:4], plain[4]))


@pytest.mark.parametrize("target", ["reference", pytest.param("inductor", marks=pytest.mark.slow)])
def test_heads_first_in_a_page(target, tmp_path):
    module = coded(PagesOfHeads)(sized(1)).float()
    pages = in_codes(heads_first(arguments(module.sizes, torch.float32)))
    fuses(module, tmp_path, given=pages, close=FLOAT32, target=target)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [ZeroPoints, coded(Grouped)], ids=lambda kind: kind.__name__)
def test_many_tokens(kind, tmp_path):
    fuses(kind(sized(70, batch=2, blocks=8)), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Coded, ZeroPoints, coded(Grouped)], ids=lambda kind: kind.__name__)
def test_one_graph_for_all_sizes(kind):
    torch._dynamo.reset()
    shapes = [Sizes(3, 5, 7, 2, 8, 6), Sizes(5, 7, 9, 2, 8, 6), Sizes(2, 3, 11, 2, 8, 6)]
    module = kind(shapes[0])
    run = torch.compile(fixed(module), backend=mla_fx.get_backend(target="reference"), dynamic=True, fullgraph=True)
    compared(run, module, given(module), CLOSE)
    assert mla_fx.last_report().fused == ONE, str(mla_fx.last_report())
    with torch.compiler.set_stance("fail_on_recompile"):
        for sizes in shapes[1:]:
            compared(run, module, in_codes(arguments(sizes)), CLOSE)


# --- precision -------------------------------------------------------------------------------------------------------


PRECISE = (Coded, InFloat32, coded(Eager), coded(Grouped), coded(Upcast), ZeroPoints, OneNumber)


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, *(pytest.param(t, marks=pytest.mark.slow) for t in (torch.float16, torch.float32))]
)
@pytest.mark.parametrize("kind", PRECISE, ids=lambda kind: kind.__name__)
def test_no_coarser_than_the_program(kind, dtype):
    """Against the program in float64. Scales of 16 bits are the same numbers there."""
    torch._dynamo.reset()
    module = kind(sized(1)).to(dtype)
    inputs = given(module, dtype)
    exact = copy.deepcopy(module).double()(*[part.double() if part.is_floating_point() else part for part in inputs])
    theirs, ours = copy.deepcopy(inputs), copy.deepcopy(inputs)
    with torch.no_grad():
        near = module(*theirs)
        found = torch.compile(module, backend=mla_fx.get_backend(target="reference"))(*ours)
    report = mla_fx.last_report()
    assert report.fused == ONE and report.checked, str(report)
    assert (found - exact).norm() <= 1.5 * (near - exact).norm() + 1e-6 * exact.norm()
    assert found.dtype == near.dtype and all(map(torch.equal, ours, theirs))


# --- near twins ------------------------------------------------------------------------------------------------------


class OtherScales(Coded):
    """Keys have the scale of values, and values that of keys: the operator gets them so."""

    def keys(self, key):
        return self.numbers(key, self.value_scale, self.value_zero)

    def values(self, value):
        return self.numbers(value, self.key_scale, self.key_zero)


def test_each_cache_has_the_scale_that_the_program_gives_it(tmp_path):
    fuses(OtherScales(Sizes(tokens=3)), tmp_path)


class OfTokens(Coded):
    def numbers(self, codes, scale, zero):
        return codes.to(scale.dtype) * torch.linspace(0.5, 1.5, codes.shape[1], dtype=scale.dtype).view(-1, 1, 1)


class OfSequences(Coded):
    def numbers(self, codes, scale, zero):
        return codes.to(scale.dtype) * torch.linspace(0.5, 1.5, codes.shape[0], dtype=scale.dtype).view(-1, 1, 1, 1)


class OfQueryHeads(AfterRepeat):
    def repeated(self, codes):
        codes = codes.repeat_interleave(HEADS // self.kv_heads, 2).to(self.key_scale.dtype)
        return codes * torch.linspace(0.5, 1.5, HEADS, dtype=codes.dtype).view(-1, 1)


class ZerosOfTokens(Coded):
    def numbers(self, codes, scale, zero):
        return (codes - torch.arange(codes.shape[1], dtype=scale.dtype).view(-1, 1, 1)) * scale


class ZerosAfterScale(Coded):
    def numbers(self, codes, scale, zero):
        return codes.to(scale.dtype) * scale + zero


class NumberForZero(Coded):
    def numbers(self, codes, scale, zero):
        return (codes.to(scale.dtype) - 3) * scale


class ZerosMinusCodes(Coded):
    def numbers(self, codes, scale, zero):
        return (zero - codes) * scale


class Divided(Coded):
    def numbers(self, codes, scale, zero):
        return codes.to(scale.dtype) / (1 / scale)


class TwoScales(Coded):
    def numbers(self, codes, scale, zero):
        return codes.to(scale.dtype) * scale * scale


class WithoutSign(Coded):
    """Caches of uint8."""

    def codes(self, rows, scale):
        return (rows / scale + 128).round().clamp(0, 255).to(torch.uint8)


class Doubled(Coded):
    """In int8, where most codes overflow."""

    def numbers(self, codes, scale, zero):
        return (codes + codes).to(scale.dtype) * scale


class Float8First(Coded):
    def numbers(self, codes, scale, zero):
        return codes.to(torch.float8_e4m3fn).to(scale.dtype) * scale


class Clamped(Coded):
    def numbers(self, codes, scale, zero):
        return codes.clamp(-8, 7).to(scale.dtype) * scale


class Squared(Coded):
    def numbers(self, codes, scale, zero):
        return codes.to(scale.dtype) * codes


class ScaledScores(coded(Eager)):
    """The scale of a channel cannot multiply scores; one of a query head is a product with the scores."""

    def keys(self, key):
        return key.to(self.key_scale.dtype)

    def weights(self, scores):
        return (scores * self.key_scale[:, :1].repeat_interleave(HEADS // self.kv_heads, 0).unsqueeze(-1)).softmax(-1)


NOT_OF_CHANNELS = "of codes is not the same for all tokens and query heads; paged_attention takes one for each channel"
NO_CODES = "expected codes in torch.int8, an offset that is added and a scale that multiplies both"
REFUSED = {
    OfTokens: f"the scale {NOT_OF_CHANNELS}",
    OfSequences: f"the scale {NOT_OF_CHANNELS}",
    OfQueryHeads: f"the scale {NOT_OF_CHANNELS}",
    ZerosOfTokens: f"the offset {NOT_OF_CHANNELS}",
    ZerosAfterScale: NO_CODES,
    NumberForZero: NO_CODES,
    ZerosMinusCodes: NO_CODES,
    Divided: "codes are divided, expected a product with a scale",
    TwoScales: NO_CODES,
    WithoutSign: NO_CODES,
    Doubled: "expected gathered rows, found add",
    Float8First: NO_CODES,
    Squared: "codes",
    ScaledScores: "the attention scores go through mul before the softmax",
}


@pytest.mark.parametrize("kind", REFUSED, ids=lambda kind: kind.__name__)
def test_near_twins_are_refused_with_a_reason(kind):
    module = kind(sized(3))
    inputs = given(module)
    if kind is WithoutSign:
        inputs = *inputs[:3], *(cache.view(torch.uint8) for cache in inputs[3:])
    report = check(module, given=inputs)
    assert not report.fused and not report.refuted, str(report)
    assert any(REFUSED[kind] in miss.reason for miss in report.misses), str(report)


def test_clamped_codes_are_no_codes_of_the_cache():
    assert not check(Clamped(sized(3)), given=given(Clamped(sized(3)))).fused
