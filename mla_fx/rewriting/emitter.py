"""Drafts the calls of a plan, and adds drafts to a graph."""

import contextlib
import copy
import functools
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any

import sympy
import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate

from mla_fx.errors import NoMatch
from mla_fx.graph.provenance import RULE, fused_name, inherit_sources, stand_in
from mla_fx.graph.schemas import written
from mla_fx.graph.torch_private import share_storage
from mla_fx.graph.walk import erase_unread, nearest_first
from mla_fx.readings.sizes import Size, size_of
from mla_fx.readings.views import RESHAPES, shape_of

from .draft import Change, Draft, is_value, value_of
from .fake_values import FakeValues, hashable
from .inline import Traces
from .plan import ByHoisting, ByTarget, Call, Cast, Expression, Inlined, Representative, Value, ViewOf

aten = torch.ops.aten


class Emitter:
    """Drafts calls with their fake values, which changes nothing, and adds drafts to one graph.

    Equal calls are drafted and added once. `added` lists the new nodes since `at` began. `refuses_positions` is the
    target's property of that name; `hoists` is whether values that depend on parameters alone leave the graph."""

    def __init__(self, graph: Graph, *, refuses_positions: bool = True, hoists: bool = False) -> None:
        self.graph, self.refuses_positions, self.hoists = graph, refuses_positions, hoists
        self.fakes = FakeValues(graph)
        self.traces = Traces(self.fakes)
        self.added: list[Node] = []
        self._calls: dict[Any, Node] = {}
        self._drafts: dict[Any, Any] = {}
        self._drafts_of: dict[Node, Draft] = {}
        self._nodes: dict[Draft, Node] = {}
        self._before: Node | None = None
        self._sizes: dict[Size, Node] | None = None

    @contextlib.contextmanager
    def at(self, anchor: Node, rule: str) -> Iterator[None]:
        """Insert new nodes before `anchor`, and give them its source line and the name of the rule."""
        self.added, self._drafts, self._nodes = [], {}, {}
        with self.before(anchor):
            yield
        for node in self.added:
            node.meta[RULE] = rule
            inherit_sources(node, anchor)
            for name in ("stack_trace", "nn_module_stack", "seq_nr"):
                if name in anchor.meta and name not in node.meta:
                    node.meta[name] = anchor.meta[name]

    @contextlib.contextmanager
    def before(self, node: Node) -> Iterator[None]:
        """Insert new nodes before this one, and reuse only nodes that precede it."""
        outer, self._before = self._before, node
        try:
            with self.graph.inserting_before(node):
                yield
        finally:
            self._before = outer

    # --- drafts --------------------------------------------------------------------------------------------------

    def evaluate(self, part: Any) -> Any:
        """An expression as a draft or node, or a size as a number or as the value that computes it.

        Raises NoMatch if an operator refuses its operands."""
        if isinstance(part, Expression):
            if part not in self._drafts:
                self._drafts[part] = _EVALUATED[type(part)](self, part)
            return self._drafts[part]
        if isinstance(part, (list, tuple)):
            return type(part)(map(self.evaluate, part))
        return self.size(part) if isinstance(part, sympy.Expr) else part

    def call(self, target: Any, *args: Any, **options: Any) -> Draft | Node:
        """A call on nodes and drafts, or the node of an equal call that was added before.

        A fused operator is always a draft, because each one is checked for lost inputs."""
        return self._called(target, args, options, self.fakes.of_call)

    def again(self, call: Draft, args: Any, options: Any) -> Draft | Node:
        """The call of a draft on operands with the signatures of its own."""
        return self._called(call.target, args, options, functools.partial(self.fakes.of_equal_call, call.value))

    def _called(self, target: Any, args: Any, options: Any, compute: Callable[..., Any]) -> Draft | Node:
        key = (target, hashable(args), hashable(options))
        found: Draft | None = self._drafts.get(key)
        if found is not None:
            return found
        node = self._calls.get(key)
        if node is not None and not node._erased and fused_name(node) is None:
            return node
        self._drafts[key] = found = Draft(target, args, options, compute(target, args, options))
        return found

    def draft_of(self, node: Node) -> Draft | None:
        """The draft that a node was added from; None for an original node."""
        return self._drafts_of.get(node)

    def inlined(self, function: Callable[..., Any], *args: Any, decompositions: Any = None, **options: Any) -> Any:
        """The results of a function of tensors, as drafts of the calls it makes."""
        return self.traces.inlined(function, args, options, decompositions)

    def _call(self, part: Call) -> Draft | Node:
        options = {name: self.evaluate(value) for name, value in part.options.items()}
        return self.call(part.target, *map(self.evaluate, part.args), **options)

    def _cast(self, part: Cast) -> Draft | Node:
        value: Draft | Node = self.evaluate(part.value)
        if value_of(value).dtype == part.dtype:
            return value
        return self.call(torch.ops.prims.convert_element_type.default, value, part.dtype)

    def _view(self, part: ViewOf) -> Draft | Node:
        value: Draft | Node = self.evaluate(part.value)
        if not share_storage(value_of(value), part.base.meta["val"]):
            raise NoMatch(part.because, part.base)
        return value

    # --- nodes ---------------------------------------------------------------------------------------------------

    def apply(self, plan: Change) -> list[Node]:
        """Add the calls, replace every old value by its new one, and erase dead code; return the erased nodes in order.

        Raises NoMatch, and changes nothing, if the new values cannot be computed before the first old one. A write is
        replaced where it is."""
        if not plan.replacements:  # of a call that nothing reads
            return []
        moved = {old: new for old, new in plan.replacements if not written(old)}
        first, news = min(moved), list[tuple[Node, Node]]()
        for node in _needed([*moved.values()], set(plan.olds), first):
            first.prepend(node)
        for old, new in plan.replacements:
            with self.before(first if old in moved else old):
                news.append((old, self._node(new)))
        for dropped in plan.dropped:
            self.graph.erase_node(dropped)
        for old, new in news:
            stand_in(new, old)
            old.replace_all_uses_with(new, lambda user: plan.readers is None or user in plan.readers)
        for write in set(plan.olds) - moved.keys():
            self.graph.erase_node(write)
        return erase_unread(plan.olds)

    def _node(self, part: Draft | Node) -> Node:
        """Add a draft, and the drafts that it depends on."""
        if isinstance(part, Node):
            return part
        node = self._nodes.get(part)
        if part.is_input and node is None:
            node = self._nodes[part] = self._input(part)
        if node is None or not self._is_usable(node):
            args, kwargs = map_aggregate((part.args, part.kwargs), self._added)
            key = (part.target, hashable(args), hashable(kwargs))
            node = self._calls.get(key)
            if node is None or not self._is_usable(node):
                node = self._calls[key] = self._create(part, args, kwargs)
            self._nodes[part] = node
        return node

    def _added(self, leaf: Any) -> Any:
        return self._node(leaf) if isinstance(leaf, Draft) else leaf

    def _create(self, part: Draft, args: Any, kwargs: Any) -> Node:
        if isinstance(part.target, GraphModule):
            node = self._module(part.target)
        else:
            node = self.graph.create_node("call_function", part.target, args, kwargs, part.name)
        node.meta.update(part.meta)
        if part.value is not None:
            node.meta["val"] = part.value
        if isinstance(part.value, torch.SymInt) and self._sizes is not None:
            self._sizes[size_of(part.value)] = node
        self.added.append(node)
        self._drafts_of[node] = part
        return node

    def _input(self, part: Draft) -> Node:
        if part.target in RESHAPES and isinstance(source := part.operands[0], Node):
            source.meta |= part.meta
            return source
        with self.graph.inserting_after(self.graph.find_nodes(op="placeholder")[-1]):
            node = self.graph.placeholder(str(part.name))
        node.target = node.name  # torchair names inputs by the one, and what reads them by the other
        node.meta = {**part.meta}
        return node

    def _module(self, module: GraphModule) -> Node:
        """Add a module that an operator calls to the graph's owner; return a node that reads it."""
        owner = self.graph.owning_module
        assert owner is not None, "a graph that is compiled belongs to a module"
        name = f"mla_fx_{len(list(owner.children()))}"
        owner.add_submodule(name, copy.copy(module))
        return self.graph.get_attr(name)

    # --- sizes ---------------------------------------------------------------------------------------------------

    def size(self, size: Size) -> Any:
        """A size as an operator's argument: a number, or the node or draft that computes it."""
        if isinstance(size, int):
            return size
        if self._sizes is None:
            self._sizes = _sizes_of(self.graph)
        node = self._sizes.get(size)
        return node if node is not None and self._is_usable(node) else self._computed(size)

    def _is_usable(self, node: Node) -> bool:
        """Whether the node still exists and precedes the insertion point."""
        return not node._erased and (self._before is None or node < self._before)

    def _computed(self, size: Size) -> Draft | Node:
        for node in itertools.takewhile(self._is_usable, self.graph.nodes):
            value = node.meta.get("val")
            if isinstance(value, torch.Tensor) and size in (sizes := list(shape_of(node))):
                return self.call(aten.sym_size.int, node, sizes.index(size))
        if not isinstance(size, (sympy.Mul, sympy.Add)):
            raise NoMatch(f"the size {size} is not known to the graph")
        combine = operator.mul if isinstance(size, sympy.Mul) else operator.add
        parts = map(self._argument, size.args)
        whole: Draft | Node = functools.reduce(lambda *both: self.call(combine, *both), parts)
        assert is_value(whole), "a symbolic size is computed"
        return whole

    def _argument(self, size: sympy.Expr) -> Any:
        return int(size) if size.is_Integer else self.size(size)


def _needed(news: Sequence[Draft | Node], olds: Set[Node], first: Node) -> list[Node]:
    """The direct and indirect operands that come after `first`, in order."""

    def is_before(part: Draft | Node) -> bool:
        return isinstance(part, Node) and part < first

    def operands(part: Draft | Node) -> list[Draft | Node]:
        if isinstance(part, Draft):
            return [] if part.is_input else part.operands
        return [*part.all_input_nodes]

    parts = nearest_first(news, operands, is_before)
    found = [part for part in parts if isinstance(part, Node) and not is_before(part)]
    if (own := next((node for node in found if node in olds), None)) is not None:
        raise NoMatch("the operator would need a value that it computes itself", own)
    return sorted(found)


def _sizes_of(graph: Graph) -> dict[Size, Node]:
    sizes: dict[Size, Node] = {}
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt):
            sizes.setdefault(size_of(value), node)
    return sizes


_EVALUATED: dict[type[Expression], Callable[[Emitter, Any], Any]] = {
    Value: lambda emit, part: part.node,
    Call: Emitter._call,
    Cast: Emitter._cast,
    Inlined: lambda emit, part: emit.inlined(part.function, *map(emit.evaluate, part.args)),
    ByTarget: lambda emit, part: emit.evaluate(part.refusing if emit.refuses_positions else part.skipping),
    ByHoisting: lambda emit, part: emit.evaluate(part.once if emit.hoists else part.each_step),
    Representative: lambda emit, part: emit.evaluate(part.value),
    ViewOf: Emitter._view,
}


Apply = Callable[[Emitter, str, Change], list[Node]]
"""Proves the plan of a rule or a pass, which is named, and applies it. Raises NoMatch, and changes nothing, if the plan
changes a value."""
