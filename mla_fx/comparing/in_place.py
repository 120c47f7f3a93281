"""Checks a write in place: who reads the memory that it writes must see what it saw before.

As the graph is and as the plan would make it, the calls around one operator run in the order of the graph, on memory
that views really share. What other calls read of it is compared, and what the graph's inputs hold in the end. The
operator itself is any function of its operands: that its two forms compute the same is for its own tests."""

import operator
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from mla_fx.graph.provenance import label_of
from mla_fx.graph.schemas import named_arguments
from mla_fx.graph.torch_private import OpOverload, tree_leaves
from mla_fx.graph.walk import FEW, few_behind
from mla_fx.rewriting.draft import Change, Draft, value_of

from .closeness import apart
from .inputs import TRIES, Inputs
from .interpreter import Interpreter, on_real_tensors
from .region import Region, UncheckedError
from .small_sizes import Numbers, Value

Seen = Mapping[tuple[str, str], Tensor]


def difference(plan: Change) -> str | None:
    """How what is seen of the written graph inputs would change. Raises UncheckedError if that cannot be found out."""
    memory = _Memory(plan)
    with on_real_tensors():
        attempt, before = memory.first_seen()
        try:
            after = memory.seen(attempt, dict(plan.replacements), {*plan.dropped})
        except Exception as error:
            raise UncheckedError(f"the graph does not run: {error}") from error
        for place, seen in before.items():
            sentence = apart(seen, after[place], close=0)
            if sentence is not None:
                return f"{' of '.join(place)}: {sentence}"
    return None


class _Memory:
    """What is seen of some graph inputs around a call whose results are copied to them."""

    def __init__(self, plan: Change) -> None:
        call = plan.olds[0]
        sources = [copy.all_input_nodes[0] for copy in plan.dropped]
        between = {node for copy in plan.dropped for node in _between(copy, {call, *sources})}
        self.around = _Around(call, sources, between)
        self.region = self.around.region()
        self.numbers = Numbers(self.region.values, apart=True)
        self.small = self.region.small(self.numbers)
        names = [result.name for result in call.target._schema.returns]  # type: ignore[union-attr]  # an operator
        self.results = dict(zip(names, tree_leaves(call.meta["val"]), strict=True))

    def first_seen(self) -> tuple[int, Seen]:
        """Return which attempt is the first for whose numbers the program runs, and what is seen then."""
        reason = ""
        for attempt in range(TRIES):
            try:
                return attempt, self.seen(attempt, {}, set())
            except Exception as error:  # PyTorch refuses numbers that are out of range, and sizes that do not fit
                reason = str(error)
        raise UncheckedError(f"the program does not run: {reason}")

    def seen(self, attempt: int, new_of: Mapping[Node, Node | Draft], dropped: Set[Node]) -> Seen:
        inputs = Inputs(self.numbers, self.small, attempt)
        fresh = {name: inputs.like(value) for name, value in self.results.items()}
        values: dict[Value, Any] = {leaf: inputs.drawn(leaf) for leaf in self.region.leaves}
        call = self.around.call
        run = _Run(self.numbers, self.small, values, new_of.get(call, call), fresh)
        seen = self.around.seen(run, new_of, dropped)
        return {place: value.nan_to_num() for place, value in seen}  # any bytes may be read as numbers


class _Around:
    """The calls around one operator: those that run, as those in `between` do, and those that read what these
    compute."""

    def __init__(self, call: Node, sources: Sequence[Node], between: Set[Node]) -> None:
        self.call, self.sources = call, sources
        self.run, self.readers = {call}, set[Node]()
        pending = [*sources, call]
        while pending:
            for user in pending.pop().users.keys() - self.run:
                if user not in between and not _shares_memory(user):
                    self.readers.add(user)
                    continue
                self.run.add(user)
                pending.append(user)

    def region(self) -> Region:
        """Constants are computed; other operands are drawn."""
        calls, leaves = set(self.run), dict.fromkeys(self.sources)

        def visit(operand: Node) -> None:
            if operand in calls or operand in leaves:
                return
            if not _is_constant(operand):
                leaves[operand] = None
                return
            calls.add(operand)
            for further in operand.all_input_nodes:
                visit(further)

        for node in self.run:
            for operand in node.all_input_nodes:
                visit(operand)
        return Region(tuple(leaves), tuple(sorted(calls)))

    def seen(
        self, run: Interpreter, new_of: Mapping[Node, Value], dropped: Set[Node]
    ) -> Iterator[tuple[tuple[str, str], Tensor]]:
        """What each reader reads, while the calls run one after another, and what the inputs hold in the end."""
        shown = self.run.union(self.sources)
        for node in sorted((self.run | self.readers) - dropped):
            if node in self.run:
                run.values[node] = run.run(new_of.get(node, node))
                continue
            for place, operand in enumerate(tree_leaves([node.args, node.kwargs])):
                is_read = place > 0 or not _reads_no_numbers(node)
                if is_read and operand in shown and isinstance(run.values[operand], Tensor):
                    yield (f"operand {place}", node.name), run.values[operand]
                    if node.op == "output":
                        yield (f"the memory of result {place}", node.name), self._shared(run, operand)
        for source in self.sources:
            yield ("the content", label_of(source)), run.values[source]

    def _shared(self, run: Interpreter, value: Node) -> Tensor:
        """Which inputs are in the memory of a value."""
        memories = [run.values[one].untyped_storage().data_ptr() for one in (value, *self.sources)]
        return torch.tensor([memory == memories[0] for memory in memories[1:]], device="cpu")


class _Run(Interpreter):
    """Runs one call as a function of all its operands, which are floating or codes, and of fresh numbers. A view shares
    memory or fails."""

    instead: Mapping[Any, Any] = {}

    def __init__(
        self,
        numbers: Numbers,
        small: Mapping[int, int],
        values: dict[Value, Any],
        call: Value,
        fresh: dict[str, Tensor],
    ) -> None:
        super().__init__(numbers, small, values, torch.bfloat16)
        self.call, self.fresh = call, fresh

    def _result(self, part: Value) -> Any:
        if part is not self.call:
            return super()._result(part)
        schema = part.target._schema  # type: ignore[union-attr]  # an operator
        given = {name: self._operand(value) for name, value in named_arguments(part)}
        read = sum(float(value.double().sum()) for value in given.values() if isinstance(value, Tensor))
        results = {
            name: _made(given.get(name.removesuffix("_out")), fresh, read) for name, fresh in self.fresh.items()
        }
        for argument in schema.arguments:
            if argument.alias_info is not None and argument.alias_info.is_write:
                written = results.get(f"{argument.name}_out", results.get(argument.name))
                given[argument.name].copy_(written)
        kept = [results[result.name] for result in schema.returns]
        return kept if isinstance(value_of(part), (tuple, list)) else kept[0]


def _made(old: Tensor | None, fresh: Tensor, read: float) -> Tensor:
    return (fresh + read if old is None else fresh + read + old / 2).to(fresh.dtype)


def _between(copy: Node, ends: set[Node]) -> set[Node]:
    """A copy and the calls between some values and what it copies."""
    leads = dict.fromkeys(ends, True)

    def visit(node: Node) -> bool:
        if node not in leads:
            leads[node] = False
            operands = [visit(operand) for operand in node.all_input_nodes] if len(leads) < FEW else []
            leads[node] = any(operands)
        return leads[node]

    visit(copy)
    return {node for node, is_between in leads.items() if is_between} - ends


def _is_constant(node: Node) -> bool:
    behind = [node, *few_behind(node)]
    sources = {operand.op for one in behind for operand in one.all_input_nodes}
    return node.op == "call_function" and len(behind) <= FEW and sources <= {"call_function"}


def _reads_no_numbers(node: Node) -> bool:
    """Whether a call reads the size and the dtype of its first operand alone."""
    name = node.target._opname if isinstance(node.target, OpOverload) else ""
    return name == "copy" or name.endswith("_like") or name.startswith("new_")


def _shares_memory(node: Node) -> bool:
    """The pass that writes in place asks the same of `graph.schemas`; the check shares no code with it."""
    if not isinstance(node.target, OpOverload):
        return node.target is operator.getitem
    return any(result.alias_info is not None for result in node.target._schema.returns)
