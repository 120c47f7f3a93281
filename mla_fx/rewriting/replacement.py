"""Replaces values by values: drafts a plan, lays its results out, and checks that no input is lost."""

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field

import torch
from torch.fx import Node

from mla_fx.errors import NoMatch
from mla_fx.graph.provenance import name_of
from mla_fx.graph.schemas import stride_readers
from mla_fx.graph.walk import unread_without
from mla_fx.ops.common.sizes import statically_known_true
from mla_fx.readings.axes import Index, axes
from mla_fx.readings.calls import args_of, named_argument
from mla_fx.readings.constant import constant
from mla_fx.readings.element import is_coarser, is_parameter
from mla_fx.readings.same_value import equal_calls
from mla_fx.readings.views import MOVERS, Place, fresh_index, move

from .draft import Change, Draft
from .emitter import Emitter
from .materialize import fill_memory_alike, laid_out_as, tensor
from .plan import Call, Cast, Computed, Expression, Plan, Replacement

aten = torch.ops.aten

# The operator that replaces a recognised attention. It accepts operands in any layout.
ATTENTION = torch.ops.mla_fx.attention.default


def has_heads(call: Node) -> bool:
    """Whether a call of attention expands keys and values of heads, for which it has weights."""
    return named_argument(call, "weight_uk") is not None


# Operators that read a tensor's shape and dtype, but not its values.
LIKE = frozenset(
    {
        aten.empty_like.default, aten.zeros_like.default, aten.ones_like.default, aten.full_like.default,
        aten.new_empty.default, aten.new_zeros.default, aten.new_ones.default, aten.new_full.default,
        aten.new_empty_strided.default, aten.sym_size.int, aten.sym_numel.default,
    }
)  # fmt: skip


# Operators that may overwrite all of their first operand. Whether a call does was decided when it was read.
OVERWRITES = frozenset({aten.slice_scatter.default, aten.select_scatter.default, aten.copy.default})


def change_of(emit: Emitter, plan: Plan) -> Change:
    """Draft a plan. Raises NoMatch if an operator refuses its operands."""
    replacements = [(one.old, emit.evaluate(one.new)) for one in plan.replacements]
    return Change.of(replacements, plan.sources, plan.exact, differs=bool(plan.differences))


def replacing(old: Node, index: Sequence[Index], part: Computed, *, padding: int = 0) -> Replacement:
    """Replace `old`, read at `index`, by `part`, followed by `padding` zeros in the last dimension."""
    dims = [axes(place, f"a dimension of {old.name}", old) for place in index]
    new: Expression = Cast(tensor(part, dims, expand=True), old.meta["val"].dtype)
    return Replacement(old, Call(aten.constant_pad_nd.default, new, [0, padding]) if padding else new)


def fitted(emit: Emitter, plan: Change) -> Change:
    """The plan with new values in layouts that suit all readers of the old ones.

    Raises NoMatch if an old value is read by its strides and the new one would give other elements."""
    unread = unread_without(plan.olds)
    news = [(old, _fitting(emit, old, new, unread)) for old, new in plan.replacements]
    return Change.of(news, plan.sources, plan.exact, differs=plan.differs)


def _fitting(emit: Emitter, old: Node, new: Draft | Node, unread: Set[Node]) -> Draft | Node:
    is_one = isinstance(old.meta["val"], torch.Tensor)
    if not is_one or all(_takes_any_layout(user, old) for user in old.users if user not in unread):
        return new
    fitting = laid_out_as(emit, old, new)
    by_strides = next(stride_readers(old), None)
    if by_strides is not None and not fill_memory_alike(old, fitting):
        reason = f"{name_of(by_strides)} reads {old.name} by its strides and would read other elements"
        raise NoMatch(reason, by_strides)
    return fitting


def _takes_any_layout(user: Node, value: Node) -> bool:
    if user.target is aten.reshape.default:
        return all(_takes_any_layout(further, user) for further in user.users)
    is_row = user.target is aten.slice_scatter.default and value is not args_of(user)[0]
    return is_row or user.target is ATTENTION


def check_nothing_is_lost(
    olds: Iterable[Node], sources: Set[Node], dtype: torch.dtype, exact: Set[Node] = frozenset()
) -> set[Node]:
    """Check that every input of the old values enters the new ones, and that the program rounds nothing coarser than
    the operator, which computes in `dtype`. Raises NoMatch; returns the nodes that it looked at.

    `sources` are the operations from which the operator's operands are read. Between them and the old values are the
    nodes that the patterns read. The check does not rely on the patterns having overlooked nothing. Those in `exact`
    round nothing."""
    search = _Search(sources, dtype, exact)
    lost = search.lost(list(olds))
    if lost is not None:
        raise NoMatch(f"{name_of(lost)} enters the result but would not enter the operator", lost)
    return search.seen | search.moved


@dataclass(frozen=True)
class _Search:
    """What was met on the way from the old values to the sources: all elements of the nodes in `seen`, some or none of
    those in `moved`."""

    sources: Set[Node]
    dtype: torch.dtype
    exact: Set[Node]
    seen: set[Node] = field(default_factory=set)
    moved: set[Node] = field(default_factory=set)

    def lost(self, pending: list[Node]) -> Node | None:
        """The first graph input reached from the pending nodes without passing a source, or None."""
        while pending:
            node = pending.pop()
            if not _has_elements(node.meta.get("val")):
                continue
            if node.target in LIKE:
                self.moved.add(node)
                continue
            node = self._origin(node)
            if node in self.seen or self._is_source(node):
                continue
            self.seen.add(node)
            if is_parameter(node):
                if constant(node) is None:
                    return node
                continue
            self._check_rounding(node)
            if node.target is not aten.cat.default:
                pending += self._needed_operands(node)
            elif all(lost := [self.lost([piece]) for piece in node.all_input_nodes]):
                return lost[0]  # some pieces of a cat may be unread
        return None

    def _is_source(self, node: Node) -> bool:
        """Whether this is a source, or computes its value again."""
        return node in self.sources or any(equal_calls(node, source) for source in self.sources)

    def _origin(self, node: Node) -> Node:
        """The node that computes the elements of a view, as far as one that is known. What the view does not read of
        the values on the way, such as a base whose row is overwritten, does not enter the result."""
        if not isinstance(node.meta["val"], torch.Tensor):
            return node
        place: Place = node, fresh_index(node)
        while place[0] not in self.seen and place[0] not in self.sources and (origin := move(*place)) is not None:
            self.moved.add(place[0])
            place = origin
        return place[0]

    def _needed_operands(self, node: Node) -> list[Node]:
        """The operands of a node without the base it overwrites, unless that base is itself a result of writes."""
        if node.target not in OVERWRITES:
            return node.all_input_nodes
        base, *others = node.all_input_nodes
        self.moved.add(base)
        return [base, *others] if base.target in OVERWRITES else others

    def _check_rounding(self, node: Node) -> None:
        value = node.meta["val"]
        is_rounded = isinstance(value, torch.Tensor) and is_coarser(value.dtype, self.dtype)
        if is_rounded and node not in self.exact and not _keeps(node, value.dtype):
            raise NoMatch(f"the program rounds to {value.dtype}, the operator only to {self.dtype}", node)


def _keeps(node: Node, dtype: torch.dtype) -> bool:
    """Whether the node rounds nothing: its value is a compile-time constant, or moves data of the same dtype."""
    operands = [operand.meta.get("val") for operand in node.all_input_nodes]
    dtypes = {operand.dtype for operand in operands if isinstance(operand, torch.Tensor)}
    return constant(node) is not None or (node.target in MOVERS and dtypes == {dtype})


def _has_elements(value: object) -> bool:
    if isinstance(value, torch.Tensor):
        return not any(statically_known_true(size == 0) for size in value.shape)
    return isinstance(value, (tuple, list))
