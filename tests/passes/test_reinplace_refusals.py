"""Caches that operators write in place, and why a near twin of these writes is left as it is."""

import operator

import pytest
import torch
from lib.traced import B, S, T, dense
from lib.writes import copied_back, fused, scaled
from torch.fx.experimental.proxy_tensor import make_fx

from mla_fx.graph.schemas import may_share, surely_shares
from mla_fx.passes.reinplace import reinplace

aten = torch.ops.aten


def in_one_input(*given):
    both = given[-1]
    return copied_back(*given[:-2], both[..., :6], both[..., 6:])


def written_twice(*given):
    copied_back(*given)
    given[-2].mul_(2)


def written_by_columns(*given):
    k_cache, ckv_cache = fused(*given)[:2]
    given[-2].view(-1).copy_(k_cache.view(-1))
    given[-1].copy_(ckv_cache)


def held(*given):
    return copied_back(*given[:-2], HELD, given[-1])


def read_by_strides(*given):
    results = fused(*given)
    for cache, result in zip(given[-2:], results[:2], strict=True):
        cache.copy_(result)
    return results[0].as_strided((T, 6), (6, 1)).clone()


HELD = torch.zeros(B, 1, T, 6)
IN_PLACE = {
    written_twice: "the graph input of k_cache is not written exactly once and completely",
    written_by_columns: "the graph input of k_cache is not written exactly once and completely",
    scaled: "the updated k_cache differs from what the graph input becomes",
    held: "k_cache is not a view of a graph input",
}


def reinplaced(function, width=20, room=T):
    """The notes about writing the caches of a traced call in place."""
    given = dense(B, 1, S, 26), dense(20), dense(B, 1, S, 6), dense(B, 1, S, 6), torch.arange(S).expand(B, S)
    caches = dense(B, 1, room, 6)[:, :, :T], dense(B, 1, T, width)
    graph = make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)(*given, *caches).graph
    return [sentence.partition(": ")[2] for sentence in reinplace(graph, lambda emit, what, plan: emit.apply(plan))]


def test_caches_that_may_be_written_in_place():
    assert reinplaced(copied_back) == []


@pytest.mark.parametrize("function", IN_PLACE, ids=lambda function: function.__name__)
def test_caches_that_may_not_be_written_in_place(function):
    assert reinplaced(function) == [IN_PLACE[function]]


def test_a_cache_with_gaps_that_is_read_by_strides():
    reason = "the updated k_cache is read by its strides, and the graph input has other strides"
    assert reinplaced(read_by_strides) == []
    assert reinplaced(read_by_strides, room=2 * T) == [reason]


def test_caches_in_one_graph_input():
    assert reinplaced(in_one_input, 26) == ["another operand is in the same graph input as k_cache"]


def test_what_is_no_view_shares_nothing_surely():
    graph = make_fx(lambda x: x.split(2)[0].add_(1), tracing_mode="fake")(dense(4, 4)).graph
    item, *_ = graph.find_nodes(op="call_function", target=operator.getitem)
    (added,) = graph.find_nodes(op="call_function", target=aten.add_.Tensor)
    assert may_share(item) and surely_shares(item) is None
    assert may_share(added) and surely_shares(added) is None
