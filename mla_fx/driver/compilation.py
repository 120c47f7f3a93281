"""The driver of one compilation: options, target, passes, judgement, and the fence around all of them.

Before AOTAutograd, floats that `dynamic=True` turned into inputs become numbers again in Dynamo's graph, and the names
of inputs, which AOTAutograd only numbers, are kept."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from mla_fx.comparing.verify import Verification
from mla_fx.debug.recorder import Recorder, tell
from mla_fx.debug.report import Report
from mla_fx.errors import FusionError, MlaWarning, OptionError, VerificationError, first_line
from mla_fx.graph.provenance import INPUT_NAME, code_of, plain_path
from mla_fx.graph.torch_compilers import input_path, is_saving, passing_dynamo, static_inputs
from mla_fx.options import AUTO, Options, parse
from mla_fx.passes.fuel import VARIABLE, Fuel, fuel_of_process
from mla_fx.passes.pipeline import PIPELINE, TRIAGE, run_pipeline
from mla_fx.passes.run import Pass, Run
from mla_fx.passes.triage import may_attend, read_by_products, tell_undecomposed, triage
from mla_fx.rule import Rule
from mla_fx.target import Compiled, Compiler, Target

from . import compile_caches, discovery, report_log

FROM_BEFORE = "from before a graph break"
NOT_COMPILED = "does not compile this graph"


def recover_floats(gm: GraphModule) -> None:
    """Turn epsilons and softmax scales that Dynamo lifted to 0-d inputs into numbers again, under a guard.

    Only if the graph may contain attention, and those alone that enter a product: a temperature of logits may be
    another at each call. Then a new shape recompiles nothing, and a new number recompiles once. If anything fails, the
    graph is unchanged."""
    if not any(map(_is_lifted_float, gm.graph.nodes)) or not may_attend(gm.graph):
        return
    read = read_by_products(gm.graph)
    items = [node for node in gm.graph.nodes if _is_lifted_float(node) and node in read]
    numbers = {node: node.meta["example_value"].node.guard_float(__file__, 0) for node in items}
    for node, number in numbers.items():
        node.replace_all_uses_with(number)
        gm.graph.erase_node(node)
    gm.recompile()


def _is_lifted_float(node: Node) -> bool:
    value = node.meta.get("example_value")
    return node.op == "call_method" and node.target == "item" and isinstance(value, torch.SymFloat)


def input_names(graph: Graph) -> tuple[str, ...]:
    """The names of Dynamo's inputs as the user writes them, `layers.3.self_attn.o_proj.weight`; empty if unknown."""
    paths = (plain_path(input_path(node)) for node in graph.find_nodes(op="placeholder"))
    return tuple(FROM_BEFORE if path.startswith("___stack") else path for path in paths)


def name_inputs(graph: Graph, names: tuple[str, ...]) -> None:
    """Let messages call the inputs of an operator graph by these names, if each input has one."""
    inputs = graph.find_nodes(op="placeholder")
    if len(inputs) != len(names):
        return
    for node, name in zip(inputs, names, strict=True):
        if name:
            node.meta[INPUT_NAME] = name


def checked(given: Mapping[str, Any]) -> Options:
    """Check options as far as possible before there is a graph. Raises OptionError."""
    for fault in discovery.found_targets().faults:
        if fault.name == given.get("target"):
            raise OptionError(str(fault)) from fault.error
    patterns = {rule.name for rule in discovery.rules()} | {fault.name for fault in discovery.found_rules().faults}
    options = parse(given, discovery.targets(), frozenset(patterns))
    reason = None if options.target == AUTO else discovery.targets()[options.target].missing()
    if reason is not None:
        raise OptionError(f"target {options.target!r} cannot be used here: {reason}")
    return options


@dataclass
class Compilation:
    """What is known about one call of the backend; only the report outlives it.

    With `is_dry`, for `explain` on meta tensors or without the target's device, the result is the graph as it was. The
    target's compiler is called only if it needs no values."""

    options: Options
    target: Target
    report: Report
    keep_text: bool = False
    is_dry: bool = False
    passes: tuple[Pass, ...] = PIPELINE
    rules: tuple[Rule, ...] = field(default_factory=discovery.rules)
    is_broken: bool = False
    input_names: tuple[str, ...] = ()
    key: str | None = None
    source: str = ""
    fuel: Fuel = field(default_factory=fuel_of_process)

    @classmethod
    def prepare(cls, example_inputs: Sequence[Any], given: Mapping[str, Any], **rest: Any) -> Compilation:
        """Check the options and choose the target. Raises OptionError."""
        target = _target(given.get("target", AUTO), example_inputs)
        return cls.begin(example_inputs, checked({**given, "target": target}), **rest)

    @classmethod
    def begin(
        cls, example_inputs: Sequence[Any], options: Options, *, keep_text: bool = False, fuel: Fuel | None = None
    ) -> Compilation:
        """Begin with options that were checked before."""
        options = replace(options, target=_target(options.target, example_inputs))
        target = discovery.targets()[options.target]
        is_on_meta = any(isinstance(value, Tensor) and value.is_meta for value in example_inputs)
        is_dry = keep_text and (is_on_meta or target.only_compiles(example_inputs))
        report = Report(target=target.name, made="" if keep_text else f"{datetime.now():%Y-%m-%d %H:%M:%S}")
        compilation = cls(options, target, report, keep_text, is_dry, fuel=fuel or fuel_of_process())
        report_log.remember(compilation.report)
        compilation._tell_faults()
        return compilation

    def compile(self, gm: GraphModule, example_inputs: Sequence[Any]) -> Compiled:
        try:
            recover_floats(gm)
            self.input_names = input_names(gm.graph)
        except Exception as error:
            self._fail("reading Dynamo's graph", error)
        self.key, self.source = self._key(example_inputs), gm.code
        self._check_saved()
        compiled = self.target.compile(gm, example_inputs, self, self.options.extra)
        return gm.forward if self.is_dry else compiled

    def __call__(self, compiler: Compiler) -> Compiler:
        """Return `compiler` with every graph fused first. If it cannot compile a fused graph, it gets the original
        one."""

        def compile_fused(gm: GraphModule, inputs: Sequence[Any], *, is_inference: bool, **given: Any) -> Compiled:
            compile_graph = functools.partial(compiler, gm, is_inference=is_inference, **given)
            if not is_inference:
                self.leave_alone(gm.graph)
                return compile_graph(inputs)
            prepares = self.target.prepares and self.options.lay_out
            run = self.rewrite(gm, weights=_weights(gm) if prepares else None)
            if self.is_dry and not self.target.only_compiles(inputs):
                return gm
            try:
                made = compile_graph(run.fake_inputs(inputs))
                run.on_compiled(f"compiled for {self.target.name}", lambda: self.target.shown(made, gm.graph))
                if self.is_dry:
                    return gm
                compiled = run.around(made)
                return self._verified(run, gm).around(compiled) if run.rewritten is not None else compiled
            except Exception as error:
                if self.is_dry:
                    self.report.notes.append(f"{self.target.name} {NOT_COMPILED}: {first_line(error)}")
                    return gm
                if not run.is_changed:
                    raise
                run.restore(gm)
                self._fail(f"compiling the fused graph for {self.target.name}", error)
                self._judge()
            return compile_graph(inputs)

        return compile_fused

    def rewrite(self, gm: GraphModule, *, weights: Set[Node] | None = None) -> Run:
        """Run the passes over an operator graph. Whatever fails in them, the user gets a graph that runs.

        With `weights`, the graph may need other inputs than it came with; `Run.around` computes them."""
        keeps, fuses = self.keep_text, self.target.fuses_loops
        recorder = Recorder(self.report, self.options.dump, keep_text=keeps, fuses_loops=fuses)
        given = self.options, self.rules, self.report, self.target, weights, self.fuel
        run = Run(gm.graph, *given, on_stage=recorder.stage, on_compiled=recorder.compiled)
        try:
            self.report.code = code_of(gm.graph)
            name_inputs(gm.graph, self.input_names)
            with torch.no_grad():
                run_pipeline(run, (TRIAGE,) if self.is_broken else self.passes)
        except Exception as error:
            run.restore(gm)
            self._fail(f"pass {run.step!r}", error)
        if not run.fused:
            run.restore(gm)  # nothing that is used was fused, so the graph is returned unchanged
            tell_undecomposed(gm.graph, self.report)
        if run.is_changed:
            gm.recompile()
        if self.fuel.is_empty:
            self.report.notes.append(f"{VARIABLE}={self.fuel.limit}: no more rewrites are applied")
        recorder.finish()
        self._judge()
        return run

    def _verified(self, run: Run, gm: GraphModule) -> Verification:
        assert run.original is not None and run.rewritten is not None, "a fused graph has its original"
        unfused, fused = (GraphModule(gm, graph.restore()) for graph in (run.original, run.rewritten))
        options, once = {"target": self.target.name, **self.options.extra}, self.options.verify == "first"
        return Verification(unfused, fused, self.report.verified, once, self.options.dump, options)

    def leave_alone(self, graph: Graph) -> None:
        """Report on a forward graph that needs gradients."""
        self.report.is_training = True
        try:
            triage(graph, self.report, is_inference=False)
        except Exception as error:
            self._fail("checking a training graph", error)
        self._judge()

    def report_weights(self, size: int) -> None:
        self.report.memory = [replace(entry, weights=entry.weights + size) for entry in self.report.memory]

    def _check_saved(self) -> None:
        """Raise OptionError if `aot_compile` asks for something that cannot be saved."""
        if is_saving() and not self.target.is_saved:
            raise OptionError(f"what target {self.target.name!r} compiles cannot be saved by aot_compile")
        if is_saving() and self.options.verify != "off":
            why = "the graph that it compares with cannot be saved"
            raise OptionError(f"option verify does not work with aot_compile: {why}")

    # --- graphs that are kept for later processes --------------------------------------------------------------------

    def _key(self, inputs: Sequence[Any]) -> str | None:
        """The cache key. None when dumping, explaining or verifying, when rewrites are limited, and when passes or
        rules were replaced."""
        is_whole = not self.is_broken and not self.fuel.is_limited
        is_usual = self.passes is PIPELINE and self.rules is discovery.rules() and is_whole
        is_watched = self.keep_text or self.options.dump is not None or self.options.verify != "off"
        is_keepable = is_usual and not is_watched and compile_caches.are_plain(inputs)
        return compile_caches.key(self.options, inputs) if is_keepable else None

    def save_report(self, graph_key: str | None) -> bool:
        """Save the report. If something failed, nothing is cached: it may succeed the next time."""
        if self.key is not None and graph_key is not None and not self.is_broken:
            compile_caches.save(self.report, self.key, self.source, graph_key)
        return not self.is_broken

    def load_report(self, graph_key: str | None) -> bool:
        found = compile_caches.load(self.key, self.source, graph_key) if self.key and graph_key else None
        if found is not None:
            self.use_report(found)
        return found is not None

    def use_report(self, found: Report) -> None:
        """Use the report of a cached graph, and judge it like the original."""
        vars(self.report).update(vars(found), made=self.report.made)
        self._judge()

    # --- the fence ---------------------------------------------------------------------------------------------------

    def _tell_faults(self) -> None:
        """Warn once for each file that cannot be used, unless it is disabled; the others are used."""
        for fault in (*discovery.found_rules().faults, *discovery.found_targets().faults):
            if fault.name in self.options.disable:
                continue
            self.report.notes.append(str(fault))
            if self.options.strict:
                raise FusionError(str(fault)) from fault.error
            self._warn(f"mla_fx: {fault}")

    def _fail(self, what: str, error: Exception) -> None:
        """Handle a failure in this project: one warning, and nothing more is tried."""
        cause = f"{type(error).__name__}: {error}"
        self.is_broken = True
        for entries in (self.report.fused, self.report.pieces, self.report.modules, self.report.memory):
            entries.clear()
        self.report.notes.append(f"{what} failed, the graph is unchanged: {cause}")
        if self.options.strict:
            raise FusionError(f"{what} failed: {cause}") from error
        self._warn(f"mla_fx: {what} failed with {cause}; the model runs unfused")

    def _warn(self, message: str) -> None:
        warnings.warn(message, MlaWarning, stacklevel=3)

    # --- judgement ---------------------------------------------------------------------------------------------------

    def _judge(self) -> None:
        """Tell torch's logs the result, compare it with `expect` and `strict`, and warn about what was not fused."""
        tell(self.report)
        expected = self.options.expect
        if expected is not None and self.report.has_attention and not expected.is_met(self.report.fused):
            raise FusionError(f"expected {expected}, fused {self.report.fused}\n{self.report}")
        if self.report.refuted and self.options.strict:
            raise FusionError(f"a rewrite was wrong and was not made: {self.report.refuted[0]}")
        reason = self._looks_unfused()
        if reason and self.options.strict:
            raise FusionError(f"attention that looks like MLA was not fused: {reason}")
        if self.is_broken:
            return  # the failure itself was already reported
        if self.report.refuted:
            self._warn(f"mla_fx: a rewrite was wrong and was not made: {self.report.refuted[0]}")
        if self.report.is_training:
            self._warn("mla_fx fuses inference only; a graph that needs gradients is left unchanged")
        elif reason:
            self._warn(f"mla_fx: attention that looks like MLA was not fused: {reason}")

    def _looks_unfused(self) -> str:
        """Why a layer that looks like MLA was not fused, or an empty string. What kept a graph from being read comes
        first, because the nearest miss is then only a symptom."""
        near = [miss for miss in self.report.misses if miss.looks_like_mla]
        if self.report.hindrances or not near:
            return "; ".join(self.report.hindrances)
        return str(max(near, key=lambda miss: miss.depth))


def _target(name: str, example_inputs: Sequence[Any]) -> str:
    return name if name != AUTO else automatic_target(discovery.targets(), example_inputs).name


def automatic_target(targets: Mapping[str, Target], example_inputs: Sequence[Any]) -> Target:
    """The target that serves these inputs; a target of last resort only if there is no other."""
    able = [target for target in targets.values() if target.serves(example_inputs) and target.missing() is None]
    if not able:
        raise OptionError(f"no target serves these inputs; known targets are {', '.join(map(repr, targets))}")
    return min(able, key=lambda target: target.is_fallback)


def through_dynamo(error: Exception) -> Exception:
    """Let our own errors reach the user without a BackendCompilerFailed around them."""
    is_ours = isinstance(error, (OptionError, FusionError, VerificationError))
    return passing_dynamo(error) if is_ours else error


def _weights(gm: GraphModule) -> Set[Node]:
    places = static_inputs()
    inputs = gm.graph.find_nodes(op="placeholder")
    return {node for position, node in enumerate(inputs) if position in places}
