"""A node of a graph as Python source: its call, and as comments its result and what it replaced. No tensor's values are
shown."""

from __future__ import annotations

import itertools
import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from .provenance import ORIGINS, RULE, fused_name
from .torch_private import OpOverload, dtype_abbrs, has_symbolic_sizes

SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)
PLAIN = (bool, int, complex, str, torch.dtype, torch.layout, torch.memory_format)

NameOf = Callable[[Node], str]


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
    if fused_name(node) is None:
        return []
    rule, origins = node.meta.get(RULE), node.meta.get(ORIGINS, ())
    places: dict[str, list[str]] = {}
    for name, source, module in origins:
        place = ", ".join(part for part in (short_source(source), module) if part)
        places.setdefault(place or "unknown source", []).append(name)
    title = [target_name(node.target)]
    title += [f"by rule {rule}"] if rule else []
    title += [f"replaces {len(origins)} nodes"] if origins else []
    return [one_line(", ".join(title)), *(f"  {one_line(place)}: {' '.join(names)}" for place, names in places.items())]


def short_source(source: str) -> str:
    """`file:line` without the folders that installed packages lie in."""
    return source.rpartition("site-packages/")[2]
