"""Turns the user's own calls of operators that write caches or outputs in place into calls of the functional operators.

AOTAutograd keeps a graph functional by wrapping an in-place call: `auto_functionalized_v2(form, ..., _all_bases=[...])`
returns the results of that form, followed by the new value of each base, i.e. of each tensor that the form mutates.
After this pass a target sees only the functional form of each operator, whether the user or a rule called it."""

import functools
import operator
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from mla_fx.errors import NoMatch
from mla_fx.graph.schemas import names_of
from mla_fx.graph.torch_private import OpOverload
from mla_fx.ops import catalogue
from mla_fx.ops.common.sizes import statically_known_true
from mla_fx.readings.calls import args_of
from mla_fx.rewriting.draft import Change, Draft
from mla_fx.rewriting.emitter import Apply, Emitter

aten = torch.ops.aten
WRAPPER = torch.ops.higher_order.auto_functionalized_v2

# The wrapper's arguments that describe a view -> the operator that takes that view of a base, and its scatter.
VIEWS: dict[tuple[str, ...], tuple[OpOverload, OpOverload]] = {
    ("slice_dim", "slice_start", "slice_end"): (aten.slice.Tensor, aten.slice_scatter.default),
    ("size", "stride", "storage_offset"): (aten.as_strided.default, aten.as_strided_scatter.default),
}


@dataclass(frozen=True)
class Written:
    """A mutated argument: a view of a base, or the whole base."""

    base: int
    view: tuple[OpOverload, OpOverload] | None
    parts: tuple[Any, ...]

    def read(self, emit: Emitter, base: Node | Draft) -> Node | Draft:
        return base if self.view is None else emit.call(self.view[0], base, *self.parts)

    def write(self, emit: Emitter, base: Node | Draft, value: Node | Draft) -> Node | Draft:
        return value if self.view is None else emit.call(self.view[1], base, value, *self.parts)


def calls_in_place_forms(graph: Graph) -> bool:
    """Whether the graph calls an in-place form. Most graphs have no wrapped calls at all."""
    return any(args_of(node)[0] in _functional() for node in graph.find_nodes(op="call_function", target=WRAPPER))


def functionalize(graph: Graph, apply: Apply) -> Counter[str]:
    """Replace all calls of in-place forms whose writes are results of the functional operator; return why others stay,
    with counts."""
    emit, functional, refusals = Emitter(graph), _functional(), Counter[str]()
    wrapped = graph.find_nodes(op="call_function", target=WRAPPER)
    calls = [(node, functional[form]) for node in wrapped if (form := args_of(node)[0]) in functional]
    calls = [(node, plain) for node, plain in calls if _writes_caches(node, plain) or _writes_all_rows(node)]
    for node, plain in calls:
        try:
            with emit.at(node, "functionalize"):
                apply(emit, "functionalizing", Change.of(_replaced(emit, node, plain), {*node.all_input_nodes}))
        except NoMatch as refusal:
            refusals[f"{plain._opname} stays a call that writes in place: {refusal.reason}"] += 1
    return refusals


@functools.cache
def _functional() -> dict[OpOverload, OpOverload]:
    """The functional operator of each in-place form."""
    found = {}
    for entry in catalogue().values():
        for form, plain in ((entry.inplace, entry.overload), (entry.inplace_host, entry.host)):
            if form is not None and plain is not None:
                found[form] = plain
    return found


def _writes_caches(node: Node, plain: OpOverload) -> bool:
    return set(_written(args_of(node)[0])) <= set(names_of(plain))


def _writes_all_rows(node: Node) -> bool:
    """Whether an attention that writes into an output writes every row of it.

    It leaves the rows of a sequence without context unchanged, so every length must be a positive number, not a node.
    Each sequence then has one row, unless row counts are given."""
    options: dict[str, Any] = dict(node.kwargs)
    lengths, counts = options["context_lens"], options.get("q_seqlen", options.get("q_seq_lens"))
    if isinstance(lengths, Node) or not all(isinstance(length, int) and length > 0 for length in lengths):
        return False
    rows = next(iter(options.values())).meta["val"].shape[0]
    return counts is not None or statically_known_true(rows == len(lengths))


def _written(form: OpOverload) -> list[str]:
    return [argument.name for argument in form._schema.arguments if argument.is_write]


def _replaced(emit: Emitter, node: Node, plain: OpOverload) -> Iterator[tuple[Node, Node | Draft]]:
    """What is read of a wrapped call, and what the functional operator gives instead."""
    form: OpOverload = args_of(node)[0]
    options = dict(node.kwargs)
    bases: list[Node | Draft] = list(options.pop("_all_bases"))  # type: ignore[arg-type]  # a list of nodes, here
    found = {name: _written_argument(options, name) for name in _written(form)}
    places = {name: place for name, place in found.items() if place is not None}
    written = {name: place.read(emit, bases[place.base]) for name, place in places.items()}
    results = _results(emit, plain, options | written)
    for name, place in places.items():
        updated = results.get(f"{name}_out", results.get(name))
        assert updated is not None, "every write is among the functional results"
        bases[place.base] = place.write(emit, bases[place.base], updated)
    kept = [results[result.name] for result in form._schema.returns]
    values: list[Node | Draft | None] = [*kept, *bases] if kept else [None, *bases]
    for user in node.users:
        value = values[args_of(user)[1]]
        assert value is not None, "a call without a result has no readers"
        yield user, value


def _written_argument(options: dict[str, Any], name: str) -> Written | None:
    """Pop the wrapper's arguments that locate the mutated argument `name`; None if that argument is not given."""
    prefix = f"_{name}_"
    parts = {key.removeprefix(prefix): options.pop(key) for key in list(options) if key.startswith(prefix)}
    base = parts.pop("base_index")
    if base is None:
        return None
    if not parts or "alias" in parts:
        return Written(base, None, ())
    return Written(base, VIEWS[tuple(parts)], tuple(parts.values()))


def _results(emit: Emitter, plain: OpOverload, values: dict[str, Any]) -> dict[str, Node | Draft]:
    """The results of the functional operator by name. It takes no output tensor, so that one is not passed to it."""
    arguments, names = plain._schema.arguments, [result.name for result in plain._schema.returns]
    positional = [values[entry.name] for entry in arguments if not entry.kwarg_only]
    options = {entry.name: values[entry.name] for entry in arguments if entry.kwarg_only}
    call = emit.call(plain, *positional, **options)
    if len(names) == 1:
        return {names[0]: call}
    return {name: emit.call(operator.getitem, call, place) for place, name in enumerate(names)}
