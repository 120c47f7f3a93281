"""One compilation: options, target, report, and what happens when a pass fails."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import GraphModule

from . import discover
from .capture import recover_floats
from .debug.dump import Dump, graph_text
from .debug.report import PassRecord, Report, count_fused
from .errors import FusionError, MlaWarning, OptionError, VerificationError
from .options import Options, parse
from .pipeline import PIPELINE, Pass, Run, run_pipeline
from .target import Target
from .verify import verified


@dataclass
class Compilation:
    """What is known about one call of the backend; nothing of it outlives the call but the report."""

    options: Options
    target: Target
    report: Report
    keep_text: bool = False
    passes: tuple[Pass, ...] = PIPELINE

    @classmethod
    def prepare(
        cls, example_inputs: Sequence[Any], mode: str | None, given: Mapping[str, Any] | None, *, keep_text: bool
    ) -> Compilation:
        """Checks the options and chooses the target. Raises OptionError."""
        targets = discover.targets()
        given = dict(given or {})
        if given.get("target", "auto") == "auto":
            given["target"] = automatic_target(targets, example_inputs)
        patterns = frozenset(rule.name for rule in discover.rules())
        options = parse(given, targets, patterns)
        target = targets[options.target]
        reason = target.missing()
        if reason is not None:
            raise OptionError(f"target {target.name!r} cannot be used here: {reason}")
        extra = dict(options.extra)
        if mode not in (None, "default"):
            extra.update(target.mode_options(str(mode)))
        return cls(replace(options, extra=extra), target, Report(target=target.name), keep_text)

    def compile(self, gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        if needs_gradients(example_inputs):
            self.report.notes.append("training graph: left alone, mla_fx fuses inference only")
            warnings.warn(
                "mla_fx fuses inference only; a graph that needs gradients is left alone", MlaWarning, stacklevel=2
            )
            return self.target.compile(gm, example_inputs, lambda graph_module: graph_module, self.options)
        original = gm if self.options.verify == "off" else _copy(gm)
        recover_floats(gm)
        compiled = self.target.compile(gm, example_inputs, self.rewrite, self.options)
        if self.options.verify == "off":
            return compiled
        return verified(compiled, original, once=self.options.verify == "first")

    def rewrite(self, gm: GraphModule) -> GraphModule:
        """Runs the passes over an operator graph. Whatever fails in them, the user gets a graph that runs."""
        dump = Dump(self.options.dump) if self.options.dump else None
        run = Run(gm.graph, self.options, discover.rules(), self.report, on_stage=self._recorder(dump))
        try:
            with torch.no_grad():
                run_pipeline(run, self.passes)
                self._lower(gm, run)
        except Exception as error:
            self._fall_back(gm, run, error)
        if run.is_changed:
            gm.recompile()
        if dump is not None:
            dump.finish(self.report)
        self._judge()
        return gm

    def _lower(self, gm: GraphModule, run: Run) -> None:
        """Hands a graph with fused operators, be they the user's own calls, to the target.

        What the target cannot do leaves the user's graph as it came, too."""
        if count_fused(run.graph):
            run.record = PassRecord(f"lower to {self.target.name}")
            run.keep_original()
            self.target.lower(gm)

    def _recorder(self, dump: Dump | None) -> Callable[[str, torch.fx.Graph], None] | None:
        if dump is None and not self.keep_text:
            return None

        def record(name: str, graph: torch.fx.Graph) -> None:
            if dump is not None:
                dump.stage(name, graph)
            if self.keep_text:
                self.report.graphs[name] = graph_text(graph)

        return record

    def _fall_back(self, gm: GraphModule, run: Run, error: Exception) -> None:
        name = run.record.name
        if self.options.strict:
            raise FusionError(f"pass {name!r} failed: {type(error).__name__}: {error}") from error
        if run.original is not None:
            gm.graph = run.original.restore()
            gm.recompile()
        self.report.fused.clear()
        self.report.notes.append(
            f"pass {name!r} failed, the graph was left as it came: {type(error).__name__}: {error}"
        )
        warnings.warn(
            f"mla_fx: pass {name!r} failed with {type(error).__name__}: {error}; the model runs unfused",
            MlaWarning,
            stacklevel=2,
        )

    def _judge(self) -> None:
        """Holds the result against `strict` and `expect`, and tells the user of the nearest miss."""
        expected = self.options.expect
        if expected is not None and dict(expected) != self.report.fused and (self.report.fused or self.report.passes):
            raise FusionError(f"expected {dict(expected)}, fused {self.report.fused}\n{self.report}")
        near = [miss for miss in self.report.misses if miss.suspicious]
        if not near:
            return
        nearest = max(near, key=lambda miss: miss.depth)
        if self.options.strict:
            raise FusionError(f"attention that looks like MLA stays unfused: {nearest}")
        warnings.warn(f"mla_fx: attention that looks like MLA stays unfused: {nearest}", MlaWarning, stacklevel=2)


def automatic_target(targets: Mapping[str, Target], example_inputs: Sequence[Any]) -> str:
    """GE where the inputs live on an NPU and torchair is there, Inductor everywhere else."""
    on_npu = any(isinstance(value, torch.Tensor) and value.device.type == "npu" for value in example_inputs)
    is_ge_here = "ge" in targets and targets["ge"].missing() is None
    return "ge" if on_npu and is_ge_here else "inductor"


def needs_gradients(example_inputs: Sequence[Any]) -> bool:
    tensors = (value for value in example_inputs if isinstance(value, torch.Tensor))
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def through_dynamo(error: Exception) -> Exception:
    """Our own errors reach the user as what they are, not wrapped in BackendCompilerFailed."""
    from torch._dynamo.exc import ShortenTraceback

    if not isinstance(error, (OptionError, FusionError, VerificationError)) or isinstance(error, ShortenTraceback):
        return error
    kind = type(error)
    passing = type(kind.__name__, (ShortenTraceback, kind), {"__module__": kind.__module__})
    wrapped: Exception = passing(*error.args, first_useful_frame=None)
    return wrapped


def _copy(gm: GraphModule) -> GraphModule:
    return GraphModule(gm, copy.deepcopy(gm.graph))
