"""A graph as a Python file: one function for each kind of layer, called once for each such layer. The file runs on
random inputs; `mla_fx.debug.stage` holds what it imports. A layer, and in it each module, is a section of nodes."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
from torch.fx import Graph, Node

from mla_fx.graph.node_text import INPUTS, Source, consecutive, described, one_line, quoted, value_of
from mla_fx.graph.provenance import module_of
from mla_fx.graph.schemas import written
from mla_fx.graph.torch_private import hint_of
from mla_fx.target import Shown

LEAST = 6  # nodes of a section; fewer are not worth a function

Path = tuple[str, ...]
_NUMBER = re.compile(r"(?<![\w.])\d+(?![\w])|(?<=\.)\d+(?=[.\]]|$)")
RUN = "from mla_fx.debug.stage import run"
A_GRAPH = "# a graph"


@dataclass(frozen=True)
class Section:
    """Consecutive nodes of one module, some of them in sections of their own."""

    path: Path
    items: tuple[Node | Section, ...]

    @property
    def layer(self) -> str | None:
        """The number of the layer, such as "3" for `model.layers.3.mlp`."""
        return next((part for part in self.path if part.isdecimal()), None)

    def nodes(self) -> Iterator[Node]:
        for item in self.items:
            yield from item.nodes() if isinstance(item, Section) else (item,)


def in_sections(nodes: Sequence[Node]) -> tuple[Node | Section, ...]:
    """Nodes in their order; those of a layer in its section, and those of a module of the layer in one within it.

    A node without a module belongs to that of the node before it, unless it writes something: AOTAutograd writes what
    changed at the end of a graph."""
    paths, last = dict[Node, Path](), Path()
    for node in nodes:
        module = module_of(node)
        last = tuple(module.split(".")) if module else Path() if written(node) else last
        paths[node] = last
    layers = {_layer(path) for path in paths.values()}
    holders = {Path(), *(path[:length] for path in layers for length in range(len(path)))}
    items: list[Node | Section] = []
    for path, group in groupby(nodes, key=lambda node: _layer(paths[node])):
        inside = list(group)
        items += _section(path, _modules(path, inside, paths), len(inside), holders)
    return tuple(items)


def _layer(path: Path) -> Path:
    """The path of the layer that holds a module; of a module in no layer, its own."""
    length = next((place for place, part in enumerate(path, 1) if part.isdecimal()), len(path))
    return path[:length]


def _modules(layer: Path, nodes: Sequence[Node], paths: dict[Node, Path]) -> list[Node | Section]:
    items: list[Node | Section] = []
    for path, group in groupby(nodes, key=lambda node: paths[node][: len(layer) + 1]):
        inside = list(group)
        items += _section(path, inside, len(inside), {layer})
    return items


def _section(path: Path, items: Sequence[Node | Section], count: int, holders: Set[Path]) -> list[Node | Section]:
    """One section, or the items themselves if they are few, or of a module that holds the others."""
    return [*items] if path in holders or count < LEAST else [Section(path, tuple(items))]


def graph_text(graph: Graph) -> str:
    """`graph` as the source of a Python module. Comments give dtypes and shapes, strides where a value is not
    contiguous, and, above each fused operator, what it replaced. No tensor's values are shown."""
    return Writer(graph).text()


@dataclass
class _Function:
    """A section as a function, and the sections that are calls of it."""

    name: str
    lines: list[str]
    paths: list[str] = field(default_factory=list)


class Writer(Source):
    def __init__(self, graph: Graph) -> None:
        super().__init__(graph)
        self.functions: dict[str, _Function] = {}

    def text(self) -> str:
        whole = self.whole("graph", self._body(self.sections(), None))
        parts = [
            f"{A_GRAPH}: {len(self.graph.nodes)} nodes. Run this file to compute it on random inputs.",
            "\n".join([*self.imports(), "", RUN]),
            "\n".join(self._head()),
            whole,
            *("\n".join(_of_function(function)) for function in self.functions.values()),
            'if __name__ == "__main__":\n    run(graph, INPUTS)\n',
        ]
        return "\n\n\n".join(part for part in parts if part)

    def sections(self) -> tuple[Node | Section, ...]:
        """What the graph computes, in the sections of its layers and modules."""
        return in_sections(self.computed)

    # --- above the functions -----------------------------------------------------------------------------------------

    def _head(self) -> list[str]:
        """The operators' namespaces, the symbols of this example, and the inputs."""
        lines = self.namespaces()
        lines += [f"{name} = {size}  # in this example" for name, size in symbols(self.graph).items()]
        entries = [f"    {quoted(name)}: {quoted(type_)}," for name, type_ in _collapsed(self.inputs)]
        return [*lines, *([""] * bool(lines)), "INPUTS = {", *entries, "}"]

    # --- functions ---------------------------------------------------------------------------------------------------

    def _body(self, items: Iterable[Node | Section], layer: str | None) -> list[str]:
        """The lines of some items, in a function of the layer with this number."""
        lines = list[str]()
        for item in items:
            if isinstance(item, Section):
                lines.append(self._call(item, layer))
                continue
            lines += self.lines(item, functools.partial(self._named, layer=layer))
        return lines

    def _named(self, node: Node, layer: str | None) -> str:
        name = self.inputs.get(node, "")
        found = _NUMBER.search(name)
        if layer is None or found is None or found[0] != layer:
            return self.name_of(node)
        return f"inputs[f{quoted(_braced(name[: found.start()]) + '{i}' + _braced(name[found.end() :]))}]"

    def _call(self, section: Section, layer: str | None) -> str:
        """The call of a section's function, which is written if no equal one is."""
        takes, gives = borders(section)
        text = self.as_any_layer(section, takes, gives)
        path = ".".join(section.path if layer is None else ["{i}" if part == layer else part for part in section.path])
        if text not in self.functions:
            self.functions[text] = function = _Function(self._free_name(section), [])
            function.lines = self._definition(function.name, section, takes, gives)
        function = self.functions[text]
        function.paths += [path] if layer is None or path not in function.paths else []
        number = [] if section.layer is None else ["i" if layer is not None else section.layer]
        call = f"{function.name}({', '.join(['inputs', *number, *(node.name for node in takes)])})"
        names, types = ", ".join(node.name for node in gives), ", ".join(described(value_of(node)) for node in gives)
        return f"    {names} = {call}  # {path}: {types}" if gives else f"    {call}  # {path}"

    def _definition(self, name: str, section: Section, takes: Sequence[Node], gives: Sequence[Node]) -> list[str]:
        number = [] if section.layer is None else ["i"]
        head = f"def {name}({', '.join(['inputs', *number, *(node.name for node in takes)])}):"
        body = self._body(section.items, section.layer)
        return [head, *body, *([f"    return {', '.join(node.name for node in gives)}"] if gives else [])]

    def as_any_layer(self, section: Section, takes: Sequence[Node], gives: Sequence[Node]) -> str:
        """The section with numbers for its names: equal for equal layers."""
        nodes = [*section.nodes()]
        numbers = {node: f"v{number}" for number, node in enumerate([*takes, *nodes])}
        depth = len(section.path)

        def name_of(node: Node) -> str:
            return numbers[node] if node in numbers else self._named(node, section.layer)

        lines = [f"{self.assigned(node, name_of)} {module_of(node).split('.')[depth:]}" for node in nodes]
        return "\n".join([*lines, *(numbers[node] for node in gives)])

    def _free_name(self, section: Section) -> str:
        name = re.sub(r"\W|^(?=\d)", "_", "_".join(section.path))
        taken = [re.sub(r"__\d+$", "", function.name) for function in self.functions.values()]
        return f"{name}__{taken.count(name) + 1}" if name in taken else name


def _of_function(function: _Function) -> list[str]:
    count = len(function.paths)
    return [f"# {ranges(function.paths)}" + (f", {count} times" if count > 1 else ""), *function.lines]


def borders(section: Section) -> tuple[list[Node], list[Node]]:
    """The values that a section takes from other nodes, and those that it gives to them."""
    inside = dict.fromkeys(section.nodes())
    operands = dict.fromkeys(operand for node in inside for operand in node.all_input_nodes)
    takes = [node for node in operands if node not in inside and node.op not in INPUTS]
    return takes, [node for node in inside if any(user not in inside for user in node.users)]


# --- inputs ----------------------------------------------------------------------------------------------------------


def _collapsed(inputs: dict[Node, str]) -> list[tuple[str, str]]:
    """Names and types; inputs that differ in the number of their layer alone in one line, with a range of numbers."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for node, name in inputs.items():
        found, type_ = _NUMBER.search(name), described(_given(node))
        before, after = (name[: found.start()], name[found.end() :]) if found else (name, "")
        groups.setdefault((before, after, type_), []).append(found[0] if found else "")
    return [
        (f"{before}{{{_range(numbers)}}}{after}" if len(numbers) > 1 else f"{before}{numbers[0]}{after}", type_)
        for (before, after, type_), numbers in groups.items()
    ]


def _given(node: Node) -> Any:
    """The value of an input, or of an attribute."""
    owner = node.graph.owning_module
    value = value_of(node)
    return getattr(owner, str(node.target), None) if value is None and node.op == "get_attr" else value


def _range(numbers: Iterable[str]) -> str:
    """`0-2,5` for 0, 1, 2 and 5."""
    parts = consecutive(sorted(map(int, numbers)))
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in parts)


def ranges(paths: Sequence[str]) -> str:
    """`model.layers.{0-2}.mlp` for the paths of equal modules in three layers."""
    found = _NUMBER.search(paths[0])
    if len(paths) == 1 or found is None:
        return paths[0]
    numbers = [_NUMBER.search(path) for path in paths]
    return f"{paths[0][: found.start()]}{{{_range(one[0] for one in numbers if one)}}}{paths[0][found.end() :]}"


def symbols(graph: Graph) -> dict[str, int]:
    """The symbols in the types of inputs, each with its size in this example."""
    values = [value_of(node) for node in graph.find_nodes(op="placeholder")]
    sizes = [size for value in values if isinstance(value, torch.Tensor) for size in value.shape]
    symbols = [value for value in (*values, *sizes) if isinstance(value, torch.SymInt) and str(value).isidentifier()]
    return {str(symbol): hint_of(symbol) for symbol in symbols}


def _braced(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")


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
