"""Operands made of several values: adjacent parts of one tensor, rotary tables, attention in parts, and the masks of
attention scores."""

import contextlib
import functools
import itertools
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from mla_fx.errors import NoMatch
from mla_fx.graph.torch_private import OpOverload
from mla_fx.ops.common.math import nan_where_blind
from mla_fx.readings.attention import Attention
from mla_fx.readings.axes import Axes, Axis, Dims, Index, axes, combine, composite, of_axis, shifted, substitute, whole
from mla_fx.readings.calls import keywords, positional
from mla_fx.readings.causal import CausalByPosition, causal_by_position
from mla_fx.readings.element import Element, element_of, is_coarser, resolve
from mla_fx.readings.logits import Mask, Masked, fill_of
from mla_fx.readings.reading import renamed
from mla_fx.readings.rope import Rope, Table
from mla_fx.readings.sizes import Size, at_most, plain, product

from .materialize import tensor
from .plan import Call, Cast, Expression, Inlined, Representative, Value

aten = torch.ops.aten


def call_with(call: Node, **changes: Any) -> Call:
    """A call with some arguments changed. What has its default is left out, and what follows has its name."""
    assert isinstance(call.target, OpOverload), "the call of an operator"
    given = {**positional(call), **keywords(call), **changes}
    known = call.target._schema.arguments
    kept = [one for one in known if not _has_default(one, given)]
    pairs = zip(kept, known, strict=False)
    count = len(list(itertools.takewhile(lambda pair: pair[0] is pair[1] and not pair[0].kwarg_only, pairs)))
    named = {one.name: _read(given[one.name]) for one in kept[count:]}
    return Call(call.target, *(_read(given[one.name]) for one in kept[:count]), **named)


def _read(value: Any) -> Any:
    """A tensor of the graph with the operation that it is read from."""
    is_tensor = isinstance(value, Node) and isinstance(value.meta["val"], torch.Tensor)
    return Value(value, element_of(value).origin) if is_tensor else value


def _has_default(argument: Any, given: Mapping[str, Any]) -> bool:
    default = argument.default_value
    return bool(argument.has_default_value() and given.get(argument.name, default) == default)


@dataclass(frozen=True)
class Joined:
    """Two adjacent parts of one tensor as one element, read along `axis`, which counts the columns of both."""

    element: Element
    axis: Axis


def joined(first: Element, columns: Axes, second: Element, others: Axes) -> Joined | None:
    """`first` along its columns and then `second` along its own, if they are adjacent in one tensor; else None."""
    (node, left, factor), (other, right, other_factor) = _source(first), _source(second)
    if node is not other or (factor, other_factor) != (1.0, 1.0) or len(columns) > 1 or len(others) > 1:
        return None
    start, stop = (product(axis.size for axis in part) for part in (columns, others))
    axis = Axis(start + stop)
    here, behind = {axis: composite(columns)}, {axis: shifted(composite(others), start)}
    index: list[Index] = []
    for mine, theirs in zip(left, right, strict=True):
        rest = [term for term in mine.terms if term[0].axis not in columns]
        both = combine(mine.offset, [*rest, (whole(axis), _stride(mine, columns, theirs, others))])
        if (substitute(both, here), substitute(both, behind)) != (mine, theirs):
            return None
        index.append(both)
    return Joined(resolve(node, tuple(index)), axis) if sum(axis in part.axes for part in index) == 1 else None


def _stride(mine: Index, columns: Axes, theirs: Index, others: Axes) -> Size:
    """The distance of neighbouring columns in a dimension. If each part has one column, the distance of these two."""
    for part, found in ((mine, columns), (theirs, others)):
        if found:
            return dict(part.terms).get(whole(found[0]), 0)
    distance = plain(theirs.offset - mine.offset)
    return distance if at_most(1, distance) else 0


def joined_parts(one: Element, columns: Axes, other: Element, others: Axes, what: str) -> tuple[Element, Axes]:
    """Two parts as one, and the columns of both. Raises NoMatch if they are not adjacent."""
    whole = joined(one, columns, other, others)
    if whole is None:
        raise NoMatch(f"{what} are {_apart(one, other)}", other.origin)
    return whole.element, (whole.axis,)


def _apart(one: Element, other: Element) -> str:
    if one.origin is other.origin:
        return "not adjacent in one matrix"
    return "two parameters; the operator takes one matrix, which would be a copy of both"


def _source(part: Element) -> tuple[Node, tuple[Index, ...], float]:
    """The node, index and factor of a part: its rounded value if it is rounded, because no rounding may be lost."""
    return part.as_operand if part.roundings else (part.origin, part.index, part.factor)


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


def merged(
    outs: Sequence[Expression],
    lses: Sequence[Expression],
    blanks: Iterable[Expression],
    blank_if_empty: bool,
    sink: Expression | None,
) -> Expression:
    """A call of merge_attention. Rows are NaN that have minus infinity among `blanks`, logarithms of some parts, and if
    `blank_if_empty` rows that no part sees; others that no part sees are zero. A sink has the rest of the shares."""
    call = Call(torch.ops.mla_fx.merge_attention.default, outs, lses)
    value: Expression = Call(operator.getitem, call, 0)
    sums, blanks = Call(operator.getitem, call, 1), list(blanks)
    if sink is not None:
        value = Inlined(_beside_sink, (value, sums, sink))
    if blank_if_empty and not blanks:
        blanks.append(sums)
    for blank in blanks:
        value = Inlined(nan_where_blind, (value, blank))
    return value


def _beside_sink(out: Tensor, lse: Tensor, sink: Tensor) -> Tensor:
    """A sink of minus infinity has no share, not even of rows that no part sees."""
    shares = torch.where(sink == -torch.inf, 1.0, (lse - sink).sigmoid())
    return (out * shares.unsqueeze(-1)).to(out.dtype)


def check_is_causal(found: Attention, s: Axes) -> None:
    """Raises NoMatch unless `is_causal`, if given, counts the tokens of each sequence, and no other mask is present."""
    if found.causal is not None and found.masks:
        raise NoMatch("is_causal is given together with a mask", found.node)
    if found.causal is not None and axes(found.causal.rows, "the query", found.node) != s:
        raise NoMatch("is_causal counts the tokens of several sequences or heads as one sequence", found.node)


def known_causal(found: Masked, b: Axes, s: Axes, dtype: torch.dtype) -> CausalByPosition | None:
    """The number of keys that each row sees, if this describes the masks completely.

    None if this is not known, or if the masks are rounded coarser than `dtype`, in which the operator computes."""
    try:
        for mask in found.masks:
            _check_type(mask, dtype)
        return causal_by_position(found, b, s)
    except NoMatch:
        return None


def counts_from_first(causal: CausalByPosition, s: Axes) -> bool:
    """Whether row s sees exactly the keys t <= s, as `is_causal` means.

    Each row then sees at least one key. Next to it the hidden scores vanish, because the fill of a known causal mask is
    minus infinity or the lowest number of a dtype."""
    if isinstance(causal.position, Element):
        return False
    return plain(causal.position + causal.more - product(axis.size for axis in s)) == 0


def mask_operands(
    found: Masked, causal: CausalByPosition | None, dims: tuple[Axes, Axes, Axes, Axes]
) -> tuple[Expression | None, Expression | None, float | None]:
    """The mask, the context lengths and the fill of hidden scores. At most one of mask and lengths is not None.

    If the masks are known to be causal, they are given as lengths. Otherwise the mask broadcasts to `dims`, the axes of
    sequences, heads, tokens and keys. A fill of None is minus infinity."""
    if causal is not None:
        with contextlib.suppress(NoMatch):  # any mask can still be passed as a tensor
            return None, _context_lens(found, causal, dims[0]), causal.fill
    return joined_masks(found.masks, dims), None, fill_of(found.masks)


def mask_and_lengths(
    found: Masked, dims: tuple[Axes, Axes, Axes, Axes], dtype: torch.dtype
) -> tuple[Expression | None, Expression | None]:
    """The same where hidden scores are minus infinity, for an operator that computes in `dtype`."""
    causal = known_causal(found, dims[0], dims[2], dtype)
    mask, lengths, _ = mask_operands(found, None if causal is None or causal.fill is not None else causal, dims)
    return mask, lengths


def _context_lens(found: Masked, causal: CausalByPosition, b: Axes) -> Expression:
    """The number of keys that the last row of each sequence sees, int64 [B] or [1]."""
    device = found.node.meta["val"].device
    if not isinstance(causal.position, Element):
        return lengths(causal.position + causal.more, device)
    own = causal.position.origin.meta["val"].device
    if own != device:
        raise NoMatch(f"the positions are on {own}, the attention is on {device}", causal.position.origin)
    positions = Cast(tensor(causal.position, (b,)), torch.int64)
    return positions if causal.more == 0 else Call(aten.add.Tensor, positions, causal.more)


def lengths(length: Size, device: torch.device) -> Expression:
    """One length for all sequences, int64 [1]."""
    return Call(aten.full.default, [1], length, dtype=torch.int64, device=device)


def _check_type(mask: Mask, dtype: torch.dtype) -> None:
    """Raises NoMatch if an additive mask is rounded coarser than `dtype`.

    Known as lengths, the added numbers are no longer an operand, so their rounding counts as the program's."""
    dtypes = (mask.element.origin.meta["val"].dtype, *mask.element.roundings)
    if mask.fill is None and any(is_coarser(own, dtype) for own in dtypes):
        raise NoMatch(f"the mask is in {dtypes[0]}, the operator computes in {dtype}", mask.node)


def joined_masks(masks: Sequence[Mask], dims: Dims) -> Expression | None:
    """The masks as one tensor that broadcasts to `dims`, or None without masks.

    If all masks are conditions, it is a condition that is True where a score is kept. Otherwise it is additive."""
    numbers = [mask.element for mask in masks if mask.fill is None]
    visible = _together(aten.logical_and.default, [_visible(mask, dims) for mask in masks if mask.fill is not None])
    added = _together(aten.add.Tensor, [tensor(element, dims) for element in numbers])
    if visible is None or added is None:
        return added if visible is None else visible
    # a masked score is minus infinity, regardless of what is added to it
    dtype = functools.reduce(torch.promote_types, (element.dtype for element in numbers))
    device = numbers[0].origin.meta["val"].device
    return Call(aten.where.self, visible, added, Call(aten.full.default, [], -math.inf, dtype=dtype, device=device))


def _together(combine: object, values: Sequence[Expression]) -> Expression | None:
    return functools.reduce(lambda *both: Call(combine, *both), values) if values else None


def _visible(mask: Mask, dims: Dims) -> Expression:
    condition = tensor(mask.element, dims)
    return condition if mask.keep_where else Call(aten.logical_not.default, condition)
