"""A mutant as it runs: a graph, its arguments, the number of calls, and what is observed."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx._lazy_graph_module import _LazyGraphModule

from mla_fx.comparing import exact

from .capture import copies, copy_of, run

in_float64 = functools.partial(exact.widened, torch.float64)

ROUNDED = 8  # times

Call = Callable[..., Any]


@dataclass(frozen=True)
class Way:
    """`changes` are made to inputs between two calls: the number of an input, how, and a factor. A `flaw` is an
    operator, and the place and the size of its error."""

    runner: str = "reference"
    calls: int = 1
    changes: tuple[tuple[int, str, float], ...] = ()
    flaw: tuple[str, int, int] | None = None
    has_garbage: bool = False  # inputs may be NaN or infinite, and results computed from that are not compared


@dataclass(frozen=True)
class Program:
    gm: GraphModule
    inputs: tuple[Any, ...]
    way: Way = Way()

    is_rounded: bool = False  # in fewer digits than float64, which then decides what is right

    def held(self) -> dict[str, Tensor]:
        """The tensors that the graph holds itself, as they are now."""
        names = {str(node.target) for node in self.gm.graph.nodes if node.op == "get_attr"}
        held = {name: getattr(self.gm, name) for name in sorted(names)}
        return {name: value for name, value in held.items() if isinstance(value, Tensor)}


@dataclass(frozen=True)
class Seen:
    """The results of all calls, the inputs and held tensors afterwards, and the error that ended it."""

    outputs: tuple[Any, ...]
    inputs: tuple[Any, ...]
    error: str = ""
    held: dict[str, Tensor] = field(default_factory=dict)

    @property
    def left(self) -> tuple[Any, ...]:
        return (*self.inputs, *self.held.values())


def observe(program: Program, call: Call, *, may_raise: bool = False) -> Seen:
    """Run a program as often as it says. Tensors in its graph are restored.

    Only a program that `may_raise` may raise anything but an out-of-range error, which is observed."""
    inputs, outputs, error = copies(program.inputs), [], ""
    held = program.held()
    before = {name: copy_of(value) for name, value in held.items()}
    with torch.no_grad():
        try:
            for number in range(program.way.calls):
                for change in program.way.changes if number else ():
                    _change(inputs, *change)
                outputs += call(*inputs)
        except Exception as failure:
            if not may_raise and not is_out_of_range(failure):
                raise
            error = f"{type(failure).__name__}: {failure}"
        left = {name: copy_of(value) for name, value in held.items()}
        for name, value in held.items():
            value.copy_(before[name])
    return Seen(tuple(outputs), inputs, error, left)


def plainly(program: Program, instead: dict[Any, Any] | None = None) -> Seen:
    """Runs the graph node by node, with other functions `instead` of some operators."""
    return observe(program, lambda *inputs: run(program.gm, inputs, instead))


def _change(inputs: tuple[Any, ...], number: int, how: str, factor: float) -> None:
    """A weight gets other numbers, sometimes in ways that no counter of writes notices."""
    if how == "data":
        inputs[number].data.mul_(factor)
    elif how == "numpy":
        inputs[number].detach().numpy()[...] *= factor
    elif how == "other memory":
        inputs[number].data = inputs[number].data * factor
    else:
        inputs[number].mul_(factor)


def is_out_of_range(error: Exception) -> bool:
    return isinstance(error, IndexError) or ("index" in str(error) and "out of" in str(error))


def widened(program: Program) -> Program:
    """The same program in float64."""
    graph = copy.deepcopy(program.gm.graph)
    for node in graph.nodes:
        node.args, node.kwargs = in_float64((node.args, node.kwargs))
    held = {name: in_float64(value) for name, value in program.held().items()}
    return replace(program, gm=_LazyGraphModule(held, graph), inputs=in_float64(program.inputs))


def rounded_once(exact: Program, like: Seen) -> Iterator[Seen]:
    """What a program in float64 gives for inputs that move by up to half a digit of their dtypes in `like`, at
    random."""
    for inputs in _moved(exact.inputs, like.inputs):
        seen = plainly(replace(exact, inputs=inputs))
        held = {name: _as(value, like.held[name]) for name, value in seen.held.items()}
        outputs, left = (tuple(map(_as, *pair)) for pair in ((seen.outputs, like.outputs), (seen.inputs, like.inputs)))
        yield Seen(outputs, left, seen.error, held)


def rounded_otherwise(program: Program, exact: Program, seen: Seen) -> Iterator[Seen]:
    """What a program may give where its roundings fall otherwise: it is as far from `seen`, its results in float64, as
    it is from them for inputs that move by up to half a digit."""
    for inputs in _moved(program.inputs, program.inputs):
        near = plainly(replace(program, inputs=inputs))
        there = plainly(replace(exact, inputs=in_float64(inputs)))
        if near.error or there.error:
            continue
        held = {name: _shifted(seen.held[name], near.held[name], there.held[name]) for name in seen.held}
        outputs, left = (
            tuple(map(_shifted, *values))
            for values in ((seen.outputs, near.outputs, there.outputs), (seen.inputs, near.inputs, there.inputs))
        )
        yield Seen(outputs, left, "", held)


def _moved(inputs: tuple[Any, ...], like: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    """The inputs, moved at random by up to half a digit of the dtypes of others."""
    random = torch.Generator().manual_seed(0)

    def moved(value: Any, other: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        half = torch.finfo(other.dtype).eps * (torch.rand(value.shape, generator=random) - 0.5)
        result = (value.detach().double() * (1 + half.double())).to(value.dtype)
        result = torch.where(result.isfinite(), result, value.detach())  # the largest number stays one
        return torch.nn.Parameter(result, requires_grad=False) if isinstance(value, torch.nn.Parameter) else result

    for _ in range(ROUNDED):
        yield tuple(map(moved, inputs, like))


def _shifted(exact: Any, near: Any, there: Any) -> Any:
    if not isinstance(near, Tensor) or not near.is_floating_point():
        return near
    return (exact + (near.double() - there)).to(near.dtype)


def _as(value: Any, other: Any) -> Any:
    return value.to(other.dtype) if isinstance(value, Tensor) and isinstance(other, Tensor) else value
