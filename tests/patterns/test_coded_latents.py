"""Attention over latents that are kept as codes: it reads the codes, and computes what the program does."""

import functools
import itertools

import pytest
import torch
from lib import layers
from lib.kernels import draw
from lib.layers import Rewritten
from torch import nn

from mla_fx.cases import DR, HCKV, B, D, Layer, N, S, T, inputs

pytestmark = [pytest.mark.usefixtures("no_gradients"), pytest.mark.filterwarnings("ignore::mla_fx.MlaWarning")]
CODES = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)
BLOCK, TILES = 4, 4


class Coded(Layer):
    """Latents are codes of a kind, numbers are `codes * scales`; pieces are overridden."""

    shape = (B, 1, T, 1)

    def __init__(self, kind=torch.int8):
        super().__init__()
        self.kind, self.step = kind, 40 if kind == torch.int8 else 1
        self.codes = nn.Buffer(self.coded(draw(B, 1, T, HCKV)))
        self.scales = nn.Buffer((draw(*self.shape, 1).abs().squeeze(-1) + 0.5) / self.step)

    def coded(self, numbers):
        return (numbers * self.step).clamp(-100, 100).to(self.kind)

    def store(self, latent, k_rope, position):
        _, keys = super().store(latent, k_rope, position)
        self.codes[:, :, position] = self.coded(latent)
        return self.numbers(latent.dtype), keys

    def attend(self, q_nope, q_rope, latent, k_rope, mask):
        return super().attend(q_nope, q_rope, latent, k_rope, mask.to(latent.dtype))

    def numbers(self, dtype):
        return (self.codes.float() * self.by()).to(dtype)

    def by(self):
        return self.scales


class Tiles(Coded):
    shape = (B, 1, T, TILES)

    def by(self):
        return self.scales.repeat_interleave(HCKV // TILES, -1)


variant = functools.partial(layers.variant, kind=Coded)

OneScale = variant("OneScale", shape=())
OfColumns = variant("OfColumns", shape=(HCKV,))
OfSequences = variant("OfSequences", shape=(B, 1, 1, 1))
Constant = variant("Constant", by=lambda my: 0.03)
Unscaled = variant("Unscaled", numbers=lambda my, dtype: my.codes.to(dtype))
Negative = variant("Negative", by=lambda my: -my.scales)
ScaledAfter = variant("ScaledAfter", numbers=lambda my, dtype: (my.codes.to(dtype) * my.scales.to(dtype)) * 2)


class Repeated(Tiles):
    def by(self):
        return self.scales.unsqueeze(-1).expand(*self.shape, HCKV // TILES).flatten(-2)


class Unfolded(Tiles):
    def numbers(self, dtype):
        return (self.codes.unflatten(-1, (TILES, -1)).to(dtype) * self.scales.unsqueeze(-1).to(dtype)).flatten(-2)


class RotaryCodes(Tiles):
    def __init__(self, kind=torch.int8):
        super().__init__(kind)
        self.key_codes = nn.Buffer(self.coded(draw(B, 1, T, DR)))
        self.key_scales = nn.Buffer((draw(B, 1, T, 1).abs() + 0.5) / self.step)

    def store(self, latent, k_rope, position):
        numbers, _ = super().store(latent, k_rope, position)
        self.key_codes[:, :, position] = self.coded(k_rope)
        return numbers, (self.key_codes.float() * self.key_scales).to(latent.dtype)


class Grown(Coded):
    """Transformers keeps codes that grow by cat, with one number as the scale of all."""

    shape = ()

    def store(self, latent, k_rope, position):
        _, keys = Layer.store(self, latent, k_rope, position)
        tokens = latent.shape[2]
        new = (latent.float() / self.scales).to(self.kind)
        grown = torch.cat((self.codes[:, :, : T - tokens], new), 2)
        return (grown.float() * self.scales).to(latent.dtype), keys


class Pages(Coded):
    """Codes and scales of tokens in pages."""

    shape = (B * T // BLOCK, BLOCK, 1)

    def __init__(self, kind=torch.int8):
        super().__init__(kind)
        self.codes = nn.Buffer(self.coded(draw(B * T // BLOCK, BLOCK, HCKV)))
        self.key_pages = nn.Buffer(draw(B * T // BLOCK, BLOCK, DR))
        self.table = nn.Buffer(draw(B * T // BLOCK).argsort().view(B, -1))

    def store(self, latent, k_rope, position):
        rows = self.table[:, position // BLOCK] * BLOCK + position % BLOCK
        self.codes.flatten(0, 1)[rows.flatten()] = self.coded(latent).flatten(0, 2)
        self.key_pages.flatten(0, 1)[rows.flatten()] = k_rope.to(self.key_pages.dtype).flatten(0, 2)
        return self.read(latent.dtype).view(B, 1, T, -1), self.key_pages[self.table].view(B, 1, T, -1).to(latent.dtype)

    def read(self, dtype):
        return (self.codes[self.table].float() * self.scales[self.table]).to(dtype)


class DequantisedBefore(Pages):
    def read(self, dtype):
        return (self.codes.float() * self.scales).to(dtype)[self.table]


class FlashMla(Pages):
    """A page holds rows of bytes: codes of float8, a float32 for each tile, and rotary keys."""

    def __init__(self, kind=torch.float8_e4m3fn):
        super().__init__(kind)
        codes = self.codes.view(torch.uint8)
        scales = (draw(B * T // BLOCK, BLOCK, TILES).abs() + 0.5).view(torch.uint8)
        self.rows_of_bytes = nn.Buffer(torch.cat((codes, scales, self.key_pages.view(torch.uint8)), -1))

    def store(self, latent, k_rope, position):
        rows = (self.table[:, position // BLOCK] * BLOCK + position % BLOCK).flatten()
        tiles = latent.float().unflatten(-1, (TILES, -1))
        scales = tiles.abs().amax(-1).clamp(min=1e-4) / 448
        codes = (tiles / scales.unsqueeze(-1)).flatten(-2).to(self.kind)
        parts = codes, scales, k_rope.float()
        new = torch.cat([part.contiguous().view(torch.uint8) for part in parts], -1)
        self.rows_of_bytes.flatten(0, 1)[rows] = new.flatten(0, 2)
        return self.numbers(latent.dtype), self.key(latent.dtype)

    def numbers(self, dtype):
        rows = self.rows_of_bytes[self.table].view(B, 1, T, -1)
        codes, scales = rows[..., :HCKV].view(self.kind), rows[..., HCKV : HCKV + 4 * TILES].view(torch.float32)
        tiles = codes.float().unflatten(-1, (TILES, -1)) * scales.unsqueeze(-1)
        return tiles.flatten(-2).to(dtype)

    def key(self, dtype):
        return self.rows_of_bytes[self.table].view(B, 1, T, -1)[..., HCKV + 4 * TILES :].view(torch.float32).to(dtype)


class Absorbed(Tiles):
    """The query is absorbed, and attention is in the latent space."""

    def attend(self, q_nope, q_rope, latent, k_rope, mask):
        weight = self.kv_b.view(N, -1, HCKV)
        query = torch.einsum("bnsd,ndc->bnsc", q_nope, weight[:, :D])
        scores = (query @ latent.mT + q_rope @ k_rope.mT) * 0.3 + mask.to(latent.dtype)
        out = torch.softmax(scores, -1) @ latent
        return torch.einsum("bnsc,nvc->bnsv", out, weight[:, D:])


FUSED = (
    *(Coded, OneScale, OfColumns, OfSequences, Constant, Unscaled, Tiles, Repeated, Unfolded, Negative, ScaledAfter),
    *(RotaryCodes, Grown, Pages, DequantisedBefore, Absorbed),
)
EACH = [*itertools.product(FUSED, CODES), (FlashMla, torch.float8_e4m3fn)]
QUICK = [(kind, torch.int8) for kind in FUSED]
SLOW = [pytest.param(*case, marks=pytest.mark.slow) for case in EACH if case not in QUICK]
IN_TURNS = [*zip(FUSED, itertools.cycle(CODES), strict=False), EACH[-1]]  # each layer once, and each kind of codes
BY_A_COMPILER = Pages, FlashMla  # the others with --campaign
COMPILED = [
    pytest.param(
        *case,
        marks=[
            pytest.mark.slow if case in IN_TURNS else pytest.mark.campaign,
            *([pytest.mark.compiled] if case[0] in BY_A_COMPILER else []),
        ],
    )
    for case in EACH
]


def in_dtype(layer, dtype):
    """The layer with its numbers in a dtype; codes stay."""
    own = {name: value for name, value in layer.state_dict().items() if value.is_floating_point()}
    wide = {name: value.to(dtype) for name, value in own.items() if value.itemsize > 1}
    layer.load_state_dict(wide, strict=False, assign=True)
    return layer.eval()


def arguments(dtype, tokens):
    return [value.to(dtype) if value.is_floating_point() else value for value in inputs(tokens)]


def check(build, target, dtype=torch.float32, tokens=(S, S), **options):
    """Outputs of each call are as near to those of eager mode in float64 as eager mode is, and caches are its own."""
    kinds = dtype, dtype, torch.float64
    layers = [in_dtype(build(), kind) for kind in kinds]
    ours = Rewritten(layers[0], target=target, **options)
    run = ours, *layers[1:]
    for count in tokens:
        given = (arguments(kind, count) for kind in kinds)
        found, eager, exact = (one(*own) for one, own in zip(run, given, strict=True))
        off, allowed = ((out.double() - exact).norm() for out in (found, eager))
        assert off <= 2 * allowed + 1e-5 * exact.norm()
        if dtype == torch.float32 and target == "reference":
            mine, others = (list(layer.buffers()) for layer in layers[:2])
            torch.testing.assert_close([*map(bytes_of, mine)], [*map(bytes_of, others)], rtol=0, atol=0)
    return ours.report


def bytes_of(value):
    return value.reshape(-1).view(torch.uint8)


def fired(report):
    return [name for part in report.passes for name in part.fired if "coded" in name or "paged" in name]


@pytest.mark.parametrize(("kind", "codes"), QUICK + SLOW)
def test_codes_are_read(kind, codes):
    report = check(lambda: kind(codes), "reference")
    assert "coded_latents" in fired(report), str(report)
    assert any("paged" in name for name in fired(report)) == issubclass(kind, Pages), str(report)
    assert report.checked and (kind is FlashMla or not report.unchecked)  # bytes are not drawn as a page's


@pytest.mark.parametrize(("kind", "codes"), COMPILED)
def test_compiled(kind, codes):
    for dtype in (torch.float32, torch.bfloat16):
        assert fired(check(lambda: kind(codes), "inductor", dtype))


@pytest.mark.slow
@pytest.mark.parametrize("target", ["reference", "inductor"])
@pytest.mark.parametrize("kind", [Tiles, Pages, FlashMla])
def test_any_number_of_tokens(kind, target):
    report = check(kind, target, tokens=(3, 5, 2), dynamic=True)
    assert report.fused == {"mla_attention": 1} and "coded_latents" in fired(report), str(report)


@pytest.mark.slow
@pytest.mark.parametrize("kind", FUSED)
def test_float16(kind):
    check(kind, "inductor", torch.float16)


SCALES = {
    "of the next token": (Coded, lambda my: my.scales.roll(1, 2)),
    "of other tiles": (Tiles, lambda my: my.scales.flip(-1).repeat_interleave(HCKV // TILES, -1)),
    "of every fourth column": (Tiles, lambda my: my.scales.repeat(1, 1, 1, HCKV // TILES)),
    "squared": (Coded, lambda my: my.scales * my.codes.float()),
}
NUMBERS = {
    "an offset": lambda my, dtype: ((my.codes.float() + my.scales.mean()) * my.by()).to(dtype),
    "divided": lambda my, dtype: (my.codes.float() / my.by()).to(dtype),
    "scaled twice": lambda my, dtype: ((my.codes.float() * 0.5) * my.scales).to(dtype),
    "rounded": lambda my, dtype: Coded.numbers(my, torch.bfloat16).to(dtype),
    "from other columns": lambda my, dtype: Coded.numbers(my, dtype).flip(-1),
}
OTHERS = {name: variant(name, kind=kind, by=by) for name, (kind, by) in SCALES.items()}
OTHERS |= {name: variant(name, numbers=numbers) for name, numbers in NUMBERS.items()}


class PagesOfOtherScales(Pages):
    def read(self, dtype):
        return (self.codes[self.table].float() * self.scales[self.table.flip(0)]).to(dtype)


KINDS = (
    "expected codes in torch.int8 or torch.float8_e4m3fn or torch.float8_e5m2, "
    "an offset that is added and a scale that multiplies both"
)
REASONS = {
    "an offset": "codes have an offset, attention takes none",
    "divided": "codes are divided, expected a product with a scale",
    "scaled twice": KINDS,
    "of every fourth column": "each code has a scale of its own",
    "squared": "each code has a scale of its own",
}


@pytest.mark.parametrize("name", REASONS)
def test_refused(name):
    report = check(OTHERS[name], "reference")
    assert [miss.reason for miss in report.misses if miss.pattern == "coded_latents"] == [REASONS[name]], str(report)


@pytest.mark.parametrize("kind", [PagesOfOtherScales, *(OTHERS[name] for name in OTHERS if name not in REASONS)])
def test_twins_are_programs_of_their_own(kind):
    check(kind, "reference")
