"""The rewrite as a graph pass for existing pipelines: Inductor's hook, and torchair's hook of the same name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.fx import Graph, GraphModule

from .debug.report import Report
from .driver import compile_caches
from .driver.compilation import Compilation, checked, through_dynamo
from .driver.compile_caches import LOST, CachedReports
from .errors import FusionError, NoMatch, OptionError
from .graph.torch_compilers import GraphPass, is_packaging
from .graph.torch_private import OpOverload
from .options import MODE, OWN
from .passes.fuel import fuel_of_process
from .passes.lower import lowered


class MlaPass(GraphPass):
    """Fuses MLA in an operator graph, in place.

    Use it as `torch._inductor.config.post_grad_custom_pre_pass = mla_fx.MlaPass()`, or as torchair's
    `CompilerConfig().post_grad_custom_pre_pass`, which calls it with `(gm, example_inputs, config)`. It takes the
    options of `mla_backend` except `verify` and a target's own options, because the pass does not compile the graph.
    `target` says for which compiler operators are lowered; Inductor by default. Variables such as MLA_FX_DISABLE are
    read when the pass is made, so that Inductor's cache is keyed by what the pass does."""

    def __init__(self, **options: Any) -> None:
        self._report: Report | None = None
        self._cached = CachedReports(self._use)
        self._options = checked({"target": "inductor", **options})
        if self._options.verify != "off":
            raise OptionError("option verify does not apply to MlaPass, which has no unfused graph to run")
        if theirs := sorted(set(options) - OWN | set(options) & {MODE}):
            names = ", ".join(map(repr, theirs))
            raise OptionError(f"option {names} does not apply to MlaPass; give it to what compiles the graph")

    def __call__(self, graph: Graph | GraphModule, *rest: Any, is_inference: bool | None = None) -> None:
        gm = graph if isinstance(graph, GraphModule) else _module_of(graph)
        inputs = {node.name for node in gm.graph.find_nodes(op="placeholder")}
        if any(name.startswith("tangents_") for name in inputs):
            return  # a backward graph; the warning came with its forward graph
        if is_inference is None:
            is_inference = not any(name.startswith("primals_") for name in inputs)
        compilation = self._prepare(rest[0] if rest else ())
        try:
            if is_inference:
                compilation.rewrite(gm)
                _check_portable(gm.graph, compilation)
            else:
                compilation.leave_alone(gm.graph)
            self._cached.add(compilation.report)
        except Exception as error:
            raise through_dynamo(error) from error.__cause__

    @property
    def report(self) -> Report | None:
        """The report of the last graph. If Inductor took it from its cache, that of its first compilation."""
        self._cached.read()
        return self._report

    def uuid(self) -> str | None:
        """A hash of the options and of the sources of all rules, operators and lowerings.

        `strict` and `expect` are among the options, so a cached graph has met them. None, which disables Inductor's
        cache, if a cached graph would not be dumped, or if the process limits rewrites."""
        if self._options.dump or fuel_of_process().is_limited:
            return None
        self._cached.watch()  # Inductor asks before it looks into its cache
        return compile_caches.key(self._options)

    def _prepare(self, inputs: Sequence[Any]) -> Compilation:
        compilation = Compilation.begin(inputs, self._options)
        self._report = compilation.report
        return compilation

    def _use(self, found: Report | None) -> None:
        """Report on a graph from Inductor's cache, and warn as its first compilation did."""
        compilation = self._prepare(())
        compilation.use_report(found or Report(target=compilation.target.name, notes=[LOST]))

    def __deepcopy__(self, memo: Any) -> MlaPass:
        """The pass itself: Inductor runs copies of its configuration, and the user reads the report of this object."""
        return self

    def __copy__(self) -> MlaPass:
        return self


def _check_portable(graph: Graph, compilation: Compilation) -> None:
    """Raise FusionError for operators that a package of AOTInductor cannot contain, because it runs without
    `mla_fx`."""
    for node in graph.nodes if is_packaging() else ():
        own = next(filter(_is_own, (node.target, *node.args[:1])), None)
        if own is None:
            continue
        why = "it writes its arguments, or takes lengths as numbers"
        lowering = compilation.target.lowerings({}, prepares=False).get(own)
        if lowering is not None:
            try:
                lowered(node, lowering)
            except NoMatch as refusal:
                why = refusal.reason
        raise FusionError(
            f"a package of AOTInductor runs where there is no mla_fx, but the graph calls {own}, which cannot be "
            f"decomposed: {why}"
        )


def _is_own(target: object) -> bool:
    return isinstance(target, OpOverload) and target.namespace == "mla_fx"


def _module_of(graph: Graph) -> GraphModule:
    """The module that owns a graph, or a new one around that graph."""
    owner = graph.owning_module
    if isinstance(owner, GraphModule) and owner.graph is graph:
        return owner
    raise TypeError("MlaPass needs a graph that belongs to a GraphModule; this one does not")
