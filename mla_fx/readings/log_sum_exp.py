"""The logarithm of the sum that a softmax divides by, such as `logsumexp`, or
`largest + log(sum(exp(scores - largest)))`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.fx import Node

from mla_fx.errors import NoMatch
from mla_fx.graph.provenance import name_of
from mla_fx.graph.torch_private import unset_fake_temporarily

from .arithmetic import LOGARITHMS
from .attention import Attention
from .axes import Axis, Index, extent, shifted
from .element import Element, computed_from, computed_with, readers, resolve
from .reading import Reading, renamed
from .row_arithmetic import Rows
from .rows import MOVES, is_product
from .views import fresh_index

aten = torch.ops.aten

NO_LOGARITHM = "expected the logarithm of the sum of exponentials that a softmax divides by"
OTHER_SCORES = "the logarithm is not of the sum that the softmax divides by"


@dataclass(frozen=True)
class LogSumExp(Reading):
    """`log(sum over keys of exp(logits)) / unit`, read at `index` of `node`, at the axes of an attention."""

    index: tuple[Index, ...]
    unit: float
    is_nan: bool = False
    """Rows of minus infinity give NaN, and not minus infinity."""

    @property
    def constants(self) -> tuple[float, ...]:
        return (self.unit,)


def beside(anchor: Node) -> list[Node]:
    """The values computed from the scores of an attention that may be logarithms of the sum it divides by."""
    products = [node for node in computed_from(anchor, is_product) if is_product(node)]
    return logarithms(products)


def logarithms(products: Iterable[Node]) -> list[Node]:
    """`logsumexp`, and sums with a logarithm, that are computed from some products, and from no others of them."""
    found = dict[Node, None]()
    for node in computed_with(products, lambda user: is_product(user) or user.target in LOGARITHMS):
        if node.target is aten.logsumexp.default:
            found[node] = None
        elif node.target in LOGARITHMS:
            found.update(dict.fromkeys(user for user in readers(node, MOVES) if user.target is aten.add.Tensor))
    return list(found)


def log_sum_exp(node: Node, attention: Attention) -> LogSumExp:
    """Read a value as the logarithm of the sum that an attention divides by. Raises NoMatch if it is not that one."""
    if attention.logits is None:
        raise NoMatch("the scores of the attention are no values of the graph", attention.node)
    index, read = fresh_index(node), Rows(end=node)
    place = read.read(resolve(node, index))
    if len(read.lses) != 1 or len(read.leaves) != 1:
        raise NoMatch(NO_LOGARITHM, node)
    unit, is_nan = _evaluated(read, place, node)
    (logits,), (keys,) = read.leaves.values(), read.names.values()
    if logits.origin is not attention.logits.origin:
        one, other = name_of(logits.origin), name_of(attention.logits.origin)
        raise NoMatch(f"{OTHER_SCORES}: it is of {one}, expected {other}", node)
    names = _names(logits, keys, index, attention)
    logits = renamed(logits, names)
    if logits.factor != attention.logits.factor:
        factors = f"{logits.factor:.6g} times the scores, the softmax of {attention.logits.factor:.6g} times these"
        raise NoMatch(f"the logarithm is of the sum for {factors}", node)
    if logits != attention.logits:
        raise NoMatch(OTHER_SCORES, node)
    return LogSumExp(node, renamed(index, names), unit, is_nan)


def _evaluated(read: Rows, place: int, node: Node) -> tuple[float, bool]:
    """The unit of a logarithm, and whether rows of minus infinity give NaN. Raises NoMatch if it is another value."""
    leaves = *read.leaves, *read.free
    with unset_fake_temporarily():
        drawn = read.points(0, 1, leaves)
        cases = drawn.and_where({"lse": -torch.inf}, {"lse": torch.inf}, {"lse": torch.nan})
        found, blind, *unknown = read.value(place, cases, leaves).chunk(4)
        units = [unit for unit in set(LOGARITHMS.values()) if read.is_close(found * unit, drawn.lses[0], drawn)]
        is_nan = bool(blind.isnan().all())
        if not units or not (is_nan or (blind == -torch.inf).all()) or any(value.isfinite().any() for value in unknown):
            raise NoMatch(NO_LOGARITHM, node)
    return units[0], is_nan


def _names(logits: Element, keys: Index, index: tuple[Index, ...], attention: Attention) -> dict[Axis, Index]:
    """The attention's names for the axes of the logarithm at `index`, whose scores lie along the same dimensions."""
    mine, theirs = logits.index, () if attention.logits is None else attention.logits.index
    pairs = zip(mine, theirs, strict=False)
    parts = ((shifted(part, -part.offset), shifted(other, -part.offset)) for part, other in pairs)
    names = {part.axis: other for part, other in parts if part.axis is not None and extent(other) == part.axis.size}
    axes = {axis for part in (*index, *mine) for axis in part.axes}
    is_over_keys = {names.get(axis) for axis in keys.axes} == {attention.keys}
    if len(mine) != len(theirs) or not axes <= names.keys() or not is_over_keys:
        raise NoMatch("the logarithms are of scores in another shape than those of the softmax", logits.origin)
    return names
