"""Where a node comes from: its operator, rule, source line and module, and the user's name for it."""

import functools
import re
from collections import Counter
from collections.abc import Iterable, Sequence

from torch.fx import Graph, Node
from torch.fx.traceback import NodeSource, NodeSourceAction

from mla_fx.ops import ATTENTION, form

from .schemas import CallLike, named_arguments
from .torch_private import OpOverload

_VARIABLE = re.compile(r"^[LG]\['(?P<name>\w+)'\](?P<dot>\.?)")
_KEYWORD = re.compile(r"^kwargs\['(\w+)'\]")
_MEMBER = re.compile(r"\._(?:modules|parameters|buffers)\['(\w+)'\]")
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')

# Keys of a node's meta.
INPUT_NAME = "mla_fx_input"  # of a graph input: the user's name for it
LAID_OUT = "mla_fx_laid_out"  # of an added graph input: a weight in another layout
RULE = "mla_fx_rule"  # of a new node: the rule or pass that made it
STANDS_FOR = "mla_fx_stands_for"  # of a node that replaces another: the other's name in the original graph
SOURCES = "from_node"  # torch's: the nodes of earlier graphs that a node comes from
ORIGINS = "mla_fx_replaced"  # of a fused operator: names, source lines and modules of what it replaced


def count_fused(graph: Graph) -> dict[str, int]:
    """How often each operator of this project appears in a graph, in order of first appearance."""
    return dict(Counter(name for node in graph.nodes if (name := fused_name(node)) is not None))


def fused_name(node: CallLike) -> str | None:
    """The name of the called fused operator, or of the form of it that people know; the same for its in-place form;
    None for other nodes."""
    target = node.target
    if not isinstance(target, OpOverload) or target.namespace != "mla_fx":
        return None
    name = str(target._opname).rstrip("_")
    return form(dict(named_arguments(node))) if name == ATTENTION else name


def source_of(node: Node | None) -> str:
    """`file:line` of the user's code that made a node, or an empty string."""
    return _innermost(node.meta.get("stack_trace") or "") if node is not None else ""


@functools.lru_cache(maxsize=4096)
def _innermost(trace: str) -> str:
    frames = _FRAME.findall(trace)
    return f"{frames[-1][0]}:{frames[-1][1]}" if frames else ""


def code_of(graph: Graph) -> str:
    """The user's function from which a graph was captured, as `function at file:line` of its first operation, or an
    empty string."""
    traces = (_FRAME.findall(node.meta.get("stack_trace") or "") for node in graph.nodes)
    file, line, function = next((frames[0] for frames in traces if frames), ("", "", ""))
    return f"{function} at {file}:{line}" if file else ""


def module_of(node: Node | None) -> str:
    """The path of the module that made a node, as its user writes it (`model.layers.3.self_attn`), or an empty
    string."""
    stack = node.meta.get("nn_module_stack") if node is not None else None
    return plain_path(str(next(reversed(stack.values()))[0])) if stack else ""


@functools.lru_cache(maxsize=4096)
def plain_path(path: str) -> str:
    """Turn a path of Dynamo's into the user's: `layers.3.weight` for `L['self'].layers._modules['3']...`.

    Dynamo's path begins with the variable that holds the model; for the compiled function that is `self` or `fn`.
    A keyword argument has its own name."""
    named = _VARIABLE.sub(_variable, _MEMBER.sub(r".\1", path))
    return _KEYWORD.sub(r"\1", named).strip(".")


def _variable(found: re.Match[str]) -> str:
    return "" if found["name"] in ("self", "fn") else found["name"] + found["dot"]


def name_of(node: Node) -> str:
    """The name of a node's operation, for messages."""
    if node.op in ("placeholder", "get_attr"):
        return f"the graph input {label_of(node)}" if node.op == "placeholder" else f"the attribute {node.target}"
    if isinstance(node.target, OpOverload):
        return fused_name(node) or str(node.target._opname)
    return str(getattr(node.target, "__name__", node.target))


def label_of(node: Node) -> str:
    """The name of a node; for a graph input, the user's name."""
    return str(node.meta.get(INPUT_NAME, node.name))


def placed_name(node: Node) -> str:
    where = module_of(node)
    return f"{node.name} of {where}" if where else node.name


def stand_in(new: Node, old: Node) -> None:
    """Record which value of the original graph a node replaces."""
    new.meta.setdefault(STANDS_FOR, old.meta.get(STANDS_FOR, old.name))


def note_sources(new: Iterable[Node], olds: Sequence[Node], rule: str) -> None:
    """Record for torch that each new node comes from whatever the replaced nodes come from."""
    found = {(source.graph_id, source.name): source for node in olds for source in node.meta.get(SOURCES, ())}
    if not found:
        return
    whole = NodeSource(None, f"mla_fx: {rule}", [NodeSourceAction.REPLACE, NodeSourceAction.CREATE])
    last = olds[-1]  # given to NodeSource, it would be copied with everything it comes from
    whole.node_info = NodeSource.NodeInfo(last.name, str(last.target), id(last.graph))
    whole.from_node = list(found.values())
    for node in new:
        node.meta[SOURCES] = [whole]


def inherit_sources(new: Node, old: Node) -> None:
    """Record for torch that a new node comes from where an old one does, unless it has sources of its own. A source
    without a name does not count: torch notes one on every node that a pass of Inductor adds."""
    if SOURCES in old.meta and not any(source.name for source in new.meta.get(SOURCES, ())):
        new.meta[SOURCES] = list(old.meta[SOURCES])


def is_laid_out(node: Node) -> bool:
    """Whether a graph input was added by a pass."""
    return LAID_OUT in node.meta
