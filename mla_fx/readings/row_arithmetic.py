"""What is computed from exponentials of rows of attention scores, as a function of few numbers.

    largest = max(logits),  total = sum(exp(logits - less)),  product = sum(exp(logits - less) * value)

`less` is the largest score, or another number of each row. Let lse be the logarithm of the sum that a softmax of the
logits divides by, and the share of a key its probability, exp(logits - lse). Then

    exp(logits - less) = exp(lse - less) * share,  total = exp(lse - less),  product = exp(lse - less) * attention

and what is computed from these is a function of lse and of shares, or of attention. The largest is below lse by 0,
where one key has all the weight, to log T, where T keys are alike."""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.fx import Node

from mla_fx.errors import NoMatch, attempt
from mla_fx.graph.provenance import name_of

from .arithmetic import EXPONENTIALS, LOG_SOFTMAX, SOFTMAX, Arithmetic, are_few
from .axes import Axis, Index, fresh, of_axis, one_axis
from .bounds import bounded
from .calls import args_of
from .conditions import NOT
from .contraction import SUMS, Contraction, reduced
from .element import Element, element_of, operand, resolve
from .merged_parts import before
from .reading import renamed
from .rows import (
    OVER_OTHERS,
    Row,
    Ways,
    apart,
    difference,
    exponentials,
    is_total,
    largest_of,
    summed_row,
    weighted_row,
)
from .sizes import Size

aten = torch.ops.aten

EXPONENTIATE = SOFTMAX | LOG_SOFTMAX | {aten.logsumexp.default}
MANY = 2**20  # keys, where their number is a symbol
ANY = frozenset({aten.any.dim, aten.any.dims})


@dataclass(kw_only=True)
class Rows(Arithmetic):
    """Arithmetic on attention, or on the shares of `keys`, and on logarithms."""

    end: Node
    keys: Axis | None = None
    are_several: bool = False
    """Whether other rows may be read, too, as those of other parts."""

    outs: list[int] = field(default_factory=list)
    """The places of shares, or of attention, and their rows and products."""

    rows: list[Row] = field(default_factory=list)
    products: list[Contraction] = field(default_factory=list)
    factors: dict[Node, float] = field(default_factory=dict)
    """The factors of logits that are exponentiated."""

    lses: dict[tuple[object, ...], int] = field(default_factory=dict)
    """The places of logarithms, by what their logits are."""

    names: dict[Size, Index] = field(default_factory=dict)
    """The keys of a context have one name in all sums."""

    distances: dict[int, int] = field(default_factory=dict)
    """How far the largest score is below a logarithm, by their places."""

    peaks: dict[int, int] = field(default_factory=dict)
    """The places of largest scores, and those of their logarithms."""

    ones: set[int] = field(default_factory=set)
    """The places of sums that are 1 or more: the largest score was subtracted."""

    scales: tuple[float, ...] = (0.0, 1.0, 1.0, 5.0, 30.0, 1e3, 1e5, 1e8, 1e12)
    rounding: float = 1e-14

    def _computed(self, plain: Element) -> int:
        found = self._of_row(plain)
        return super()._computed(plain) if found is None else found

    def _of_row(self, plain: Element) -> int | None:
        node = plain.origin
        if self.keys in plain.axes and (node.target in EXPONENTIALS or node.target in SOFTMAX):
            assert self.keys is not None, "the axis of an element"
            return self._weighted(Row.of(plain, (of_axis(self.keys),)), plain)
        if is_total(node):
            return self._summed(plain)
        if node.target in SUMS and exponentials(node):
            return self._multiplied(plain)
        if node.target is aten.logsumexp.default:
            return self._logarithm(plain)
        if node.target in ANY:
            return self._sees(plain)
        call = largest_of(node)
        return None if call is None else self._largest(call, plain)

    def _leaf(self, plain: Element) -> int:
        if self.keys is not None and plain.dtype is torch.bool:
            raise NoMatch("the attention probabilities are replaced under a condition", plain.origin)
        if self.keys in plain.axes:
            raise NoMatch(f"expected a softmax, found {name_of(plain.origin)}", plain.origin)
        return super()._leaf(plain)

    def _weighted(self, row: Row, plain: Element) -> int:
        """Shares, or attention, times exp(lse - less)."""
        self.rows.append(row)
        self.outs.append(super()._leaf(plain))
        return self._add(torch.mul, [self._exponential(row), self.outs[-1]])

    def _multiplied(self, plain: Element) -> int | None:
        """A product with exponentials of scores, and not of few numbers that are stacked."""
        is_written_out = plain.origin.target is aten.sum.dim_IntList
        found = attempt(weighted_row, plain) if is_written_out else weighted_row(plain)
        if found is None or are_few(found[1].logits, (of_axis(found[1].columns.whole),)):
            return None
        product, row = found
        self.products.append(product)
        return self._weighted(row, plain)

    def _summed(self, plain: Element) -> int:
        factor, row = summed_row(plain)
        place = self._exponential(row)
        if factor != 1.0:
            return self._add(functools.partial(operator.mul, factor), [place])
        if self.peaks.get(self._less(row.less)) == self._lse(row.logits, row.columns.whole):
            self.ones.add(place)
        return place

    def _switch(self, node: Node, given: Sequence[int]) -> None:
        """A sum that is 1 or more is never below a number up to 1."""
        limited = bounded(node) if given[0] in self.ones else None
        if limited is not None and limited[1].high == math.inf and limited[1].low <= 1:
            return
        super()._switch(node, given)

    def _exponential(self, row: Row) -> int:
        lse = self._lse(row.logits, row.columns.whole)
        power = self._add(torch.sub, [lse, self._less(row.less)])
        if row.are_shares:
            power = self._add(torch.sub, [power, power])
        exp = self._add(functools.partial(_exponential, row.node.meta["val"].dtype), [power])
        is_safe = row.node.target is aten._safe_softmax.default
        return self._add(torch.nan_to_num, [exp]) if is_safe else exp

    def _less(self, less: tuple[Ways, ...]) -> int:
        return self._total([self._either(ways) for ways in less])

    def _either(self, ways: Ways) -> int:
        """One of these sums, whatever the condition between them is."""
        one, *others = (self._total(list(map(self.read, way))) for way in ways)
        for other in others:
            flag = self._add(None, [])
            self.free[flag] = 1.0
            one = self._add(lambda flag, one, other: torch.where(flag > 0.5, one, other), [flag, one, other])
        return one

    def _total(self, places: Sequence[int]) -> int:
        return places[0] if len(places) == 1 else self._add(_total, places)

    def _logarithm(self, plain: Element) -> int | None:
        source, index, over = reduced(plain.origin, plain.index)
        raised, keys = resolve(source, index), one_axis(over)
        if are_few(raised, over):
            return None
        if keys is None:
            raise NoMatch(OVER_OTHERS, plain.origin)
        logits, less = apart(raised, keys)
        return self._add(torch.sub, [self._lse(logits, keys), self._less(less)])

    def _largest(self, call: Node, plain: Element) -> int | None:
        source, index, over = reduced(call, plain.index)
        raised, keys = resolve(source, index), one_axis(over)
        if keys is None or are_few(raised, over):
            return None
        logits, less = apart(raised, keys)
        factor, scores = logits.apart()
        own = self._factor_of(scores.node)
        if own * factor <= 0:
            return self._leaf(plain)
        lse, unit = self._lse(scores.times(own), keys), own / factor
        if lse not in self.distances:
            self.distances[lse] = self._add(None, [])
            self.free[self.distances[lse]] = math.log(keys.size if isinstance(keys.size, int) else MANY)
        given = lse, self.distances[lse], self._less(less)
        place = self._add(lambda lse, distance, less: (lse - distance) / unit - less, given)
        if unit == 1.0 and not less:
            self.peaks[place] = lse
        return place

    def _factor_of(self, logits: Node) -> float:
        """The factor with which logits are exponentiated, which may be read later; 0 if they are not."""
        if logits not in self.factors:
            for element in itertools.chain.from_iterable(map(_logits_in, before(self.end))):
                factor, plain = element.apart()
                self.factors.setdefault(plain.node, factor)
        return self.factors.setdefault(logits, 0.0)

    def _sees(self, plain: Element) -> int | None:
        """Whether any of the logits is not minus infinity."""
        source, index, over = reduced(plain.origin, plain.index)
        tested, is_negated = operand(source, index), False
        while tested.origin.target in NOT:
            tested, is_negated = operand(args_of(tested.node)[0], tested.index), not is_negated
        if tested.origin.target is not (aten.eq.Scalar if is_negated else aten.ne.Scalar) or len(over) != 1:
            return None
        value, number = args_of(tested.node)[:2]
        if number != -math.inf or over[0].axis is None:
            return None
        lse = self._lse(operand(value, tested.index), over[0].axis)
        return self._add(lambda lse: lse != -math.inf, [lse])

    def _lse(self, logits: Element, keys: Axis) -> int:
        factor, plain = logits.apart()
        name = self.names.setdefault(keys.size, fresh(keys.size))
        key = factor, plain.node, plain.roundings, renamed(plain.index, {keys: name})
        self.factors.setdefault(plain.node, factor)
        if key not in self.lses:
            if self.lses and not self.are_several:
                raise NoMatch("a sum or a maximum beside exponentials is of other scores", plain.origin)
            self.lses[key] = self._add(None, [])
            self.leaves[self.lses[key]] = renamed(logits, {keys: name})
        return self.lses[key]


def _logits_in(node: Node) -> Iterator[Element]:
    """What may be the logits in the power of a call: all of it, and what remains without numbers of a row."""
    if node.target in SUMS:
        yield from itertools.chain.from_iterable(map(_logits_in, exponentials(node)))
    if node.target not in EXPONENTIALS and node.target not in EXPONENTIATE:
        return
    raised = element_of(args_of(node)[0]).times(EXPONENTIALS.get(node.target, 1.0))
    yield raised
    while (found := attempt(difference, raised)) is not None:
        raised, _ = found
        yield raised


def _total(*terms: Tensor) -> Tensor:
    return sum(terms, torch.zeros((), dtype=torch.float64))


def _exponential(dtype: torch.dtype, power: Tensor) -> Tensor:
    """Infinite or zero where it is in at least 32 bits."""
    wide = torch.finfo(torch.promote_types(dtype, torch.float32))
    most, least = math.log(wide.max), math.log(wide.smallest_normal)
    return torch.where(power > most, torch.inf, torch.where(power < least, 0.0, power.exp()))
