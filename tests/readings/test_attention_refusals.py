"""Near twins of attention: each is refused, and says why."""

from dataclasses import replace

import pytest
import torch
from lib.traced import BIAS, MASK, B, D, N, S, T, Traced, dense, refused
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F  # noqa: N812

from mla_fx.readings.attention import Causal, anchors, attention
from mla_fx.readings.axes import axes_of
from mla_fx.readings.causal import CausalByPosition, causal_by_position
from mla_fx.readings.element import Element
from mla_fx.rewriting.operands import check_is_causal, mask_operands

aten = torch.ops.aten


def raised(q, k):
    scores = q @ k.mT
    return torch.exp(scores - scores.amax(-1, keepdim=True))


def is_masked(logits):
    return ~(logits != -torch.inf).any(-1, keepdim=True)


def guarded(condition):
    """A softmax that is zero where a condition of its logits holds."""

    def function(q, k, v):
        logits = q @ k.mT + BIAS
        return torch.where(condition(logits), 0.0, logits.softmax(-1)) @ v

    return function


ATTENTIONS = {
    "the sum of the first head": (lambda e: e / e[:, :1].sum(-1, keepdim=True), "is of other scores"),
    "the sum over all queries": (lambda e: e / e.sum((-1, -2), keepdim=True), "not summed over the keys alone"),
    "the sum of other values": (lambda e: e / e.sin().sum(-1, keepdim=True), "not divided by their sum"),
    "a maximum": (lambda e: e / e.amax(-1, keepdim=True), "not divided by their sum"),
}


@pytest.mark.parametrize("name", ATTENTIONS)
def test_near_twins_of_a_softmax_by_hand(name):
    divided, reason = ATTENTIONS[name]
    with refused(reason):
        read(lambda q, k, v: divided(raised(q, k)) @ v)


NOT_BY_SUM = "not divided by their sum"
LATE = {
    "the sum of the first head": (lambda e: e[:, :1].sum(-1, keepdim=True), "is of other scores"),
    "the sum over all queries": (lambda e: e.sum((-1, -2), keepdim=True), "over the keys alone"),
    "the sum over the heads": (lambda e: e.sum(1, keepdim=True)[..., :1], "not the maximum of the scores"),
    "twice the sum": (lambda e: (e * 2).sum(-1, keepdim=True), NOT_BY_SUM),
    "half the sum": (lambda e: e.sum(-1, keepdim=True) * 0.5, NOT_BY_SUM),
    "a mean": (lambda e: e.mean(-1, keepdim=True), NOT_BY_SUM),
    "a maximum": (lambda e: e.amax(-1, keepdim=True), NOT_BY_SUM),
    "a sum of sines": (lambda e: e.sin().sum(-1, keepdim=True), NOT_BY_SUM),
    "at least two": (lambda e: e.sum(-1, keepdim=True).clamp(min=2.0), NOT_BY_SUM),
    "at most ten": (lambda e: e.sum(-1, keepdim=True).clamp(1e-9, 10.0), "a case that no attention provably reaches"),
    "two for one": (
        lambda e: torch.where(e.sum(-1, keepdim=True) == 1, 2.0, e.sum(-1, keepdim=True)),
        "expected arithmetic on floats",
    ),
    "a sum and a number": (lambda e: e.sum(-1, keepdim=True) + 1e-3, NOT_BY_SUM),
}


def divided_late(divisor):
    def function(q, k, v):
        scores = q @ k.mT
        e = torch.exp(scores - scores.amax(-1, keepdim=True))
        return (e @ v) / divisor(e)

    return function


@pytest.mark.parametrize("name", LATE)
def test_near_twins_of_a_late_division(name):
    divisor, reason = LATE[name]
    with refused(reason):
        read(divided_late(divisor))


def test_a_maximum_over_the_queries_is_no_softmax():
    def function(q, k, v):
        logits = q @ k.mT
        e = torch.exp(logits - logits.amax(-2, keepdim=True))
        return (e / (e * 1).sum(-1, keepdim=True)) @ v

    with refused("not the maximum of the scores"):
        read(function)


REPLACED = "the attention probabilities are replaced under a condition"
OTHER_SCORES = "a sum or a maximum beside exponentials is of other scores"
GUARDS = {
    "not at all": (lambda logits: (logits != -torch.inf).any(-1, keepdim=True), NOT_BY_SUM),
    "masked logits": (lambda logits: ~(logits != -torch.inf), "expected a softmax, found bmm"),
    "all queries": (lambda logits: ~(logits != -torch.inf).any(-1, keepdim=True).any(-2, keepdim=True), REPLACED),
    "all queries at once": (lambda logits: ~aten.any.dims(logits != -torch.inf, [-1, -2], True), REPLACED),
    "anything but all": (lambda logits: (logits != -torch.inf).any(-1, keepdim=True) & MASK, REPLACED),
    "some masked": (lambda logits: ~(logits == -torch.inf).any(-1, keepdim=True), REPLACED),
    "positive": (lambda logits: ~(logits > -torch.inf).any(-1, keepdim=True), REPLACED),
    "infinite": (lambda logits: ~(logits != torch.inf).any(-1, keepdim=True), REPLACED),
    "other logits": (lambda logits: ~(logits * 2 != -torch.inf).any(-1, keepdim=True), OTHER_SCORES),
    "another query": (lambda logits: ~(logits[..., :1, :] != -torch.inf).any(-1, keepdim=True), OTHER_SCORES),
}


@pytest.mark.parametrize("name", GUARDS)
def test_near_twins_of_a_guarded_softmax(name):
    guard, reason = GUARDS[name]
    with refused(reason):
        read(guarded(guard))


def test_a_guarded_softmax():
    assert len(read(guarded(is_masked)).scores) == 1


def test_probabilities_that_are_replaced_by_a_number():
    with refused("replaced under a condition"):
        read(lambda q, k, v: torch.where(MASK, 0.5, (q @ k.mT).softmax(-1)) @ v)


def test_probabilities_that_are_left_out():
    with refused("only some of the softmax's probabilities"):
        read(lambda q, k, v: (q @ k.mT).softmax(-1)[..., 2:] @ v[..., 2:, :])


@pytest.mark.parametrize("divided", [lambda x: torch.cat([x, x], -1) / 2, lambda x: x.exp().sin() / x.sum()])
def test_a_quotient_that_begins_no_attention(divided):
    def function(x, v):
        value = divided(x)
        return value @ v[: value.shape[-1]]

    assert not list(anchors(Traced(function, dense(S, 4), dense(D, D), decompose=False).graph))


def test_a_number_subtracted_before_the_exponential_is_no_maximum():
    def function(q, k, v):
        e = torch.exp(q @ k.mT - 3.0)
        return (e / e.sum(-1, keepdim=True)) @ v

    with refused("not the maximum of the scores"):
        read(function)


def test_a_triangle_of_many_numbers_is_no_causal_mask():
    position = torch.arange(T)
    distance = (position - position[:, None]).float()
    found = read(lambda q, k, v: (q @ k.mT + distance.triu(1)).softmax(-1) @ v, *[(B, T, D)] * 3, decompose=False)
    with refused("more than one number above its diagonal"):
        causal_by_position(found, (), axes_of(found.index[1]))


def test_is_causal_together_with_a_mask():
    masked = read(lambda q, k, v, m: (q @ k.mT + m).softmax(-1) @ v, *[(B, N, S, D)] * 3, (S, S))
    rows = masked.index[-2]
    with refused("is_causal is given together with a mask"):
        check_is_causal(replace(masked, causal=Causal(masked.node, rows)), axes_of(rows))


def test_positions_on_another_device_leave_the_mask_a_tensor():
    masked = read(lambda q, k, v, m: (q @ k.mT + m).softmax(-1) @ v, *[(B, S, D)] * 3, (S, S))
    positions = masked.node.graph.placeholder("positions")
    sequences, rows, _ = (axes_of(part) for part in masked.index)
    dims = sequences, (), rows, axes_of(masked.keys)
    for device, is_length in (("cpu", True), ("meta", False)):
        positions.meta["val"] = torch.empty(B, dtype=torch.int64, device=device)
        counted = CausalByPosition(Element(positions, masked.index[:1]), 0, None)
        mask, lengths, _ = mask_operands(masked, counted, dims)
        assert (mask is None, lengths is not None) == (is_length, is_length)


FUSED = {
    "with dropout": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=0.5),
    "over a single key": lambda q, k, v: F.scaled_dot_product_attention(q, k[..., :1, :], v[..., :1, :]),
    "belongs to other sequences than the query": lambda q, k, v: F.scaled_dot_product_attention(q, k[0], v[0]),
    "output is not used": lambda q, k, v: aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)[1],
}


@pytest.mark.parametrize("reason", FUSED)
def test_near_twins_of_fused_attention(reason):
    values = [dense(B, N, size, D) for size in (S, T, T)]
    graph = make_fx(FUSED[reason], tracing_mode="fake", pre_dispatch=True)(*values).graph
    graph.eliminate_dead_code()
    (anchor,) = anchors(graph)
    with refused(reason):
        attention(anchor)


def test_fused_attention_over_columns_of_unknown_number():
    values = [dense(B, N, size, D) for size in (S, T, T)]
    function = make_fx(F.scaled_dot_product_attention, tracing_mode="symbolic", pre_dispatch=True)
    (anchor,) = anchors(function(*values).graph)
    with refused("the softmax scale is not a compile-time number"):
        attention(anchor)


def read(function, *shapes, **options):
    shapes = shapes or ((B, N, S, D), (B, N, T, D), (B, N, T, D))
    traced = Traced(function, *(dense(*shape) for shape in shapes), **options)
    (anchor,) = anchors(traced.graph)
    return attention(anchor)
