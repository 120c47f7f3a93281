"""The state of one graph on its way through the passes, and the type of a pass."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from torch.fx import Graph, GraphModule, Node

from mla_fx.debug.memory import peak_of_temporaries
from mla_fx.debug.report import Report
from mla_fx.graph.torch_private import OpOverload
from mla_fx.options import Options
from mla_fx.passes.hoist import Hoisted
from mla_fx.passes.read_ahead import HostNumbers
from mla_fx.rewriting.cleanup import Snapshot
from mla_fx.rewriting.emitter import Emitter
from mla_fx.rule import Rule
from mla_fx.target import Lowering, Shown, Target

from .fuel import Fuel
from .invariants import OldReaders, old_readers


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
