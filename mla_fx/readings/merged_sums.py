"""Attention in parts of a context that are merged by sums of exponentials, and not by logarithms, as in flash
attention's loop:

    largest = max(logits),  total = sum(exp(logits - less)),  product = sum(exp(logits - less) * value)

`less` is the largest so far, or another number of each row. With lse, the logarithm of the sum that a softmax of a part
divides by, these are

    total = exp(lse - less),  product = exp(lse - less) * attention

So what is computed from them is a function of attention and its logarithms, and may be a merge of these. The largest is
below lse by 0, where one key has all the weight, to log T, where T keys are alike; a merge does not depend on it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch.fx import Graph, Node

from mla_fx.errors import NoMatch
from mla_fx.graph.provenance import name_of
from mla_fx.graph.walk import unread_without

from .arithmetic import Arithmetic
from .attention import Attention, weighted_by
from .axes import Axis, Index, of_axis
from .calls import operands_of
from .contraction import PRODUCTS, Contraction, contraction, reduced, summed
from .divided_late import SUMS
from .element import Element, readers, resolve
from .log_sum_exp import MOVES
from .merged_parts import Merge, before, merge, merge_before, merges
from .reading import Reading, renamed
from .sizes import Size
from .softmax import EXPONENTIALS, Softmax, difference, exponent, exponential, largest_of
from .views import fresh_index, shape_of

aten = torch.ops.aten

MANY = 2**20  # keys, where their number is a symbol


@dataclass(frozen=True)
class MergedSums(Reading):
    """`parts` of attention, merged at `index` of `node`, where each is read as well. Rows that some of the parts in
    `blanks` do not see are NaN, and if `blank_if_empty` those that no part sees; else they are zero."""

    index: tuple[Index, ...]
    parts: tuple[Attention, ...]
    blanks: frozenset[int]
    blank_if_empty: bool

    @property
    def constants(self) -> tuple[object, ...]:
        return self.blanks, self.blank_if_empty


def weights(graph: Graph) -> Iterator[Node]:
    """The exponentials that are summed, and multiplied by values."""
    for target in EXPONENTIALS:
        for node in graph.find_nodes(op="call_function", target=target):
            read_by = {user.target for user in readers(node, MOVES)}
            if aten.sum.dim_IntList in read_by and not PRODUCTS.isdisjoint(read_by):
                yield node


def ends_of_sums(graph: Graph) -> Iterator[Node]:
    """The last values that arithmetic computes from several products of such weights and values."""
    products = [user for exp in weights(graph) for user in readers(exp, MOVES) if user.target in PRODUCTS]
    return merges(products) if len(products) > 1 else iter(())


def merged_sums(node: Node) -> MergedSums:
    """The nearest merge of sums among a value and those that arithmetic computes it from. Raises NoMatch with the
    reason if there is none."""
    factors = _factors(node)
    found = merge_before(node, lambda node: _alone(merge(node, _Sums(factors=factors))))
    return MergedSums(found.node, found.index, _parts(found), found.blanks, found.blank_if_empty)


def _parts(found: Merge) -> tuple[Attention, ...]:
    return tuple(map(_attention, found.outs))


def _alone(found: Merge) -> Merge:
    """Raise NoMatch if a merge does not replace all that its exponentials are for."""
    if found.cleans:
        raise NoMatch("sums that are infinite or NaN are left out", found.node)
    unread = unread_without([found.node])
    for exp in {exp for part in _parts(found) for exp in _exponentials(part.node)}:
        others = [user for user in readers(exp, MOVES) if user not in unread]
        if others:
            raise NoMatch(f"exponentials that are merged are also read by {name_of(others[0])}", exp)
    return found


def _exponentials(product: Node) -> Iterator[Node]:
    return filter(None, map(exponential, operands_of(product)))


def _attention(product: Element) -> Attention:
    weighted, row = _weighted(product)
    exp = row.exp
    return weighted_by(exp, product.origin, product.index, weighted, Softmax(row.logits, row.keys, zeroes=True))


def _weighted(product: Element) -> tuple[Contraction, _Row]:
    found = contraction(product)
    is_left = found.left.origin.target in EXPONENTIALS
    return found, _Row.of(found.left if is_left else found.right, found.over)


@dataclass(frozen=True)
class _Row:
    """Exponentials along `keys`, all of a row, of `logits - less`."""

    exp: Node
    keys: Axis
    logits: Element
    less: Element

    @classmethod
    def of(cls, weights: Element, over: tuple[Index, ...]) -> _Row:
        exp, keys = weights.origin, over[0].axis if len(over) == 1 else None
        dims = [dim for dim, part in enumerate(weights.index) if keys in part.axes]
        if exp.target not in EXPONENTIALS or keys is None or len(dims) != 1 or weights.factor != 1.0:
            raise NoMatch(f"expected a sum of exponentials over the keys alone, found one of {name_of(exp)}", exp)
        if weights.index[dims[0]] != over[0] or shape_of(exp)[dims[0]] != keys.size:
            raise NoMatch("only some of the exponentials of a row are summed", exp)
        terms = difference(exponent(exp, weights.index))
        if terms is None:
            raise NoMatch("exponentials that are not divided by their sum are of no difference", exp)
        logits, less = terms
        if keys in less.axes or keys not in logits.axes:
            raise NoMatch("what is subtracted before the exponential is not one number of each row", exp)
        return cls(exp, keys, logits, less)


def _factors(end: Node) -> dict[Node, float]:
    """The logits of the exponentials that a value is computed from, and the factor of each; 0 if there are several."""
    found: dict[Node, float] = {}
    for node in before(end):
        for exp in _exponentials(node) if node.target in SUMS else ():
            terms = difference(exponent(exp, fresh_index(exp)))
            if terms is not None:
                factor, plain = terms[0].apart()
                found[plain.node] = factor if found.get(plain.node, factor) == factor else 0.0
    return found


@dataclass
class _Sums(Arithmetic):
    """Arithmetic on attention and its logarithms. Sums of exponentials are computed from these."""

    factors: dict[Node, float] = field(default_factory=dict)
    lses: dict[tuple[object, ...], int] = field(default_factory=dict)
    """The places of logarithms, by what their logits are."""

    names: dict[Size, Index] = field(default_factory=dict)
    """The keys of a context have one name in all sums."""

    distances: dict[int, int] = field(default_factory=dict)
    """How far the largest score is below a logarithm, by their places."""

    scales: tuple[float, ...] = (0.0, 1.0, 1.0, 5.0, 30.0, 1e3, 1e5, 1e8, 1e12)
    rounding: float = 1e-14

    def _computed(self, plain: Element) -> int:
        found = self._sum(plain)
        return super()._computed(plain) if found is None else found

    def _sum(self, plain: Element) -> int | None:
        node = plain.origin
        if node.target in SUMS and any(_exponentials(node)):
            if node.target in PRODUCTS:
                _, row = _weighted(plain)
                given = self._lse(row.logits, row.keys), self.read(row.less), self._leaf(plain)
                return self._add(lambda lse, less, out: (lse - less).exp() * out, given)
            row = _Row.of(*summed(plain))
            above = self._lse(row.logits, row.keys), self.read(row.less)
            return self._add(lambda lse, less: (lse - less).exp(), above)
        call = largest_of(node)
        return None if call is None else self._largest(call, plain.index)

    def _largest(self, call: Node, index: tuple[Index, ...]) -> int | None:
        source, index, over = reduced(call, index)
        logits, keys = resolve(source, index), over[0].axis if len(over) == 1 else None
        factor, plain = logits.apart()
        own = self.factors.get(plain.node, 0.0)
        if keys is None or not (own > 0 and factor > 0):
            return None
        lse, unit = self._lse(plain.times(own), keys), own / factor
        if lse not in self.distances:
            self.distances[lse] = self._add(None, [])
            self.free[self.distances[lse]] = math.log(keys.size if isinstance(keys.size, int) else MANY)
        return self._add(lambda lse, distance: (lse - distance) / unit, [lse, self.distances[lse]])

    def _lse(self, logits: Element, keys: Axis) -> int:
        factor, plain = logits.apart()
        name = self.names.setdefault(keys.size, of_axis(keys))
        key = factor, plain.node, renamed(plain.index, {keys: name})
        if key not in self.lses:
            self.lses[key] = self._add(None, [])
            self.leaves[self.lses[key]] = logits
        return self.lses[key]
