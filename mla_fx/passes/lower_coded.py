"""Lowers products with weights that are dequantised in the graph to functions that read their codes."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping

import torch
from torch.fx import Graph, Node

from mla_fx.errors import NoMatch
from mla_fx.graph.torch_private import OpOverload
from mla_fx.readings.calls import args_of, options_of
from mla_fx.rewriting.coded_weights import coded_weight
from mla_fx.rewriting.draft import Change, Draft, fake_of, is_value
from mla_fx.rewriting.emitter import Apply, Emitter
from mla_fx.target import Lowering

aten = torch.ops.aten


def lower_coded(graph: Graph, lowerings: Mapping[OpOverload, Lowering], apply: Apply) -> Counter[str]:
    """Replace products as `Target.coded_lowerings` says. Returns notes for the report with their counts."""
    emit, notes = Emitter(graph), Counter[str]()
    for operator, lowering in lowerings.items():
        for node in graph.find_nodes(op="call_function", target=operator):
            if options_of(node):  # factors of a sum
                continue
            with contextlib.suppress(NoMatch), emit.at(node, "lower"):
                *bias, rows, weight = args_of(node)
                found = coded_weight(weight)
                parts = found.codes, found.scales, found.zeros, found.tile_k, found.tile_n
                operands = [rows, *map(emit.evaluate, parts)]
                function = lowering(*map(fake_of, operands))
                product = emit.inlined(function, *operands)
                for added in bias:
                    product = emit.call(aten.add.Tensor, product, added)
                read = {source for operand in (*operands, *bias) if is_value(operand) for source in _sources(operand)}
                apply(emit, f"the lowering of {operator._opname}", Change.of([(node, product)], read))
                notes[f"{operator._opname} is computed as {function.__name__}"] += 1
    return notes


def _sources(part: Draft | Node) -> Iterator[Node]:
    """The values of the graph that an operand is drafted from."""
    if isinstance(part, Draft):
        for operand in part.operands:
            yield from _sources(operand)
    else:
        yield part
