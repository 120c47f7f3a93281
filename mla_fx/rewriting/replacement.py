"""Values for values: what a rewrite returns, and applying all of it or none."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from mla_fx.errors import NoMatch
from mla_fx.graph.aliasing import stride_readers
from mla_fx.graph.dead_code import erase_unread, unread_without
from mla_fx.graph.provenance import name_of, stand_in
from mla_fx.readings.axes import Index
from mla_fx.readings.calls import args_of
from mla_fx.readings.element import Element, constant, is_coarser
from mla_fx.readings.views import MOVERS

from .emitter import Emitter
from .materialize import axes, fill_memory_alike, laid_out_as, tensor

aten = torch.ops.aten

# What a recognised attention becomes. It reads its operands in whatever layout they come.
ATTENTION = (torch.ops.mla_fx.mla_attention.default, torch.ops.mla_fx.latent_attention.default)

# Operators that read a tensor's shape and type, and none of its values.
LIKE = frozenset(
    {
        aten.empty_like.default, aten.zeros_like.default, aten.ones_like.default, aten.full_like.default,
        aten.new_empty.default, aten.new_zeros.default, aten.new_ones.default, aten.new_full.default,
        aten.new_empty_strided.default, aten.sym_size.int, aten.sym_numel.default,
    }
)  # fmt: skip


# Operators that may overwrite all of their first operand. Whether a call does was decided by the reading of it.
OVERWRITES = frozenset({aten.slice_scatter.default, aten.select_scatter.default, aten.copy.default})


@dataclass(frozen=True)
class Replacement:
    """`new` is used wherever `old` was: the same values, in whatever layout. What reads the old one decides about that
    where it is applied, place by place, so that no rule has to look at readers."""

    old: Node
    new: Node


def replaced(emit: Emitter, old: Node, index: Sequence[Index], element: Element, *, padding: int = 0) -> Replacement:
    """`element` in the place of `old` read at `index`; behind it come `padding` zeros."""
    dims = [axes(part, f"a dimension of {old.name}", old) for part in index]
    new = tensor(emit, element, dims, dtype=element.dtype, expand=True)
    new = emit.cast(new, old.meta["val"].dtype)
    if padding:
        new = emit.call(aten.constant_pad_nd.default, new, [0, padding])
    return Replacement(old, new)


def apply(emit: Emitter, replacements: Sequence[Replacement]) -> list[Node]:
    """Uses every new value for its old one, and erases what nobody reads any more; returns what was erased, in order.

    Raises NoMatch, and changes nothing, if the new values cannot be computed before the first old one is used, or if
    one is read in a way that only the memory of the old one allows."""
    olds = {replacement.old for replacement in replacements}
    unread = unread_without(olds)
    news = [(one.old, _fitting(emit, one, unread)) for one in replacements]
    added = set(emit.added)
    first = min(olds)
    for node in (*_needed(added, olds, first), *emit.added):
        first.prepend(node)
    for old, new in news:
        stand_in(new, old)
        old.replace_all_uses_with(new, delete_user_cb=lambda user: user not in added)
    return erase_unread(olds)


def _fitting(emit: Emitter, one: Replacement, unread: set[Node]) -> Node:
    """The new value in a layout that suits all who read the old one."""
    readers = [user for user in one.old.users if user not in unread and user not in emit.added]
    if all(_takes_any_layout(user, one.old) for user in readers):
        return one.new
    new = laid_out_as(emit, one.old, one.new)
    by_strides = next(stride_readers(one.old), None)
    if by_strides is not None and not fill_memory_alike(one.old, new):
        reason = f"{name_of(by_strides)} reads {one.old.name} by its strides, and would read other elements"
        raise NoMatch(reason, by_strides)
    return new


def _takes_any_layout(user: Node, value: Node) -> bool:
    if user.target is aten.reshape.default:
        return all(_takes_any_layout(further, user) for further in user.users)
    is_row = user.target is aten.slice_scatter.default and value is not args_of(user)[0]
    return is_row or user.target in ATTENTION


def _needed(added: set[Node], olds: set[Node], first: Node) -> list[Node]:
    """The operands, at first and second hand, that stand behind `first`, in order."""
    pending = [operand for node in added for operand in node.all_input_nodes]
    found: set[Node] = set()
    while pending:
        node = pending.pop()
        if node in added or node in found or node < first:
            continue
        if node in olds:
            raise NoMatch("the operator would need a value that it computes itself", node)
        found.add(node)
        pending += node.all_input_nodes
    return sorted(found)


def check_nothing_is_lost(replacements: Iterable[Replacement], sources: set[Node], dtype: torch.dtype) -> set[Node]:
    """All that the old values are computed from enters the new ones, and nothing on the way is rounded coarser than
    the operator rounds, which computes in `dtype`. Raises NoMatch; returns the nodes that it looked at.

    `sources` are the operations from which the operator's operands are read. Between them and the old values lies what
    the patterns have read; this holds whatever they may have overlooked."""
    seen = set(sources)
    lost = _lost([replacement.old for replacement in replacements], seen, dtype)
    if lost is not None:
        raise NoMatch(f"{name_of(lost)} enters the result, and would not enter the operator", lost)
    return seen - sources


def _lost(pending: list[Node], seen: set[Node], dtype: torch.dtype) -> Node | None:
    """The first graph input met behind some nodes that lies behind none of the `seen` ones."""
    while pending:
        node = pending.pop()
        value = node.meta.get("val")
        if node in seen or not _has_elements(value) or node.target in LIKE:
            continue
        seen.add(node)
        if node.op in ("placeholder", "get_attr"):
            if constant(node) is None:
                return node
            continue
        if isinstance(value, torch.Tensor) and is_coarser(value.dtype, dtype) and not _keeps(node, value.dtype):
            raise NoMatch(f"the program rounds to {value.dtype}, the operator only to {dtype}", node)
        if node.target is not aten.cat.default:
            pending += _needed_operands(node)
        elif all(lost := [_lost([piece], seen, dtype) for piece in node.all_input_nodes]):
            return lost[0]  # a cat may have pieces that nobody reads
    return None


def _keeps(node: Node, dtype: torch.dtype) -> bool:
    """The node rounds nothing: its value is a number known at compile time, or a view of what is in the same type."""
    operands = [operand.meta.get("val") for operand in node.all_input_nodes]
    held = {operand.dtype for operand in operands if isinstance(operand, torch.Tensor)}
    return constant(node) is not None or (node.target in MOVERS and held == {dtype})


def _needed_operands(node: Node) -> list[Node]:
    """The operands of a node but what it writes over, unless that was put together by writes itself."""
    if node.target not in OVERWRITES:
        return node.all_input_nodes
    base, *others = node.all_input_nodes
    return [base, *others] if base.target in OVERWRITES else others


def _has_elements(value: object) -> bool:
    if isinstance(value, torch.Tensor):
        return 0 not in value.shape
    return isinstance(value, (tuple, list))
