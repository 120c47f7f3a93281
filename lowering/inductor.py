"""Inductor: fused operators become decompositions that it compiles well, and the rest of the graph stays its own."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from mla_fx.canonical.views import shape_of
from mla_fx.ops import Operator, catalogue
from mla_fx.ops.mla_attention import expanded
from mla_fx.options import Options
from mla_fx.rewrite import Emitter
from mla_fx.target import Compiled, Rewrite, Target

aten = torch.ops.aten


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
            return compile_fx_inner(rewrite(graph_module), inputs, **kwargs)

        with functorch_config.patch(enable_autograd_cache=False):
            return compile_fx(gm, list(example_inputs), inner_compile=inner, config_patches=dict(options.extra) or None)

    def lower(self, gm: GraphModule) -> None:
        """Replaces the fused operators of a graph by their decompositions."""
        operators = {entry.overload: entry for entry in catalogue().values()}
        fused = [
            (node, function)
            for node in gm.graph.nodes
            if node.target in operators and (function := _decomposition(node, operators[node.target])) is not None
        ]
        if not fused:
            return
        emit = Emitter(gm.graph, _decompositions())
        for node, function in fused:
            _replace(emit, node, function, *node.args, **_options(node, function))
        for node in gm.graph.find_nodes(op="call_function", target=aten.mm.default):
            if _is_single_row(node):
                _replace(emit, node, single_row, *node.args)
        gm.graph.eliminate_dead_code()
        gm.recompile()


def _decomposition(node: Node, operator: Operator) -> Callable[..., Any] | None:
    """The plain function that a fused node stands for; None for what must be called at run time.

    That is a choice by sizes, and whatever is quantised: compilers do not keep the roundings in between."""
    if not operator.traceable or any(operand.meta["val"].dtype == torch.int8 for operand in _tensors(node)):
        return None
    if operator.name != "mla_attention":
        return operator.body
    return expanded if isinstance(shape_of(node.args[0])[1], int) else None


def _tensors(node: Node) -> list[Node]:
    return [operand for operand in node.all_input_nodes if isinstance(operand.meta.get("val"), Tensor)]


def _options(node: Node, function: Callable[..., Any]) -> dict[str, Any]:
    return {
        name: value for name, value in node.kwargs.items() if function is not expanded or name != "max_absorbed_tokens"
    }


def _replace(emit: Emitter, node: Node, function: Callable[..., Any], *arguments: Any, **options: Any) -> None:
    with emit.at(node, "lower"):
        results = emit.inline(function, *arguments, **options)
    if isinstance(results, Node):
        node.replace_all_uses_with(results)
    else:
        for user in list(node.users):
            user.replace_all_uses_with(results[user.args[1]])
            node.graph.erase_node(user)
    node.graph.erase_node(node)


def _decompositions() -> dict[Any, Any]:
    """Inductor's own, and a batched product of one as a plain one, for which it has the better kernel."""
    from torch._inductor.decomposition import select_decomp_table

    table = dict(select_decomp_table())
    batched = table.get(aten.bmm.default)

    def bmm(left: Tensor, right: Tensor) -> Tensor:
        if isinstance(left.shape[0], int) and left.shape[0] == 1:
            return torch.mm(left[0], right[0]).unsqueeze(0)
        return NotImplemented if batched is None else batched(left, right)

    table[aten.bmm.default] = bmm
    return table


def _is_single_row(node: Node) -> bool:
    """One row times a weight of 16 bits that lies transposed in memory, as `nn.Linear` keeps it, on a CPU."""
    row, weight = (operand.meta["val"] for operand in node.args[:2])
    is_row = isinstance(row.shape[0], int) and row.shape[0] == 1
    is_half = weight.dtype in (torch.bfloat16, torch.float16) and row.dtype == weight.dtype
    return is_row and is_half and weight.device.type == "cpu" and weight.stride(0) == 1


def single_row(row: Tensor, weight: Tensor) -> Tensor:
    """[1, K] @ [K, N] as N dot products along contiguous memory: at one row nothing but reading the weight costs.

    A long dot product is summed along several streams at once, so that it waits for memory and not for its own sum."""
    inner, columns = weight.shape
    streams = _streams(inner)
    weight_snk = weight.permute(1, 0).reshape(columns, streams, inner // streams).permute(1, 0, 2)
    row_s1k = row.reshape(streams, 1, inner // streams)
    products = (weight_snk[stream].float() * row_s1k[stream].float() for stream in range(streams))
    return functools.reduce(torch.add, products).sum(-1).to(row.dtype).unsqueeze(0)


def _streams(inner: int) -> int:
    """Measured: streams pay from 4096 elements on, up to eight of them, none shorter than 1024."""
    if inner < 4096:
        return 1
    return max(count for count in range(1, 9) if inner % count == 0 and inner // count >= 1024)
