"""Which values are the scores of an indexer, and which near twins are not."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from mla_fx.errors import NoMatch
from mla_fx.readings.index_scores import has_index_scores, index_scores

B, S, N, T, D, CHOSEN = 2, 3, 5, 12, 4, 2


def in_order(q, k, w):
    return torch.einsum("bsn,bsnt->bst", w, torch.relu(torch.einsum("bsnd,btd->bsnt", q, k)))


def heads_first(q, k, w):
    return (torch.relu(q.transpose(1, 2) @ k.mT.unsqueeze(1)) * w.mT.unsqueeze(-1)).sum(1)


def clamped(q, k, w):
    return (w.unsqueeze(-2) @ (q @ k.mT.unsqueeze(1)).clamp_min(0)).squeeze(-2)


def above_zero(q, k, w):
    return (w.unsqueeze(-2) @ torch.maximum(q @ k.mT.unsqueeze(1), torch.zeros(()))).squeeze(-2)


def scaled(q, k, w):
    return ((w * 0.5).unsqueeze(-2) @ (((q * 0.5) @ k.mT.unsqueeze(1)).relu() * -2.0)).squeeze(-2) / 4


def masked(q, k, w):
    return in_order(q, k, w).masked_fill(torch.ones(S, T).tril(8) == 0, -torch.inf)


def biased(q, k, w):
    return in_order(q, k, w) + k.sum(-1).unsqueeze(1)


def with_scales(q, k, w):
    """Coded keys: their scales multiply the sums, before a mask."""
    scales = k.norm(dim=-1).unsqueeze(1) * -2.0
    return (heads_first(q, k, w) * scales).masked_fill(torch.ones(S, T).tril(8) == 0, -torch.inf)


def with_scales_of_sequences(q, k, w):
    return k.norm(dim=(1, 2)).view(B, 1, 1) * in_order(q, k, w)


SCALED = with_scales, with_scales_of_sequences
FACTORS = {in_order: 1.0, heads_first: 1.0, clamped: 1.0, above_zero: 1.0, scaled: -0.125, masked: 1.0, biased: 1.0}
FACTORS |= {with_scales: -2.0, with_scales_of_sequences: 1.0}


def without_relu(q, k, w):
    return torch.einsum("bsn,bsnt->bst", w, torch.einsum("bsnd,btd->bsnt", q, k))


def other_bound(q, k, w):
    return (w.unsqueeze(-2) @ (q @ k.mT.unsqueeze(1)).clamp_min(0.5)).squeeze(-2)


def bounded_above(q, k, w):
    return (w.unsqueeze(-2) @ (q @ k.mT.unsqueeze(1)).clamp(0, 6)).squeeze(-2)


def weights_inside(q, k, w):
    return ((q @ k.mT.unsqueeze(1)) * w.unsqueeze(-1)).relu().sum(2)


def negative_inside(q, k, w):
    return in_order(-q, k, w)


def biased_inside(q, k, w):
    return (w.unsqueeze(-2) @ (q @ k.mT.unsqueeze(1) + 1).relu()).squeeze(-2)


def weights_of_keys(q, k, w):
    return ((q @ k.mT.unsqueeze(1)).relu() * (w.unsqueeze(-1) + k.sum(-1)[:, None, None])).sum(2)


def keys_of_heads(q, k, w):
    return torch.einsum("bsn,bsnt->bst", w, torch.einsum("bsnd,bntd->bsnt", q, torch.stack((k, -k, k, k, k), 1)).relu())


def of_keys_alone(q, k, w):
    return torch.einsum("bsn,bsnt->bst", w, (k * k).sum(-1).relu()[:, None, None].expand(B, S, N, T))


def squared(q, k, w):
    return in_order(q, k, w).square()


def twice(q, k, w):
    return in_order(q, k, w) + in_order(q, k.roll(1, 1), w)


def with_scales_of_tokens(q, k, w):
    return in_order(q, k, w) * (q.norm(dim=(2, 3)).unsqueeze(-1) + k.norm(dim=-1).unsqueeze(1))


def divided(q, k, w):
    return in_order(q, k, w) / k.norm(dim=-1).unsqueeze(1)


def scaled_inside(q, k, w):
    """Where weights are the second factor, relu is of a product and a scale that may be negative."""
    return (w.unsqueeze(-2) @ ((q @ k.mT.unsqueeze(1)) * k.sum(-1)[:, None, None]).relu()).squeeze(-2)


def scaled_after_a_mask(q, k, w):
    return masked(q, k, w) * k.norm(dim=-1).unsqueeze(1)


def of_two_sums(q, k, w):
    return in_order(q, k, w) * in_order(q, k.roll(1, 1), w)


EXPECTED = "expected a sum over heads of weights times relu"
REFUSED = {
    without_relu: EXPECTED,
    other_bound: EXPECTED,
    bounded_above: EXPECTED,
    weights_inside: EXPECTED,
    negative_inside: "relu is of products times -1, expected a positive number",
    biased_inside: "relu is of add, expected a product of query and key",
    weights_of_keys: "the weights of the index scores depend on the key",
    keys_of_heads: "the indexer has keys of each head",
    of_keys_alone: "the index scores are no product of a query and a key",
    squared: EXPECTED,
    twice: "the index scores are 2 products",
    with_scales_of_tokens: "the index scores are multiplied by numbers that are no scales of keys",
    of_two_sums: "the index scores are multiplied by numbers that are no scales of keys",
    divided: EXPECTED,
    scaled_inside: "relu is of mul, expected a product of query and key",
    scaled_after_a_mask: EXPECTED,
}


def topk(scores_of, **options):
    operands = torch.randn(B, S, N, D), torch.randn(B, T, D), torch.randn(B, S, N)
    traced = make_fx(lambda *given: scores_of(*given).topk(CHOSEN, **options), tracing_mode="fake")(*operands)
    return traced.graph.find_nodes(op="call_function", target=torch.ops.aten.topk.default)[0]


@pytest.mark.parametrize("scores_of", FACTORS)
def test_scores_are_read(scores_of):
    node = topk(scores_of)
    found = index_scores(node)
    assert found.factor == FACTORS[scores_of]
    operands = found.query, found.key, found.weights
    assert [operand.origin for operand in operands] == node.graph.find_nodes(op="placeholder")
    assert len(found.masks) == (scores_of in (masked, biased, with_scales))
    assert (found.key_scale is not None) == (scores_of in SCALED)
    assert has_index_scores(node)


@pytest.mark.parametrize("scores_of", REFUSED)
def test_twins_are_refused(scores_of):
    with pytest.raises(NoMatch, match=REFUSED[scores_of]):
        index_scores(topk(scores_of))


def test_the_smallest_are_refused():
    with pytest.raises(NoMatch, match="the keys with the smallest scores are chosen"):
        index_scores(topk(in_order, largest=False))


def test_a_choice_of_queries_is_refused():
    with pytest.raises(NoMatch, match="the index scores are no product of a query and a key"):
        index_scores(topk(in_order, dim=0))
