"""Replacing values: all of a rewrite or none, in an order that runs, and no lost input."""

import inspect

import pytest
import torch
from lib.traced import D, Traced, dense, refused
from torch.fx.experimental.proxy_tensor import make_fx

from mla_fx.errors import NoMatch
from mla_fx.rewriting.emitter import Emitter
from mla_fx.rewriting.plan import Call, Inlined, Plan, Replacement
from mla_fx.rewriting.replacement import change_of, check_nothing_is_lost, fitted

aten = torch.ops.aten


class Rewritten:
    """A traced function with nodes by name, and an emitter that adds at its first computation."""

    def __init__(self, function, dtype=torch.float32):
        names = inspect.signature(function).parameters
        inputs = [torch.randn(3, 4, dtype=dtype) for _ in names]
        self.module = make_fx(function, tracing_mode="fake")(*inputs)
        self.graph = self.module.graph
        for node, name in zip(self.graph.find_nodes(op="placeholder"), names, strict=True):
            node._rename(name)
        self.nodes = {node.name: node for node in self.graph.nodes}
        self.emit = Emitter(self.graph)
        self.inputs = inputs

    def __getitem__(self, name):
        return self.nodes[name]

    @property
    def anchor(self):
        return next(node for node in self.graph.nodes if node.op == "call_function")

    def replace(self, old, new):
        return self.emit.apply(fitted(self.emit, change_of(self.emit, Plan(Replacement(self[old], new)))))

    def run(self):
        self.graph.lint()
        self.module.recompile()
        return self.module(*self.inputs)


def test_new_values_are_used_and_old_ones_erased():
    graph = Rewritten(lambda x, y: (x.sin() * y).exp() + y)
    with graph.emit.at(graph.anchor, "test"):
        erased = graph.replace("exp", Call(aten.cos.default, graph["x"]))
    assert {node.name for node in erased} == {"exp", "mul", "sin"}
    x, y = graph.inputs
    torch.testing.assert_close(graph.run(), x.cos() + y)


def test_what_others_still_read_stays():
    graph = Rewritten(lambda x: ((shared := x.sin()).exp(), shared))
    with graph.emit.at(graph.anchor, "test"):
        erased = graph.replace("exp", Call(aten.cos.default, graph["x"]))
    assert [node.name for node in erased] == ["exp"]
    torch.testing.assert_close(graph.run(), (graph.inputs[0].cos(), graph.inputs[0].sin()))


def test_an_operand_that_stands_later_comes_first():
    """`neg` is computed after the first replaced value, and does not need it."""
    graph = Rewritten(lambda x, y: (x.sin() + 1, y.neg().exp()))
    with graph.emit.at(graph.anchor, "test"):
        graph.replace("add", Call(aten.cos.default, graph["exp"]))
    _, y = graph.inputs
    torch.testing.assert_close(graph.run(), (y.neg().exp().cos(), y.neg().exp()))


def test_an_operator_that_would_need_its_own_result_is_refused_and_not_added():
    graph = Rewritten(lambda x: x.sin().exp().neg())
    before = [node.name for node in graph.graph.nodes]
    refusal = pytest.raises(NoMatch, match="would need a value that it computes itself")
    with refusal, graph.emit.at(graph.anchor, "test"):
        new = Call(aten.cos.default, graph["exp"])
        graph.emit.apply(change_of(graph.emit, Plan(Replacement(graph["sin"], new), Replacement(graph["neg"], new))))
    assert [node.name for node in graph.graph.nodes] == before
    torch.testing.assert_close(graph.run(), graph.inputs[0].sin().exp().neg())


# --- in what layout ------------------------------------------------------------------------------------------------


def in_place_of(function, lay_out=lambda x: x.T.contiguous().T):
    """`function` reads the sine of x, which is replaced by one in another layout."""
    graph = Rewritten(lambda x: function(x.sin()))
    with graph.emit.at(graph.anchor, "test"):
        graph.replace("sin", Inlined(lambda x: lay_out(x.sin()), (graph["x"],)))
    (x,) = graph.inputs
    torch.testing.assert_close(graph.run(), function(x.sin()), rtol=0, atol=0)
    return graph.graph.find_nodes(op="call_function", target=aten.clone.default)


READERS = {
    "a view": lambda value: value.view(12) + 1,
    "strides": lambda value: value.as_strided((3,), (4,), 1) + 1,
    "strides of a view": lambda value: value.view(12).as_strided((3,), (4,), 1) + 1,
    "the caller": lambda value: value,
    "what is written over": lambda value: value.slice_scatter(value[:1] * 2, 0, 1, 2).view(12),
    "a view of a reshape": lambda value: aten.reshape.default(value, [3, 4]).view(12) + 1,
}


@pytest.mark.parametrize("name", READERS)
def test_who_minds_the_layout_finds_the_old_one(name):
    assert len(in_place_of(READERS[name])) == 2


def test_who_takes_any_layout_is_handed_what_there_is():
    assert len(in_place_of(lambda value: (value * 2).slice_scatter(value[:1] * 2, 0, 1, 2))) == 2
    assert len(in_place_of(lambda value: torch.zeros(3, 4).slice_scatter(value, 0, 0, 3))) == 1


def test_who_reads_more_memory_than_the_value_has_none_other():
    """The other columns are read, too."""
    graph = Rewritten(lambda x: (columns := x.sin()[:, :2], columns.as_strided((3, 4), (4, 1))))
    with pytest.raises(NoMatch, match="reads slice_1 by its strides"), graph.emit.at(graph.anchor, "test"):
        graph.replace("slice_1", Inlined(lambda x: x.sin()[:, :2].contiguous(), (graph["x"],)))


def lost(function, old, *sources, dtype=torch.float32):
    graph = Rewritten(function, dtype)
    check_nothing_is_lost([graph[old]], {graph[name] for name in sources}, dtype)


def test_an_input_that_no_operand_is_made_from_is_lost():
    lost(lambda x, y: x.sin() * y, "mul", "x", "y")
    with pytest.raises(NoMatch, match="the graph input y enters the result but would not enter the operator"):
        lost(lambda x, y: x.sin() * y, "mul", "x")


def test_what_only_lends_its_shape_is_not_lost():
    lost(lambda x, y: x.sin() + torch.zeros_like(y), "add", "x")
    lost(lambda x, y: torch.empty_like(y).copy_(x) + x.new_full((), 2.0), "add", "x")


def written_twice(x, y):
    """Columns of the first row of x are replaced by those of y, in two steps."""
    for start in (0, 2):
        row = aten.slice_scatter(x[0], y[0, start : start + 2], 0, start, start + 2)
        x = aten.select_scatter(x, row, 0, 0)
    return x


def test_what_is_overwritten_is_not_lost():
    lost(lambda x, y: aten.select_scatter(aten.select_scatter(x, y[1], 0, 0), y[2], 0, 0)[0].exp(), "exp", "y")
    lost(lambda x, y: written_twice(x, y)[1].exp(), "exp", "x")
    with pytest.raises(NoMatch, match="the graph input x enters the result"):
        lost(lambda x, y: written_twice(x, y)[1].exp(), "exp", "y")
    with pytest.raises(NoMatch, match="the graph input y enters the result"):
        lost(lambda x, y: written_twice(x, y)[0].exp(), "exp", "x")


def test_what_is_computed_again_is_not_lost():
    lost(lambda x: x.sin() * x.sin().exp(), "mul", "sin_1")
    with pytest.raises(NoMatch, match="the graph input x enters the result"):
        lost(lambda x: x.sin() * x.cos().exp(), "mul", "sin")


def test_a_rounding_on_the_way_is_lost():
    lost(lambda x: x.sin().bfloat16().exp(), "exp", "x", dtype=torch.bfloat16)
    lost(lambda x: x.double().sin(), "sin", "x")
    with pytest.raises(NoMatch, match=r"rounds to torch\.bfloat16, the operator only to torch\.float32"):
        lost(lambda x: x.sin().bfloat16().float(), "_to_copy_1", "x")
    lost(lambda x: x.sin().bfloat16().float(), "_to_copy_1", "_to_copy")


def test_what_a_function_writes_of_its_own_is_spliced_in_as_values():
    def shifted(x):
        return x.clone().add_(1).mul_(2)

    graph = Rewritten(lambda x: (x.sin(), x.cos()))
    with graph.emit.at(graph.anchor, "test"):
        graph.replace("sin", Inlined(shifted, (graph["x"],)))
    assert {aten.add.Tensor, aten.mul.Tensor} <= {node.target for node in graph.graph.nodes}
    (x,) = graph.inputs
    torch.testing.assert_close(graph.run(), ((x + 1) * 2, x.cos()))


def test_flags_on_the_way_are_no_rounding():
    out = Traced(lambda x, y: torch.where(y > 0, x.sin(), x), dense(D), dense(D)).out
    sources = set(out.graph.find_nodes(op="placeholder"))
    check_nothing_is_lost([out], sources, torch.float32)
    with refused("the graph input y enters the result"):
        check_nothing_is_lost([out], sources - {out.args[0].args[0]}, torch.float32)
