"""The layers of a graph for the page: one of each kind, before and after the passes, node by node."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import Graph, Node

from mla_fx.graph.node_text import call_text, described, short_source, target_name, value_of
from mla_fx.graph.provenance import ORIGINS, RULE, fused_name, module_of, source_of

from .graph_text import Section, Writer, borders, ranges
from .memory import Lives
from .outcomes import WHOLE
from .work import Meter, Work

REST = "outside the layers"


@dataclass(frozen=True)
class LayerText:
    """The nodes of a layer as JSON values, and a text that is equal for equal layers."""

    text: str
    nodes: Sequence[Mapping[str, Any]]
    temporaries: int | None = 0


def layers_of(graph: Graph, *, is_fused: bool = False) -> dict[str, LayerText]:
    """The layers by path; what is in none is one more, under the path `REST`. `is_fused` as for `Lives`."""
    writer, meter, lives = Writer(graph), Meter(graph), Lives(graph, is_fused=is_fused)
    parts: dict[str, list[Section]] = {}
    for item in writer.sections():
        is_layer = isinstance(item, Section) and item.layer is not None
        section = item if isinstance(item, Section) else Section((), (item,))
        parts.setdefault(".".join(section.path) if is_layer else REST, []).append(section)
    layers: dict[str, LayerText] = {}
    works: dict[str, list[Work]] = {}  # of equal layers once
    for path, sections in parts.items():
        texts = [writer.as_any_layer(section, *borders(section)) for section in sections]
        nodes = [node for section in sections for node in section.nodes()]
        text = "\n".join(texts)
        works[text] = works.get(text) or [meter.of(node) for node in nodes]
        values = [{**_values(writer, node), **vars(work)} for node, work in zip(nodes, works[text], strict=True)]
        layers[path] = LayerText(text, values, lives.peak(nodes))
    return layers


def _values(writer: Writer, node: Node) -> dict[str, Any]:
    """A node as JSON values; `operands` are the names of other nodes, `inputs` those of inputs of the graph."""
    operands = node.all_input_nodes
    return {
        "name": node.name,
        "operator": target_name(node.target),
        "call": call_text(node, writer.name_of),
        "type": described(value_of(node)),
        "module": module_of(node),
        "source": short_source(source_of(node)),
        "operands": [operand.name for operand in operands if operand not in writer.inputs],
        "inputs": [writer.inputs[operand] for operand in operands if operand in writer.inputs],
        "fused": fused_name(node),
        "rule": node.meta.get(RULE, ""),
        "replaced": [name for name, *_ in node.meta.get(ORIGINS, ())],
    }


def kinds(before: Mapping[str, LayerText], after: Mapping[str, LayerText]) -> Iterator[dict[str, Any]]:
    """The kinds of layers: those with equal nodes before and after. Each is shown by its first layer; a model
    without layers is one, and is named as such."""
    nothing = LayerText("", ())
    every = dict.fromkeys([*before, *after])
    alike: dict[tuple[str, str], list[str]] = {}
    for path in every:
        alike.setdefault((before.get(path, nothing).text, after.get(path, nothing).text), []).append(path)
    for paths in alike.values():
        sides = {"before": before.get(paths[0], nothing), "after": after.get(paths[0], nothing)}
        names = [WHOLE] if [*every] == [REST] else paths
        yield {
            "path": names[0],
            "paths": ranges(names),
            "count": len(paths),
            **{side: layer.nodes for side, layer in sides.items()},
            "work": {side: _work(layer) for side, layer in sides.items()},
        }


def _work(layer: LayerText) -> dict[str, Any]:
    """The sums of a layer's FLOPs and bytes; `uncounted` counts the operators whose FLOPs are unknown."""
    return {
        "flops": sum(node["flops"] or 0 for node in layer.nodes),
        "uncounted": sum(node["flops"] is None for node in layer.nodes),
        "bytes": sum(node["bytes"] for node in layer.nodes),
        "temporaries": layer.temporaries,
    }
