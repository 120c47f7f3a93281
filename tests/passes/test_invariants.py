"""Graphs that are checked after every pass: the order of nodes, their metadata, and writes over what is read later."""

import operator

import pytest
import torch

from mla_fx.graph.schemas import written
from mla_fx.passes.run import check, old_readers

pytestmark = pytest.mark.usefixtures("no_gradients")

aten = torch.ops.aten


def chain():
    """x, its copy back, a view and a late reader of the view: as a graph, by name."""
    graph = torch.fx.Graph()
    nodes = {"x": graph.placeholder("x")}
    nodes["parts"] = graph.call_function(aten.unbind.int, (nodes["x"],))
    nodes["part"] = graph.call_function(operator.getitem, (nodes["parts"], 0))
    nodes["new"] = graph.call_function(aten.add.Tensor, (nodes["x"], 1))
    nodes["late"] = graph.call_function(aten.exp.default, (nodes["part"],))
    nodes["copy"] = graph.call_function(aten.copy_.default, (nodes["x"], nodes["new"]))
    graph.output((nodes["late"],))
    return graph, nodes


def test_a_node_before_its_operand_is_found():
    graph, nodes = chain()
    nodes["late"].append(nodes["part"])  # behind what reads it
    with pytest.raises(RuntimeError, match=f"{nodes['late'].name} comes before its operand {nodes['part'].name}"):
        check(graph, set(graph.nodes), {})


def test_a_node_without_metadata_is_found():
    graph, nodes = chain()
    with pytest.raises(RuntimeError, match=f"{nodes['late'].name} was added without metadata"):
        check(graph, set(graph.nodes) - {nodes["late"]}, {})


def test_a_write_over_what_is_read_later_through_views_is_found():
    graph, nodes = chain()
    before, originals = old_readers(graph), set(graph.nodes)
    with graph.inserting_before(nodes["late"]):
        write = graph.call_function(aten.add_.Tensor, (nodes["x"], 1))
    write.meta["val"] = None
    with pytest.raises(RuntimeError, match=f"{write.name} writes x, but {nodes['late'].name} still reads"):
        check(graph, originals, before)
    nodes["late"].append(write)
    check(graph, originals, before)


def test_written_is_what_the_schema_says():
    _, nodes = chain()
    assert written(nodes["copy"]) == [nodes["x"]]
    assert written(nodes["new"]) == []
