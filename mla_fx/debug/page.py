"""The page of a dumped graph, as one HTML file: its passes, its layers before and after them, and its misses."""

from __future__ import annotations

import html
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from mla_fx.graph.node_text import one_line, tally

from .layers import LayerText, kinds
from .memory import MemoryUse, readable_size
from .recorded import RecordedStage
from .report import PassRecord, Report
from .work import amount

Side = Literal["before", "after"]
Row = tuple[str, ...]
_TEMPLATE = Path(__file__).with_name("page.html")
_DATA = '"data of the graph"'
SIDES: Sequence[Side] = ("before", "after")


def data_of(
    report: Report,
    stages: Sequence[RecordedStage],
    layers: Mapping[Side, Mapping[str, LayerText]],
    sizes: Mapping[str, int],
) -> dict[str, Any]:
    """What a page shows, as JSON values. `sizes` are those of symbols in this example."""
    passes = {record.name: record for record in report.passes}
    found = [*kinds(layers["before"], layers["after"])]
    for kind in found:
        temporaries = (kind["work"][side]["temporaries"] for side in SIDES)
        kind["cost"] = [*_work([{**kind, "count": 1}]), *_temporaries(*temporaries)]
    return {
        "report": report.to_dict(),
        "outcome": str(report).partition("\n")[0].partition(": ")[2],
        "stages": [_stage(stage, passes.get(stage.name, PassRecord(stage.name))) for stage in stages],
        "kinds": found,
        "cost": [*_nodes(stages, report.passes), *_work(found), *_memory(report.memory)],
        "sizes": ", ".join(f"{name} = {size}" for name, size in sizes.items()),
    }


def _stage(stage: RecordedStage, record: PassRecord) -> dict[str, Any]:
    return {
        "name": stage.name,
        "file": stage.file,
        "milliseconds": record.milliseconds,
        "nodes": stage.nodes,
        "fired": tally(record.fired),
    }


# --- costs: rows of what, before and after ---------------------------------------------------------------------------


def _nodes(stages: Sequence[RecordedStage], passes: Sequence[PassRecord]) -> Iterator[Row]:
    if stages:
        after = passes[-1].nodes_after if passes else stages[-1].nodes
        yield "nodes", str(stages[0].nodes), str(after)


def _work(kinds: Sequence[Mapping[str, Any]]) -> Iterator[Row]:
    """FLOPs and bytes of some kinds of layers."""

    def total(side: str, what: str) -> int:
        return sum(int(kind["count"] * kind["work"][side][what]) for kind in kinds)

    yield "FLOPs", *(amount(total(side, "flops"), "FLOP") for side in SIDES)
    uncounted = [total(side, "uncounted") for side in SIDES]
    if any(uncounted):
        yield "operators whose FLOPs are unknown", *map(str, uncounted)
    yield "moved", *(readable_size(total(side, "bytes")) for side in SIDES)


def _temporaries(before: int | None, after: int | None) -> Iterator[Row]:
    if before is not None and after is not None:
        yield "temporaries", readable_size(before), readable_size(after)


def _memory(memory: Sequence[MemoryUse]) -> Iterator[Row]:
    for entry in memory:
        yield from _temporaries(entry.unfused, entry.temporaries)
        yield "copies of weights", readable_size(0), readable_size(entry.weights)


# --- the page --------------------------------------------------------------------------------------------------------


def page(graph: Mapping[str, Any]) -> str:
    """The page of a dumped graph, whose data is in its `graph.json`. It needs no other file and no network."""
    data = json.dumps(graph).replace("<", "\\u003c")  # which could end the script
    title = one_line(f"mla_fx on {graph['report']['target']}")
    return _TEMPLATE.read_text(encoding="utf-8").replace("page title", html.escape(title), 1).replace(_DATA, data, 1)
