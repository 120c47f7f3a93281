"""A node as Python source: its call, and as comments its result and what it replaced; and a graph as a function of its
inputs, by their names. No tensor's values are shown."""

import itertools
import json
import math
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from .provenance import ORIGINS, RULE, fused_name, label_of
from .torch_private import OpOverload, defining_module, dtype_abbrs, has_symbolic_sizes

SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)
PLAIN = (bool, int, complex, str, torch.dtype, torch.layout, torch.memory_format)

NameOf = Callable[[Node], str]
INPUTS = ("placeholder", "get_attr")


def one_line(text: str) -> str:
    """`text` without line breaks, which would end a comment, a heading or the row of a table."""
    return " ".join(text.split())


def tally(counts: Mapping[str, int]) -> str:
    return ", ".join(name if count == 1 else f"{name} x{count}" for name, count in counts.items())


def consecutive(numbers: Iterable[int]) -> list[list[int]]:
    """Numbers in runs without gaps."""
    runs = itertools.groupby(enumerate(numbers), lambda placed: placed[1] - placed[0])
    return [[number for _, number in run] for _, run in runs]


def value_of(node: Node) -> Any:
    """The fake value of a node; None if it has none."""
    return node.meta.get("val", node.meta.get("example_value"))


# --- results ---------------------------------------------------------------------------------------------------------


def described(value: Any) -> str:
    """Dtype and shape of a value, and the strides of a tensor that is not contiguous; an empty string if unknown."""
    if isinstance(value, Tensor):
        dtype = dtype_abbrs.get(value.dtype, str(value.dtype).removeprefix("torch."))
        parts = [f"{dtype}[{', '.join(map(str, value.shape))}]"]
        parts += [] if _is_contiguous(value) else [f"strides ({', '.join(map(str, value.stride()))})"]
        parts += [] if value.device.type == "cpu" else [f"on {value.device}"]
        return " ".join(parts)
    if isinstance(value, (list, tuple)):
        return f"({', '.join(described(item) or '-' for item in value)})"
    if isinstance(value, SYMBOLS):
        return str(value)
    return "" if value is None else type(value).__name__


def _is_contiguous(value: Tensor) -> bool:
    """Symbols are compared as text, because a comparison of them would add a guard."""
    if value.layout != torch.strided or not has_symbolic_sizes(value):
        return value.layout != torch.strided or value.is_contiguous()
    strides, stride = list[str](), 1
    for size in reversed(value.shape):
        strides.insert(0, str(stride))
        stride = stride * size
    return strides == [*map(str, value.stride())]


# --- calls -----------------------------------------------------------------------------------------------------------


def call_text(node: Node, name_of: NameOf) -> str:
    """The call of a node, with its operands under the names that `name_of` gives."""
    if node.target is operator.getitem:
        value, index = node.args
        return f"{literal(value, name_of)}[{literal(index, name_of)}]"
    args, called = list(node.args), target_name(node.target)
    if node.op == "call_method":
        called = f"{literal(args.pop(0), name_of)}.{node.target}"
    named = [f"{name}={literal(value, name_of)}" for name, value in node.kwargs.items()]
    return f"{called}({', '.join([*(literal(arg, name_of) for arg in args), *named])})"


def target_name(target: Any) -> str:
    if isinstance(target, (OpOverload, str)):
        return str(target).removesuffix(".default")
    name = f"{getattr(target, '__module__', '')}.{getattr(target, '__name__', type(target).__name__)}"
    return re.sub(r"[^\w.]", "_", name.strip("._"))


def literal(value: Any, name_of: NameOf) -> str:
    """An argument as source text; for anything but nodes and plain values only its type."""
    if isinstance(value, Node):
        return name_of(value)
    if isinstance(value, SYMBOLS):
        return str(value)
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else f"float({str(value)!r})"
    if isinstance(value, torch.device):
        return repr(str(value))
    if value is None or isinstance(value, PLAIN):
        return repr(value)
    if isinstance(value, (list, tuple)):
        items = ", ".join(literal(item, name_of) for item in value)
        return f"[{items}]" if isinstance(value, list) else f"({items}{',' * (len(value) == 1)})"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key!r}: {literal(item, name_of)}' for key, item in value.items())}}}"
    if isinstance(value, slice):
        return f"slice({', '.join(literal(part, name_of) for part in (value.start, value.stop, value.step))})"
    return "..." if value is Ellipsis else f"value({type(value).__name__!r})"


# --- what it replaced ------------------------------------------------------------------------------------------------


def origin(node: Node) -> list[str]:
    """What a fused operator replaced: the names of nodes, by the line of code and the module that made them."""
    name = fused_name(node)
    if name is None:
        return []
    rule, origins = node.meta.get(RULE), node.meta.get(ORIGINS, ())
    places: dict[str, list[str]] = {}
    for old, source, module in origins:
        place = ", ".join(part for part in (short_source(source), module) if part)
        places.setdefault(place or "unknown source", []).append(old)
    title = [name]
    title += [f"by rule {rule}"] if rule else []
    title += [f"replaces {len(origins)} nodes"] if origins else []
    return [one_line(", ".join(title)), *(f"  {one_line(place)}: {' '.join(names)}" for place, names in places.items())]


def short_source(source: str) -> str:
    """`file:line` without the folders that installed packages lie in."""
    return source.rpartition("site-packages/")[2]


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
