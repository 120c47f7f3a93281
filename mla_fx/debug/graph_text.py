"""A graph as a Python file: one function for each kind of layer, called once for each such layer. The file runs on
random inputs; `mla_fx.debug.stage` holds what it imports."""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, Node

from mla_fx.graph.provenance import label_of, module_of
from mla_fx.graph.torch_private import OpOverload, defining_module, hint_of

from .node_text import call_text, described, literal, one_line, origin, value_of
from .sections import Section, in_sections

_NUMBER = re.compile(r"(?<![\w.])\d+(?![\w])|(?<=\.)\d+(?=[.\]]|$)")
INPUTS = ("placeholder", "get_attr")
RUN = "from mla_fx.debug.stage import run"
A_GRAPH = "# a graph"


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


class Writer:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.inputs = _input_names(graph)
        self.functions: dict[str, _Function] = {}

    def text(self) -> str:
        whole = self._whole("graph", self.sections())
        parts = [
            f"{A_GRAPH}: {len(self.graph.nodes)} nodes. Run this file to compute it on random inputs.",
            "\n".join([*self.imports(), "", RUN]),
            "\n".join(self._head()),
            whole,
            *("\n".join(_of_function(function)) for function in self.functions.values()),
            'if __name__ == "__main__":\n    run(graph, INPUTS)\n',
        ]
        return "\n\n\n".join(part for part in parts if part)

    def function(self, name: str) -> str:
        """The graph as one function; it needs `imports` and `namespaces`."""
        return self._whole(name, self._computed())

    def _whole(self, name: str, items: Iterable[Node | Section]) -> str:
        body = self._body(items, None)
        returned = literal(self.graph.output_node().args[0], self.named(None))
        return "\n".join([f"def {name}(inputs):", *body, f"    return {returned}"])

    def sections(self) -> tuple[Node | Section, ...]:
        """What the graph computes, in the sections of its layers and modules."""
        return in_sections(self._computed())

    def _computed(self) -> list[Node]:
        return [node for node in self.graph.nodes if node.op not in (*INPUTS, "output")]

    # --- above the functions -----------------------------------------------------------------------------------------

    def imports(self) -> list[str]:
        """Import torch, the modules of functions that are called, and those that define operators of other packages."""
        modules = {module for node in self.graph.nodes if (module := _module_of_target(node)) is not None}
        return [f"import {module}" for module in sorted({"torch", *modules})]

    def namespaces(self) -> list[str]:
        """Name the namespaces of the operators."""
        targets = (node.target for node in self.graph.nodes)
        names = sorted({target.namespace for target in targets if isinstance(target, OpOverload)})
        return [f"{name} = torch.ops.{name}" for name in names]

    def _head(self) -> list[str]:
        """The operators' namespaces, the symbols of this example, and the inputs."""
        lines = self.namespaces()
        lines += [f"{name} = {size}  # in this example" for name, size in symbols(self.graph).items()]
        entries = [f"    {_quoted(name)}: {_quoted(type_)}," for name, type_ in _collapsed(self.inputs)]
        return [*lines, *([""] * bool(lines)), "INPUTS = {", *entries, "}"]

    # --- functions ---------------------------------------------------------------------------------------------------

    def _body(self, items: Iterable[Node | Section], layer: str | None) -> list[str]:
        """The lines of some items, in a function of the layer with this number."""
        lines = list[str]()
        for item in items:
            if isinstance(item, Section):
                lines.append(self._call(item, layer))
                continue
            lines += [f"    # {line}" for line in origin(item)]
            lines.append(f"    {self._assigned(item, self.named(layer))}")
        return lines

    def _assigned(self, node: Node, name_of: Callable[[Node], str]) -> str:
        type_ = described(value_of(node))
        return f"{name_of(node)} = {call_text(node, name_of)}" + (f"  # {type_}" if type_ else "")

    def named(self, layer: str | None) -> Callable[[Node], str]:
        def name_of(node: Node) -> str:
            return self._input(node, layer) if node in self.inputs else node.name

        return name_of

    def _input(self, node: Node, layer: str | None) -> str:
        name = self.inputs[node]
        found = _NUMBER.search(name)
        if layer is None or found is None or found[0] != layer:
            return f"inputs[{_quoted(name)}]"
        return f"inputs[f{_quoted(_braced(name[: found.start()]) + '{i}' + _braced(name[found.end() :]))}]"

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
            return numbers[node] if node in numbers else self._input(node, section.layer)

        lines = [f"{self._assigned(node, name_of)} {module_of(node).split('.')[depth:]}" for node in nodes]
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


def _module_of_target(node: Node) -> str | None:
    """What a program imports to call a function or an operator; those of `mla_fx` come with `run`."""
    target = node.target
    if isinstance(target, OpOverload):
        return None if target.namespace == "mla_fx" else defining_module(target)
    is_named = node.op == "call_function" and target is not operator.getitem
    return str(target.__module__).partition(".")[0] if is_named else None


# --- inputs ----------------------------------------------------------------------------------------------------------


def _input_names(graph: Graph) -> dict[Node, str]:
    """A name of its own for each input and attribute: the user's, if there is one."""
    names: dict[str, Node] = {}
    for node in graph.nodes:
        if node.op in INPUTS:
            name = str(node.target) if node.op == "get_attr" else one_line(label_of(node))
            names[name if name not in names else f"{name} ({node.name})"] = node
    return {node: name for name, node in names.items()}


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
    parts: list[list[int]] = []
    for number in sorted(map(int, numbers)):
        if parts and parts[-1][1] == number - 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


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


def _quoted(text: str) -> str:
    """A string literal."""
    return json.dumps(text, ensure_ascii=False)
