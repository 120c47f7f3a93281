"""Which values of a graph share memory: views, what may copy, and copies."""

import pytest
import torch
from torch import nn

from mla_fx.graph.schemas import may_share, owner, readers, surely_shares
from mla_fx.graph.torch_private import make_fx

pytestmark = pytest.mark.usefixtures("no_gradients")

aten = torch.ops.aten


def node_of(function, *shapes):
    """The graph of a function, and the node that it returns."""
    graph = make_fx(function, tracing_mode="fake")(*map(torch.randn, shapes)).graph
    return graph, graph.output_node().args[0]


VIEWS = {
    "split": lambda x: x.split(2, 0)[1],
    "unbind": lambda x: x.unbind(1)[0],
    "unfold": lambda x: x.unfold(0, 2, 1),
    "as_strided": lambda x: x.as_strided((2, 2), (1, 2)),
    "transpose": lambda x: x.transpose(0, 1)[1:],
    "expand": lambda x: x.unsqueeze(0).expand(3, -1, -1),
    "detach": lambda x: x.detach(),
    "_unsafe_view": lambda x: aten._unsafe_view(x, [6, 4]),
}
COPIES = {
    "clone": lambda x: x.clone(),
    "cat": lambda x: torch.cat((x, x)),
    "repeat": lambda x: x.repeat(2, 1),
    "pad": lambda x: nn.functional.pad(x, (1, 1)),
    "slice_scatter": lambda x: torch.slice_scatter(x, x[:1], 0, 0, 1),
    "stack": lambda x: torch.stack((x, x)),
}


@pytest.mark.parametrize("name", VIEWS)
def test_views_are_followed(name):
    graph, node = node_of(VIEWS[name], (4, 6))
    (source,) = graph.find_nodes(op="placeholder")
    assert owner(node) is source
    assert [reader.op for reader in readers(source)] == ["output"]


@pytest.mark.parametrize("name", COPIES)
def test_copies_are_no_views(name):
    graph, node = node_of(COPIES[name], (4, 6))
    (source,) = graph.find_nodes(op="placeholder")
    assert owner(node) is node
    assert surely_shares(node) is None
    assert node in set(readers(source))


def test_what_may_copy_is_no_sure_view():
    _, node = node_of(lambda x: aten.reshape.default(x.t(), [24]), (4, 6))
    assert owner(node).op == "placeholder" or node.target is not aten.reshape.default
    graph = torch.fx.Graph()
    source = graph.placeholder("x")
    source.meta["val"] = torch.empty(4, 6).t()
    reshaped = graph.call_function(aten.reshape.default, (source, [24]))
    assert may_share(reshaped) == [source]
    assert surely_shares(reshaped) is None
