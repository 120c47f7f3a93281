"""Plans without a graph: what a rule makes of a hand-written match, and what the engine makes of a plan."""

import pytest
import torch
from mla_fx.patterns.rms_norm import RmsNormAlone
from torch.fx import Graph

from mla_fx.errors import NoMatch
from mla_fx.matching.match import Match, OperandAxes
from mla_fx.readings.axes import Axis, of_axis
from mla_fx.readings.element import Element
from mla_fx.readings.rms_norm import RmsNorm
from mla_fx.rewriting.draft import Change
from mla_fx.rewriting.emitter import Emitter
from mla_fx.rewriting.materialize import tensor
from mla_fx.rewriting.plan import ByHoisting, ByTarget, Call, Cast, Plan, Replacement, ViewOf
from mla_fx.rewriting.replacement import change_of

aten = torch.ops.aten
TOKENS, WIDTH = Axis(3), Axis(4)


def value(name, *sizes, dtype=torch.float32):
    """A value without a program: an input of a graph of its own."""
    node = Graph().placeholder(name)
    node.meta["val"] = torch.empty(*sizes, dtype=dtype, device="meta")
    return node


def read(node, *axes):
    return Element(node, tuple(map(of_axis, axes)))


def norm_of(x, gamma, out, *, over=WIDTH, factor=1.0):
    norm = RmsNorm(out, x, gamma, (of_axis(over),), 1e-6, gamma_after_cast=True, factor=factor)
    dims = OperandAxes(out, (of_axis(TOKENS), of_axis(WIDTH)), "te")
    return Match({"x": x, "gamma": gamma}, {"norm": norm, "value.axes": dims})


def test_a_rule_is_tried_without_a_program():
    """The value is stored transposed, so it is permuted first."""
    x, gamma, out = value("x", 4, 3), value("gamma", 4), value("out", 3, 4)
    plan = RmsNormAlone().rewrite(norm_of(read(x, WIDTH, TOKENS), read(gamma, WIDTH), out))
    (one,) = plan.replacements
    assert one.old is out
    norm = one.new.value
    assert norm.target is torch.ops.mla_fx.rms_norm.default
    assert norm.options == {"epsilon": 1e-6, "gamma_after_cast": True}
    permuted = norm.args[0].value
    assert (permuted.target, permuted.args[0].node, permuted.args[1]) == (aten.permute.default, x, [1, 0])
    assert plan.sources == {x, gamma}


REFUSED = {
    "the norm is multiplied by a number, 2": {"factor": 2.0},
    "the norm is not over the columns of a row": {"over": TOKENS},
}


@pytest.mark.parametrize("reason", REFUSED)
def test_a_rule_refuses_without_a_program(reason):
    x, gamma, out = value("x", 3, 4), value("gamma", 4), value("out", 3, 4)
    with pytest.raises(NoMatch, match=reason):
        RmsNormAlone().rewrite(norm_of(read(x, TOKENS, WIDTH), read(gamma, WIDTH), out, **REFUSED[reason]))


def traced():
    graph = Graph()
    x, y = (graph.placeholder(name) for name in "xy")
    for node in (x, y):
        node.meta["val"] = torch.empty(3, 4, device="meta")
    out = graph.call_function(aten.sin.default, (x,))
    out.meta["val"] = torch.empty(3, 4, device="meta")
    graph.output((out, y))
    return graph, x, y, out


def test_drafting_adds_nothing():
    graph, x, _, out = traced()
    before = str(graph)
    shared = Call(aten.mul.Tensor, x, 2.0)
    plan = Plan(Replacement(out, Call(aten.add.Tensor, shared, Call(aten.mul.Tensor, x, 2.0))))
    emit = Emitter(graph)
    with emit.at(out, "test"):
        draft = change_of(emit, plan)
        assert [call.target for call in draft.calls] == [aten.mul.Tensor, aten.add.Tensor], "equal calls are one"
        assert str(graph) == before
        emit.apply(draft)
    assert str(graph) != before
    assert aten.sin.default not in {node.target for node in graph.nodes}


def test_an_operator_that_refuses_leaves_no_trace():
    graph, x, y, out = traced()
    before = str(graph)
    refused = Call(torch.ops.mla_fx.rms_norm.default, Call(aten.neg.default, x), y, epsilon=1e-6, gamma_after_cast=True)
    emit = Emitter(graph)
    with pytest.raises(NoMatch, match="the operator refuses: gamma"), emit.at(out, "test"):
        change_of(emit, Plan(Replacement(out, refused)))
    assert str(graph) == before


def test_sources_are_those_of_all_that_is_called():
    x, y, z = value("x", 3, 4), value("y", 3, 4), value("z", 3, 4)
    gathered = tensor(read(y, TOKENS, WIDTH), [(TOKENS,), (WIDTH,)], read_by=z)
    either = ByTarget(refusing=Call(aten.neg.default, x), skipping=gathered)
    assert Plan(Replacement(z, Cast(either, torch.bfloat16))).sources == {x, y, z}
    assert Plan(Replacement(z, Call(aten.cat.default, [x, gathered]))).sources == {x, y, z}


@pytest.mark.parametrize("hoists, called", [(True, aten.neg.default), (False, aten.abs.default)])
def test_one_alternative_is_for_targets_that_hoist(hoists, called):
    graph, x, y, out = traced()
    either = ByHoisting(once=Call(aten.neg.default, x), each_step=Call(aten.abs.default, y))
    emit = Emitter(graph, hoists=hoists)
    with emit.at(out, "test"):
        assert emit.evaluate(either).target is called
    assert Plan(Replacement(out, either)).sources == {x, y}


def test_what_must_be_a_view_and_is_none_is_refused():
    graph, x, _, out = traced()
    emit = Emitter(graph)
    with emit.at(out, "test"):
        emit.evaluate(ViewOf(Call(aten.reshape.default, x, [12]), x, "it would be a copy"))
        with pytest.raises(NoMatch, match="it would be a copy"):
            emit.evaluate(ViewOf(Call(aten.neg.default, x), x, "it would be a copy"))


def test_an_equal_fused_call_is_checked_for_itself():
    """Two places with the same call: neither reuses what was found about the other."""
    graph, x, y, out = traced()
    emit = Emitter(graph)
    norm = Call(torch.ops.mla_fx.rms_norm.default, x, Call(aten.select.int, y, 0, 0), epsilon=1e-6)
    with emit.at(out, "test"):
        emit.apply(Change.of([(out, emit.evaluate(norm))], set()))
    with emit.at(out, "test"):
        again = Change.of([(out, emit.evaluate(norm))], set())
    assert [call.target for call in again.fused] == [torch.ops.mla_fx.rms_norm.default]
