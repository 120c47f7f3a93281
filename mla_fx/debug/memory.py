"""Memory: what a graph holds at once, and what a report says about it."""

import functools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from mla_fx.graph.provenance import fused_name
from mla_fx.graph.schemas import named_arguments, owners_in, readers
from mla_fx.graph.torch_private import OpOverload

aten = torch.ops.aten
CACHES = frozenset({"kv_cache", "kr_cache", "key_cache", "value_cache"})
TABLES = frozenset({"block_table", "block_tables"})
LOOPS = frozenset({"pointwise", "view_copy", "full", "empty", "copy"})


@dataclass(frozen=True)
class MemoryUse:
    """Bytes of one graph; None if a size is a symbol.

    Temporaries are estimated: the values that the graph computes, each for as long as it is read, in the order of the
    graph. `unfused` are those of the original graph. `calls` counts the operators whose own temporaries are unknown.
    `stands_for` counts the layers of the model if only some of them, `layers`, are in the graph."""

    layers: int
    caches: int | None
    weights: int
    temporaries: int | None
    unfused: int | None
    calls: int
    stands_for: int = 0

    def __str__(self) -> str:
        parts = [f"{readable_size(self.weights / self.layers)} of copies of weights"]
        if self.caches is not None:
            parts.append(f"{readable_size(self.caches / self.layers)} of caches read")
        layers = f"the {self.layers} traced for {self.stands_for}" if self.stands_for > self.layers else self.layers
        sizes = f"memory, per layer of {layers}: {', '.join(parts)}"
        if self.temporaries is None or self.unfused is None:
            return sizes
        beside = " and what operators allocate inside" if self.calls else ""
        peaks = f"temporaries about {readable_size(self.temporaries)}{beside}, unfused {readable_size(self.unfused)}"
        return f"{sizes}; {peaks}"


class Lives:
    """How long the values of a graph live; a view lives as long as its base.

    With `is_fused`, values that a compiler of loops computes where they are read, or writes in place, are not
    counted."""

    def __init__(self, graph: Graph, *, is_fused: bool = False) -> None:
        owners = owners_in(graph)
        unstored = _computed_where_read(owners) | written_in_place(graph, owners) if is_fused else set()
        made = (node for node, base in owners.items() if base is node and node.op == "call_function")
        self._sizes = {node: _size(node.meta.get("val")) for node in made if node not in unstored}
        self._last = _last_reads(owners, unstored)
        self._places = {node: place for place, node in enumerate(owners)}

    def peak(self, nodes: Iterable[Node] | None = None) -> int | None:
        """The most bytes of temporaries that live at once, of those that some nodes compute; None if a size is a
        symbol."""
        sizes = [
            (node, self._sizes[node]) for node in (self._places if nodes is None else nodes) if node in self._sizes
        ]
        if not all(isinstance(size, int) for _, size in sizes):
            return None
        changes = Counter[int]()
        for node, size in sizes:
            changes[self._places[node]] += size
            changes[self._last[node] + 1] -= size
        return max(accumulate(changes[place] for place in sorted(changes)), default=0)


def peak_of_temporaries(graph: Graph, *, is_fused: bool = False) -> int | None:
    """The most bytes that live at once, without the graph's inputs."""
    return Lives(graph, is_fused=is_fused).peak()


def _last_reads(owners: Mapping[Node, Node], unstored: Set[Node]) -> dict[Node, int]:
    """The position at which a value is last read; by the readers of its reader, if that is not stored."""
    last: dict[Node, int] = {}
    for place, node in reversed([*enumerate(owners)]):
        own = owners[node]
        until = last.get(own, place) if own in unstored else place
        for base in (own, *map(owners.__getitem__, node.all_input_nodes)):
            if last.get(base, -1) < until:
                last[base] = until
    return last


def _computed_where_read(owners: Mapping[Node, Node]) -> set[Node]:
    """Values that are computed elementwise and only read elementwise or summed up."""
    loops, stored = set[Node](), set[Node]()
    for node in (node for node, base in owners.items() if base is node):
        if not LOOPS.isdisjoint(_kinds(node)):
            loops.add(node)
        elif not _sums(node):
            stored.update(owners[operand] for operand in node.all_input_nodes)
    return loops - stored


def _sums(node: Node) -> bool:
    """Whether a loop sums something up; on a CPU, that includes a product of single rows or columns."""
    if node.target is not aten.bmm.default:
        return "reduction" in _kinds(node)
    product = node.meta["val"]
    return product.device.type == "cpu" and any(isinstance(size, int) and size == 1 for size in product.shape[1:])


def _kinds(node: Node) -> frozenset[str]:
    """An operator's name and its tags."""
    return _kinds_of(node.target) if isinstance(node.target, OpOverload) else frozenset()


@functools.cache
def _kinds_of(target: OpOverload) -> frozenset[str]:
    return frozenset({target._opname, *(tag.name for tag in target.tags)})


def written_in_place(graph: Graph, owners: Mapping[Node, Node]) -> set[Node]:
    """What is computed from a graph input and copied into it, if nothing reads the old value after that."""
    found = set[Node]()
    for copy in graph.find_nodes(op="call_function", target=aten.copy_.default):
        operands: Any = copy.args[:2]
        old, new = (owners[operand] for operand in operands)
        is_made_of_it = old in (owners[operand] for operand in new.all_input_nodes)
        if is_made_of_it and not any(new < reader for reader in readers(old)):
            found.add(new)
    return found


def _size(value: Any) -> Any:
    values = value if isinstance(value, (tuple, list)) else (value,)
    return sum(part.numel() * part.element_size() for part in values if isinstance(part, Tensor))


def bytes_of_caches(graph: Graph) -> int | None:
    """The most that the fused attentions of a graph read of caches: whole caches, all pages in their tables, or all
    chosen rows. The rows of a prompt together choose all keys."""
    sizes = [size for node in graph.nodes for size, _ in sizes_of_caches(node)]
    return sum(sizes) if all(isinstance(size, int) for size in sizes) else None


def sizes_of_caches(call: Node) -> Iterator[tuple[Any, Any]]:
    """How much of each cache a fused attention reads, and how large that is, in bytes."""
    if not (fused_name(call) or "").endswith("attention"):
        return
    values = {name: node.meta["val"] for name, node in named_arguments(call) if isinstance(node, Node)}
    chosen = None if "weight_uk" in values else values.get("indices")  # those of a prompt are all keys
    pages = next((values[name].numel() for name in TABLES & values.keys()), None)
    for name in CACHES & values.keys():
        cache = values[name]
        read = cache.numel() if pages is None else math.prod(cache.shape[1:]) * pages
        count = read if chosen is None else cache.shape[-1] * chosen.numel()
        yield count * cache.element_size(), _size(cache)


def readable_size(size: float) -> str:
    return f"{size / 2**20:.1f} MiB" if size >= 2**20 else f"{size / 2**10:.1f} KiB"
