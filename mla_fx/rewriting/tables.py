"""Rotary tables as operands."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mla_fx.readings.axes import Axis, Dims, Index, axes, of_axis
from mla_fx.readings.reading import renamed
from mla_fx.readings.rope import Rope, Table

from .joined import joined
from .materialize import tensor
from .plan import Call, Expression, Representative

aten = torch.ops.aten


def table(found: Table, pair: Index, outer: Dims, *, expand: bool = False) -> Expression:
    """cos or sin with all columns, [*outer, Dr]: those of the pairs' first elements, then those of the second ones.

    A dimension in which the table is the same has one element, or all of them with `expand`."""
    pairs = axes(pair, "a rotary table", found.node)
    first, second = found.first, found.second
    if len(pairs) == 1:
        other = Axis(pairs[0].size)
        whole_table = joined(first, pairs, renamed(second, {pairs[0]: of_axis(other)}), (other,))
        if whole_table is not None:
            return tensor(whole_table.element, [*outer, [whole_table.axis]], dtype=first.stored.dtype, expand=expand)
    return Call(aten.cat.default, [tensor(half, [*outer, pairs], expand=True) for half in (first, second)], -1)


def tables(
    rotation: Rope | None, names: Sequence[str], outer: Dims, *, equal: Rope | None = None, expand: bool = False
) -> list[Expression | None]:
    """The tables with the given names, each None if there is no rotation.

    They also replace those of `equal`, a rotation by equal tables."""
    if rotation is None:
        return [None for _ in names]
    found: list[Expression] = [table(getattr(rotation, name), rotation.pair, outer, expand=expand) for name in names]
    others: list[Table] = [] if equal is None else [getattr(equal, name) for name in names]
    alike = [(part.first.origin, part.second.origin) for part in others]
    return [*map(Representative, found, alike)] if alike else [*found]
