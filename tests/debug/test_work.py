"""FLOPs and bytes of nodes: by hand, and the same sum before and after a rewrite that computes the same."""

import functools

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from mla_fx.debug.work import Meter, Work
from mla_fx.graph.torch_private import guards

aten = torch.ops.aten


def work(function, *inputs, dynamic=False):
    """The work of each node that costs something, by the name of its operator."""
    graph = make_fx(function, tracing_mode="symbolic" if dynamic else "fake")(*inputs).graph
    meter = Meter(graph)
    measured = [(str(node.target), meter.of(node)) for node in graph.nodes]
    return {name.removeprefix("aten."): found for name, found in measured if found != Work(0, 0)}


HALF = torch.bfloat16


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_graph_by_hand(dynamic):
    """Symbols count with their sizes in the example."""

    def function(x, weight, bias):
        y = (x @ weight).transpose(0, 1)
        return torch.softmax(y + bias, dim=-1), y

    found = work(function, torch.randn(3, 5), torch.randn(5, 7), torch.randn(3), dynamic=dynamic)
    assert found == {
        "mm.default": Work(2 * 3 * 5 * 7, 4 * (3 * 5 + 5 * 7 + 3 * 7)),
        "add.Tensor": Work(0, 4 * (7 * 3 + 3 + 7 * 3)),
        "_softmax.default": Work(0, 4 * 2 * 7 * 3),
    }


def test_products_of_rows_and_of_integers():
    assert work(torch.mv, torch.ones(3, 4), torch.ones(4)) == {"mv.default": Work(2 * 3 * 4, 4 * (12 + 4 + 3))}
    codes = torch.ones(3, 4, dtype=torch.int8), torch.ones(4, 5, dtype=torch.int8)
    assert work(aten._int_mm, *codes) == {"_int_mm.default": Work(2 * 3 * 4 * 5, 12 + 20 + 4 * 15)}


def test_rows_are_picked_and_expanded_dimensions_stored_once():
    def function(table, tokens, key):
        return aten.embedding(table, tokens), key.expand(8, -1, -1).clone()

    found = work(function, torch.randn(1000, 6), torch.tensor([3, 1]), torch.randn(2, 5))
    assert found == {
        "embedding.default": Work(0, 2 * 4 * 12 + 16),
        "clone.default": Work(0, 4 * (10 + 8 * 10)),
    }


@pytest.mark.parametrize("is_functional", [False, True])
def test_a_cache_that_is_written_in_place_is_not_read(is_functional):
    """AOTAutograd writes it with a copy at the end; one operator writes it, too."""

    def function(cache, place, row):
        if not is_functional:
            cache.index_copy_(0, place, row)
            return
        cache.copy_(aten.index_copy(cache, 0, place, row))

    name = "index_copy.default" if is_functional else "index_copy_.default"
    found = work(function, torch.zeros(1000, 4), torch.tensor([2]), torch.ones(1, 4))
    assert found == {name: Work(0, 8 + 16)}


def test_a_copy_reads_and_writes():
    def function(x, y):
        y.copy_(x)

    assert work(function, torch.ones(8, dtype=HALF), torch.ones(8)) == {"copy_.default": Work(0, 2 * 8 + 4 * 8)}


def attention(heads=4, rank=32, rope=8, context=16):
    shapes = (2, 3, heads, rank), (2, 3, heads, rope), (2, context, rank), (2, context, rope)
    return [torch.randn(shape, dtype=HALF) for shape in shapes]


def test_a_fused_operator_has_the_flops_of_its_body():
    found = work(lambda *inputs: torch.ops.mla_fx.attention(*inputs, None, scale=0.5)[0], *attention())
    scores, moved = 2 * 3 * 4 * 16, 2 * 3 * 4 * (32 + 8) + 2 * 16 * (32 + 8) + 2 * 3 * 4 * 32
    assert found == {"mla_fx.attention.default": Work(2 * scores * (32 + 8 + 32), 2 * moved)}


def test_of_a_cache_in_pages_those_in_its_table_are_read():
    query, query_rope, *_ = attention()
    pages = [torch.randn(100, 8, width, dtype=HALF) for width in (32, 8)]
    table = torch.tensor([[7, 3], [5, 1]])

    def function(table, *inputs):
        return torch.ops.mla_fx.attention(*inputs, None, scale=0.5, block_table=table)[0]

    (found,) = work(function, table, query, query_rope, *pages).values()
    moved = 2 * 3 * 4 * (32 + 8) + 2 * 2 * 8 * (32 + 8) + 2 * 3 * 4 * 32
    assert found == Work(2 * 2 * 3 * 4 * 16 * (32 + 8 + 32), 2 * moved + 8 * table.numel())


def test_other_operators_have_unknown_flops(foreign):
    (found,) = work(foreign, torch.ones(4)).values()
    assert found == Work(None, 4 * 8)


@pytest.fixture
def foreign():
    with torch.library._scoped_library("mla_fx_test_work", "DEF") as library:
        library.define("double(Tensor x) -> Tensor")
        library.impl("double", lambda x: x * 2, "CompositeExplicitAutograd")
        yield torch.ops.mla_fx_test_work.double


def test_measuring_adds_no_guard():
    """A dump changes nothing about a compilation."""
    inputs = [tensor.repeat(2, *[1] * (tensor.ndim - 1)) for tensor in attention()]
    step = functools.partial(torch.ops.mla_fx.attention, mask=None, scale=0.5)
    graph = make_fx(lambda *given: step(*given)[0] * 2, tracing_mode="symbolic")(*inputs).graph
    shape_env = graph.find_nodes(op="placeholder")[0].meta["val"].fake_mode.shape_env
    before = guards(shape_env)
    assert sum(Meter(graph).of(node).flops for node in graph.nodes) == 2 * 4 * 3 * 4 * 16 * (32 + 8 + 32)
    assert guards(shape_env) == before
