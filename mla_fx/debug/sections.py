"""The nodes of a graph in sections: each layer of the model, and in it each module."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from itertools import groupby

from torch.fx import Node

from mla_fx.graph.aliasing import written
from mla_fx.graph.provenance import module_of

LEAST = 6  # nodes of a section; fewer are not worth a function

Path = tuple[str, ...]


@dataclass(frozen=True)
class Section:
    """Consecutive nodes of one module, some of them in sections of their own."""

    path: Path
    items: tuple[Node | Section, ...]

    @property
    def layer(self) -> str | None:
        """The number of the layer, such as "3" for `model.layers.3.mlp`."""
        return next((part for part in self.path if part.isdecimal()), None)

    def nodes(self) -> Iterator[Node]:
        for item in self.items:
            yield from item.nodes() if isinstance(item, Section) else (item,)


def in_sections(nodes: Sequence[Node]) -> tuple[Node | Section, ...]:
    """Nodes in their order; those of a layer in its section, and those of a module of the layer in one within it.

    A node without a module belongs to that of the node before it, unless it writes something: AOTAutograd writes what
    changed at the end of a graph."""
    paths, last = dict[Node, Path](), Path()
    for node in nodes:
        module = module_of(node)
        last = tuple(module.split(".")) if module else Path() if written(node) else last
        paths[node] = last
    layers = {_layer(path) for path in paths.values()}
    holders = {Path(), *(path[:length] for path in layers for length in range(len(path)))}
    items: list[Node | Section] = []
    for path, group in groupby(nodes, key=lambda node: _layer(paths[node])):
        inside = list(group)
        items += _section(path, _modules(path, inside, paths), len(inside), holders)
    return tuple(items)


def _layer(path: Path) -> Path:
    """The path of the layer that holds a module; of a module in no layer, its own."""
    length = next((place for place, part in enumerate(path, 1) if part.isdecimal()), len(path))
    return path[:length]


def _modules(layer: Path, nodes: Sequence[Node], paths: dict[Node, Path]) -> list[Node | Section]:
    items: list[Node | Section] = []
    for path, group in groupby(nodes, key=lambda node: paths[node][: len(layer) + 1]):
        inside = list(group)
        items += _section(path, inside, len(inside), {layer})
    return items


def _section(path: Path, items: Sequence[Node | Section], count: int, holders: Set[Path]) -> list[Node | Section]:
    """One section, or the items themselves if they are few, or of a module that holds the others."""
    return [*items] if path in holders or count < LEAST else [Section(path, tuple(items))]
