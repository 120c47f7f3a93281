"""Restores a graph to an earlier state, and removes what a rewrite leaves unused."""

import contextlib
import itertools
import operator
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch.fx import Graph, Node

from mla_fx.errors import NoMatch
from mla_fx.graph.provenance import RULE, fused_name
from mla_fx.graph.schemas import written
from mla_fx.graph.torch_private import codegen_of
from mla_fx.readings.axes import axes
from mla_fx.readings.calls import CASTS
from mla_fx.readings.element import is_coarser
from mla_fx.readings.same_value import are_neighbours, joined
from mla_fx.readings.sizes import Size, size_of
from mla_fx.readings.views import cat_dim, pieces, shape_of

from .draft import Change, Draft, value_of
from .emitter import Emitter
from .fake_values import signature
from .inline import unturned
from .materialize import tensor

aten = torch.ops.aten
MOVES = frozenset(
    {
        aten.view.default, aten.reshape.default, aten.permute.default, aten.transpose.int, aten.unsqueeze.default,
        aten.clone.default,
    }
)  # fmt: skip


class Snapshot:
    """A record of a graph, from which it is rebuilt if a pass fails. Taking one costs next to nothing."""

    def __init__(self, graph: Graph) -> None:
        self.nodes = [(node, node.args, node.kwargs, dict(node.meta)) for node in graph.nodes]
        self.originals = {node for node, *_ in self.nodes}
        self.unused = {node for node in self.originals if not node.users}
        self.owner = graph.owning_module
        self.signature = codegen_of(graph)

    def restore(self) -> Graph:
        """A new graph with a copy of every recorded node."""
        graph = Graph(owning_module=self.owner)
        graph.set_codegen(self.signature)
        copies: dict[Node, Node] = {}
        for node, args, kwargs, meta in self.nodes:
            args, kwargs = (torch.fx.map_arg(value, copies.__getitem__) for value in (args, kwargs))
            copies[node] = graph.create_node(node.op, node.target, args, kwargs, node.name, node.type)
            copies[node].meta = dict(meta)
        return graph


def erase_orphans(graph: Graph, before: Snapshot) -> None:
    """Remove nodes that lost their last user since `before`, or were added and have no users.

    A node without users in `before` stays: it may have an effect, and it belongs to the user's program."""
    for node in reversed(graph.nodes):
        if not node.users and node.op == "call_function" and node not in before.unused and not written(node):
            graph.erase_node(node)


def empty_parts(emit: Emitter) -> Iterator[Change]:
    """New empty tensors instead of empty slices and results, so that their sources are not computed for them alone."""
    for target in (operator.getitem, aten.slice.Tensor):
        for node in emit.graph.find_nodes(op="call_function", target=target):
            value = node.meta["val"]
            if node._erased or not isinstance(value, torch.Tensor) or 0 not in shape_of(node):
                continue
            with emit.before(node):
                sizes = list(map(emit.size, shape_of(node)))
            empty = emit.call(aten.empty.memory_format, sizes, dtype=value.dtype, device=value.device)
            yield Change.of([(node, empty)], {*node.all_input_nodes})


def round_trips(emit: Emitter) -> Iterator[Change]:
    """The narrow value where a rewrite widens it, it is only moved, and the program rounds it back."""
    for wide in emit.graph.find_nodes(op="call_function", target=torch.ops.prims.convert_element_type.default):
        if wide._erased:
            continue
        narrow = wide.all_input_nodes[0]
        dtypes = narrow.meta["val"].dtype, wide.meta["val"].dtype
        is_lossless = is_coarser(*dtypes) and _strides(narrow) == _strides(wide)
        if RULE in wide.meta and is_lossless:
            yield from (Change.of([pair], {narrow}) for pair in _round_trips(emit, wide, narrow))


def _round_trips(emit: Emitter, wide: Node, narrow: Node | Draft) -> Iterator[tuple[Node, Node | Draft]]:
    for user in list(wide.users):
        if user.target in CASTS and signature(user.meta["val"]) == signature(value_of(narrow)):
            yield user, narrow
        elif user.target in MOVES and user.all_input_nodes == [wide]:
            yield from _round_trips(emit, user, emit.call(user.target, narrow, *user.args[1:], **user.kwargs))


def turns(emit: Emitter) -> Iterator[Change]:
    """A value where a permutation undoes the one that the value went through."""
    for node in list(emit.graph.nodes):
        value = node if node._erased else unturned(node)
        if value is not node and isinstance(value, Node):
            yield Change.of([(node, value)], {value})


def rejoined(emit: Emitter) -> Iterator[Change]:
    """The result of a fused operator where the program joins all its parts again, without having rounded them."""
    for cat in emit.graph.find_nodes(op="call_function", target=aten.cat.default):
        if cat._erased:
            continue
        with contextlib.suppress(NoMatch):  # the parts are none, or lie in another order
            whole = _joined_again(emit, cat)
            if whole is not None:
                yield Change.of([(cat, whole[0])], {whole[1]})


def _joined_again(emit: Emitter, cat: Node) -> tuple[Draft | Node, Node] | None:
    """The value that a cat joins of its parts, and what computed it."""
    parts, dim = [part for part, *_ in pieces(cat)], cat_dim(cat)
    if not parts or not all(are_neighbours(one, other, dim) for one, other in itertools.pairwise(parts)):
        return None
    element, index = joined(parts, dim)
    if fused_name(element.origin) is None or element.roundings:
        return None
    with emit.before(cat):
        dims = [axes(part, "a dimension", cat) for part in index]
        whole = emit.evaluate(tensor(replace(element, top=None), dims))
    return (whole, element.origin) if signature(value_of(whole)) == signature(cat.meta["val"]) else None


def _strides(node: Node) -> list[Size]:
    return [size_of(stride) for stride in node.meta["val"].stride()]
