"""Attention over latents beside the logarithm of its sum: spellings, near twins, parts of a context that are merged.

Results are compared with eager mode in float64, and merged ones with attention over the whole context."""

import warnings

import pytest
import torch
from lib import log_sums
from lib.layers import QUIET
from lib.log_sums import SCALE, Added, Attention, B, Divided, Expanded, Maximum, N, S, T, arguments, compiled, in_parts
from torch import nn

import mla_fx

pytestmark = [pytest.mark.filterwarnings(line) for line in QUIET]

BOTH, CALL = "return_lse=True", "mla_fx.attention("


def check(module, given=None):
    """The report, with the text of graphs."""
    given = arguments() if given is None else given
    found, report = compiled(module, given, keep_text=True)
    for one, wanted in zip(found, module(*given), strict=True):
        torch.testing.assert_close(one, wanted, rtol=1e-9, atol=1e-10)
    return report


@pytest.mark.parametrize("kind", log_sums.SPELLINGS, ids=lambda kind: kind.__name__)
def test_spellings(kind):
    """One operator, also where the program uses the logarithm in another form later."""
    report = check(kind())
    assert report.fused == {"latent_attention": 1}
    text = report.graphs["lower"]
    assert text.count(BOTH) == text.count(CALL) == 1
    assert "aten.logsumexp" not in text and "aten.log(" not in text and "_softmax" not in text, text


@pytest.mark.parametrize("kind", [Attention, Added, Divided, log_sums.Widened], ids=lambda kind: kind.__name__)
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
    torch._dynamo.reset()
    text = mla_fx.explain(kind(), target="inductor")(*given).graphs["clean up"]
    assert text.count(BOTH) == text.count(CALL) == 1


@pytest.mark.parametrize("target", ["reference", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("absorb", "fused"), [("always", "latent_attention"), ("never", "mla_attention")])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_expanded_keys(dtype, absorb, fused, target):
    """Both forms return logarithms; a row that sees no key has eager's NaN, and minus infinity."""
    module, given = Expanded(), log_sums.nearly_blind(*arguments(dtype))
    exact = module(*[part.double() if part.is_floating_point() else part for part in given])
    found, report = compiled(module, given, target, absorb=absorb, keep_text=target == "reference")
    assert report.fused == {fused: 1}, str(report)
    for one, near, wanted in zip(found, module(*given), exact, strict=True):
        seen = wanted.isfinite()
        assert one.dtype == near.dtype and torch.equal(one.isneginf(), wanted.isneginf())
        assert torch.equal(one.isnan(), wanted.isnan())
        assert (one - wanted)[seen].norm() <= 2 * (near - wanted)[seen].norm() + 1e-6 * wanted[seen].norm()
    text = report.graphs["lower"] if target == "reference" else ""
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
    found, report = compiled(log_sums.Merged(), in_parts(*given), keep_text=True)
    assert report.fused == {"latent_attention": 2, "merge_attention": 1}, str(report)
    torch.testing.assert_close(found, Attention()(*given)[0], rtol=1e-9, atol=1e-10)
    assert report.graphs["lower"].count(BOTH) == 2


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

    is_safe = ("peak", "total")

    def forward(self, query, query_rope, kv_cache, kr_cache, table, first):
        positions = first.unsqueeze(-1) + torch.arange(query.shape[1])
        latents, keys = (cache[table].flatten(1, 2) for cache in (kv_cache, kr_cache))
        scores = self.masked(self.scores(query, query_rope, latents, keys), positions)
        largest = scores.amax(-1, keepdim=True)
        peak = torch.where(largest == -torch.inf, 0.0, largest) if "peak" in self.is_safe else largest
        raised = (scores - peak).exp()
        total = raised.sum(-1, keepdim=True)
        out = (raised @ latents.unsqueeze(1)) / (total.clamp(min=1e-30) if "total" in self.is_safe else total)
        return out.transpose(1, 2), (largest + total.log()).squeeze(-1)


class SafePeakAlone(SafePeak):
    is_safe = ("peak",)


class SafeTotalAlone(SafePeak):
    is_safe = ("total",)


class SafeSoftmax(Attention):
    def weights(self, scores):
        return torch.ops.aten._safe_softmax(scores, -1)


@pytest.mark.parametrize(
    "kind", [Attention, Added, Maximum, Divided, SafePeak, SafePeakAlone, SafeTotalAlone, SafeSoftmax]
)
@pytest.mark.parametrize("target", ["reference", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_row_that_sees_no_key(kind, target):
    """Whatever the program has there: NaN, zeros, minus infinity."""
    given = log_sums.nearly_blind(*arguments())
    found, report = compiled(kind(), given, target)
    assert report.fused == {"latent_attention": 1}
    wanted = kind()(*given)
    assert not wanted[1].isfinite().all()
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-10, equal_nan=True)


# --- near twins ------------------------------------------------------------------------------------------------------


class Twin(Attention):
    def __init__(self, lse):
        super().__init__()
        self.twin = lse

    def lse(self, masked, scores):
        return self.twin(masked, scores)


def by_hand(masked, total=lambda raised: raised.sum(-1, keepdim=True), largest=None, log=torch.log, **alpha):
    """The largest score, and the logarithm of what is made of the exponentials of the others less that."""
    peak = masked.amax(-1, keepdim=True)
    found = log(total((masked - peak).exp()))
    return torch.add(peak if largest is None else largest, found, **alpha).squeeze(-1)


NO_LOGARITHM = "expected the logarithm of the sum of exponentials that a softmax divides by"
NOT_THE_SUM = "the logarithm is not of the sum that the softmax divides by"
OTHER_SHAPE = "the logarithms are of scores in another shape than those of the softmax"
TWINS = {  # without a reason, nothing looks like the logarithm
    "unscaled": ("the logarithm is of the sum for", lambda masked, _: (masked / SCALE).logsumexp(-1)),
    "unmasked": (f"{NOT_THE_SUM}: it is of add, expected masked_fill", lambda _, scores: scores.logsumexp(-1)),
    "masked otherwise": (
        NOT_THE_SUM,
        lambda _, scores: scores.masked_fill(torch.arange(scores.shape[-1]) > 9, -torch.inf).logsumexp(-1),
    ),
    "over the heads of a token": (OTHER_SHAPE, lambda masked, _: masked[..., 0].logsumexp(1)),
    "of some keys": (OTHER_SHAPE, lambda masked, _: masked[..., :9].logsumexp(-1)),
    "of one key, once for each key": (OTHER_SHAPE, lambda masked, _: masked[..., :1].expand_as(masked).logsumexp(-1)),
    "of heads in another order": (
        f"{NOT_THE_SUM}: it is of add", lambda masked, _: (masked + masked.flip(1)).logsumexp(-1),
    ),
    "of the largest": (NO_LOGARITHM, lambda masked, _: by_hand(masked, lambda raised: raised.amax(-1, keepdim=True))),
    "of the mean": (NO_LOGARITHM, lambda masked, _: by_hand(masked, lambda raised: raised.mean(-1, keepdim=True))),
    "the largest twice": (
        NO_LOGARITHM, lambda masked, _: by_hand(masked, largest=2 * masked.amax(-1, keepdim=True)),
    ),
    "another maximum": (
        NO_LOGARITHM, lambda masked, _: by_hand(masked, largest=masked.amax((1, 3), keepdim=True)),
    ),
    "of another base": (NO_LOGARITHM, lambda masked, _: by_hand(masked, log=torch.log2)),
    "twice the logarithm": (NO_LOGARITHM, lambda masked, _: by_hand(masked, alpha=2)),
    "the logarithm alone": ("", lambda masked, _: (masked - masked.amax(-1, keepdim=True)).exp().sum(-1).log()),
    "less the logarithm": ("", lambda masked, _: by_hand(masked, log=lambda total: -total.log())),
    "of squares": ("", lambda masked, _: by_hand(masked, lambda raised: raised.square().sum(-1, keepdim=True))),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TWINS)
def test_other_logarithms_stay(name):
    """The attention fuses without them."""
    because, lse = TWINS[name]
    report = check(Twin(lse))
    assert report.fused == {"latent_attention": 1}
    reasons = [miss.reason for miss in report.misses if miss.pattern == "mla_attention_lse"]
    assert any(because in reason for reason in reasons) if because else not reasons, reasons
    assert BOTH not in report.graphs["lower"]


def test_the_logarithm_of_another_attention():
    class OfAnother(nn.Module):
        def forward(self, *given):
            query, *rest = given
            out, _ = Attention()(*given)
            _, lse = Attention()(query * 2, *rest)
            return out, lse

    report = check(OfAnother())
    assert report.fused == {"latent_attention": 1} and BOTH not in report.graphs["lower"]


def test_a_logarithm_that_nothing_reads():
    class Unread(Attention):
        def forward(self, *given):
            return (super().forward(*given)[0],)

    report = check(Unread())
    assert report.fused == {"latent_attention": 1}
    text = report.graphs["lower"]
    assert text.count(CALL) == 1 and BOTH not in text


def test_a_sink_is_no_part_of_the_sum():
    class Sink(Attention):
        def weights(self, scores):
            return torch.cat((scores, torch.ones_like(scores[..., :1])), -1).softmax(-1)[..., :-1]

    report = check(Sink())
    assert report.fused == {"latent_attention": 1} and BOTH not in report.graphs["lower"]
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
