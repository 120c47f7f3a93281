"""What nobody reads any more once some values are replaced, and erasing it; what writes in place stays."""

from __future__ import annotations

from collections.abc import Iterable

from torch.fx import Node

from .aliasing import written


def unread_without(values: Iterable[Node]) -> set[Node]:
    """What nobody reads once nobody reads these values, themselves included."""
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
    """Erases values, and what led to them, as far as nobody reads it; returns what was erased, in order."""
    pending, erased = sorted(values), []
    while pending:
        node = pending.pop()
        if node._erased or node.users or node.op != "call_function" or written(node):
            continue
        pending += node.all_input_nodes
        node.graph.erase_node(node)
        erased.append(node)
    return sorted(erased)
