"""What the nodes of a graph cost: the FLOPs of their products, and the bytes that they move.

FLOPs are those that torch.utils.flop_counter counts; a fused operator has those of its body. Bytes are counted as if
each node were a kernel of its own, in one way for every graph: a view moves nothing, other nodes read their operands
and write their results once. Operators that pick rows read what they return. Rows written in place are not counted, nor
is what they are written to; of a cache in pages, as many pages are read as its table has. Symbols have their sizes in
this example."""

import inspect
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_aggregate
from torch.utils.flop_counter import FlopCounterMode

from mla_fx.graph.node_text import call_text, described, value_of
from mla_fx.graph.schemas import COPIES, UNDECLARED, names_of, owners_in, surely_shares, written
from mla_fx.graph.torch_private import OpOverload, hint_of, tree_leaves, tree_map
from mla_fx.ops import catalogue

from .memory import sizes_of_caches, written_in_place

aten = torch.ops.aten
PLAIN = ("aten", "prims")  # what has no formula there has no products
PICKS = frozenset({aten.embedding.default, aten.gather.default, aten.index.Tensor, aten.index_select.default})


@dataclass(frozen=True)
class Work:
    """`flops` is None if they are unknown, as for an operator that reads lengths."""

    flops: int | None
    bytes: int


class Meter:
    """Measures the nodes of a graph; the FLOPs of equal calls once."""

    def __init__(self, graph: Graph) -> None:
        owners = owners_in(graph)
        self._in_place = written_in_place(graph, owners)
        self._owners = owners
        self._flops: dict[str, int | None] = {}

    def of(self, node: Node) -> Work:
        if node.op != "call_function":
            return Work(0, 0)
        call = call_text(node, lambda operand: described(value_of(operand)))
        if call not in self._flops:
            self._flops[call] = _flops(node)
        return Work(self._flops[call], self._bytes(node))

    def _bytes(self, node: Node) -> int:
        target = node.target
        if not isinstance(target, OpOverload) or surely_shares(node) is not None or target in UNDECLARED:
            return 0
        operands = [operand for operand in node.all_input_nodes if operand not in self._overwritten(node)]
        read = [_size(value_of(operand)) for operand in operands]
        made = 0 if node in self._in_place else sum(_size(value) for value in _fresh(target, value_of(node)))
        if target in PICKS:
            return 2 * made + sum(read[1:])
        if target in COPIES and target._schema.is_mutable:
            is_new = any(self._owners[operand] not in self._in_place for operand in operands)
            return is_new * (sum(read) + sum(_size(value_of(operand)) for operand in written(node)))
        return made + sum(read) + sum(_number(part) - _number(whole) for part, whole in sizes_of_caches(node))

    def _overwritten(self, node: Node) -> list[Node]:
        """The operands that a node writes, by itself or once its result is copied into them."""
        if node not in self._in_place:
            return written(node)
        copies = (user for user in node.users if user.target is aten.copy_.default)
        return [operand for copy in copies for operand in copy.all_input_nodes[:1]]


# --- FLOPs -----------------------------------------------------------------------------------------------------------


def _flops(node: Node) -> int | None:
    target = node.target
    if not isinstance(target, OpOverload):
        return 0 if target is operator.getitem or not isinstance(value_of(node), Tensor | tuple) else None
    args, kwargs = map_aggregate((node.args, node.kwargs), _on_meta)
    formula = _FORMULAS.get(target.overloadpacket)
    try:
        if formula is not None:
            return int(formula(*args, **kwargs, out_val=_on_meta(node)))
        with torch.no_grad(), FlopCounterMode(display=False, custom_mapping=_MORE) as counter:
            compute = _body(target) if target.namespace == "mla_fx" else target.decompose
            is_opaque = compute(*args, **kwargs) is NotImplemented and target.namespace not in PLAIN
        return None if is_opaque else int(counter.get_total_flops())
    except Exception:  # it needs values, which nothing on meta has
        return None


def _body(target: OpOverload) -> Callable[..., Any]:
    """The body of a fused operator, without what its form in place has besides."""
    body = catalogue()[str(target._opname).rstrip("_")].body

    def compute(*args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(names_of(target), args, strict=False)), **kwargs}
        return body(**{name: given[name] for name in inspect.signature(body).parameters if name in given})

    return compute


def _on_meta(value: Any) -> Any:
    """A value of the same sizes that adds no guard when it is computed with."""
    return tree_map(_plain, value_of(value) if isinstance(value, Node) else value)


def _plain(value: Any) -> Any:
    if isinstance(value, torch.SymInt):
        return hint_of(value)
    if not isinstance(value, Tensor):
        return value
    sizes, strides = (_numbers(part) for part in (value.shape, value.stride()))
    return torch.empty_strided(sizes, strides, dtype=value.dtype, device="meta")


def _numbers(sizes: Any) -> list[int]:
    return [*map(_number, sizes)]


def _number(size: Any) -> int:
    return hint_of(size) if isinstance(size, torch.SymInt) else int(size)


def _product(rows: list[int], matrix: list[int], *rest: Any, out_shape: Any = None, **named: Any) -> int:
    return 2 * torch.Size(rows).numel() * (matrix[-1] if len(matrix) > 1 else 1)


_MORE: dict[Any, Callable[..., Any]] = {aten._int_mm: _product, aten.mv: _product, aten.dot: _product}
_FORMULAS = FlopCounterMode(display=False, custom_mapping=_MORE).flop_registry


# --- bytes -----------------------------------------------------------------------------------------------------------


def _fresh(target: OpOverload, value: Any) -> list[Any]:
    """The results that are not what the operator writes."""
    values = value if isinstance(value, (tuple, list)) and len(target._schema.returns) > 1 else [value]
    return [value for value, made in zip(values, target._schema.returns, strict=False) if made.alias_info is None]


def _size(value: Any) -> int:
    """Bytes; an expanded dimension is stored once."""
    return sum(_stored(part) for part in tree_leaves(value) if isinstance(part, Tensor))


def _stored(value: Tensor) -> int:
    sizes = zip(_numbers(value.shape), _numbers(value.stride()), strict=True)
    return torch.Size([size for size, stride in sizes if stride != 0 or size == 0]).numel() * value.element_size()


def amount(number: float, unit: str) -> str:
    for prefix in ("", "k", "M", "G", "T"):
        if number < 1000 or prefix == "T":
            break
        number /= 1000
    return f"{number:.4g} {prefix}{unit}"
