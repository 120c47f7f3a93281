"""A folder with one file per pass, and their index."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from torch.fx import Graph

from mla_fx.graph.provenance import count_fused

from .graph_text import graph_text
from .layers import Layer, layers_of
from .node_text import one_line, tally
from .page import Stage, data_of, page
from .report import Report


class Dump:
    """The stages of one graph, in the next free `graph_NNN` in the user's folder."""

    def __init__(self, folder: str) -> None:
        self.folder = _next_free(Path(folder))
        self._stages: list[Stage] = []
        self._code = ""
        self._before: Mapping[str, Layer] = {}
        self._after: Mapping[str, Layer] = {}
        self._most_fused = 0

    def stage(self, name: str, graph: Graph) -> None:
        """Write the graph after the pass `name`, unless it is that of the stage before."""
        text = graph_text(graph, name)
        code = text.partition("\n")[2]
        if code != self._code:
            file = f"{len(self._stages):02d}_{_file_name(name)}.py"
            self._write(file, text)
            self._keep_layers(graph)
        else:
            file = self._stages[-1].file
        self._code = code
        self._stages.append(Stage(name, file, len(graph.nodes)))

    def _keep_layers(self, graph: Graph) -> None:
        """Those of the first graph, and of the last one before fused operators are lowered."""
        count = sum(count_fused(graph).values())
        if not self._stages:
            self._before = self._after = layers_of(graph)
        elif count >= self._most_fused:
            self._after, self._most_fused = layers_of(graph), count

    def finish(self, report: Report) -> None:
        """Write `index.md`: the passes with links to their graphs, what fused, and what almost did; then the page."""
        self._write("index.md", _index(report, self._stages))
        data = data_of(report, self._stages, self._before, self._after)
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


def _file_name(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")[:80] or "stage"


def _index(report: Report, stages: Sequence[Stage]) -> str:
    files = {stage.name: stage.file for stage in stages}
    known = {record.name for record in report.passes}
    rows = [_row(stage.name, "", "", str(stage.nodes), stage.file) for stage in stages if stage.name not in known]
    for record in report.passes:
        took, nodes = f"{record.milliseconds:.1f}", f"{record.nodes_before} -> {record.nodes_after}"
        rows.append(_row(record.name, took, tally(record.fired), nodes, files.get(record.name)))
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


def _row(name: str, milliseconds: str, fired: str, nodes: str, file: str | None) -> str:
    cells = (name, milliseconds, fired, nodes, f"[{file}]({file})" if file else "")
    return "| " + " | ".join(one_line(cell).replace("|", "\\|") for cell in cells) + " |"


def _section(title: str, items: Iterable[str]) -> list[str]:
    lines = [f"- {one_line(item)}" for item in items]
    return ["", f"## {title}", "", *lines] if lines else []
