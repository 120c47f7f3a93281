"""Moves work out of the compiled graph that it need not repeat at each step, or that it cannot repeat.

weights    A value that a fused operator reads and that is computed from weights alone, or from constants, is computed
           once and becomes a graph input. It follows its weights (see `LaidOut`), so a newly loaded state takes effect
           from the next call on.
caches     A graph input that an operator or a plain write of rows reads through a reshape, and that is written back
           through one, becomes an input of that shape. A compiler then sees one buffer that is read and written.
numbers    A captured graph would repeat the numbers that the host got in its first run. A target names the operators
           that return such numbers, elements of a tensor [B]. If the graph's inputs determine the tensor, its elements
           become inputs, and a function of the other inputs computes it before each call. All numbers of a graph are
           copied to the host at once.
"""

import contextlib
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate

from mla_fx.errors import NoMatch
from mla_fx.graph.provenance import LAID_OUT, RULE
from mla_fx.graph.schemas import owner, written
from mla_fx.graph.torch_private import OpOverload, detect_fake_mode, has_symbolic_sizes, unknown_number
from mla_fx.readings.calls import args_of
from mla_fx.readings.element import computed_from
from mla_fx.readings.sizes import size_of
from mla_fx.readings.views import RESHAPES, shape_of
from mla_fx.rewriting.draft import Change, Draft
from mla_fx.rewriting.emitter import Apply, Emitter
from mla_fx.rewriting.fake_values import hashable, signature
from mla_fx.rewriting.inline import drafts_of

from .laid_out import LaidOut

aten = torch.ops.aten
PLAIN_WRITES = frozenset({aten.index_put.default, aten.index_copy.default})
FLAT = RESHAPES | {aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims}  # elements stay in their order


@dataclass
class Hoisted:
    """What happens to a compiled graph's inputs before each call: some are viewed, then laid-out values appended."""

    views: dict[int, list[int]] = field(default_factory=dict)
    laid_out: list[LaidOut] = field(default_factory=list)

    def summary(self) -> str:
        """A summary of what was hoisted, for the report; empty if nothing was."""
        weights = [value for value in self.laid_out if value.sources]
        size = sum(value.bytes for value in weights) / 2**20
        parts = (
            (len(weights), "weight", f"laid out once, {size:.1f} MiB"),
            (len(self.laid_out) - len(weights), "constant", "computed once"),
            (len(self.views), "cache", "passed as views"),
        )
        return "; ".join(f"{count} {noun}{'s' * (count > 1)} {what}" for count, noun, what in parts if count)

    def inputs(self, given: Sequence[Any]) -> list[Any]:
        ready = list(given)
        for position, sizes in self.views.items():
            ready[position] = given[position].view(sizes)
        return ready + [value(given) for value in self.laid_out]

    def around(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `compiled`, which takes the prepared inputs, as a function of the original inputs."""
        if not self.views and not self.laid_out:
            return compiled
        return lambda *given: compiled(*self.inputs(given))


def hoist(graph: Graph, weights: Set[Node], apply: Apply) -> Hoisted:
    """Move what can be done before a call out of the graph. `weights` are graph inputs that seldom change. A value
    whose plan is refused is computed at each call."""
    emit, prepared = Emitter(graph), Hoisted()
    _drop_copies(emit, apply)
    places = {node: position for position, node in enumerate(graph.find_nodes(op="placeholder"))}
    written_inputs = {owner(operand) for node in graph.nodes for operand in written(node)}
    for source in written_inputs & places.keys():
        with contextlib.suppress(NoMatch):  # the input keeps its shape
            sizes = _take_viewed(emit, source, apply)
            if sizes is not None:
                prepared.views[places[source]] = sizes
    if not places:
        return prepared
    inputs: dict[int, Draft] = {}
    keys: dict[Node, int] = {}
    calls: dict[Any, int] = {}
    for node, users in _laid_out_values(graph, weights - written_inputs).items():
        key = key_of(node, keys, calls)
        make, sources = function_of(node)
        value = inputs.get(key) or _input(node, drafts_of(make, sources), f"laid_out_{len(inputs)}")
        try:
            apply(emit, "hoisting", Change.of([(node, value)], set(), readers=users))
        except NoMatch:
            continue
        if key not in inputs:
            inputs[key], fake = value, node.meta["val"]
            size = fake.numel() * fake.element_size() if not has_symbolic_sizes(fake) else 0
            prepared.laid_out.append(LaidOut(make, make.code, [places[source] for source in sources], size))
    return prepared


def inputs_of(graph: Graph, operators: Set[str]) -> set[Node]:
    """The graph inputs that calls of the named operators depend on."""
    calls = [node for node in graph.nodes if isinstance(node.target, OpOverload) and node.target._opname in operators]
    return {node for call in calls for node in computed_from(call) if node.op == "placeholder"}


# --- weights ---------------------------------------------------------------------------------------------------------


def _laid_out_values(graph: Graph, weights: Set[Node]) -> dict[Node, list[Node]]:
    """The values computed from weights or constants alone, each with the added operators that read it."""
    still = set(weights)
    found: dict[Node, list[Node]] = {}
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if is_fixed(node) and still.issuperset(node.all_input_nodes):
            still.add(node)
        elif RULE in node.meta:
            for operand in node.all_input_nodes:
                if operand in still and _is_worth_it(operand):
                    found.setdefault(operand, []).append(node)
    return found


def is_fixed(node: Node) -> bool:
    """Whether a call is deterministic and writes nothing. `empty` qualifies: its contents are arbitrary anyway.

    Python's own functions compute sizes, or take one of several results."""
    if not isinstance(node.target, OpOverload):
        return node.target is operator.getitem or isinstance(node.meta.get("val"), torch.SymInt)
    return torch.Tag.nondeterministic_seeded not in node.target.tags and not written(node)


def _is_worth_it(value: Node) -> bool:
    """Whether hoisting a value saves work: reshaping a weight costs nothing at a step."""
    is_computed = isinstance(value.meta["val"], Tensor) and _before_reshapes(value).op == "call_function"
    return is_computed and value.op == "call_function"


def function_of(value: Node) -> tuple[GraphModule, list[Node]]:
    """The computation of a value as a function of the graph inputs it depends on, and these inputs.

    The function's names are its own, so equal computations of different graphs have equal code."""
    nodes = sorted(computed_from(value))
    graph = Graph()
    sources = [node for node in nodes if node.op == "placeholder"]
    copies: dict[Any, Node] = {node: graph.placeholder(f"source_{place}") for place, node in enumerate(sources)}
    for node in nodes:
        if node.op != "placeholder":
            args, kwargs = map_aggregate((node.args, node.kwargs), lambda leaf: copies.get(leaf, leaf))
            copies[node] = graph.create_node(node.op, node.target, args, kwargs)
            copies[node].meta = node.meta
    graph.output(copies[value])
    return GraphModule({}, graph), sources


def _input(node: Node, value: Draft, name: str) -> Draft:
    """What a function computes, as a graph input that the value of a node becomes."""
    fake = node.meta["val"]
    meta = {**node.meta, "val": _of_shape(fake, fake.shape), LAID_OUT: True}
    return Draft(value.target, value.args, value.kwargs, value.value, name, meta, is_input=True)


def key_of(value: Node, keys: dict[Node, int], calls: dict[Any, int]) -> int:
    """A number that is equal for values computed in the same way. Each call behind a value is visited once."""
    for node in sorted({*computed_from(value)} - keys.keys()):
        operands = hashable((args_of(node), node.kwargs), keys.__getitem__)
        keys[node] = calls.setdefault(node if node.op == "placeholder" else (node.target, operands), len(calls))
    return keys[value]


# --- caches ----------------------------------------------------------------------------------------------------------


def _drop_copies(emit: Emitter, apply: Apply) -> None:
    """Read results of added operators directly where the program copies them over a whole tensor: of `cache.copy_(x)`
    the functional graph has a copy, and then one that writes."""
    for copy in emit.graph.find_nodes(op="call_function", target=aten.copy.default):
        source = args_of(copy)[1]
        result = _before_reshapes(source)
        is_added = result.target is operator.getitem and RULE in result.all_input_nodes[0].meta
        if is_added and signature(source.meta["val"]) == signature(copy.meta["val"]):
            with contextlib.suppress(NoMatch):  # the copy stays
                apply(emit, "hoisting", Change.of([(copy, source)], {source}))


def _take_viewed(emit: Emitter, source: Node, apply: Apply) -> list[int] | None:
    """Give an input the shape in which an operator reads it; return that shape, or None if this is not possible.

    Otherwise a compiler would see a view that is copied, written, and copied back through another view."""
    copies = [user for user in source.users if user.target is aten.copy_.default and args_of(user)[0] is source]
    if len(copies) != 1 or not source.meta["val"].is_contiguous():
        return None
    result = _before_reshapes(args_of(copies[0])[1], FLAT)
    view = next((view for view in _views(source) if _is_given(view, result)), None)
    if view is None or view.target not in RESHAPES:
        return None
    for plan in sizes_of_inputs(source.users):
        apply(emit, "hoisting", plan)
    asked = args_of(view)[1]
    sizes = [size if isinstance(size, int) else -1 for size in asked]
    if sizes.count(-1) > 1 or any(user.target not in RESHAPES for user in source.users.keys() - {*copies}):
        return None
    meta = {"val": _of_shape(source.meta["val"], sizes)}
    given = Draft(view.target, (source, asked), {}, view.meta["val"], meta=meta, is_input=True)
    alike = [node for node in _views(source) if node.target in RESHAPES and args_of(node)[1] == asked]
    others = [node for node in source.users if node not in (*copies, *alike)]
    pairs = [(node, given) for node in alike]
    pairs += [(node, Draft(node.target, (given, args_of(node)[1]), {}, node.meta["val"])) for node in others]
    apply(emit, "hoisting", Change.of([*pairs, _written(copies[0], given, result)], {result}))
    return sizes


def _written(copy: Node, given: Draft, result: Node) -> tuple[Node, Draft]:
    """A copy to an input, and the copy to that input in another shape."""
    write = Draft(copy.target, (given, result, *copy.args[2:]), {}, given.value, meta=copy.meta)
    return copy, Draft(aten.view_as.default, (write, args_of(copy)[1]), {}, copy.meta["val"])


def sizes_of_inputs(calls: Iterable[Node]) -> Iterator[Change]:
    """The inputs that hold what some of the calls ask for: sizes."""
    for node in [call for call in calls if call.target is aten.sym_size.int]:
        inputs = node.graph.find_nodes(op="placeholder")
        symbols = (value for value in inputs if isinstance(value.meta["val"], torch.SymInt))
        held = next((value for value in symbols if size_of(value.meta["val"]) == size_of(node.meta["val"])), None)
        if held is not None:
            yield Change.of([(node, held)], {held})


def _of_shape(value: Tensor, sizes: Sequence[int]) -> Tensor:
    """A new tensor like `value` with these sizes. A view would express a symbolic size by nested quotients."""
    rest = math.prod(size for size in sizes if size != -1)
    with detect_fake_mode([value]) or contextlib.nullcontext():
        return value.new_empty([value.numel() // rest if size == -1 else size for size in sizes])


def _before_reshapes(value: Node, reshapes: Set[Any] = RESHAPES) -> Node:
    while value.target in reshapes:
        value = value.all_input_nodes[0]
    return value


def _views(source: Node) -> Iterator[Node]:
    yield source
    for user in source.users:
        if user.target in FLAT:
            yield from _views(user)


def _is_given(view: Node, result: Node) -> bool:
    """Whether an added operator, or a plain write, takes the view and returns its updated form in the same shape."""
    if shape_of(view) != shape_of(result):
        return False
    if result.target in PLAIN_WRITES:
        return args_of(result)[0] is view
    if result.target is not operator.getitem:
        return False
    call = result.all_input_nodes[0]
    return RULE in call.meta and view in call.all_input_nodes


@dataclass
class HostNumbers:
    """The numbers that are appended to a graph's inputs: those at `places` among the elements of all tensors. The
    inputs at `sources` give each tensor."""

    tensors: list[tuple[GraphModule, list[int]]] = field(default_factory=list)
    places: list[int] = field(default_factory=list)

    @property
    def count(self) -> int:
        return len(self.places)

    def summary(self) -> str:
        """A summary for the report; empty if there are none."""
        return f"{self.count} length{'s' * (self.count > 1)} read by the host before each call" if self.count else ""

    def inputs(self, given: Sequence[Any]) -> list[Any]:
        with torch.no_grad():
            rows = [make(*(given[place] for place in sources)) for make, sources in self.tensors]
        numbers = torch.cat(rows).tolist()
        return [*given, *(numbers[place] for place in self.places)]

    def around(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `compiled`, which takes the numbers too, as a function of the original inputs."""
        return (lambda *given: compiled(*self.inputs(given))) if self.tensors else compiled


def read_ahead(graph: Graph, operators: Set[str], apply: Apply) -> HostNumbers:
    """Make the results of the named operators graph inputs, where the other inputs determine them. A result whose plan
    is refused is computed at each call."""
    emit, found, inputs = Emitter(graph), HostNumbers(), graph.find_nodes(op="placeholder")
    calls = [node for node in graph.nodes if isinstance(node.target, OpOverload) and node.target._opname in operators]
    for plan in sizes_of_inputs(graph.nodes) if calls else ():
        with contextlib.suppress(NoMatch):
            apply(emit, "reading ahead", plan)
    keys: dict[Node, int] = {}
    known: dict[Any, int] = {}
    starts: dict[int, int] = {}  # of each tensor among all elements
    elements, added = 0, dict[int, Draft]()
    for call in filter(_is_determined, calls):
        values, position = args_of(call)
        key = key_of(values, keys, known)
        if key not in starts:
            make, sources = function_of(values)
            found.tensors.append((make, [inputs.index(source) for source in sources]))
            starts[key], elements = elements, elements + int(values.meta["val"].shape[0])
        place = starts[key] + position
        number = added.get(place) or _number(call)
        with contextlib.suppress(NoMatch):
            apply(emit, "reading ahead", Change.of([(call, number)], {values}))
            if place not in added:
                added[place] = number
                found.places.append(place)
    return found


def _is_determined(call: Node) -> bool:
    """Whether the graph's inputs determine a number, by PyTorch's own operators: a vendor's may be for graphs only."""
    computed = [source for source in computed_from(args_of(call)[0]) if source.op != "placeholder"]
    return all(is_fixed(source) and getattr(source.target, "namespace", "aten") == "aten" for source in computed)


def _number(call: Node) -> Draft:
    """A number as a graph input. Each has a symbol of its own: equal traces share that of their call."""
    meta = {"val": unknown_number(detect_fake_mode([args_of(call)[0].meta["val"]]))}
    return Draft(call.target, call.args, call.kwargs, call.meta["val"], "length", meta, is_input=True)
