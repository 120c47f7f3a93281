"""Building graph: tensors from elements, operator calls with their metadata, values replaced by other values."""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, in_kernel_invocation_manager
from torch.fx import Graph, Node
from torch.utils._pytree import tree_map_only

from .canonical.axes import Axis, Index, Size, at_most, composite, leaves, product, ratio, settle, size_of
from .canonical.element import Element
from .canonical.views import shape_of
from .errors import NoMatch

aten = torch.ops.aten

VIEWS = frozenset({aten.reshape.default, aten.permute.default, aten.slice.Tensor, aten.select.int, aten.expand.default})
Dims = Sequence[Sequence[Axis]]
Unit = tuple[Axis, ...]


class Emitter:
    """Adds nodes to one graph. Equal calls are made once; `added` lists the new nodes, so they can be taken back."""

    def __init__(self, graph: Graph, decompositions: Any = None) -> None:
        self.graph = graph
        self.decompositions = decompositions
        self.fake_mode = detect_fake_mode([node.meta.get("val") for node in graph.nodes if node.op == "placeholder"])
        self._calls: dict[Any, Node] = {}
        self._values: dict[Any, Any] = {}
        self._sizes: dict[Size, Node] | None = None
        self._traced: dict[Any, torch.fx.GraphModule] = {}
        self.added: list[Node] = []

    def roll_back(self, mark: int) -> None:
        """Removes what was added since `added` had `mark` nodes: a rewrite that was refused leaves no trace."""
        while len(self.added) > mark:
            node = self.added.pop()
            if not node._erased:
                self.graph.erase_node(node)

    @contextlib.contextmanager
    def at(self, anchor: Node, rule: str) -> Iterator[None]:
        """New nodes go before `anchor`, come from its source line, and say which rule made them."""
        mark = len(self.added)
        with self.graph.inserting_before(anchor):
            yield
        for node in self.added[mark:]:
            node.meta["mla_fx_rule"] = rule
            for name in ("stack_trace", "nn_module_stack", "seq_nr"):
                if name in anchor.meta and name not in node.meta:
                    node.meta[name] = anchor.meta[name]

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        """A call node with its value's metadata. The same call made before is reused."""
        key = (target, _hashable(args), _hashable(kwargs))
        if key in self._calls and not self._calls[key]._erased:
            return self._calls[key]
        value = self._value(target, args, kwargs)
        node = self.graph.call_function(target, args, kwargs)
        node.meta["val"] = value
        self._calls[key] = node
        self.added.append(node)
        return node

    def _value(self, target: Any, args: Any, kwargs: Any) -> Any:
        """What is known about a call's result. Fused operators check a lot, so equal calls are computed once; each
        result still is a tensor of its own, since compilers ask by storage what aliases what."""
        if getattr(target, "namespace", "") != "mla_fx":
            return self._computed_value(target, args, kwargs)
        key = (target, _described(args), _described(tuple(sorted(kwargs.items()))))
        if key not in self._values:
            self._values[key] = self._computed_value(target, args, kwargs)
            return self._values[key]
        with self.fake_mode or contextlib.nullcontext():
            return tree_map_only(torch.Tensor, _another, self._values[key])

    def _computed_value(self, target: Any, args: Any, kwargs: Any) -> Any:
        args = _known(args)
        if self.fake_mode is not None and target in VIEWS and not args[0]._has_symbolic_sizes_strides:
            return _viewed(self.fake_mode, target, args)
        kwargs = {name: _known(value) for name, value in kwargs.items()}
        try:
            with self.fake_mode or contextlib.nullcontext():
                return target(*args, **kwargs)
        except ValueError as refusal:
            raise NoMatch(f"the operator refuses: {refusal}") from refusal

    # --- elements to tensors -------------------------------------------------------------------------------------

    def tensor(self, element: Element, dims: Dims, *, dtype: torch.dtype | None = None, expand: bool = False) -> Node:
        """The tensor whose element at `dims` is `element`; each dimension runs over some axes, slowest first.

        An axis the element does not depend on gives a dimension of one, or is repeated if `expand`."""
        element = element.settled()
        node, index, scale = element.held
        if len(index) == len(shape_of(node)) + 1:
            node = self.call(aten.view_as_real.default, node)
        wanted = [leaves(dim) for dim in dims]
        node = self._arrange(*self._spread(node, index, wanted), wanted)
        if expand:
            node = self._expanded(node, wanted)
        if scale != 1.0:
            node = self.call(aten.mul.Tensor, node, scale)
        return self.cast(node, dtype or element.dtype)

    def cast(self, node: Node, dtype: torch.dtype) -> Node:
        if node.meta["val"].dtype == dtype:
            return node
        return self.call(torch.ops.prims.convert_element_type.default, node, dtype)

    def scaled(self, node: Node, factor: float) -> Node:
        return node if abs(factor - 1.0) < 1e-6 else self.call(aten.mul.Tensor, node, factor)

    def _spread(self, node: Node, index: tuple[Index, ...], wanted: list[tuple[Axis, ...]]) -> tuple[Node, list[Unit]]:
        """`node` with what is fixed selected away, and the groups of axes that its dimensions then run over.

        The node may have other dimensions than the groups say, if a reshape leads from one to the other."""
        digits = [digit for part, size in zip(index, shape_of(node), strict=True) for digit in _digits(part, size)]
        digits = [digit for digit in digits if digit.radix != 1]
        if all(digit.is_whole for digit in digits):
            return node, _grouped([(digit.axis,) for digit in digits if digit.axis], wanted)
        node = self.reshape(node, [digit.radix for digit in digits])
        units: list[Unit] = []
        for digit in digits:
            if digit.axis is None:
                node = self.call(aten.select.int, node, len(units), self.size(digit.start))
                continue
            if not digit.is_whole:
                stop = self.size(digit.start + digit.axis.size)
                node = self.call(aten.slice.Tensor, node, len(units), self.size(digit.start), stop)
            units.append((digit.axis,))
        return node, _grouped(units, wanted)

    def _arrange(self, node: Node, units: list[Unit], wanted: list[tuple[Axis, ...]]) -> Node:
        """Permutes and merges the groups of axes into the wanted dimensions."""
        present = {axis for unit in units for axis in unit}
        if present != {axis for dim in wanted for axis in dim if axis in present}:
            raise NoMatch("a value depends on an axis it should not depend on", node)
        if any(not present.isdisjoint(dim) and not present.issuperset(dim) for dim in wanted):
            raise NoMatch("a value depends on only a part of a dimension", node)
        position = {axis: place for place, axis in enumerate(axis for dim in wanted for axis in dim)}
        order = sorted(range(len(units)), key=lambda unit: position[units[unit][0]])
        if order != list(range(len(units))):
            node = self.reshape(node, [product(axis.size for axis in unit) for unit in units])
            node = self.call(aten.permute.default, node, order)
        return self.reshape(node, [product(axis.size for axis in dim if axis in present) for dim in wanted])

    def _expanded(self, node: Node, wanted: list[tuple[Axis, ...]]) -> Node:
        sizes = [product(axis.size for axis in dim) for dim in wanted]
        if list(shape_of(node)) == sizes:
            return node
        return self.call(aten.expand.default, node, [self.size(size) for size in sizes])

    def reshape(self, node: Node, sizes: Sequence[Size]) -> Node:
        if list(shape_of(node)) == list(sizes):
            return node
        unknown = [dim for dim, size in enumerate(sizes) if not isinstance(size, int)]
        inferred = unknown[0] if len(unknown) == 1 else None
        return self.call(
            aten.reshape.default, node, [-1 if dim == inferred else self.size(size) for dim, size in enumerate(sizes)]
        )

    # --- values for values ---------------------------------------------------------------------------------------

    def result(self, node: Node, roles: Dims) -> Element:
        """A new tensor as an element of the axes that its dimensions run over."""
        return Element(node, tuple(composite(leaves(axes)) for axes in roles))

    def replace(self, old: Node, index: tuple[Index, ...], element: Element, *, padding: int = 0) -> None:
        """Uses `element` wherever `old`, read at `index`, was used; behind it come `padding` zeros."""
        new = self.tensor(element, [settle(part).axes for part in index], dtype=old.meta["val"].dtype, expand=True)
        if padding:
            new = self.call(aten.constant_pad_nd.default, new, [0, padding])
        old.replace_all_uses_with(self._laid_out_as(old, new))

    def _laid_out_as(self, old: Node, new: Node) -> Node:
        """`new` with the strides of `old`: what follows was traced for those, and a view of other ones would fail."""
        strides = [size_of(stride) for stride in old.meta["val"].stride()]
        if strides == [size_of(stride) for stride in new.meta["val"].stride()]:
            return new
        order = _slowest_first(strides)
        if order == list(range(len(order))):
            return self.call(aten.clone.default, new, memory_format=torch.contiguous_format)
        ordered = self.call(aten.permute.default, new, order)
        dense = self.call(aten.clone.default, ordered, memory_format=torch.contiguous_format)
        return self.call(aten.permute.default, dense, [order.index(dim) for dim in range(len(order))])

    def inline(self, function: Callable[..., Any], *arguments: Node | None, **options: Any) -> Any:
        """The graph of `function` on `arguments`, spliced in; traced once for equal shapes and options."""
        values = [None if argument is None else argument.meta["val"] for argument in arguments]
        key = (function, tuple(None if value is None else _signature(value) for value in values), _hashable(options))
        if key not in self._traced:
            with self.fake_mode or contextlib.nullcontext():
                self._traced[key] = _trace(functools.partial(function, **options), values, self.decompositions)
        return self._splice(self._traced[key], [argument for argument in arguments if argument is not None])

    def _splice(self, traced: torch.fx.GraphModule, arguments: list[Node]) -> Any:
        placeholders = [node for node in traced.graph.nodes if node.op == "placeholder"]
        copies: dict[Node, Node] = dict(zip(placeholders, arguments, strict=True))
        for node in traced.graph.nodes:
            if node.op == "output":
                return torch.fx.map_arg(node.args[0], copies.__getitem__)
            if node.op == "placeholder":
                continue
            assert node.op == "call_function", f"cannot splice a {node.op} node"
            copies[node] = self.graph.node_copy(node, copies.__getitem__)
            self.added.append(copies[node])
        raise AssertionError("a traced graph ends with its output")

    # --- sizes ---------------------------------------------------------------------------------------------------

    def size(self, size: Size) -> Any:
        """A size as an operator's argument: a number, or the node that computes it."""
        if isinstance(size, int):
            return size
        if self._sizes is None:
            self._sizes = _known_sizes(self.graph)
        if size in self._sizes:
            return self._sizes[size]
        node = self._computed(size)
        self._sizes[size] = node
        return node

    def _computed(self, size: Size) -> Node:
        if isinstance(size, (sympy.Mul, sympy.Add)):
            combine = operator.mul if isinstance(size, sympy.Mul) else operator.add
            first, *rest = map(self._argument, size.args)
            for part in rest:
                first = self.call(combine, first, part)
            assert isinstance(first, Node), "a symbolic size is computed by a node"
            return first
        for node in self.graph.nodes:
            value = node.meta.get("val")
            if isinstance(value, torch.Tensor) and size in (sizes := list(shape_of(node))):
                return self.call(aten.sym_size.int, node, sizes.index(size))
        raise NoMatch(f"the size {size} is not known to the graph")

    def _argument(self, size: sympy.Expr) -> Any:
        return int(size) if size.is_Integer else self.size(size)


@dataclass(frozen=True)
class _Digit:
    """One place of a dimension written as a mixed-radix number: read along `axis` from `start`, or fixed there."""

    radix: Size
    axis: Axis | None
    start: Size

    @property
    def is_whole(self) -> bool:
        return self.axis is not None and self.start == 0 and self.axis.size == self.radix


def _digits(part: Index, size: Size) -> list[_Digit]:
    rest, offset = size, part.offset
    out: list[_Digit] = []
    for axis, stride in sorted(part.terms, key=functools.cmp_to_key(_slower_first)):
        radix = ratio(rest, stride)
        if radix is None:
            raise NoMatch(f"a dimension of {size} is read in steps of {stride}, which is no view of it")
        start = 0 if offset == 0 else offset // stride
        offset = offset - start * stride
        out.append(_Digit(radix, axis, start))
        rest = stride
    if rest != 1 or not part.terms:
        out.append(_Digit(rest, None, offset))
    return out


def _grouped(units: list[Unit], wanted: list[tuple[Axis, ...]]) -> list[Unit]:
    """Neighbouring groups that are neighbours in a wanted dimension too, merged: no reshape need part them."""
    follows = {left: right for dim in wanted for left, right in itertools.pairwise(dim)}
    merged: list[Unit] = []
    for unit in units:
        if merged and follows.get(merged[-1][-1]) is unit[0]:
            merged[-1] = (*merged[-1], *unit)
        else:
            merged.append(unit)
    return merged


def _slowest_first(strides: Sequence[Size]) -> list[int]:
    """Dimensions by falling stride, in order where strides are equal."""

    def compare(one: int, two: int) -> int:
        if strides[one] == strides[two]:
            return one - two
        return 1 if at_most(strides[one], strides[two]) else -1

    return sorted(range(len(strides)), key=functools.cmp_to_key(compare))


def _slower_first(left: tuple[Axis, Size], right: tuple[Axis, Size]) -> int:
    if left[1] == right[1]:
        return 0
    return 1 if at_most(left[1], right[1]) else -1


def _known_sizes(graph: Graph) -> dict[Size, Node]:
    sizes: dict[Size, Node] = {}
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt):
            sizes.setdefault(size_of(value), node)
    return sizes


def _trace(function: Callable[..., Any], values: list[Any], decompositions: Any) -> torch.fx.GraphModule:
    from torch.fx.experimental.proxy_tensor import make_fx

    # new tensors: an argument given twice, or sharing what is known with another, would be traced as one
    given = [_unshared(value) for value in values if value is not None]

    def positional(*tensors: Any) -> Any:
        rest = iter(tensors)
        return function(*[None if value is None else next(rest) for value in values])

    with torch.no_grad():
        traced = make_fx(positional, decompositions, tracing_mode="real")(*given)
    traced.graph.eliminate_dead_code()
    return traced


def _unshared(value: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def _another(value: torch.Tensor) -> torch.Tensor:
    """A tensor of which the same is known."""
    if not isinstance(value, FakeTensor) or value._has_symbolic_sizes_strides:
        return _unshared(value)
    with in_kernel_invocation_manager(value.fake_mode):
        plain = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return FakeTensor(value.fake_mode, plain, value.fake_device)


def _viewed(mode: Any, target: Any, args: Any) -> Any:
    """A view of a tensor of known sizes. Rewriting makes a dozen for each layer, and asking the tensor behind the fake
    one is five times quicker than dispatching through fake tensors."""
    with in_kernel_invocation_manager(mode):
        view = target(*args)
    return FakeTensor(mode, view, args[0].fake_device)


def _described(value: Any) -> Any:
    """An argument as a key, with nodes replaced by the shape and type of their values."""
    if isinstance(value, Node):
        return _signature(value.meta["val"])
    return tuple(map(_described, value)) if isinstance(value, (list, tuple)) else (type(value), value)


def _known(value: Any) -> Any:
    """An argument with nodes replaced by what is known about their values."""
    if isinstance(value, Node):
        return value.meta["val"]
    return [_known(item) for item in value] if isinstance(value, (list, tuple)) else value


def _signature(value: Any) -> Any:
    if isinstance(value, torch.SymInt):
        return size_of(value)
    if not isinstance(value, torch.Tensor):
        return tree_map_only(torch.Tensor, _signature, value)
    sizes, strides = (tuple(map(size_of, numbers)) for numbers in (value.shape, value.stride()))
    return sizes, strides, value.dtype, value.device


def _hashable(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(map(_hashable, value))
    if isinstance(value, dict):
        return tuple((name, _hashable(item)) for name, item in sorted(value.items()))
    return (type(value), value)


def view_key(element: Element, dims: Dims) -> Any:
    """What identifies the tensor that `Emitter.tensor` would build: equal keys, equal tensors."""
    element = element.settled()
    position = {axis: place for place, axis in enumerate(axis for dim in dims for axis in leaves(dim))}
    index = tuple(
        (part.offset, frozenset((position.get(axis, axis), stride) for axis, stride in part.terms))
        for part in element.index
    )
    return element.node, index, element.scale, tuple(len(leaves(dim)) for dim in dims)
