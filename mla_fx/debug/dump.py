"""Graphs as readable text, and a folder with one file per pass."""

from __future__ import annotations

import contextlib
import itertools
import operator
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.fx import Graph, Node

from mla_fx.graph.provenance import REPLACED, RULE, fused_name
from mla_fx.graph.torch_private import OpOverload, dtype_abbrs

from .report import Report

_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)
_PLAIN = (bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format)

# --- a graph as text ---------------------------------------------------------------------------------------------


def graph_text(graph: Graph) -> str:
    """`graph` as Python source, for reading only.

    Comments give dtypes and shapes and, above each fused operator, what it replaced. No tensor's values are shown.
    """
    arguments: list[str] = []
    body: list[str] = []
    for node in graph.nodes:
        if node.op == "placeholder":
            arguments.append(_commented(f"    {node.name},", node))
        elif node.op == "output":
            body.append(f"    return {_literal(node.args[0])}")
        else:
            body += [f"    # {line}" for line in _origin(node)]
            body.append(_commented(f"    {node.name} = {_call(node)}", node))
    return "\n".join(["def graph(", *arguments, "):", *body, ""])


def _commented(line: str, node: Node) -> str:
    described = _described(node.meta.get("val", node.meta.get("example_value")))
    return f"{line}  # {described}" if described else line


def _described(value: Any) -> str:
    """Dtype and shape of a value; an empty string if unknown."""
    if isinstance(value, torch.Tensor):
        dtype = dtype_abbrs.get(value.dtype, str(value.dtype).removeprefix("torch."))
        return f"{dtype}[{', '.join(map(str, value.shape))}]"
    if isinstance(value, (list, tuple)):
        return f"({', '.join(_described(item) or '-' for item in value)})"
    if isinstance(value, _SYMBOLS):
        return str(value)
    return "" if value is None else type(value).__name__


def _call(node: Node) -> str:
    if node.target is operator.getitem:
        return "{}[{}]".format(*map(_literal, node.args))
    if node.op == "get_attr":
        return f"attribute({node.target!r})"
    args, called = list(node.args), _target_name(node.target)
    if node.op == "call_method":
        called = f"{_literal(args.pop(0))}.{node.target}"
    named = [f"{name}={_literal(value)}" for name, value in node.kwargs.items()]
    return f"{called}({', '.join([*map(_literal, args), *named])})"


def _target_name(target: Any) -> str:
    if isinstance(target, (OpOverload, str)):
        return str(target).removesuffix(".default")
    name = f"{getattr(target, '__module__', '')}.{getattr(target, '__name__', type(target).__name__)}"
    return re.sub(r"[^\w.]", "_", name.strip("._"))


def _literal(value: Any) -> str:
    """An argument as source text; for anything but nodes and plain values only its type."""
    if isinstance(value, Node):
        return value.name
    if isinstance(value, _SYMBOLS):
        return f"symbol({str(value)!r})"
    if value is None or isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, (list, tuple)):
        items = ", ".join(map(_literal, value))
        return f"[{items}]" if isinstance(value, list) else f"({items}{',' * (len(value) == 1)})"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_literal(key)}: {_literal(item)}' for key, item in value.items())}}}"
    if isinstance(value, slice):
        return f"slice({_literal(value.start)}, {_literal(value.stop)}, {_literal(value.step)})"
    return "..." if value is Ellipsis else f"value({type(value).__name__!r})"


def _origin(node: Node) -> list[str]:
    """What a fused operator replaced: the calls, grouped by the line of code that made them."""
    if fused_name(node) is None:
        return []
    rule, replaced = node.meta.get(RULE), node.meta.get(REPLACED, ())
    calls: dict[str, Counter[str]] = {}
    for _, name, source in replaced:
        calls.setdefault(source or "unknown source", Counter())[name] += 1
    title = [_target_name(node.target)]
    title += [f"by rule {rule}"] if rule else []
    title += [f"replaces {len(replaced)} nodes"] if replaced else []
    lines = [f"  {_one_line(source)}: {_tally(names)}" for source, names in calls.items()]
    return [_one_line(", ".join(title)), *lines]


def _one_line(text: str) -> str:
    """`text` without line breaks, which would end a comment, a heading or the row of a table."""
    return " ".join(text.split())


def _tally(counts: Mapping[str, int]) -> str:
    return ", ".join(name if count == 1 else f"{name} x{count}" for name, count in counts.items())


# --- a folder of graphs ------------------------------------------------------------------------------------------


class Dump:
    """The stages of one graph, in the next free `graph_NNN` in the user's folder."""

    def __init__(self, folder: str) -> None:
        self.folder = _next_free(Path(folder))
        self._stages: list[tuple[str, str, int]] = []

    def stage(self, name: str, graph: Graph) -> None:
        """Write the graph after the pass `name`."""
        file = f"{len(self._stages):02d}_{_file_name(name)}.py"
        self._write(file, f"# {_one_line(name)}: {len(graph.nodes)} nodes\n\n{graph_text(graph)}")
        self._stages.append((name, file, len(graph.nodes)))

    def finish(self, report: Report) -> None:
        """Write `index.md`: the passes with links to their graphs, what fused, and what almost did."""
        self._write("index.md", _index(report, self._stages))

    def _write(self, file: str, text: str) -> None:
        with _writing(self.folder):
            (self.folder / file).write_text(text, encoding="utf-8")


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


def _index(report: Report, stages: list[tuple[str, str, int]]) -> str:
    files = {name: file for name, file, _ in stages}
    known = {record.name for record in report.passes}
    rows = [_row(name, "", "", str(count), file) for name, file, count in stages if name not in known]
    for record in report.passes:
        took, nodes = f"{record.milliseconds:.1f}", f"{record.nodes_before} -> {record.nodes_after}"
        rows.append(_row(record.name, took, _tally(record.fired), nodes, files.get(record.name)))
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
    return "| " + " | ".join(_one_line(cell).replace("|", "\\|") for cell in cells) + " |"


def _section(title: str, items: Iterable[str]) -> list[str]:
    lines = [f"- {_one_line(item)}" for item in items]
    return ["", f"## {title}", "", *lines] if lines else []
