"""Where a node comes from: the operator, rule, source line and module behind it, and what its user calls it."""

from __future__ import annotations

import functools
import re
from typing import Any, Protocol

from torch.fx import Graph, Node

from .torch_private import OpOverload

_VARIABLE = re.compile(r"^[LG]\['(?P<name>\w+)'\](?P<dot>\.?)")
_MEMBER = re.compile(r"\._(?:modules|parameters|buffers)\['(\w+)'\]")
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')

# Keys of a node's meta.
INPUT_NAME = "mla_fx_input"  # of a graph input: what the user calls it
LAID_OUT = "mla_fx_laid_out"  # of a graph input that was added: a weight in another layout
RULE = "mla_fx_rule"  # of a new node: the rule or pass that made it
STANDS_FOR = "mla_fx_stands_for"  # of a node in the place of another: the name of that in the untouched graph
REPLACED = "mla_fx_replaced"  # of a fused operator: names, calls and source lines of what it stands for


def count_fused(graph: Graph) -> dict[str, int]:
    """How often each operator of this project appears in a graph, in order of first appearance."""
    counts: dict[str, int] = {}
    for node in graph.nodes:
        name = fused_name(node)
        if name is not None:
            counts[name] = counts.get(name, 0) + 1
    return counts


class Calling(Protocol):
    @property
    def target(self) -> Any: ...


def fused_name(node: Calling) -> str | None:
    """The name of the fused operator that is called, the same for its in-place form; None if none is."""
    target = node.target
    if not isinstance(target, OpOverload) or target.namespace != "mla_fx":
        return None
    return str(target._opname).rstrip("_")


def source_of(node: Node | None) -> str:
    """`file:line` of the user's code that made a node, or an empty string."""
    return _innermost(node.meta.get("stack_trace") or "") if node is not None else ""


@functools.lru_cache(maxsize=4096)
def _innermost(trace: str) -> str:
    frames = _FRAME.findall(trace)
    return f"{frames[-1][0]}:{frames[-1][1]}" if frames else ""


def module_of(node: Node | None) -> str:
    """The path of the module that made a node as its user writes it, `model.layers.3.self_attn`, or an empty string."""
    stack = node.meta.get("nn_module_stack") if node is not None else None
    return plain_path(str(list(stack.values())[-1][0])) if stack else ""


def plain_path(path: str) -> str:
    """A path of Dynamo's as the user writes it: `layers.3.weight` for `L['self'].layers._modules['3']...`.

    Dynamo begins it with the variable that it found the model in: what is compiled is `self` or `fn` to it."""
    named = _VARIABLE.sub(_variable, _MEMBER.sub(r".\1", path))
    return named.strip(".")


def _variable(found: re.Match[str]) -> str:
    return "" if found["name"] in ("self", "fn") else found["name"] + found["dot"]


def name_of(node: Node) -> str:
    """How a message names the operation of a node."""
    if node.op in ("placeholder", "get_attr"):
        return f"the graph input {label_of(node)}" if node.op == "placeholder" else f"the attribute {node.target}"
    if isinstance(node.target, OpOverload):
        return str(node.target._opname)
    return str(getattr(node.target, "__name__", node.target))


def label_of(node: Node) -> str:
    """The name of a node, for a graph input that which the user has for it."""
    return str(node.meta.get(INPUT_NAME, node.name))


def stand_in(new: Node, old: Node) -> None:
    """Notes of which value of the untouched graph a node has the place."""
    new.meta.setdefault(STANDS_FOR, old.meta.get(STANDS_FOR, old.name))


def is_laid_out(node: Node) -> bool:
    """Whether a graph input is one of those that were added."""
    return LAID_OUT in node.meta
