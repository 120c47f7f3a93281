"""Attention over latents beside the logarithm of its sum: spellings, near twins, parts of a context that are merged.

Results are compared with eager mode in float64, and merged ones with attention over the whole context."""

import warnings

import pytest
import torch
from lib.layers import QUIET
from lib.log_sums import (
    SCALE,
    SPELLINGS,
    Added,
    Attention,
    B,
    Divided,
    Expanded,
    Maximum,
    Merged,
    N,
    S,
    T,
    Unmasked,
    Widened,
    arguments,
    compiled,
    in_parts,
    nearly_blind,
)
from torch import nn

import mla_fx

pytestmark = [pytest.mark.filterwarnings(line) for line in QUIET]

BOTH, CALL = "return_lse=True", "mla_fx.attention("


def lowered(module, given):
    return stage("lower", module, given, "reference")


def stage(name, module, given, target):
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", mla_fx.MlaWarning)
        torch._dynamo.reset()
        return mla_fx.explain(module, target=target)(*given).graphs[name]


def check(module, given=None, **options):
    given = arguments() if given is None else given
    found, report = compiled(module, given, **options)
    for one, wanted in zip(found, module(*given), strict=True):
        torch.testing.assert_close(one, wanted, rtol=1e-9, atol=1e-10)
    return report


@pytest.mark.parametrize("kind", SPELLINGS, ids=lambda kind: kind.__name__)
def test_spellings(kind):
    """One operator, also where the program uses the logarithm in another form later."""
    assert check(kind()).fused == {"latent_attention": 1}
    text = lowered(kind(), arguments())
    assert text.count(BOTH) == text.count(CALL) == 1
    assert "aten.logsumexp" not in text and "aten.log(" not in text and "_softmax" not in text, text


@pytest.mark.parametrize("kind", [Attention, Added, Divided, Widened], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_no_coarser_than_the_program(kind, dtype):
    """Against the program in float64."""
    module, given = kind(), arguments(dtype)
    exact = Attention()(*[part.double() if part.is_floating_point() else part for part in given])
    found, report = compiled(module, given)
    assert report.fused == {"latent_attention": 1}
    for one, near, wanted in zip(found, module(*given), exact, strict=True):
        assert one.dtype == near.dtype
        assert (one - wanted).norm() <= 1.5 * (near - wanted).norm() + 1e-6 * wanted.norm()


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Attention, Divided], ids=lambda kind: kind.__name__)
def test_inductor(kind):
    """From the second batch on, its size is a symbol."""
    given = arguments(torch.float32)
    torch._dynamo.reset()
    module, run = kind(), torch.compile(kind(), backend=mla_fx.get_backend(target="inductor"))
    with torch.no_grad():
        for batch in (3, 2):
            few = [part[:batch] if place in (0, 1, 4, 5) else part for place, part in enumerate(given)]
            for one, wanted in zip(run(*few), module(*few), strict=True):
                torch.testing.assert_close(one, wanted, rtol=1e-5, atol=1e-5)
    assert mla_fx.last_report().fused == {"latent_attention": 2}
    text = stage("clean up", kind(), given, "inductor")
    assert text.count(BOTH) == text.count(CALL) == 1


@pytest.mark.parametrize("target", ["reference", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("absorb", "fused"), [("always", "latent_attention"), ("never", "mla_attention")])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_expanded_keys(dtype, absorb, fused, target):
    """Both forms return logarithms; a row that sees no key has eager's NaN, and minus infinity."""
    module, given = Expanded(), nearly_blind(*arguments(dtype))
    exact = module(*[part.double() if part.is_floating_point() else part for part in given])
    found, report = compiled(module, given, target, absorb=absorb)
    assert report.fused == {fused: 1}, str(report)
    for one, near, wanted in zip(found, module(*given), exact, strict=True):
        seen = wanted.isfinite()
        assert one.dtype == near.dtype and torch.equal(one.isneginf(), wanted.isneginf())
        assert torch.equal(one.isnan(), wanted.isnan())
        assert (one - wanted)[seen].norm() <= 2 * (near - wanted)[seen].norm() + 1e-6 * wanted[seen].norm()
    text = stage("lower", module, given, "reference")
    assert "aten.logsumexp" not in text and "_softmax" not in text, text


def test_expanded_keys_of_a_prompt_with_symbols():
    """Calls of one graph choose the form."""
    torch._dynamo.reset()
    run = torch.compile(Expanded(), backend=mla_fx.get_backend(target="reference"))
    for tokens in (3, 5, 40):
        given = arguments(block=24, tokens=tokens)
        for query in given[:2]:
            torch._dynamo.mark_dynamic(query, 1)
        with torch.no_grad():
            for one, wanted in zip(run(*given), Expanded()(*given), strict=True):
                torch.testing.assert_close(one, wanted, rtol=1e-9, atol=1e-10)
    report = mla_fx.last_report()
    assert (report.parts, report.fused) == ([], {"mla_attention": 1}), str(report)


def test_merged_parts_are_attention_over_the_whole_context():
    """Two sequences have parts that some or all rows do not see: their softmax gives NaN, which the merge drops."""
    given = arguments()
    found, report = compiled(Merged(), in_parts(*given))
    assert report.fused == {"latent_attention": 2, "merge_attention": 1}, str(report)
    torch.testing.assert_close(found, Attention()(*given)[0], rtol=1e-9, atol=1e-10)
    assert lowered(Merged(), in_parts(*given)).count(BOTH) == 2


class Chunks(nn.Module):
    """The same of one cache: a later chunk begins at a number, and its mask is of positions in the whole cache."""

    def forward(self, query, query_rope, kv_cache, kr_cache, first):
        scores, latents = Attention().scores(query, query_rope, kv_cache, kr_cache), kv_cache
        positions = first.unsqueeze(-1) + torch.arange(S)
        seen = torch.arange(T // 2, T) <= positions.unsqueeze(-1)
        earlier, later = scores.split(T // 2, -1)
        later = later.masked_fill(~seen.unsqueeze(1), -torch.inf)
        parts = zip((earlier, later), latents.split(T // 2, 1), strict=True)
        outs = torch.stack([torch.einsum("bnst,btc->bsnc", part.softmax(-1), values) for part, values in parts])
        lses = torch.stack((earlier.logsumexp(-1), later.logsumexp(-1)))
        return ((lses - lses.logsumexp(0)).exp().transpose(2, 3).unsqueeze(-1) * outs).sum(0)


def test_chunks_with_a_causal_later_one_are_checked():
    """Small positions are all before the later chunk, whose rows then see no key."""
    query, query_rope, *_ = arguments()
    _, _, kv_cache, kr_cache, *_ = arguments(block=T)
    given = query, query_rope, kv_cache[:B], kr_cache[:B], torch.tensor([T - S, T // 2, T // 2 + 4])
    found, report = compiled(Chunks(), given)
    assert (report.fused, report.unchecked) == ({"latent_attention": 2, "merge_attention": 1}, []), str(report)
    torch.testing.assert_close(found, Chunks()(*given), rtol=1e-9, atol=1e-10)


class SafePeak(Attention):
    """The largest score of a row that sees no key counts as 0, its sum as 1."""

    def forward(self, query, query_rope, kv_cache, kr_cache, table, first):
        positions = first.unsqueeze(-1) + torch.arange(query.shape[1])
        latents, keys = (cache[table].flatten(1, 2) for cache in (kv_cache, kr_cache))
        scores = self.masked(self.scores(query, query_rope, latents, keys), positions)
        largest = scores.amax(-1, keepdim=True)
        raised = (scores - self.peak(largest)).exp()
        total = raised.sum(-1, keepdim=True)
        out = (raised @ latents.unsqueeze(1)) / self.total(total)
        return out.transpose(1, 2), (largest + total.log()).squeeze(-1)

    def peak(self, largest):
        return torch.where(largest == -torch.inf, 0.0, largest)

    def total(self, total):
        return total.clamp(min=1e-30)


class SafePeakAlone(SafePeak):
    def total(self, total):
        return total


class SafeTotalAlone(SafePeak):
    def peak(self, largest):
        return largest


class SafeSoftmax(Attention):
    def weights(self, scores):
        return torch.ops.aten._safe_softmax(scores, -1)


@pytest.mark.parametrize(
    "kind", [Attention, Added, Maximum, Divided, SafePeak, SafePeakAlone, SafeTotalAlone, SafeSoftmax]
)
@pytest.mark.parametrize("target", ["reference", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_row_that_sees_no_key(kind, target):
    """Whatever the program has there: NaN, zeros, minus infinity."""
    given = nearly_blind(*arguments())
    found, report = compiled(kind(), given, target)
    assert report.fused == {"latent_attention": 1}
    wanted = kind()(*given)
    assert not wanted[1].isfinite().all()
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-10, equal_nan=True)


# --- near twins ------------------------------------------------------------------------------------------------------


class Unscaled(Attention):
    def lse(self, masked, scores):
        return (masked / SCALE).logsumexp(-1)


class MaskedOtherwise(Attention):
    def lse(self, masked, scores):
        return scores.masked_fill(torch.arange(scores.shape[-1]) > 9, -torch.inf).logsumexp(-1)


class OfHeads(Attention):
    """The sum over the heads of a token."""

    def lse(self, masked, scores):
        return masked[..., 0].logsumexp(1)


class OfSomeKeys(Attention):
    def lse(self, masked, scores):
        return masked[..., :9].logsumexp(-1)


class OfHeadsInAnotherOrder(Attention):
    def lse(self, masked, scores):
        return (masked + masked.flip(1)).logsumexp(-1)


class OtherMaximum(Attention):
    def lse(self, masked, scores):
        return masked.amax((1, 3), keepdim=True).squeeze(-1) + masked.sub(masked.amax(-1, True)).exp().sum(-1).log()


class LogarithmOfOtherBase(Attention):
    def lse(self, masked, scores):
        largest = masked.amax(-1)
        return largest + (masked - largest.unsqueeze(-1)).exp().sum(-1).log2()


class TwiceTheLogarithm(Attention):
    def lse(self, masked, scores):
        largest = masked.amax(-1)
        return torch.add(largest, (masked - largest.unsqueeze(-1)).exp().sum(-1).log(), alpha=2)


class LogarithmAlone(Attention):
    def lse(self, masked, scores):
        return (masked - masked.amax(-1, keepdim=True)).exp().sum(-1).log()


class Squares(Attention):
    def lse(self, masked, scores):
        largest = masked.amax(-1, keepdim=True)
        return (largest + (masked - largest).exp().square().sum(-1, keepdim=True).log()).squeeze(-1)


class OfTheLargest(Attention):
    def lse(self, masked, scores):
        largest = masked.amax(-1, keepdim=True)
        return (largest + (masked - largest).exp().amax(-1, keepdim=True).log()).squeeze(-1)


class OfOneKey(Attention):
    """The score of one key, once for each key."""

    def lse(self, masked, scores):
        return masked[..., :1].expand_as(masked).logsumexp(-1)


class OfTheMean(Attention):
    def lse(self, masked, scores):
        largest = masked.amax(-1, keepdim=True)
        return (largest + (masked - largest).exp().mean(-1, keepdim=True).log()).squeeze(-1)


class MoreThanOnce(Attention):
    """The largest score is added twice."""

    def lse(self, masked, scores):
        largest = masked.amax(-1, keepdim=True)
        return (2 * largest + (masked - largest).exp().sum(-1, keepdim=True).log()).squeeze(-1)


class NegativeLogarithm(Attention):
    def lse(self, masked, scores):
        largest = masked.amax(-1, keepdim=True)
        return (largest + -(masked - largest).exp().sum(-1, keepdim=True).log()).squeeze(-1)


NO_LOGARITHM = "expected the logarithm of the sum of exponentials that a softmax divides by"
TWINS = {
    Unscaled: "the logarithm is of the sum for",
    Unmasked: "the logarithm is not of the sum that the softmax divides by: it is of add, expected masked_fill",
    MaskedOtherwise: "the logarithm is not of the sum that the softmax divides by",
    OfHeads: "the logarithms are of scores in another shape than those of the softmax",
    OfSomeKeys: "the logarithms are of scores in another shape than those of the softmax",
    OfOneKey: "the logarithms are of scores in another shape than those of the softmax",
    OfHeadsInAnotherOrder: "the logarithm is not of the sum that the softmax divides by: it is of add",
    OfTheLargest: NO_LOGARITHM,
    OfTheMean: NO_LOGARITHM,
    MoreThanOnce: NO_LOGARITHM,
    OtherMaximum: NO_LOGARITHM,
    LogarithmOfOtherBase: NO_LOGARITHM,
    TwiceTheLogarithm: NO_LOGARITHM,
}


UNREAD = [LogarithmAlone, NegativeLogarithm, Squares]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*TWINS, *UNREAD], ids=lambda kind: kind.__name__)
def test_other_logarithms_stay(kind):
    """The attention fuses without them."""
    report = check(kind())
    assert report.fused == {"latent_attention": 1}
    reasons = [miss.reason for miss in report.misses if miss.pattern == "mla_attention_lse"]
    assert any(TWINS[kind] in reason for reason in reasons) if kind in TWINS else not reasons, reasons
    assert BOTH not in lowered(kind(), arguments())


def test_the_logarithm_of_another_attention():
    class OfAnother(nn.Module):
        def forward(self, *given):
            query, *rest = given
            out, _ = Attention()(*given)
            _, lse = Attention()(query * 2, *rest)
            return out, lse

    report = check(OfAnother())
    assert report.fused == {"latent_attention": 1} and BOTH not in lowered(OfAnother(), arguments())


def test_a_logarithm_that_nothing_reads():
    class Unread(Attention):
        def forward(self, *given):
            return (super().forward(*given)[0],)

    assert check(Unread()).fused == {"latent_attention": 1}
    text = lowered(Unread(), arguments())
    assert text.count(CALL) == 1 and BOTH not in text


def test_a_sink_is_no_part_of_the_sum():
    class Sink(Attention):
        def weights(self, scores):
            return torch.cat((scores, torch.ones_like(scores[..., :1])), -1).softmax(-1)[..., :-1]

    report = check(Sink())
    assert report.fused == {"latent_attention": 1} and BOTH not in lowered(Sink(), arguments())
    assert any("an attention sink" in miss.reason for miss in report.misses), str(report)


def test_sinks_are_refused_by_the_operator():
    query, query_rope, kv_cache, kr_cache, table, _ = arguments()
    with pytest.raises(ValueError, match="sinks are given; they must be None"):
        torch.ops.mla_fx.attention(
            query, query_rope, kv_cache, kr_cache, None, None, torch.ones(N), table, scale=SCALE, return_lse=True
        )


@pytest.mark.slow
def test_a_factor_that_is_a_symbol():
    """With `dynamic=True`, a number of the program is an input. What is not read must not fail."""
    torch._dynamo.reset()
    given, backend = arguments(), mla_fx.get_backend(target="reference", strict=False)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error", mla_fx.MlaWarning)
        found = torch.compile(Attention(), backend=backend, dynamic=True)(*given)
    for one, wanted in zip(found, Attention()(*given), strict=True):
        torch.testing.assert_close(one, wanted, rtol=1e-9, atol=1e-10)
