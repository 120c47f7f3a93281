"""The page of a dumped graph, as one HTML file: its passes, its layers before and after them, and its misses."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from .layers import Layer, kinds
from .memory import Memory, readable_size
from .node_text import one_line, tally
from .recorded import Stage
from .report import PassRecord, Report

_TEMPLATE = Path(__file__).with_name("page.html")
_DATA = '"data of the graph"'
_WIDE, _HIGH = 120, 40  # pixels between two nodes


def data_of(
    report: Report, stages: Sequence[Stage], before: Mapping[str, Layer], after: Mapping[str, Layer]
) -> dict[str, Any]:
    """What a page shows, as JSON values."""
    passes = {record.name: record for record in report.passes}
    return {
        "report": report.to_dict(),
        "outcome": str(report).partition("\n")[0].partition(": ")[2],
        "stages": [_stage(stage, passes.get(stage.name, PassRecord(stage.name))) for stage in stages],
        "kinds": [*kinds(before, after)],
        "cost": [*_costs(stages, report.memory)],
    }


def _stage(stage: Stage, record: PassRecord) -> dict[str, Any]:
    return {
        "name": stage.name,
        "file": stage.file,
        "milliseconds": record.milliseconds,
        "nodes": stage.nodes,
        "fired": tally(record.fired),
    }


def _costs(stages: Sequence[Stage], memory: Sequence[Memory]) -> Iterator[tuple[str, str, str]]:
    """Rows of what, before and after."""
    if stages:
        yield "nodes", str(stages[0].nodes), str(stages[-1].nodes)
    for entry in memory:
        if entry.temporaries is not None and entry.unfused is not None:
            yield "temporaries", readable_size(entry.unfused), readable_size(entry.temporaries)
        yield "copies of weights", readable_size(0), readable_size(entry.weights)


def page(graph: Mapping[str, Any]) -> str:
    """The page of a dumped graph, whose data is in its `graph.json`. It needs no other file and no network."""
    drawn = [_drawn(kind) for kind in graph["kinds"]]
    data = json.dumps({**graph, "kinds": drawn}).replace("<", "\\u003c")  # which could end the script
    title = one_line(f"mla_fx on {graph['report']['target']}")
    return _TEMPLATE.read_text(encoding="utf-8").replace("page title", _escaped(title), 1).replace(_DATA, data, 1)


def _drawn(kind: Mapping[str, Any]) -> dict[str, Any]:
    places = {f"places_{side}": _places(kind[side]) for side in ("before", "after")}
    return {**kind, **places}


def _places(nodes: Sequence[Mapping[str, Any]]) -> list[tuple[float, float]]:
    """Where each node lies in a drawing from the top down, in pixels: below its operands, in their middle if there is
    room."""
    import networkx

    names = [node["name"] for node in nodes]
    drawn = networkx.DiGraph()
    drawn.add_nodes_from(names)
    drawn.add_edges_from((name, node["name"]) for node in nodes for name in node["operands"] if name in drawn)
    rows = {name: row for row, group in enumerate(networkx.topological_generations(drawn)) for name in group}
    for name in names:
        if not drawn.pred[name] and drawn.succ[name]:
            rows[name] = min(rows[reader] for reader in drawn.succ[name]) - 1
    columns: dict[str, float] = {}
    for row in sorted(set(rows.values())):
        centres = {name: _mean(columns[name] for name in drawn.pred[name]) for name in names if rows[name] == row}
        free = 0.0
        for name in sorted(centres, key=centres.__getitem__):
            columns[name] = max(free, centres[name])
            free = columns[name] + 1
    return [(round(_WIDE * columns[name]), round(_HIGH * rows[name])) for name in names]


def _mean(columns: Iterable[float]) -> float:
    """The middle of some columns; of none, the first."""
    found = [*columns]
    return sum(found) / len(found) if found else 0.0


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")
