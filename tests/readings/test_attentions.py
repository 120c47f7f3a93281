"""Softmax attention in every spelling against an independent oracle."""

import pytest
import torch
from torch.nn import functional as F  # noqa: N812
from traced import B, D, N, S, T, Traced, agree, dense, sum_of

from mla_fx.errors import NoMatch
from mla_fx.readings.softmax import anchors, attention


def softmax_by_hand(scores):
    raised = torch.exp(scores - scores.amax(-1, keepdim=True))
    return raised / raised.sum(-1, keepdim=True)


MASK = dense(B, 1, S, T) > -0.5
MASK[..., 0] = True
BIAS = torch.zeros(B, 1, S, T).masked_fill(~MASK, -torch.inf)

ATTENTIONS = {
    "softmax": lambda q, k, v: (q @ k.mT * 0.3).softmax(-1) @ v,
    "scaled query": lambda q, k, v: ((q * 0.3) @ k.mT).softmax(-1) @ v,
    "in float": lambda q, k, v: F.softmax(q @ k.mT, -1, dtype=torch.float32).to(q.dtype) @ v,
    "by hand": lambda q, k, v: softmax_by_hand(q @ k.mT) @ v,
    "einsum": lambda q, k, v: torch.einsum("bnst,bntv->bnsv", torch.einsum("bnsd,bntd->bnst", q, k).softmax(-1), v),
    "output transposed": lambda q, k, v: ((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2),
    "bias": lambda q, k, v: (q @ k.mT + BIAS).softmax(-1) @ v,
    "masked_fill": lambda q, k, v: (q @ k.mT).masked_fill(~MASK, -torch.inf).softmax(-1) @ v,
    "where": lambda q, k, v: torch.where(MASK, q @ k.mT, -1e9).softmax(-1) @ v,
    "a filled mask": lambda q, k, v: (q @ k.mT + dense(S, T).masked_fill(~MASK, -3.0)).softmax(-1) @ v,
    "filled with a number": lambda q, k, v: (q @ k.mT).masked_fill(~MASK, 0.25).softmax(-1) @ v,
    "filled, then halved": lambda q, k, v: ((q @ k.mT).masked_fill(~MASK, -3.0) * 0.5).softmax(-1) @ v,
    "scaled probabilities": lambda q, k, v: ((q @ k.mT).softmax(-1) * 2) @ v,
    "scaled after the mask": lambda q, k, v: ((q @ k.mT + BIAS) * 0.5).softmax(-1) @ v,
    "fused": lambda q, k, v: F.scaled_dot_product_attention(q, k, v),
    "fused, scaled": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, scale=0.7),
    "fused, masked": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=MASK),
    "fused, biased": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=BIAS),
    "fused, causal": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
}


def test_a_softmax_that_weighs_no_values_is_no_attention():
    traced = Traced(lambda q, k: (q @ k.mT).softmax(-1).sin(), dense(B, N, S, D), dense(B, N, T, D))
    assert list(anchors(traced.graph)) == []


def read_attention(traced):
    (anchor,) = anchors(traced.graph)
    return attention(anchor)


@pytest.mark.parametrize("value_width", [D, 6], ids=["one width", "two widths"])
@pytest.mark.parametrize("name", ATTENTIONS)
def test_attention_is_read(name, value_width):
    traced = Traced(ATTENTIONS[name], dense(B, N, S, D), dense(B, N, T, D), dense(B, N, T, value_width))
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
    actual = found.value_factor * (logits.softmax(-1) * traced.read(found.value, *dims)).sum(-1)
    agree(actual, traced.values[found.node])


NO_ATTENTIONS = {
    "probabilities masked after": (lambda q, k, v: ((q @ k.mT).softmax(-1) * MASK) @ v, "expected a softmax"),
    "over the queries": (lambda q, k, v: (q @ k.mT).softmax(-2) @ v, "not summed over the softmax axis"),
    "filled, then biased": (
        lambda q, k, v: ((q @ k.mT).masked_fill(~MASK, -3.0) + BIAS).softmax(-1) @ v,
        "filled with a number, and a mask is added",
    ),
    "filled with two numbers": (
        lambda q, k, v: (q @ k.mT).masked_fill(~MASK, -3.0).masked_fill(MASK.flip(-1), 2.0).softmax(-1) @ v,
        "filled with different numbers",
    ),
    "a number added": (lambda q, k, v: (q @ k.mT + 2.0).softmax(-1) @ v, "a number is added to the attention scores"),
}


@pytest.mark.parametrize("name", NO_ATTENTIONS)
def test_what_is_no_attention_is_refused_with_a_reason(name):
    function, reason = NO_ATTENTIONS[name]
    traced = Traced(function, dense(B, N, S, D), dense(B, N, T, D), dense(B, N, T, D))
    with pytest.raises(NoMatch, match=reason):
        read_attention(traced)
