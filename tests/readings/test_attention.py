"""Softmax attention in every spelling against an independent oracle."""

import functools
import math

import pytest
import torch
from lib.traced import BIAS, MASK, B, D, N, S, T, Traced, agree, dense, refused, sum_of
from torch.nn import functional as F  # noqa: N812

from mla_fx.readings.attention import anchors, attention
from mla_fx.readings.log_sum_exp import log_sum_exp


def softmax_by_hand(scores, compared=slice(None), exp=torch.exp, shift=0.0):
    peak = scores[..., compared].amax(-1, keepdim=True)
    raised = exp(scores - (peak + shift if shift else peak))
    return raised / raised.sum(-1, keepdim=True)


def softmax_of_inductor(x, scale, other=None):
    """Its spelling of the softmax of x * scale: where all scores are finite the largest is taken before the factor."""
    scores, sign = x * scale, 1 if scale >= 0 else -1
    finite = torch.isfinite(scores).all(-1, keepdim=True)
    stable = (x * sign - (x * sign).amax(-1, keepdim=True)) * (sign * (other or scale))
    raised = torch.exp(torch.where(finite, stable, scores - scores.amax(-1, keepdim=True)))
    return raised / raised.sum(-1, keepdim=True)


def less_the_largest_twice(scores):
    """Two conditions, one after the other, whose ways are alike."""
    for _ in range(2):
        larger, largest = scores > 0, scores.amax(-1, keepdim=True)
        scores = torch.where(larger, scores - largest, scores - scores.max(-1, keepdim=True).values)
    raised = scores.exp()
    return raised / raised.sum(-1, keepdim=True)


def over_others(scores, read=slice(-1)):
    """The last column is left out of the sum."""
    raised = torch.exp(scores - scores.amax(-1, keepdim=True))
    return raised[..., read] / raised[..., :-1].sum(-1, keepdim=True)


def beside(scores, sink, first=False):
    """Scores with one more column, shared by all heads or one for each."""
    sink = torch.as_tensor(sink, dtype=scores.dtype).view(-1, 1, 1).expand(*scores.shape[:2], S, 1)
    return torch.cat((sink, scores) if first else (scores, sink), -1)


def minus_peak(scores):
    return scores - scores.max(-1, keepdim=True).values


def less_logarithm(scores, dim=-1, times=1.0):
    return (scores - times * scores.logsumexp(dim, keepdim=True)).exp()


def guarded_by_hand(scores):
    peak = scores.amax(-1, keepdim=True)
    raised = (scores - torch.where(peak == -torch.inf, 0.0, peak)).exp()
    return raised / raised.sum(-1, keepdim=True)


def divided_late(scores, values, guard=lambda total: total, exp=torch.exp):
    """Flash attention divides so."""
    peak = scores.amax(-1, keepdim=True)
    raised = exp(scores - torch.where(peak.isinf(), 0.0, peak))
    return (raised.to(values.dtype) @ values) / guard(raised.sum(-1, keepdim=True))


def powers(scores, *others):
    """Exponentials of scores and of other numbers of each row, after the largest was subtracted; and their sum."""
    peak = functools.reduce(torch.maximum, others, scores.amax(-1, keepdim=True))
    raised = (scores - peak).exp()
    return raised, sum(((other - peak).exp() for other in others), raised.sum(-1, keepdim=True))


def computed_twice(scores):
    return powers(scores)[0] / powers(scores)[1]


def times_reciprocal(scores, values=None):
    raised, total = powers(scores)
    return raised * (1 / total) if values is None else (raised @ values) * total.reciprocal()


def columns_first(raised, total, values):
    return values.mT @ raised.mT / total.mT


def with_sink(scores, sink, values=None):
    """The exponential of the sink is added to the sum of the others."""
    raised, total = powers(scores, sink.view(-1, 1, 1))
    return raised / total if values is None else raised @ values / total


def with_sink_above_the_largest(scores, sink):
    peak = scores.amax(-1, keepdim=True)
    raised = (scores - peak).exp()
    return raised / (raised.sum(-1, keepdim=True) + (sink.view(-1, 1, 1) - peak).exp())


def more_than_the_sum(scores, number=1.0):
    """The exponential of a sink that is a number is added to the sum of the others."""
    raised, total = powers(scores)
    return raised / (total + number * (-scores.amax(-1, keepdim=True)).exp())


def late_but_one(scores, values):
    raised, total = powers(scores)
    return raised[..., :-1] @ values / total


def beside_others(scores, others):
    """The sum has exponentials of other scores, too."""
    raised, total = powers(scores)
    return raised / (total + powers(others)[1])


def one_for_zero(total):
    return torch.where(total == 0, 1.0, total)


LOG2E = 1.4426950408889634
OFFSETS, OFFSET = dense(S, T), dense(N)

ATTENTIONS = {
    "softmax": lambda q, k, v: (q @ k.mT * 0.3).softmax(-1) @ v,
    "scaled query": lambda q, k, v: ((q * 0.3) @ k.mT).softmax(-1) @ v,
    "in float": lambda q, k, v: F.softmax(q @ k.mT, -1, dtype=torch.float32).to(q.dtype) @ v,
    "by hand": lambda q, k, v: softmax_by_hand(q @ k.mT) @ v,
    "by hand, guarded": lambda q, k, v: guarded_by_hand(q @ k.mT + BIAS) @ v,
    "as Inductor writes it": lambda q, k, v: softmax_of_inductor(q @ k.mT, 0.3) @ v,
    "as Inductor writes it, of a negative factor": lambda q, k, v: softmax_of_inductor(q @ k.mT, -0.3) @ v,
    "two conditions": lambda q, k, v: less_the_largest_twice(q @ k.mT) @ v,
    "less the logarithm of the sum": lambda q, k, v: less_logarithm(q @ k.mT * 0.3) @ v,
    "less it, biased": lambda q, k, v: less_logarithm(q @ k.mT + BIAS) @ v,
    "less it, filled": lambda q, k, v: less_logarithm((q @ k.mT).masked_fill(~MASK, -torch.inf)) @ v,
    "exponentials that are computed twice": lambda q, k, v: computed_twice(q @ k.mT) @ v,
    "exponential of log_softmax": lambda q, k, v: (q @ k.mT + BIAS).log_softmax(-1).exp() @ v,
    "divided late": lambda q, k, v: divided_late(q @ k.mT * 0.3, v),
    "divided late, biased": lambda q, k, v: divided_late(q @ k.mT + BIAS, v, lambda total: total.clamp(min=1e-20)),
    "divided late, one for zero": lambda q, k, v: divided_late(q @ k.mT, v, one_for_zero),
    "divided late, transposed": lambda q, k, v: divided_late(q @ k.mT, v).transpose(1, 2).flatten(2),
    "divided late, columns first": lambda q, k, v: columns_first(*powers(q @ k.mT), v),
    "divided late, powers of two": lambda q, k, v: divided_late(q @ k.mT * (0.3 * LOG2E), v, exp=torch.exp2),
    "times one by the sum": lambda q, k, v: times_reciprocal(q @ k.mT) @ v,
    "times one by the sum, late": lambda q, k, v: times_reciprocal(q @ k.mT, v),
    "powers of two": lambda q, k, v: softmax_by_hand(q @ k.mT * (0.3 * LOG2E), exp=torch.exp2) @ v,
    "powers of two of products": lambda q, k, v: softmax_by_hand(q @ k.mT, exp=lambda x: torch.exp2(x * LOG2E)) @ v,
    "einsum": lambda q, k, v: torch.einsum("bnst,bntv->bnsv", torch.einsum("bnsd,bntd->bnst", q, k).softmax(-1), v),
    "output transposed": lambda q, k, v: ((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2),
    "bias": lambda q, k, v: (q @ k.mT + BIAS).softmax(-1) @ v,
    "masked_fill": lambda q, k, v: (q @ k.mT).masked_fill(~MASK, -torch.inf).softmax(-1) @ v,
    "where": lambda q, k, v: torch.where(MASK, q @ k.mT, -1e9).softmax(-1) @ v,
    "a filled mask": lambda q, k, v: (q @ k.mT + OFFSETS.masked_fill(~MASK, -3.0)).softmax(-1) @ v,
    "filled with a number": lambda q, k, v: (q @ k.mT).masked_fill(~MASK, 0.25).softmax(-1) @ v,
    "filled, then halved": lambda q, k, v: ((q @ k.mT).masked_fill(~MASK, -3.0) * 0.5).softmax(-1) @ v,
    "scaled probabilities": lambda q, k, v: ((q @ k.mT).softmax(-1) * 2) @ v,
    "scaled after the mask": lambda q, k, v: ((q @ k.mT + BIAS) * 0.5).softmax(-1) @ v,
    "minus the largest": lambda q, k, v: minus_peak(q @ k.mT + BIAS).softmax(-1) @ v,
    "fused": lambda q, k, v: F.scaled_dot_product_attention(q, k, v),
    "fused, scaled": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, scale=0.7),
    "fused, masked": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=MASK),
    "fused, biased": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=BIAS),
    "fused, causal": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
}


SINK = dense(N)
SINKS = {
    "last": lambda q, k, v, sink: beside(q @ k.mT, sink).softmax(-1)[..., :-1] @ v,
    "first": lambda q, k, v, sink: beside(q @ k.mT, sink, first=True).softmax(-1)[..., 1:] @ v,
    "minus the largest": lambda q, k, v, sink: minus_peak(beside(q @ k.mT, sink)).softmax(-1)[..., :-1] @ v,
    "by hand": lambda q, k, v, sink: softmax_by_hand(beside(q @ k.mT, sink))[..., :-1] @ v,
    "beside the sum": lambda q, k, v, sink: with_sink(q @ k.mT, sink) @ v,
    "beside the sum, biased": lambda q, k, v, sink: with_sink(q @ k.mT + BIAS, sink) @ v,
    "beside the sum, late": lambda q, k, v, sink: with_sink(q @ k.mT, sink, v),
    "beside the sum, above the largest": lambda q, k, v, sink: with_sink_above_the_largest(q @ k.mT, sink) @ v,
    "one more than the sum": lambda q, k, v, sink: more_than_the_sum(q @ k.mT) @ v,
    "half more than the sum, biased": lambda q, k, v, sink: more_than_the_sum(q @ k.mT + BIAS, 0.5) @ v,
    "divided late": lambda q, k, v, sink: late_but_one(beside(q @ k.mT, sink), v),
    "less the logarithm": lambda q, k, v, sink: less_logarithm(beside(q @ k.mT, sink))[..., :-1] @ v,
    "masked before": lambda q, k, v, sink: beside(q @ k.mT + BIAS, sink).softmax(-1)[..., :-1] @ v,
    "mask with a column of zeros": lambda q, k, v, sink: (
        (beside(q @ k.mT, sink) + F.pad(BIAS, (0, 1))).softmax(-1)[..., :-1] @ v
    ),
    "filled before": lambda q, k, v, sink: (
        beside((q @ k.mT).masked_fill(~MASK, -1e4), sink).softmax(-1)[..., :-1] @ v
    ),
    "halved behind": lambda q, k, v, sink: (beside(q @ k.mT, sink) * 0.5).softmax(-1)[..., :-1] @ v,
    "a number": lambda q, k, v, sink: beside(q @ k.mT, 0.7).softmax(-1)[..., :-1] @ v,
    "zero": lambda q, k, v, sink: F.pad(q @ k.mT, (0, 1)).softmax(-1)[..., :-1] @ v,
    "one parameter": lambda q, k, v, sink: beside(q @ k.mT, sink[:1]).softmax(-1)[..., :-1] @ v,
    "written": lambda q, k, v, sink: (
        torch.empty(B, N, S, T + 1).slice_scatter(q @ k.mT, -1, 0, T).select_scatter(
            sink.view(N, 1).expand(B, N, S), -1, T
        ).softmax(-1)[..., :-1] @ v
    ),
}  # fmt: skip


def traced(function, *more, width=D, decompose=True):
    return Traced(function, dense(B, N, S, D), dense(B, N, T, D), dense(B, N, T, width), *more, decompose=decompose)


def test_a_softmax_that_weighs_no_values_is_no_attention():
    assert list(anchors(traced(lambda q, k, v: (q @ k.mT).softmax(-1).sin()).graph)) == []


def read_attention(traced):
    (anchor,) = anchors(traced.graph)
    return attention(anchor)


@pytest.mark.parametrize("value_width", [D, 6], ids=["one width", "two widths"])
@pytest.mark.parametrize("name", ATTENTIONS)
def test_attention_is_read(name, value_width):
    check_read(traced(ATTENTIONS[name], width=value_width))


@pytest.mark.parametrize("name", SINKS)
def test_sink_is_read(name):
    check_read(traced(SINKS[name], SINK), has_sink=True)


def check_read(traced, has_sink=False):
    found = read_attention(traced)
    assert [{score.left.node.name, score.right.node.name} for score in found.scores] == [{"q", "k"}]
    dims = (*found.index, found.keys)
    logits = sum(sum_of(traced, score, dims) for score in found.scores)
    for mask in found.masks:
        term = traced.read(mask.element, *dims)
        logits = logits + term if mask.fill is None else torch.where(term.bool() == mask.keep_where, logits, mask.fill)
    if found.causal:
        rows, keys = torch.arange(S)[:, None], torch.arange(T)
        logits = logits.masked_fill((keys > rows).view(1, 1, S, 1, T), -torch.inf)
    assert (found.sink is not None) == has_sink
    if has_sink:
        sink = torch.tensor(found.sink) if isinstance(found.sink, float) else traced.read(found.sink, *dims)[..., :1]
        weights = torch.cat((logits, sink.expand(*logits.shape[:-1], 1)), -1).softmax(-1)[..., :-1]
    else:
        weights = logits.softmax(-1)
    actual = found.value_factor * (weights * traced.read(found.value, *dims)).sum(-1)
    agree(actual, traced.values[found.node])


NO_MAXIMUM = "not the maximum of the scores"
NO_ATTENTIONS = {
    "probabilities masked after": (lambda q, k, v: ((q @ k.mT).softmax(-1) * MASK) @ v, "probabilities are multiplied"),
    "over the queries": (lambda q, k, v: (q @ k.mT).softmax(-2) @ v, NO_MAXIMUM),
    "filled, then biased": (
        lambda q, k, v: ((q @ k.mT).masked_fill(~MASK, -3.0) + BIAS).softmax(-1) @ v,
        "filled with a number and also masked by addition",
    ),
    "filled with two numbers": (
        lambda q, k, v: (q @ k.mT).masked_fill(~MASK, -3.0).masked_fill(MASK.flip(-1), 2.0).softmax(-1) @ v,
        "filled with different numbers",
    ),
    "a sink beside the sum and one among the scores": (
        lambda q, k, v: with_sink(beside(q @ k.mT, 1.0), OFFSET)[..., :-1] @ v,
        "two attention sinks",
    ),
    "twice the sink beside the sum": (
        lambda q, k, v: with_sink(q @ k.mT, 2 * OFFSET) @ v, "not divided by their sum",
    ),
    "less than the sum": (lambda q, k, v: more_than_the_sum(q @ k.mT, -1e-3) @ v, "not divided by their sum"),
    "one more than what is less the largest": (
        lambda q, k, v: (lambda raised, total: raised / (total + 1))(*powers(q @ k.mT)) @ v,
        "not divided by their sum",
    ),
    "other scores beside the sum": (lambda q, k, v: beside_others(q @ k.mT, q @ v.mT) @ v, "is of other scores"),
    "far below the largest": (lambda q, k, v: softmax_by_hand(q @ k.mT, shift=100.0) @ v, NO_MAXIMUM),
    "far above the largest": (lambda q, k, v: softmax_by_hand(q @ k.mT, shift=-90.0) @ v, NO_MAXIMUM),
    "two sinks": (
        lambda q, k, v: beside(beside(q @ k.mT, 1.0), 2.0).softmax(-1)[..., :-2] @ v,
        "only some of the softmax's probabilities",
    ),
    "a key left out in the middle": (
        lambda q, k, v: torch.cat((q @ k.mT, q @ k.mT), -1).softmax(-1)[..., 1 : T + 1] @ v,
        "only some of the softmax's probabilities",
    ),
    "over all but the sink": (lambda q, k, v: over_others(beside(q @ k.mT, 1.0)) @ v, "only some of the exponentials"),
    "over all but one": (lambda q, k, v: over_others(q @ k.mT, slice(None)) @ v, "only some of the exponentials"),
    "minus the largest of others": (
        lambda q, k, v: softmax_by_hand(beside(q @ k.mT, 1.0), slice(-1))[..., :-1] @ v, NO_MAXIMUM,
    ),
    "two factors, as a condition has it": (
        lambda q, k, v: softmax_of_inductor(q @ k.mT, 0.3, other=0.5) @ v, NO_MAXIMUM,
    ),
    "two signs, as a condition has it": (
        lambda q, k, v: softmax_of_inductor(q @ k.mT, 0.3, other=-0.3) @ v, NO_MAXIMUM,
    ),
    "less a logarithm over queries": (lambda q, k, v: less_logarithm(q @ k.mT, -2) @ v, NO_MAXIMUM),
    "less half the logarithm": (lambda q, k, v: less_logarithm(q @ k.mT, times=0.5) @ v, "not divided by their sum"),
    "less the logarithm of others": (
        lambda q, k, v: (q @ k.mT - (q @ k.mT * 0.5).logsumexp(-1, keepdim=True)).exp() @ v,
        "of other scores",
    ),
    "less the logarithm of the unbiased": (
        lambda q, k, v: (q @ k.mT + BIAS - (q @ k.mT).logsumexp(-1, keepdim=True)).exp() @ v,
        "of other scores",
    ),
    "twice less the logarithm": (
        lambda q, k, v: (2 * (q @ k.mT - (q @ k.mT).logsumexp(-1, keepdim=True))).exp() @ v,
        "differences of scores are multiplied by 2",
    ),
    "a number more": (
        lambda q, k, v: (q @ k.mT + 1.0 - (q @ k.mT).logsumexp(-1, keepdim=True)).exp() @ v,
        "of other scores",
    ),
    "a number added": (lambda q, k, v: (q @ k.mT + 2.0).softmax(-1) @ v, "a number is added to the attention scores"),
}


# A log_softmax that a graph keeps whole.
KEPT_WHOLE = {
    "natural": lambda scores: scores.log_softmax(-1).exp(),
    "base two": lambda scores: (scores.log_softmax(-1) / math.log(2)).exp2(),
    "beside a sink": lambda scores: beside(scores, 0.3).log_softmax(-1).exp()[..., :-1],
}
NOT_WHOLE = {
    "half of it": (lambda scores: (scores.log_softmax(-1) * 0.5).exp(), "multiplied by a number, 0.5"),
    "base two of it": (lambda scores: scores.log_softmax(-1).exp2(), "multiplied by a number, 0.693147"),
    "more than it": (lambda scores: (scores.log_softmax(-1) + 0.1).exp(), "exponentiated directly"),
    "over queries": (lambda scores: scores.log_softmax(-2).exp(), "not summed over the softmax axis alone"),
    "some of its columns": (
        lambda scores: torch.cat((scores, scores), -1).log_softmax(-1).exp()[..., :T],
        "only some of the softmax's probabilities",
    ),
}


def weighed(weights, **options):
    return traced(lambda q, k, v: weights(q @ k.mT) @ v, **options)


@pytest.mark.parametrize("name", KEPT_WHOLE)
def test_a_log_softmax_that_is_kept_whole_is_read(name):
    check_read(weighed(KEPT_WHOLE[name], decompose=False), has_sink="sink" in name)


@pytest.mark.parametrize(("weights", "because"), NOT_WHOLE.values(), ids=NOT_WHOLE)
def test_near_twins_of_a_log_softmax(weights, because):
    with refused(because):
        read_attention(weighed(weights, decompose=False))


@pytest.mark.parametrize("decompose", [True, False], ids=["as Inductor has it", "as it is"])
@pytest.mark.parametrize("weights", [less_logarithm, lambda scores: scores.softmax(-1)], ids=["logarithm", "softmax"])
def test_probabilities_whose_nan_are_replaced_are_refused(weights, decompose):
    """NaN may come from a query, not only from a row that sees no key."""


    def function(scores):
        return weights(scores.masked_fill(~MASK, -torch.inf)).nan_to_num(0.0)

    with refused(r"NaN among the attention probabilities is replaced|replaced under a condition"):
        read_attention(weighed(function, decompose=decompose))


@pytest.mark.parametrize("decompose", [True, False], ids=["as Inductor has it", "as it is"])
def test_the_logarithm_beside_an_attention_is_read(decompose):
    def function(q, k, v):
        scores = q @ k.mT + BIAS
        return scores.softmax(-1) @ v, scores.logsumexp(-1)

    found = traced(function, decompose=decompose)
    _, log_sum = found.out
    assert log_sum_exp(log_sum, read_attention(found)).node is log_sum


@pytest.mark.parametrize(("function", "reason"), NO_ATTENTIONS.values(), ids=NO_ATTENTIONS)
def test_what_is_no_attention_is_refused_with_a_reason(function, reason):
    with refused(reason):
        read_attention(traced(function))
