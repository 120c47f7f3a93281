"""A layer as the operator graph of a backend, mostly in float64, and the tensors it runs on.

There are two such graphs: AOTAutograd's own, and the one that Inductor makes of it before it compiles."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate, map_arg

from mla_fx.graph.torch_compilers import compile_fx

WIDER = {torch.float32: torch.float64, torch.complex64: torch.complex128}


@dataclass(frozen=True)
class Captured:
    gm: GraphModule
    inputs: tuple[Any, ...]
    mode: FakeTensorMode
    dtype: torch.dtype = torch.float64


@contextlib.contextmanager
def reals_of(dtype: torch.dtype) -> Iterator[None]:
    """Casts of integers to floats: float64 in such a program, float32 in others, as users have it."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64 if dtype == torch.float64 else torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def capture(
    module: torch.nn.Module,
    arguments: tuple[Any, ...],
    *,
    decomposed: bool = False,
    dtype: torch.dtype = torch.float64,
) -> Captured:
    """The inference graph of a layer, or of a graph of Dynamo's, with mutations of inputs as copies."""
    graphs: list[GraphModule] = []
    inputs: list[tuple[Any, ...]] = []

    def inference(gm: GraphModule, *_: Any, **__: Any) -> Any:
        graphs.append(gm)

        def forward(*given: Any) -> Any:
            inputs.append(copies(given))
            return gm(*given)

        return make_boxed_func(forward)

    torch._dynamo.reset()
    backend = _inductor(inference) if decomposed else _plain(inference)
    with torch.no_grad(), reals_of(dtype):
        if isinstance(module, GraphModule):
            backend(module, arguments)(*arguments)
        else:
            torch.compile(module, backend=backend, fullgraph=True, dynamic=False)(*arguments)
    (gm,), (given,) = graphs, inputs
    mode = next(node.meta["val"].fake_mode for node in gm.graph.nodes if isinstance(node.meta.get("val"), Tensor))
    captured = Captured(gm, given, mode, dtype)
    if dtype == torch.float64:
        with reals_of(dtype):
            _widen(captured)
    return captured


def _plain(inference: Callable[..., Any]) -> Callable[..., Any]:
    return aot_autograd(fw_compiler=inference, inference_compiler=inference, keep_inference_input_mutations=True)


def _inductor(inference: Callable[..., Any]) -> Callable[..., Any]:
    return lambda gm, inputs: compile_fx(gm, inputs, inference, {}, None)


def _widen(captured: Captured) -> None:
    """Turn casts to float32 into casts to float64: a narrowing cast is a mutation, not part of a spelling."""
    for node in captured.gm.graph.nodes:
        if node.op == "get_attr":
            attribute = getattr(captured.gm, node.target)
            setattr(captured.gm, node.target, attribute.to(WIDER.get(attribute.dtype, attribute.dtype)))
        node.args, node.kwargs = map_aggregate((node.args, node.kwargs), _wider)
        evaluate(node, captured)


def _wider(value: Any) -> Any:
    return WIDER.get(value, value) if isinstance(value, torch.dtype) else value


def evaluate(node: Node, captured: Captured) -> None:
    """Gives a node the fake value that its operator makes of its operands' fake values."""
    if node.op == "get_attr":
        node.meta["val"] = captured.mode.from_tensor(getattr(captured.gm, node.target))
    if node.op != "call_function":
        return
    args, kwargs = map_arg((node.args, node.kwargs), lambda operand: operand.meta["val"])
    with captured.mode, torch.no_grad():
        node.meta["val"] = node.target(*args, **kwargs)


def copies(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(map(copy_of, inputs))


def copy_of(value: Any) -> Any:
    """A parameter stays one."""
    if isinstance(value, torch.nn.Parameter):
        return torch.nn.Parameter(value.detach().clone(), requires_grad=False)
    return value.clone() if isinstance(value, Tensor) else value


def run(
    gm: GraphModule,
    inputs: tuple[Any, ...],
    instead: dict[Any, Any] | None = None,
    seen: list[Tensor] | None = None,
) -> tuple[Any, ...]:
    """Run a graph node by node, without compiling it to Python first, with other functions `instead` of some operators.
    Intermediate values are put into `seen`."""
    values: dict[Node, Any] = {}
    given = iter(inputs)
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            values[node] = next(given)
        elif node.op == "get_attr":
            values[node] = getattr(gm, node.target)
        elif node.op == "output":
            return tuple(map_arg(node.args[0], values.__getitem__))
        else:
            args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = (instead or {}).get(node.target, node.target)(*args, **kwargs)
            if seen is not None and isinstance(values[node], Tensor):
                seen.append(values[node])
    raise ValueError("a graph ends with its output")
