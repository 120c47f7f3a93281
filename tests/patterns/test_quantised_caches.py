"""Caches in 8 bits: attention is over the dequantised latents, and every code and scale is written as in eager mode."""

import copy

import pytest
import torch
from lib.families import cache_tensors, tiny_model, tokens
from lib.layers import Rewritten
from torch import nn
from transformers import QuantizedCache

import mla_fx
from mla_fx.cases import DV, HCKV, B, D, Layer, N, T, inputs

pytestmark = [pytest.mark.usefixtures("no_gradients"), pytest.mark.filterwarnings("ignore::mla_fx.MlaWarning")]
TILES = 4


def codes_of(x, scales):
    return (x / scales).round().clamp(-128, 127).to(torch.int8)


class InEight(Layer):
    """Latents as int8 codes, one scale for all; rotary keys as they are."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(2)

        def scales(*shape):
            return nn.Buffer(0.01 + 0.03 * torch.rand(shape, generator=generator))

        self.one, self.of_tokens, self.of_tiles = scales(), scales(B, 1, T, 1), scales(B, 1, T, TILES)
        self.kv_codes = nn.Buffer(codes_of(self.kv_cache, self.one))

    def store(self, latent, k_rope, position):
        self.kr_cache.index_copy_(2, position, k_rope)
        return self.stored(latent, position), self.kr_cache

    def stored(self, latent, position):
        self.kv_codes.index_copy_(2, position, codes_of(latent, self.one))
        return self.kv_codes.to(latent.dtype) * self.one


class OfTokens(InEight):
    def stored(self, latent, position):
        scales = latent.abs().amax(-1, keepdim=True) / 127
        self.kv_codes.index_copy_(2, position, codes_of(latent, scales))
        self.of_tokens.index_copy_(2, position, scales)
        return self.kv_codes.to(latent.dtype) * self.of_tokens


class OfTiles(InEight):
    """DeepSeek-V3.2: a scale for each token and tile of latents."""

    def stored(self, latent, position):
        tiles = latent.unflatten(-1, (TILES, -1))
        scales = tiles.abs().amax(-1) / 127
        self.kv_codes.index_copy_(2, position, codes_of(tiles, scales.unsqueeze(-1)).flatten(-2))
        self.of_tiles.index_copy_(2, position, scales)
        tiles = self.kv_codes.to(latent.dtype).unflatten(-1, (TILES, -1))
        return (tiles * self.of_tiles.unsqueeze(-1)).flatten(-2)


class OldCodes(InEight):
    """Attention reads the cache from before the write, which its own result does not show."""

    def stored(self, latent, position):
        old = self.kv_codes.to(latent.dtype) * self.one
        super().stored(latent, position)
        return old


class ScalesOneSlotLater(OfTokens):
    """Scales are written beside the rows of other tokens."""

    def stored(self, latent, position):
        scales = latent.abs().amax(-1, keepdim=True) / 127
        self.kv_codes.index_copy_(2, position, codes_of(latent, scales))
        self.of_tokens.index_copy_(2, position + 1, scales)
        return self.kv_codes.to(latent.dtype) * self.of_tokens


class OldScales(OfTokens):
    def stored(self, latent, position):
        old = self.of_tokens.clone()
        super().stored(latent, position)
        return self.kv_codes.to(latent.dtype) * old


class Truncated(InEight):
    """Codes without rounding."""

    def stored(self, latent, position):
        self.kv_codes.index_copy_(2, position, (latent / self.one).clamp(-128, 127).to(torch.int8))
        return self.kv_codes.to(latent.dtype) * self.one


KINDS = (InEight, OfTokens, OfTiles, OldCodes, ScalesOneSlotLater, OldScales, Truncated)


@pytest.mark.parametrize("kind", KINDS)
def test_attention_is_over_what_the_cache_holds(kind):
    """Whatever that is: how codes and scales are written is not the operator's."""
    ours, theirs = kind(), kind()
    compiled = Rewritten(ours)
    for _ in range(2):
        torch.testing.assert_close(compiled(*inputs()), theirs(*inputs()), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(list(ours.buffers()), list(theirs.buffers()), rtol=0, atol=0)
    assert mla_fx.last_report().fused == {"latent_attention": 1}


class Folded(OfTokens):
    """Absorbed attention multiplies codes; their scales multiply scores, probabilities, or both."""

    parts = ("scores", "probabilities")

    def attend(self, q_nope, q_rope, latent, k_rope, mask):
        weight, scales = self.kv_b.view(N, D + DV, HCKV), self.of_tokens.transpose(-1, -2)
        codes = self.kv_codes.to(latent.dtype)
        query = torch.einsum("bnsd,ndc->bnsc", q_nope, weight[:, :D])
        folded = (query @ codes.transpose(-1, -2)) * scales
        nope = folded if "scores" in self.parts else query @ latent.transpose(-1, -2)
        weights = torch.softmax((nope + q_rope @ k_rope.transpose(-1, -2)) * 0.3 + mask, -1)
        out = (weights * scales) @ codes if "probabilities" in self.parts else weights @ latent
        return torch.einsum("bnsc,nvc->bnsv", out, weight[:, D:])


class FoldedIntoScores(Folded):
    parts = ("scores",)


class FoldedIntoNothing(Folded):
    parts = ()


SCORES = "scores of codes are multiplied by scales, expected latents that are dequantised: codes times scales"
PROBABILITIES = (
    "probabilities are multiplied by index_copy, expected none: multiply the values, as by the scales of their codes"
)


@pytest.mark.parametrize(
    ("kind", "reasons"), [(Folded, [PROBABILITIES]), (FoldedIntoScores, [SCORES]), (FoldedIntoNothing, [])]
)
def test_folded_scales_of_tokens_are_named(kind, reasons):
    ours, theirs = kind(), kind()
    compiled = Rewritten(ours)
    torch.testing.assert_close(compiled(*inputs()), theirs(*inputs()), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(list(ours.buffers()), list(theirs.buffers()), rtol=0, atol=0)
    report = mla_fx.last_report()
    assert report.fused.get("latent_attention", 0) == (not reasons)
    assert [miss.reason for miss in report.misses if miss.pattern == "mla_attention"] == reasons


@pytest.mark.slow
def test_cache_of_transformers():
    model = tiny_model("deepseek_v3")
    theirs = QuantizedCache(backend="fp8", config=model.config)
    model(tokens(2, 12), past_key_values=theirs)
    ours, ids = copy.deepcopy(theirs), tokens(2, 1)
    compiled = torch.compile(model, backend="mla", options={"target": "reference"})
    expected = model(ids, past_key_values=theirs).logits
    torch.testing.assert_close(compiled(ids, past_key_values=ours).logits, expected, rtol=1e-4, atol=1e-5)
    assert mla_fx.last_report().fused == {"latent_attention": 2}
    mine, others = ([value.float() for value in cache_tensors(held)] for held in (ours, theirs))
    assert mine
    torch.testing.assert_close(mine, others, rtol=0, atol=0)
