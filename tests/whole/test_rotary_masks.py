"""MLX's spelling: rotary scores are hidden by the lowest number, and added as the mask of attention over the rest."""

import copy

import pytest
import torch
from lib.layers import QUIET, Reporting, check_no_further, in_type
from lib.zoo import servers
from torch.nn.functional import linear, scaled_dot_product_attention

pytestmark = [
    pytest.mark.interpreted,
    pytest.mark.usefixtures("no_gradients"),
    *(pytest.mark.filterwarnings(line) for line in QUIET),
]
TARGETS = ["reference", pytest.param("inductor", marks=pytest.mark.slow)]
MOSTLY_REFERENCE = ["reference", pytest.param("inductor", marks=pytest.mark.campaign)]
ATTENTION = "latent_attention", "mla_attention", "paged_attention"
PART = "only part of the attention scores is filled with a number"


class OverLatents:
    """Attends as servers do, [B,S,N,D], [B,S,N,Dr], [B,T,R], [B,T,Dr], [B,S,T]. Keys are expanded to all heads."""

    fill = None

    def rotary(self, q_pe, k_pe, allowed):
        """[B,N,S,T]."""
        scores = (q_pe.transpose(1, 2) * self.scale) @ k_pe.unsqueeze(1).mT
        return self.hidden(scores, allowed.unsqueeze(1))

    def hidden(self, scores, allowed):
        return torch.where(allowed, scores, torch.finfo(scores.dtype).min if self.fill is None else self.fill)

    def attend(self, q_nope, q_pe, latent, k_pe, allowed):
        z, mask = self.sizes, self.rotary(q_pe, k_pe, allowed)
        weight, latent = self.kv_b.unflatten(0, (z.heads, -1)), latent.unsqueeze(1)
        query = q_nope.transpose(1, 2) @ weight[:, : z.nope]
        out = self.weigh(query, latent, latent, mask)
        return (out @ weight[:, z.nope :].mT).transpose(1, 2)

    def weigh(self, query, key, value, mask):
        heads = query.shape[1]
        key, value = (part.expand(-1, heads, -1, -1) for part in (key, value))
        return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=self.scale)


class OneKey(OverLatents):
    """One key for all heads, which PyTorch decomposes to products."""

    def weigh(self, query, key, value, mask):
        return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=self.scale)


class Expanded(OverLatents):
    """Keys and values of each head, as prompts have them."""

    def attend(self, q_nope, q_pe, latent, k_pe, allowed):
        z, mask = self.sizes, self.rotary(q_pe, k_pe, allowed)
        rows = linear(latent, self.kv_b).unflatten(-1, (z.heads, -1)).transpose(1, 2)
        out = self.weigh(q_nope.transpose(1, 2), *rows.split([z.nope, z.value], dim=-1), mask)
        return out.transpose(1, 2)


class LongCat:
    """The query is multiplied behind its projection, the latent behind its norm."""

    def rows(self, x, positions):
        z = self.sizes
        q_nope, q_pe, latent, k_pe = super().rows(x, positions)
        factor = (z.hidden / z.q_rank) ** 0.5
        return q_nope * factor, q_pe * factor, latent * (z.hidden / z.kv_rank) ** 0.5, k_pe


CONTEXTS = {
    "flat": (servers.Drafts, lambda tokens: servers.drafts(3, tokens)),
    "paged": (servers.PagedDraftsBatched, lambda tokens: servers.paged_drafts_batched(3, tokens, 2)),
    "packed": (servers.PagedDrafts, lambda tokens: servers.paged_drafts(3, tokens, 2)),
}
KINDS = OverLatents, OneKey, Expanded
AT_CONTEXTS = ["flat", "paged", pytest.param("packed", marks=pytest.mark.slow)]
DTYPES = [
    pytest.param(torch.float32, id="float32"),
    pytest.param(torch.bfloat16, id="bfloat16", marks=pytest.mark.slow),
]


def layer(*kinds):
    return type("Layer", kinds, {})()


def check(module, arguments, target):
    """Outputs and caches are eager's; returns the report."""
    theirs, ours = copy.deepcopy(arguments), copy.deepcopy(arguments)
    backend = Reporting(target=target)
    expected = module(*theirs)
    found = torch.compile(module, backend=backend)(*ours)
    torch.testing.assert_close((found, ours), (expected, theirs))
    assert not backend.report.refuted, str(backend.report)
    return backend.report


def compared(module, arguments, target, dtype):
    if dtype is torch.float32:
        return check(module, arguments, target)
    return check_no_further(module, arguments, target=target)


def fuses(report):
    return any(name in report.fused for name in ATTENTION)


@pytest.mark.parametrize("target", MOSTLY_REFERENCE)
@pytest.mark.parametrize("factors", [(), (LongCat,)], ids=["plain", "LongCat"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 7], ids=["step", "chunk"])
@pytest.mark.parametrize("context", AT_CONTEXTS)
@pytest.mark.parametrize("kind", KINDS)
def test_rotary_scores_in_the_mask_fuse(kind, context, tokens, dtype, factors, target):
    server, arguments = CONTEXTS[context]
    module = layer(*factors, kind, server).to(dtype)
    given = in_type(arguments(tokens), dtype)
    report = compared(module, given, target, dtype)
    assert fuses(report), str(report)


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [1, 7], ids=["step", "chunk"])
@pytest.mark.parametrize("kind", KINDS)
def test_inductor_compiles_them_from_pages(kind, tokens):
    server, arguments = CONTEXTS["paged"]
    report = check(layer(LongCat, kind, server), arguments(tokens), "inductor")
    assert fuses(report), str(report)


class Blind:
    """The first token of each sequence sees no key."""

    def attend(self, q_nope, q_pe, latent, k_pe, allowed):
        sees = torch.arange(allowed.shape[1]) > 0
        return super().attend(q_nope, q_pe, latent, k_pe, allowed & sees[:, None])


@pytest.mark.parametrize("target", MOSTLY_REFERENCE)
@pytest.mark.parametrize("context", AT_CONTEXTS)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_without_a_visible_key_are_the_programs(kind, context, target):
    """They average over all keys, and so does fused attention."""
    server, arguments = CONTEXTS[context]
    report = check(layer(Blind, kind, server), arguments(3), target)
    assert fuses(report), str(report)


class Hundred(OneKey):
    """What is hidden still counts a little, where nothing else is seen."""

    fill = -100.0


class HundredOfEach(OverLatents):
    """The same as the mask of a fused operator, where it is one operand."""

    fill = -100.0


class BothFilled(OverLatents):
    """Each of the two parts is hidden by a number, and their sum is twice that."""

    fill = -1e30

    def attend(self, q_nope, q_pe, latent, k_pe, allowed):
        self.allowed = allowed
        return super().attend(q_nope, q_pe, latent, k_pe, allowed)

    def weigh(self, query, key, value, mask):
        scores = self.hidden(query @ key.mT * self.scale, self.allowed.unsqueeze(1))
        return (scores + mask).softmax(-1) @ value


TWINS = {
    "a fill of -100": (Hundred, torch.float32, PART),
    "a fill of -100 in bfloat16": (Hundred, torch.bfloat16, PART),
    "the lowest number of float16": (OneKey, torch.float16, PART),
    "two parts": (BothFilled, torch.float32, PART),
    "an operand of -100": (HundredOfEach, torch.float32, ""),
    "an operand in float16": (OverLatents, torch.float16, ""),
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("blind", [(), (Blind,)], ids=["all see", "some see no key"])
@pytest.mark.parametrize("twin", TWINS)
def test_twins_are_right_or_refused(twin, blind, target):
    kind, dtype, because = TWINS[twin]
    module, given = layer(*blind, kind, servers.Drafts).to(dtype), in_type(servers.drafts(3, 3), dtype)
    report = compared(module, given, target, dtype)
    if because:
        assert because in [miss.reason for miss in report.misses], str(report)
    assert fuses(report) == (not because), str(report)
