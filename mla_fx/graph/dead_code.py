"""Dead code after some values are replaced, and its removal; in-place writes stay."""

from __future__ import annotations

from collections.abc import Iterable

from torch.fx import Node

from .aliasing import written


def unread_without(values: Iterable[Node]) -> set[Node]:
    """The values that are unread once these values are unread, including these."""
    unread = {value for value in values if not written(value)}
    pending = list(unread)
    while pending:
        for node in pending.pop().all_input_nodes:
            if node in unread or node.op != "call_function" or not unread.issuperset(node.users):
                continue
            if not written(node):
                unread.add(node)
                pending.append(node)
    return unread


def erase_unread(values: Iterable[Node]) -> list[Node]:
    """Erase values and everything that only they read; return what was erased, in order."""
    pending, erased = sorted(values), []
    while pending:
        node = pending.pop()
        if node._erased or node.users or node.op != "call_function" or written(node):
            continue
        pending += node.all_input_nodes
        node.graph.erase_node(node)
        erased.append(node)
    return sorted(erased)
