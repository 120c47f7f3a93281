"""A stage of a graph, as the recorder hands it to the report, the dump, and torch's trace."""

from __future__ import annotations

import re
from dataclasses import dataclass

from torch.fx import Graph

from mla_fx.graph.node_text import one_line
from mla_fx.target import Shown

from .graph_text import A_GRAPH, graph_text


@dataclass(frozen=True)
class RecordedStage:
    """The graph after a pass, or what a compiler made of it. `title` has its number and its name, for files; `file` is
    that of the last stage that changed the graph. Equal graphs have equal texts."""

    name: str
    title: str
    text: str
    nodes: int
    file: str
    is_new: bool

    @property
    def titled(self) -> str:
        """The text, with the name of the stage."""
        return f"# {one_line(self.name)}{self.text.removeprefix(A_GRAPH)}"


def recorded(number: int, name: str, shown: Shown, before: RecordedStage | None) -> RecordedStage:
    if isinstance(shown, Graph):
        text, nodes, suffix = graph_text(shown), len(shown.nodes), "py"
    else:
        text, nodes, suffix = "\n".join([f"{A_GRAPH}: {len(shown)} nodes.", *shown, ""]), len(shown), "txt"
    title = f"{number:02d}_{_slug(name)}"
    if before is not None and before.text == text:
        return RecordedStage(name, title, before.text, nodes, before.file, is_new=False)
    return RecordedStage(name, title, text, nodes, f"{title}.{suffix}", is_new=True)


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")[:80] or "stage"
