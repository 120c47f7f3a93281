"""Traces functions of tensors into the calls that they make."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from mla_fx.graph.schemas import written
from mla_fx.graph.torch_private import make_fx, tree_flatten, tree_unflatten
from mla_fx.readings.calls import args_of

from .draft import Draft, is_value, value_of
from .fake_values import FakeValues, hashable, signature, unshared

aten = torch.ops.aten


class Traces:
    """Functions traced for one graph, once per combination of shapes and options."""

    def __init__(self, fakes: FakeValues) -> None:
        self.fakes = fakes
        self._traced: dict[Any, GraphModule] = {}

    def inlined(
        self, function: Callable[..., Any], args: tuple[Any, ...], options: Mapping[str, Any], decompositions: Any
    ) -> Any:
        """The results of `function` on nodes and drafts, as drafts of the calls in its functional graph."""
        leaves, structure = tree_flatten((args, dict(options)))
        given = [leaf for leaf in leaves if is_value(leaf)]
        values = [value_of(leaf) for leaf in given]
        described = tuple(None if is_value(leaf) else hashable(leaf) for leaf in leaves)
        key = (function, tuple(map(signature, values)), described, structure)
        if key not in self._traced:

            def positional(*given: Any) -> Any:
                rest = iter(given)
                filled = [next(rest) if is_value(leaf) else leaf for leaf in leaves]
                args, kwargs = tree_unflatten(filled, structure)
                return function(*args, **kwargs)

            with self.fakes.faking():
                self._traced[key] = _trace(positional, values, decompositions)
        # a call is the value that it is, if that is so: compilers would copy it
        return drafts_of(self._traced[key], given, lambda draft: unturned(uncut(draft)))


def _trace(function: Callable[..., Any], values: list[Any], decompositions: Any) -> GraphModule:
    from torch.func import functionalize

    # new tensors: an argument passed twice, or two arguments with one fake value, would be traced as one
    given = [unshared(value) if isinstance(value, torch.Tensor) else value for value in values]
    with torch.no_grad():
        traced: GraphModule = make_fx(function, decompositions, tracing_mode="real")(*given)
        if any(map(written, traced.graph.nodes)):  # rare, and functionalizing traces branches three times
            traced = make_fx(functionalize(function), decompositions, tracing_mode="real")(*given)
    traced.graph.eliminate_dead_code()
    return traced


def drafts_of(
    function: GraphModule, given: Sequence[Node | Draft], finish: Callable[[Draft], Any] = lambda draft: draft
) -> Any:
    """The results of a function's graph as drafts, each as `finish` has it, with `given` in place of its inputs."""
    inputs = function.graph.find_nodes(op="placeholder")
    drafts: dict[Node, Any] = dict(zip(inputs, given, strict=True))
    for node in function.graph.nodes:
        if node.op == "output":
            return torch.fx.map_arg(node.args[0], drafts.__getitem__)
        if node.op == "placeholder":
            continue
        if node.op == "get_attr":  # a branch of a conditional
            drafts[node] = Draft(getattr(function, str(node.target)), (), {}, None)
            continue
        assert node.op == "call_function", f"cannot inline a {node.op} node"
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), drafts.__getitem__)
        drafts[node] = finish(Draft(node.target, args, kwargs, node.meta.get("val"), node.name, node.meta))
    raise AssertionError("a graph ends with its output")


def uncut(part: Node | Draft) -> Node | Draft:
    """A node or draft, or the value whose slices it joins again, one after the other: all of it."""
    if part.target is not aten.cat.default:
        return part
    given = [*_arguments(part), part.kwargs.get("dim", 0)]
    pieces, dim = given[0], given[1] % value_of(part).ndim
    source: Node | Draft | None = None
    stop = 0
    for piece in pieces:
        found = _slice(piece, dim)
        if found is None or found[1] != stop or (source is not None and found[0] is not source):
            return part
        source, _, stop = found
    return part if source is None or value_of(source).shape[dim] != stop else source


def _slice(part: Any, dim: int) -> tuple[Node | Draft, int, int] | None:
    """What a value is a slice of along a dimension, with its known beginning and end."""
    if not is_value(part) or part.target is not aten.slice.Tensor or len(_arguments(part)) != 4:  # others have a step
        return None
    source, along, first, last = _arguments(part)
    size = value_of(source).shape[dim]
    if along % value_of(source).ndim != dim or not all(isinstance(number, int) for number in (first, last, size)):
        return None
    return source, first, min(last, size)


def unturned(part: Node | Draft) -> Node | Draft:
    """A node or draft, or the value that it is where its permutation undoes one before: GE would copy it twice."""
    outer = _permutation(part)
    source = part if outer is None else _arguments(part)[0]
    inner = _permutation(source)
    if outer and inner and [inner[dim] for dim in outer] == list(range(len(outer))):
        value: Node | Draft = _arguments(source)[0]
        return value
    return part


def _arguments(part: Node | Draft) -> Any:
    return args_of(part) if isinstance(part, Node) else part.args


def _permutation(part: Node | Draft) -> list[int] | None:
    """The dimension of its operand that each dimension of a value is; None if the call permutes none."""
    if part.target not in (aten.permute.default, aten.transpose.int):
        return None
    rank = value_of(part).ndim
    if part.target is aten.permute.default:
        return [dim % rank for dim in _arguments(part)[1]]
    one, other = (dim % rank for dim in _arguments(part)[1:])
    dims = list(range(rank))
    dims[one], dims[other] = other, one
    return dims
