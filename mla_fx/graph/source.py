"""A graph as a Python function of its inputs, by their names. No tensor's values are shown."""

from __future__ import annotations

import json
import operator
from collections.abc import Iterable, Iterator

from torch.fx import Graph, Node

from .node_text import NameOf, call_text, described, literal, one_line, origin, value_of
from .provenance import label_of
from .torch_private import OpOverload, defining_module

INPUTS = ("placeholder", "get_attr")


class Source:
    """The function takes a dictionary. Comments give dtypes and shapes, strides where a value is not contiguous, and,
    above each fused operator, what it replaced."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.inputs = _input_names(graph)
        self.computed = [node for node in graph.nodes if node.op not in (*INPUTS, "output")]

    def function(self, name: str) -> str:
        """The graph as one function; it needs `imports` and `namespaces`."""
        return self.whole(name, (line for node in self.computed for line in self.lines(node, self.name_of)))

    def whole(self, name: str, body: Iterable[str]) -> str:
        returned = literal(self.graph.output_node().args[0], self.name_of)
        return "\n".join([f"def {name}(inputs):", *body, f"    return {returned}"])

    def lines(self, node: Node, name_of: NameOf) -> Iterator[str]:
        yield from (f"    # {line}" for line in origin(node))
        yield f"    {self.assigned(node, name_of)}"

    def assigned(self, node: Node, name_of: NameOf) -> str:
        type_ = described(value_of(node))
        return f"{name_of(node)} = {call_text(node, name_of)}" + (f"  # {type_}" if type_ else "")

    def name_of(self, node: Node) -> str:
        return f"inputs[{quoted(self.inputs[node])}]" if node in self.inputs else node.name

    def imports(self) -> list[str]:
        """Import torch, the modules of functions that are called, and those that define operators of other packages."""
        modules = {module for node in self.graph.nodes if (module := _module_of_target(node)) is not None}
        return [f"import {module}" for module in sorted({"torch", *modules})]

    def namespaces(self) -> list[str]:
        """Name the namespaces of the operators."""
        targets = (node.target for node in self.graph.nodes)
        names = sorted({target.namespace for target in targets if isinstance(target, OpOverload)})
        return [f"{name} = torch.ops.{name}" for name in names]


def quoted(text: str) -> str:
    """A string literal."""
    return json.dumps(text, ensure_ascii=False)


def _module_of_target(node: Node) -> str | None:
    """What a program imports to call a function or an operator; those of `mla_fx` come with what runs it."""
    target = node.target
    if isinstance(target, OpOverload):
        return None if target.namespace == "mla_fx" else defining_module(target)
    is_named = node.op == "call_function" and target is not operator.getitem
    return str(target.__module__).partition(".")[0] if is_named else None


def _input_names(graph: Graph) -> dict[Node, str]:
    """A name of its own for each input and attribute: the user's, if there is one."""
    names: dict[str, Node] = {}
    for node in graph.nodes:
        if node.op in INPUTS:
            name = str(node.target) if node.op == "get_attr" else one_line(label_of(node))
            names[name if name not in names else f"{name} ({node.name})"] = node
    return {node: name for name, node in names.items()}
