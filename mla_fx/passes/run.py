"""The state of one graph on its way through the passes, the type of a pass, and the invariants that hold after each
pass. The checks of these are cheap enough to run always."""

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from mla_fx.debug.memory import peak_of_temporaries
from mla_fx.debug.report import Report
from mla_fx.graph.schemas import owner, readers, written
from mla_fx.graph.torch_private import OpOverload
from mla_fx.options import Options
from mla_fx.passes.hoist import Hoisted, HostNumbers
from mla_fx.readings.views import shape_of
from mla_fx.rewriting.cleanup import Snapshot
from mla_fx.rewriting.emitter import Emitter
from mla_fx.rule import Rule
from mla_fx.target import Lowering, Shown, Target

from .fuel import Fuel

aten = torch.ops.aten

OldReaders = Mapping[Node, Set[Node]]


@dataclass
class Run:
    """The state of one graph on its way through the pipeline.

    `weights` are the graph inputs that seldom change, or None if the compiler accepts only the original inputs.
    `fused` are the fused operators of latent attention after the rules, by name, each with the modules that call it.
    `pieces` are the smaller fused operators. `rewritten` is the graph after the rules, kept for `verify`. `proved`
    says of each kind of plan that was checked why it is refused, or None."""

    graph: Graph
    options: Options
    rules: tuple[Rule, ...]
    report: Report
    target: Target = field(default_factory=Target)
    weights: Set[Node] | None = None
    fuel: Fuel = field(default_factory=Fuel)
    hoisted: Hoisted = field(default_factory=Hoisted)
    numbers: HostNumbers = field(default_factory=HostNumbers)
    step: str = "triage"
    is_done: bool = False
    until_done: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    fired: Counter[str] = field(default_factory=Counter)
    fused: dict[str, list[str]] = field(default_factory=dict)
    pieces: Counter[str] = field(default_factory=Counter)
    original: Snapshot | None = None
    rewritten: Snapshot | None = None
    on_stage: Callable[[str, Graph], None] = lambda name, graph: None
    on_compiled: Callable[[str, Callable[[], Shown | None]], None] = lambda name, show: None
    readers_before: OldReaders = field(default_factory=dict)
    proved: dict[Hashable, str | None] = field(default_factory=dict)
    unfused: int | None = None
    caches: int | None = None
    _emit: Emitter | None = None

    @property
    def emit(self) -> Emitter:
        """The emitter that adds nodes. Its first use saves the original graph."""
        if self._emit is None:
            self.keep_original()
            refuses, hoists = self.target.refuses_positions, self.weights is not None
            self._emit = Emitter(self.graph, refuses_positions=refuses, hoists=hoists)
        return self._emit

    @functools.cached_property
    def lowerings(self) -> Mapping[OpOverload, Lowering]:
        return self.target.lowerings(self.options.extra, prepares=self.weights is not None)

    def keep_original(self) -> None:
        """Save the original graph. Call this before the first change."""
        if self.original is None:
            self.original = Snapshot(self.graph)
            self.readers_before = old_readers(self.graph)
            self.unfused = peak_of_temporaries(self.graph, is_fused=self.target.fuses_loops)

    @property
    def is_changed(self) -> bool:
        return self.original is not None

    def fake_inputs(self, given: Sequence[Any]) -> Sequence[Any]:
        """The fake values of the inputs that the graph takes now. `given` are those of the original inputs."""
        inputs = self.graph.find_nodes(op="placeholder")
        is_same = not self.hoisted.views and len(inputs) == len(given)
        return given if is_same else [node.meta["val"] for node in inputs]

    def around(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `compiled`, which takes the inputs that the graph takes now, as a function of the original ones."""
        return self.numbers.around(self.hoisted.around(compiled))

    def restore(self, gm: GraphModule) -> None:
        """Restore a module's original graph, in which nothing is fused."""
        self.fused = {}
        if self.original is not None:
            self.graph = gm.graph = self.original.restore()
            self.original = self.rewritten = self._emit = None
            self.hoisted, self.numbers = Hoisted(), HostNumbers()
            gm.recompile()


@dataclass(frozen=True)
class Pass:
    """A pass over the graph; one that is optional may be left out, and the graph is right all the same."""

    name: str
    apply: Callable[[Run], None]
    is_optional: bool = False


def old_readers(graph: Graph) -> OldReaders:
    """For each graph input that the program writes: the nodes that read its old value."""
    copies = graph.find_nodes(op="call_function", target=aten.copy_.default)
    return {source: set(readers(source)) for copy in copies if isinstance(source := copy.args[0], Node)}


def check(graph: Graph, originals: Set[Node], readers_before: OldReaders) -> None:
    """Check the invariants. `readers_before` is the result of `old_readers` before the pass.

    Raises RuntimeError if a node precedes one of its operands, if a node that is not in `originals` has no metadata, or
    if a node overwrites a value that is still read, directly or through views."""
    placed: set[Node] = set()
    writes: list[Node] = []
    for node in graph.nodes:
        if not placed.issuperset(node.all_input_nodes):
            operand = next(operand for operand in node.all_input_nodes if operand not in placed)
            raise RuntimeError(f"{node.name} comes before its operand {operand.name}")
        placed.add(node)
        if node in originals or node.op != "call_function":
            continue
        if "val" not in node.meta:
            raise RuntimeError(f"{node.name} was added without metadata: meta['val'] is missing")
        if written(node):
            writes.append(node)
    if writes:
        _check_writes(graph, writes, readers_before)


def _check_writes(graph: Graph, writes: list[Node], readers_before: OldReaders) -> None:
    order = {node: position for position, node in enumerate(graph.nodes)}
    for write in writes:
        for operand in written(write):
            source = owner(operand)
            if source.op != "placeholder" and 0 not in shape_of(operand):
                raise RuntimeError(f"{write.name} writes {source.name}, which is not a graph input")
            for reader in readers_before.get(source, ()):
                if reader is not write and order.get(reader, -1) > order[write]:
                    late = f"{reader.name} still reads its old value"
                    raise RuntimeError(f"{write.name} writes {source.name}, but {late}")
