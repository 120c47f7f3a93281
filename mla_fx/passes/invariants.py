"""Checks the graph invariants that must hold after every pass. The checks are cheap enough to run always."""

from __future__ import annotations

from collections.abc import Mapping, Set

import torch
from torch.fx import Graph, Node

from mla_fx.graph.aliasing import owner, readers, written
from mla_fx.readings.views import shape_of

aten = torch.ops.aten

OldReaders = Mapping[Node, Set[Node]]


def old_readers(graph: Graph) -> OldReaders:
    """For each graph input that the program writes: the nodes that read its old value."""
    copies = graph.find_nodes(op="call_function", target=aten.copy_.default)
    return {source: set(readers(source)) for copy in copies if isinstance(source := copy.args[0], Node)}


def check(graph: Graph, originals: Set[Node], readers_before: OldReaders) -> None:
    """Check the invariants. `readers_before` is the result of `old_readers` before the pass.

    Raises RuntimeError if a node precedes one of its operands, if a node that is not in `originals` has no metadata, or
    if a node overwrites a value that is still read, directly or through views."""
    placed: set[Node] = set()
    writes: list[Node] = []
    for node in graph.nodes:
        if not placed.issuperset(node.all_input_nodes):
            operand = next(operand for operand in node.all_input_nodes if operand not in placed)
            raise RuntimeError(f"{node.name} comes before its operand {operand.name}")
        placed.add(node)
        if node in originals or node.op != "call_function":
            continue
        if "val" not in node.meta:
            raise RuntimeError(f"{node.name} was added without metadata: meta['val'] is missing")
        if written(node):
            writes.append(node)
    if writes:
        _check_writes(graph, writes, readers_before)


def _check_writes(graph: Graph, writes: list[Node], readers_before: OldReaders) -> None:
    order = {node: position for position, node in enumerate(graph.nodes)}
    for write in writes:
        for operand in written(write):
            source = owner(operand)
            if source.op != "placeholder" and 0 not in shape_of(operand):
                raise RuntimeError(f"{write.name} writes {source.name}, which is not a graph input")
            for reader in readers_before.get(source, ()):
                if reader is not write and order.get(reader, -1) > order[write]:
                    late = f"{reader.name} still reads its old value"
                    raise RuntimeError(f"{write.name} writes {source.name}, but {late}")
