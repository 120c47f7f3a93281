"""The parts of every reading: where it begins, its operands, and the constants that equal computations share."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from torch.fx import Node

from mla_fx.errors import NoMatch

from .axes import Axis, Index, substitute
from .element import Element

Value = TypeVar("Value")


@dataclass(frozen=True)
class Parts:
    """Something made of elements, indices, other parts, tuples of them, and constants."""

    @classmethod
    @functools.cache
    def names(cls) -> tuple[str, ...]:
        """The parts by name, in order."""
        return tuple(part.name for part in fields(cls))

    @property
    def _parts(self) -> list[Element | Index]:
        found: list[Element | Index] = []
        _collect(self, found)
        return found

    @property
    def elements(self) -> Iterator[Element]:
        return (part for part in self._parts if isinstance(part, Element))


@dataclass(frozen=True)
class Reading(Parts):
    """A computation that was read from `node`."""

    node: Node

    @property
    def constants(self) -> tuple[Any, ...]:
        """What must be equal in two readings of the same computation, besides their operands."""
        return ()

    @property
    def indices(self) -> Iterator[Index]:
        """Every index of the reading, including those of its elements."""
        for part in self._parts:
            yield from (part,) if isinstance(part, Index) else part.indices

    @property
    def scope(self) -> Iterator[Index]:
        """The indices in which all axes are different; a sum within a part of the reading has its own names."""
        return self.indices


def _collect(value: Any, found: list[Element | Index]) -> None:
    if isinstance(value, (Element, Index)):
        found.append(value)
    elif isinstance(value, tuple):
        for item in value:
            _collect(item, found)
    elif isinstance(value, Parts):
        for name in value.names():
            _collect(getattr(value, name), found)


def renamed(value: Value, replacements: Mapping[Axis, Index]) -> Value:
    """A reading, an element or an index with some axes replaced by others."""
    return _renamed(value, replacements)  # type: ignore[no-any-return]  # unchanged if nothing is renamed


def _renamed(value: Any, replacements: Mapping[Axis, Index]) -> Any:
    if isinstance(value, Index):
        index = substitute(value, replacements)
        if index is None:
            raise NoMatch("a dimension is read across a boundary at which a view splits it")
        return index
    if isinstance(value, Element):
        return value.renamed(replacements)
    if isinstance(value, tuple):
        return tuple([_renamed(item, replacements) for item in value])
    if isinstance(value, Parts):
        return type(value)(*[_renamed(getattr(value, name), replacements) for name in value.names()])
    return value
