"""Attention over paged keys and values per head that are stored as int8 codes: spellings, precision and near twins."""

import functools

import pytest
import torch
from lib import coded_heads as stored
from lib import paged_heads as plain
from lib.coded_heads import Coded, ZeroPoints, coded, given, in_codes
from lib.layers import QUIET
from lib.paged_heads import FLOAT32, HEADS, Eager, Grouped, Sizes, arguments, check

pytestmark = [pytest.mark.filterwarnings(line) for line in QUIET]

ONE = {"paged_attention": 1}


def sized(tokens, **others):
    """Keys and values of different widths."""
    return Sizes(**{"tokens": tokens, "columns": 6} | others)


def fuses(module, **options):
    """Results are eager's, and the codes are read by the operator alone."""
    report = check(module, **{"given": given(module), "keep_text": True} | options)
    assert report.fused == ONE and report.checked, str(report)
    plain.check_no_context_is_gathered(report)


class Written(Coded):
    """Numbers are a function of codes, scales and zero points."""

    def __init__(self, made, sizes):
        super().__init__(sizes)
        self.made = made

    def numbers(self, codes, scale, zero):
        return self.made(codes, scale, zero)


NUMBERS = {
    "scale first, uncast": lambda codes, scale, _: scale * codes,
    "in one dimension": lambda codes, scale, _: (codes.flatten(2).to(scale.dtype) * scale.flatten()).view(codes.shape),
    "of columns": lambda codes, scale, _: codes.to(scale.dtype) * scale[0],
    "two columns of a head share a scale": lambda codes, scale, _: (
        (codes.unflatten(-1, (-1, 2)).to(scale.dtype) * scale[:, ::2].unsqueeze(-1)).flatten(-2)
    ),
    "one number": lambda codes, scale, _: codes.to(scale.dtype) * scale[0, 0],
    "a reciprocal": lambda codes, scale, _: codes.to(scale.dtype) * (1 / (3 * scale)),
    "a number of the program": lambda codes, scale, _: codes.to(scale.dtype) * 0.03,
}


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


class WrittenZeros(Written, ZeroPoints):
    pass


ZEROS = {
    "zeros, added": lambda codes, scale, zero: scale * (-zero + codes.to(scale.dtype)),
    "zeros, uncast": lambda codes, scale, zero: (codes - zero) * scale,
    "zeros alone": lambda codes, scale, zero: codes.to(scale.dtype) - zero,
}
CLASSES = Coded, stored.OfHeads, AfterRepeat, ZeroPoints, stored.ZerosOfKeys, stored.ScaledQuery
KINDS = {kind.__name__: kind for kind in CLASSES}
KINDS |= {name: functools.partial(Written, numbers) for name, numbers in NUMBERS.items()}
KINDS |= {name: functools.partial(WrittenZeros, numbers) for name, numbers in ZEROS.items()}
LAYERS = [Eager, plain.Expanded, plain.Turned, Grouped, plain.BlocksSelected, plain.BlocksEmbedded, plain.Slots]
LAYERS += [plain.SlotOfEachToken, plain.HeadsFirst, plain.Padded, plain.Scaled, plain.Window]
QUICK = ("Coded", "two columns of a head share a scale", "AfterRepeat", "zeros, added")


@pytest.mark.parametrize("tokens", [1, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in KINDS]
)
def test_spellings(name, tokens):
    fuses(KINDS[name](sized(tokens)))


@pytest.mark.slow
@pytest.mark.parametrize("kind", LAYERS, ids=lambda kind: kind.__name__)
def test_layers(kind):
    fuses(coded(kind)(Sizes(tokens=3)))


@pytest.mark.slow
def test_values_that_are_no_codes():
    module = stored.KeysAlone(sized(3))
    fuses(module, given=(*given(module)[:4], arguments(module.sizes)[4]))


@pytest.mark.parametrize("target", ["reference", pytest.param("inductor", marks=pytest.mark.slow)])
def test_heads_first_in_a_page(target):
    module = coded(plain.PagesOfHeads)(sized(1)).float()
    pages = in_codes(plain.heads_first(arguments(module.sizes, torch.float32)))
    fuses(module, given=pages, close=FLOAT32, target=target)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [ZeroPoints, coded(Grouped)], ids=lambda kind: kind.__name__)
def test_many_tokens(kind):
    fuses(kind(sized(70, batch=2, blocks=8)))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Coded, ZeroPoints, coded(Grouped)], ids=lambda kind: kind.__name__)
def test_one_graph_for_all_sizes(kind):
    plain.check_all_sizes(kind, lambda sizes: in_codes(arguments(sizes)))


# --- precision -------------------------------------------------------------------------------------------------------


PRECISE = (Coded, stored.InFloat32, coded(Eager), coded(Grouped), coded(plain.Upcast), ZeroPoints)
PRECISE = {kind.__name__: kind for kind in PRECISE} | {"one number": KINDS["one number"]}


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, *(pytest.param(t, marks=pytest.mark.slow) for t in (torch.float16, torch.float32))]
)
@pytest.mark.parametrize("name", PRECISE)
def test_no_coarser_than_the_program(name, dtype):
    """Scales of 16 bits are the same numbers in float64."""
    module = PRECISE[name](sized(1)).to(dtype)
    plain.check_no_coarser(module, given(module, dtype))


# --- near twins ------------------------------------------------------------------------------------------------------


class OtherScales(Coded):
    """Keys have the scale of values, and values that of keys: the operator gets them so."""

    def keys(self, key):
        return self.numbers(key, self.value_scale, self.value_zero)

    def values(self, value):
        return self.numbers(value, self.key_scale, self.key_zero)


def test_each_cache_has_the_scale_that_the_program_gives_it():
    fuses(OtherScales(Sizes(tokens=3)))


class OfQueryHeads(AfterRepeat):
    def repeated(self, codes):
        codes = codes.repeat_interleave(HEADS // self.kv_heads, 2).to(self.key_scale.dtype)
        return codes * torch.linspace(0.5, 1.5, HEADS, dtype=codes.dtype).view(-1, 1)


class WithoutSign(Coded):
    """Caches of uint8."""

    def codes(self, rows, scale):
        return (rows / scale + 128).round().clamp(0, 255).to(torch.uint8)


class ScaledScores(coded(Eager)):
    """The scale of a channel cannot multiply scores; one of a query head is a product with the scores."""

    def keys(self, key):
        return key.to(self.key_scale.dtype)

    def weights(self, scores):
        return (scores * self.key_scale[:, :1].repeat_interleave(HEADS // self.kv_heads, 0).unsqueeze(-1)).softmax(-1)


NOT_OF_CHANNELS = "of codes is not the same for all tokens and query heads; paged_attention takes one for each channel"
NO_CODES = "expected codes in torch.int8, an offset that is added and a scale that multiplies both"
REFUSED = {
    "scales of tokens": (
        f"the scale {NOT_OF_CHANNELS}",
        lambda codes, scale, _: codes.to(scale.dtype) * spread(scale, codes.shape[1]).view(-1, 1, 1),
    ),
    "scales of sequences": (
        f"the scale {NOT_OF_CHANNELS}",
        lambda codes, scale, _: codes.to(scale.dtype) * spread(scale, codes.shape[0]).view(-1, 1, 1, 1),
    ),
    "zeros of tokens": (
        f"the offset {NOT_OF_CHANNELS}",
        lambda codes, scale, _: (codes - torch.arange(codes.shape[1], dtype=scale.dtype).view(-1, 1, 1)) * scale,
    ),
    "zeros after the scale": (NO_CODES, lambda codes, scale, zero: codes.to(scale.dtype) * scale + zero),
    "a number for zero": (NO_CODES, lambda codes, scale, _: (codes.to(scale.dtype) - 3) * scale),
    "zeros minus codes": (NO_CODES, lambda codes, scale, zero: (zero - codes) * scale),
    "divided": (
        "codes are divided, expected a product with a scale",
        lambda codes, scale, _: codes.to(scale.dtype) / (1 / scale),
    ),
    "two scales": (NO_CODES, lambda codes, scale, _: codes.to(scale.dtype) * scale * scale),
    "doubled in int8, where most codes overflow": (
        "expected gathered rows, found add", lambda codes, scale, _: (codes + codes).to(scale.dtype) * scale,
    ),
    "in float8 first": (NO_CODES, lambda codes, scale, _: codes.to(torch.float8_e4m3fn).to(scale.dtype) * scale),
    "squared": ("codes", lambda codes, scale, _: codes.to(scale.dtype) * codes),
    "scales of query heads": (f"the scale {NOT_OF_CHANNELS}", OfQueryHeads),
    "without a sign": (NO_CODES, WithoutSign),
    "scores are scaled": ("the attention scores go through mul before the softmax", ScaledScores),
}


def spread(scale, count):
    return torch.linspace(0.5, 1.5, count, dtype=scale.dtype)


@pytest.mark.parametrize("name", REFUSED)
def test_near_twins_are_refused_with_a_reason(name):
    reason, twin = REFUSED[name]
    module = twin(sized(3)) if isinstance(twin, type) else Written(twin, sized(3))
    inputs = given(module)
    if twin is WithoutSign:
        inputs = *inputs[:3], *(cache.view(torch.uint8) for cache in inputs[3:])
    report = check(module, given=inputs)
    assert not report.fused and not report.refuted, str(report)
    assert any(reason in miss.reason for miss in report.misses), str(report)


def test_clamped_codes_are_no_codes_of_the_cache():
    module = Written(lambda codes, scale, _: codes.clamp(-8, 7).to(scale.dtype) * scale, sized(3))
    assert not check(module, given=given(module)).fused
