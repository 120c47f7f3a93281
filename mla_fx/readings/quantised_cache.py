"""Latents that a program quantises again whenever it reads its cache: the cache behind them."""

from __future__ import annotations

from torch.fx import Node

from .cache_update import WRITES
from .calls import operands_of

MOST_CALLS = 60  # between a cache and what is read of it; quantising tokens takes about thirty


def cache_behind(value: Node) -> Node | None:
    """The only written cache that a value is computed from; None if there are several, or none is near."""
    pending, seen, found = [value], {value}, list[Node]()
    while pending:
        node = pending.pop()
        if node.target in WRITES and node is not value:
            found.append(node)
            continue
        new = [source for source in operands_of(node) if source not in seen]
        seen.update(new)
        pending += new
        if len(seen) > MOST_CALLS:
            return None
    return found[0] if len(found) == 1 else None
