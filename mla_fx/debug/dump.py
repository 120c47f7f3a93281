"""A folder with one file per pass, their index, and the page of the graph: one HTML file with its passes, its misses,
and its layers, one of each kind, before and after the passes, node by node."""

import contextlib
import html
import itertools
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch.fx import Graph, Node

from mla_fx.graph.node_text import call_text, described, one_line, short_source, tally, target_name, value_of
from mla_fx.graph.provenance import ORIGINS, RULE, count_fused, fused_name, module_of, source_of
from mla_fx.target import Shown

from .graph_text import RecordedStage, Section, Writer, borders, ranges, symbols
from .memory import Lives, MemoryUse, readable_size
from .outcomes import WHOLE
from .report import PassRecord, Report
from .work import Meter, Work, amount

REST = "outside the layers"
Side = Literal["before", "after"]
Row = tuple[str, ...]
_TEMPLATE = Path(__file__).with_name("page.html")
_DATA = '"data of the graph"'
SIDES: Sequence[Side] = ("before", "after")


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
            "work": {side: _sums(layer) for side, layer in sides.items()},
        }


def _sums(layer: LayerText) -> dict[str, Any]:
    """The sums of a layer's FLOPs and bytes; `uncounted` counts the operators whose FLOPs are unknown."""
    return {
        "flops": sum(node["flops"] or 0 for node in layer.nodes),
        "uncounted": sum(node["flops"] is None for node in layer.nodes),
        "bytes": sum(node["bytes"] for node in layer.nodes),
        "temporaries": layer.temporaries,
    }


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


class Dump:
    """The stages of one graph, in the next free `graph_NNN` in the user's folder."""

    def __init__(self, folder: str, *, fuses_loops: bool = False) -> None:
        self.folder = _next_free(Path(folder))
        self._stages: list[RecordedStage] = []
        self._layers: dict[Side, Mapping[str, LayerText]] = {"before": {}, "after": {}}
        self._sizes: Mapping[str, int] = {}
        self._fuses_loops = fuses_loops

    def stage(self, stage: RecordedStage, shown: Shown) -> None:
        """Write a stage, unless nothing changed in it."""
        self._stages.append(stage)
        if stage.is_new:
            self._write(stage.file, stage.titled)
        if stage.is_new and isinstance(shown, Graph):
            self._keep_layers(shown)

    def _keep_layers(self, graph: Graph) -> None:
        """Keep the layers of the first graph, and of the last one before fused operators are lowered."""
        before = sum(node["fused"] is not None for layer in self._layers["after"].values() for node in layer.nodes)
        if sum(count_fused(graph).values()) < before:
            return
        self._layers["after"] = layers_of(graph, is_fused=self._fuses_loops)
        if not self._layers["before"]:
            self._layers["before"], self._sizes = self._layers["after"], symbols(graph)

    def finish(self, report: Report) -> None:
        """Write `index.md`: the passes with links to their graphs, what fused, and what almost did; then the page."""
        self._write("index.md", _index(report, self._stages))
        data = data_of(report, self._stages, self._layers, self._sizes)
        self._write("graph.json", json.dumps(data))
        self._write("page.html", page(data))

    def _write(self, file: str, text: str) -> None:
        """Readers see a whole file or none."""
        with _writing(self.folder):
            (begun := self.folder / f".{file}").write_text(text, encoding="utf-8")
            os.replace(begun, self.folder / file)


def _next_free(folder: Path) -> Path:
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for number in itertools.count():
            with contextlib.suppress(FileExistsError):
                (free := folder / f"graph_{number:03d}").mkdir()
                return free
    raise AssertionError("the loop ends at a free number")


@contextlib.contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OSError(f"The dump folder {str(folder)!r} cannot be written: {error.strerror or error}.") from error


def _index(report: Report, stages: Sequence[RecordedStage]) -> str:
    records = {record.name: record for record in report.passes}
    rows = [_row(records.pop(stage.name, PassRecord(stage.name)), stage) for stage in stages]
    rows += [_row(record) for record in records.values()]
    return "\n".join(
        [
            f"# mla_fx{f' on {report.target}' if report.target else ''}",
            "",
            "| pass | ms | fired | nodes before -> after | graph |",
            "| --- | ---: | --- | --- | --- |",
            *rows,
            *_section("Fused", [f"{name} x{count}" for name, count in report.fused.items()] or ["nothing"]),
            *_section("Nearest misses", [str(miss) for miss in report.misses]),
            *_section("Notes", report.notes),
            "",
        ]
    )


def _row(record: PassRecord, stage: RecordedStage | None = None) -> str:
    took, nodes = f"{record.milliseconds:.1f}", f"{record.nodes_before} -> {record.nodes_after}"
    if stage is not None and not record.nodes_before:
        took, nodes = "", str(stage.nodes)  # no pass made it
    graph = f"[{stage.file}]({stage.file})" if stage is not None else ""
    cells = record.name, took, tally(record.fired), nodes, graph
    return "| " + " | ".join(one_line(cell).replace("|", "\\|") for cell in cells) + " |"


def _section(title: str, items: Iterable[str]) -> list[str]:
    lines = [f"- {one_line(item)}" for item in items]
    return ["", f"## {title}", "", *lines] if lines else []
