"""Inductor: fused operators become decompositions that it compiles well, and the rest of the graph stays its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.fx import GraphModule, Node

from mla_fx.canonical.views import shape_of
from mla_fx.ops import catalogue
from mla_fx.ops.mla_attention import expanded
from mla_fx.options import Options
from mla_fx.rewrite import Emitter
from mla_fx.target import Compiled, Rewrite, Target


class Inductor(Target):
    name = "inductor"

    def accepts(self) -> frozenset[str]:
        from torch._inductor import config

        return frozenset(config.get_config_copy())

    def mode_options(self, mode: str) -> dict[str, Any]:
        from torch._inductor import list_mode_options

        return list_mode_options(mode)

    def compile(self, gm: GraphModule, example_inputs: Sequence[Any], rewrite: Rewrite, options: Options) -> Compiled:
        """One AOTAutograd pass: compile_fx traces, and the graph is rewritten on its way into the inner compiler.

        AOTAutograd's own cache would answer for a graph before it is rewritten, so it is off; Inductor's cache is keyed
        by the rewritten graph."""
        from torch._functorch import config as functorch_config
        from torch._inductor.compile_fx import compile_fx, compile_fx_inner

        def inner(graph_module: GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
            rewritten = rewrite(graph_module)
            self.lower(rewritten)
            return compile_fx_inner(rewritten, inputs, **kwargs)

        with functorch_config.patch(enable_autograd_cache=False):
            patches = dict(options.extra) or None
            return compile_fx(gm, list(example_inputs), inner_compile=inner, config_patches=patches)  # type: ignore[no-any-return]

    def lower(self, gm: GraphModule) -> None:
        """Replaces the fused operators of a graph by their decompositions."""
        lowered = [node for node in gm.graph.nodes if _decomposition(node) is not None]
        if not lowered:
            return
        from torch._inductor.decomposition import select_decomp_table

        emit = Emitter(gm.graph, select_decomp_table())
        for node in lowered:
            _decompose(node, emit)
        gm.graph.eliminate_dead_code()
        gm.recompile()


def _decomposition(node: Node) -> Any:
    """The plain PyTorch function that a fused node stands for; None for other nodes and for a choice left to run time."""
    operator = next((entry for entry in catalogue().values() if entry.overload is node.target), None)
    if operator is None:
        return None
    if operator.name != "mla_attention":
        return operator.body
    return expanded if isinstance(shape_of(node.args[0])[1], int) else None


def _decompose(node: Node, emit: Emitter) -> None:
    function = _decomposition(node)
    options = {name: value for name, value in node.kwargs.items() if name != "max_absorbed_tokens" or function is not expanded}
    with emit.at(node, "lower"):
        results = emit.inline(function, *node.args, **options)
    if isinstance(results, Node):
        node.replace_all_uses_with(results)
    else:
        for user in list(node.users):
            user.replace_all_uses_with(results[user.args[1]])
            node.graph.erase_node(user)
    node.graph.erase_node(node)
