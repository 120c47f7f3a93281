"""Which values are made by numbers of keys, and which near twins are made by something else."""

import pytest
import torch
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import one_hot

from mla_fx.errors import NoMatch
from mla_fx.readings.axes import fresh
from mla_fx.readings.selection import NONE, selection

QUERIES, KEYS, CHOSEN = 2, 12, 3
NO_TOPK = "is not the indices of a top-k, so it may name a key twice"
OTHERS = "does not hide the keys that were not chosen"


def chosen(scores):
    return scores.topk(CHOSEN, dim=-1).indices


def of_all(scores):
    """What all queries choose together."""
    return scores.sum(0).topk(CHOSEN).indices


def counted(scores, indices, more=1):
    counts = torch.zeros_like(scores, dtype=torch.int32)
    return counts.scatter_add(-1, indices, torch.full_like(indices, more, dtype=torch.int32))


def padded(scores):
    """Numbers of keys, and -1 for those with a score below zero."""
    found = scores.topk(CHOSEN)
    return found.indices.masked_fill(found.values < 0, -1)


def counted_if(scores, indices, is_key):
    return torch.zeros_like(scores, dtype=torch.int32).scatter_add(-1, indices, is_key.int())


def flags(scores):
    return one_hot(chosen(scores), KEYS)


def put(scores, number, *index):
    filled = torch.ones_like(scores, dtype=torch.bool)
    filled[index] = number
    return filled


ALL = slice(None)
ACCEPTED = {
    "more than zero": lambda scores: counted(scores, chosen(scores)) > 0,
    "not zero": lambda scores: counted(scores, chosen(scores)).ne(0),
    "not equal to zero": lambda scores: ~(counted(scores, chosen(scores)) == 0),
    "at least one": lambda scores: counted(scores, chosen(scores)) >= 1,
    "as a condition": lambda scores: counted(scores, chosen(scores)).bool(),
    "logical_not": lambda scores: ~counted(scores, chosen(scores)).logical_not(),
    "more than one of two": lambda scores: counted(scores, chosen(scores), 2) > 1,
    "in floats": lambda scores: torch.zeros_like(scores).scatter_add(-1, chosen(scores), torch.ones(2, CHOSEN)) > 0.5,
    "views of counts": lambda scores: counted(scores, chosen(scores)).unsqueeze(0).squeeze(0) > 0,
    "bounded": lambda scores: counted(scores, chosen(scores).clamp(0, KEYS - 1)) > 0,
    "padded": lambda s: counted_if(s, padded(s).clamp(0, KEYS - 1), padded(s) >= 0).ne(0),
    "padded, above -1": lambda s: counted_if(s, padded(s).clamp(min=0), padded(s) > -1) > 0,
    "padded, not -1": lambda s: counted_if(s, padded(s).int().clamp(min=0).long(), padded(s).int() != -1) > 0,
    "where": lambda s: counted_if(s, chosen(s), s.topk(CHOSEN).values > 0) > 0,
    "one_hot": lambda scores: flags(scores).sum(-2) > 0,
    "any of one_hot": lambda scores: flags(scores).any(-2),
    "a condition of one_hot": lambda scores: flags(scores).bool().any(-2),
    "largest of one_hot": lambda scores: flags(scores).amax(-2) != 0,
    "one_hot in floats": lambda scores: flags(scores).float().sum(-2).bool(),
    "one_hot, cut": lambda scores: one_hot(chosen(scores), KEYS + 4).sum(-2)[..., :KEYS] == 1,
    "compared": lambda scores: (chosen(scores).unsqueeze(-1) == torch.arange(KEYS)).any(-2),
    "compared with columns": lambda s: (torch.arange(KEYS).unsqueeze(-1) == chosen(s).unsqueeze(-2)).any(-1),
    "index_fill": lambda scores: ~torch.ones_like(scores, dtype=torch.bool).index_fill(-1, of_all(scores), False),
    "index_fill in numbers": lambda s: torch.full_like(s, -torch.inf).index_fill(-1, of_all(s), 0.0),
    "put": lambda scores: ~put(scores, False, ALL, of_all(scores)),
}
TWINS = {
    "beside others": (lambda scores: (scores > 1).scatter(-1, chosen(scores), True), OTHERS),
    "zero": (lambda scores: counted(scores, chosen(scores)) == 0, OTHERS),
    "at least zero": (lambda scores: counted(scores, chosen(scores)) >= 0, OTHERS),
    "counted from one": (lambda scores: counted(scores, chosen(scores)) + 1 > 0, NONE),
    "at least a number that is zero": (
        lambda s: torch.zeros_like(s).scatter_add(-1, chosen(s), torch.ones(2, CHOSEN)) >= 1e-60,
        OTHERS,
    ),
    "bounded in floats": (
        lambda s: counted(s, chosen(s).clamp(max=float(KEYS)).long()) > 0,
        NO_TOPK,
    ),
    "below one": (lambda scores: counted(scores, chosen(scores)) < 1, OTHERS),
    "twice": (lambda scores: counted(scores, chosen(scores) // 2) > 0, NO_TOPK),
    "along the queries": (
        lambda s: torch.zeros_like(s).scatter_add(0, s.topk(1, dim=0).indices, torch.ones(1, KEYS)) > 0,
        "scatter_add does not write along the keys",
    ),
    "padded, all counted": (lambda s: counted(s, padded(s).clamp(min=0)) > 0, NO_TOPK),
    "padded, others counted": (lambda s: counted_if(s, padded(s).clamp(min=0), chosen(s) >= 0) > 0, NO_TOPK),
    "padded, counted too late": (
        lambda s: counted_if(s, padded(s).clamp(min=0), padded(s).clamp(min=0) >= 0) > 0,
        NO_TOPK,
    ),
    "padded, from -1": (lambda s: counted_if(s, padded(s).clamp(min=0), padded(s) >= -1) > 0, NO_TOPK),
    "padded and written": (
        lambda s: torch.zeros_like(s, dtype=torch.bool).scatter(-1, padded(s).clamp(min=0), padded(s) >= 0),
        NO_TOPK,
    ),
    "bounded below the last": (lambda scores: counted(scores, chosen(scores).clamp(0, KEYS - 2)) > 0, NO_TOPK),
    "bounded above the first": (lambda scores: counted(scores, chosen(scores).clamp(min=1)) > 0, NO_TOPK),
    "no one_hot": (lambda scores: flags(scores).sum(-2) == 0, OTHERS),
    "two of one_hot": (lambda scores: ~(flags(scores).sum(-2) > 0), OTHERS),
    "one_hot of others": (
        lambda scores: one_hot(chosen(scores) + 1, KEYS + 1).sum(-2)[..., :KEYS] > 0,
        "add is not the indices of a top-k",
    ),
    "one_hot, shifted": (
        lambda scores: one_hot(chosen(scores), KEYS + 1).sum(-2)[..., 1:] > 0,
        "chosen keys are compared with other numbers than those of all keys",
    ),
    "all of one_hot": (lambda scores: flags(scores).bool().all(-2), f"{NONE}|is not over comparisons"),
    "more than": (
        lambda scores: (chosen(scores).unsqueeze(-1) <= torch.arange(KEYS)).any(-2),
        "any is not over comparisons of chosen keys with all keys",
    ),
    "index_fill along the queries": (
        lambda s: torch.zeros_like(s, dtype=torch.bool).index_fill(0, s.sum(1).topk(1).indices, True),
        "does not write along the keys",
    ),
    "index_fill of the chosen": (
        lambda s: torch.ones_like(s, dtype=torch.bool).index_fill(-1, of_all(s), False),
        OTHERS,
    ),
    "put by two": (lambda s: ~put(s, False, torch.arange(2), s.sum(0).topk(2).indices), "writes by several indices"),
    "put by flags": (lambda s: ~put(s, False, ALL, s.sum(0) > 1), "writes by flags"),
}


def traced(mask_of, decomposed):
    table = select_decomp_table() if decomposed else None
    function = torch.func.functionalize(mask_of)
    graph = make_fx(function, decomposition_table=table, tracing_mode="fake")(torch.randn(QUERIES, KEYS)).graph
    return graph.output_node().args[0]


def read(mask_of, decomposed):
    mask = traced(mask_of, decomposed)
    return selection(mask, tuple(map(fresh, (1, 1, QUERIES, KEYS)))[-mask.meta["val"].ndim :])


@pytest.mark.parametrize("decomposed", [False, True], ids=["as traced", "decomposed"])
@pytest.mark.parametrize("mask_of", ACCEPTED.values(), ids=ACCEPTED)
def test_named_keys_are_read(mask_of, decomposed):
    found = read(mask_of, decomposed)
    assert found.count == CHOSEN
    assert found.numbers.origin.args[0].target is torch.ops.aten.topk.default


@pytest.mark.parametrize("mask_of", ACCEPTED.values(), ids=ACCEPTED)
def test_only_the_largest_are_seen(mask_of):
    """The largest of each query, or of all queries together. Where no other mask is beside them, all of them are."""
    scores = torch.randn(QUERIES, KEYS, generator=torch.Generator().manual_seed(0))
    mask = mask_of(scores)
    is_seen = mask if mask.dtype == torch.bool else mask == 0
    ways = scores, scores.sum(0).expand_as(scores)
    chosen = [(way.unsqueeze(-1) < way.unsqueeze(-2)).sum(-1) < CHOSEN for way in ways]
    if read(mask_of, False).masks:
        assert any((is_seen <= each).all() for each in chosen)
        assert is_seen.any()
    else:
        assert any(torch.equal(is_seen, each) for each in chosen)


@pytest.mark.parametrize("decomposed", [False, True], ids=["as traced", "decomposed"])
@pytest.mark.parametrize(("mask_of", "reason"), TWINS.values(), ids=TWINS)
def test_twins_are_refused(mask_of, reason, decomposed):
    with pytest.raises(NoMatch, match=reason):
        read(mask_of, decomposed)
