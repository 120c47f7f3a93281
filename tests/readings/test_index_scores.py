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


def products(q, k):
    """[B,S,N,T]."""
    return q @ k.mT.unsqueeze(1)


def weighed(w, values):
    return (w.unsqueeze(-2) @ values).squeeze(-2)


def masked(scores):
    return scores.masked_fill(torch.ones(S, T).tril(8) == 0, -torch.inf)


def norms(x, *dim):
    return x.norm(dim=dim)


FACTORS = {
    "in order": (1.0, in_order),
    "heads first": (1.0, heads_first),
    "clamped": (1.0, lambda q, k, w: weighed(w, products(q, k).clamp_min(0))),
    "above zero": (1.0, lambda q, k, w: weighed(w, torch.maximum(products(q, k), torch.zeros(())))),
    "scaled": (-0.125, lambda q, k, w: weighed(w * 0.5, products(q * 0.5, k).relu() * -2.0) / 4),
    "masked": (1.0, lambda q, k, w: masked(in_order(q, k, w))),
    "biased": (1.0, lambda q, k, w: in_order(q, k, w) + k.sum(-1).unsqueeze(1)),
    # coded keys: their scales multiply the sums, before a mask
    "scales of keys, masked": (-2.0, lambda q, k, w: masked(heads_first(q, k, w) * (norms(k, -1).unsqueeze(1) * -2.0))),
    "scales of sequences": (1.0, lambda q, k, w: norms(k, 1, 2).view(B, 1, 1) * in_order(q, k, w)),
}


def keys_of_heads(q, k, w):
    return torch.einsum("bsn,bsnt->bst", w, torch.einsum("bsnd,bntd->bsnt", q, torch.stack((k, -k, k, k, k), 1)).relu())


EXPECTED = "expected a sum over heads of weights times relu"
NO_PRODUCT = "the index scores are no product of a query and a key"
NO_SCALES = "the index scores are multiplied by numbers that are no scales of keys"
REFUSED = {
    "without relu": (EXPECTED, lambda q, k, w: weighed(w, products(q, k))),
    "another bound": (EXPECTED, lambda q, k, w: weighed(w, products(q, k).clamp_min(0.5))),
    "bounded above": (EXPECTED, lambda q, k, w: weighed(w, products(q, k).clamp(0, 6))),
    "weights inside": (EXPECTED, lambda q, k, w: (products(q, k) * w.unsqueeze(-1)).relu().sum(2)),
    "negative inside": (
        "relu is of products times -1, expected a positive number", lambda q, k, w: in_order(-q, k, w),
    ),
    "biased inside": (
        "relu is of add, expected a product of query and key", lambda q, k, w: weighed(w, (products(q, k) + 1).relu()),
    ),
    "weights of keys": (
        "the weights of the index scores depend on the key",
        lambda q, k, w: (products(q, k).relu() * (w.unsqueeze(-1) + k.sum(-1)[:, None, None])).sum(2),
    ),
    "keys of heads": ("the indexer has keys of each head", keys_of_heads),
    "of keys alone": (
        NO_PRODUCT, lambda q, k, w: weighed(w, (k * k).sum(-1).relu()[:, None, None].expand(B, S, N, T)),
    ),
    "squared": (EXPECTED, lambda q, k, w: in_order(q, k, w).square()),
    "twice": ("the index scores are 2 products", lambda q, k, w: in_order(q, k, w) + in_order(q, k.roll(1, 1), w)),
    "scales of tokens": (
        NO_SCALES, lambda q, k, w: in_order(q, k, w) * (norms(q, 2, 3).unsqueeze(-1) + norms(k, -1).unsqueeze(1)),
    ),
    "of two sums": (NO_SCALES, lambda q, k, w: in_order(q, k, w) * in_order(q, k.roll(1, 1), w)),
    "divided": (EXPECTED, lambda q, k, w: in_order(q, k, w) / norms(k, -1).unsqueeze(1)),
    # where weights are the second factor, relu is of a product and a scale that may be negative
    "scaled inside": (
        "relu is of mul, expected a product of query and key",
        lambda q, k, w: weighed(w, (products(q, k) * k.sum(-1)[:, None, None]).relu()),
    ),
    "scaled after a mask": (EXPECTED, lambda q, k, w: masked(in_order(q, k, w)) * norms(k, -1).unsqueeze(1)),
}


def topk(scores_of, **options):
    operands = torch.randn(B, S, N, D), torch.randn(B, T, D), torch.randn(B, S, N)
    traced = make_fx(lambda *given: scores_of(*given).topk(CHOSEN, **options), tracing_mode="fake")(*operands)
    return traced.graph.find_nodes(op="call_function", target=torch.ops.aten.topk.default)[0]


@pytest.mark.parametrize("name", FACTORS)
def test_scores_are_read(name):
    factor, scores_of = FACTORS[name]
    node = topk(scores_of)
    found = index_scores(node)
    assert found.factor == factor
    operands = found.query, found.key, found.weights
    assert [operand.origin for operand in operands] == node.graph.find_nodes(op="placeholder")
    assert len(found.masks) == ("masked" in name or name == "biased")
    assert (found.key_scale is not None) == ("scales" in name)
    assert has_index_scores(node)


@pytest.mark.parametrize("name", REFUSED)
def test_twins_are_refused(name):
    reason, scores_of = REFUSED[name]
    with pytest.raises(NoMatch, match=reason):
        index_scores(topk(scores_of))


def test_the_smallest_are_refused():
    with pytest.raises(NoMatch, match="the keys with the smallest scores are chosen"):
        index_scores(topk(in_order, largest=False))


def test_a_choice_of_queries_is_refused():
    with pytest.raises(NoMatch, match=NO_PRODUCT):
        index_scores(topk(in_order, dim=0))
