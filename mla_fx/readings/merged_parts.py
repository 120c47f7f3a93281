"""Attention that was computed in parts of a context, merged by the logarithms of their sums:

    out = sum over parts of share * part,  share = exp(lse - logsumexp(lses))

Shares have many spellings: a softmax of stacked logarithms, exponentials after the largest was subtracted, a difference
from `logaddexp`, two parts at a time, in base 2. So this reading does their arithmetic, at points drawn at random, and
compares it with that of a merge. Guards decide what becomes of rows that parts do not see. They are evaluated, too."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random

import torch
from torch import Tensor
from torch.fx import Node

from mla_fx.errors import NoMatch
from mla_fx.graph.torch_private import unset_fake_temporarily
from mla_fx.ops.emitted.merge_attention import MOST_PARTS

from .arithmetic import Arithmetic, is_step
from .axes import Axis, Index
from .calls import CASTS
from .element import Element, computed_from, computed_with, resolve
from .points import Points
from .reading import Reading
from .views import MOVERS, SPLITS, fresh_index

aten = torch.ops.aten

MOVES = frozenset({*MOVERS, *CASTS, *SPLITS, aten.cat.default, operator.getitem})
SUBSETS = 64


@dataclass(frozen=True)
class Merge(Reading):
    """Parts `outs` with logarithms `lses`, merged at `index` of `node`. Its last dimension of several elements are the
    columns of `outs`. Beside them, `sink` is the logarithm of what has no attention.

    A row that a part does not see has minus infinity there. Such a part adds nothing if it is in `skips`, whatever its
    attention is, else zero times that; the row is NaN if it is in `blanks`. Rows that no part sees are NaN if
    `blank_if_empty`, else zero. Infinity and NaN count as minus infinity for parts in `cleans`."""

    index: tuple[Index, ...]
    outs: tuple[Element, ...]
    lses: tuple[Element, ...]
    skips: frozenset[int]
    cleans: frozenset[int]
    blanks: frozenset[int]
    blank_if_empty: bool
    sink: Element | None

    @property
    def constants(self) -> tuple[object, ...]:
        return self.skips, self.cleans, self.blanks, self.blank_if_empty


def merges(calls: Iterable[Node], gathered: Iterable[Node] = ()) -> Iterator[Node]:
    """The last values that arithmetic computes from several of some calls, which return parts and logarithms, or from
    what was gathered of other processes, which may hold several of both."""
    calls, gathered = set(calls), set(gathered)
    seeds = calls | gathered
    steps = {node for node in computed_with(seeds, lambda node: not _is_inside(node)) if is_step(node)}
    for node in steps:
        after = computed_with([node], lambda user: not _is_inside(user) or user in steps)
        if not steps.isdisjoint(after):
            continue
        given = seeds.intersection(before(node))
        if len(given) > 1 or not gathered.isdisjoint(given):
            yield node


def merge_before(node: Node, read: Callable[[Node], Merge] | None = None) -> Merge:
    """The nearest merge among a value and those that arithmetic computes it from: a gate may follow a merge. Raises
    NoMatch with the reason, the one of the nearest that has as many parts as logarithms."""
    misses = list[NoMatch]()
    for found in filter(is_step, before(node)):
        value = found.meta["val"]
        if not isinstance(value, Tensor) or not value.is_floating_point():
            continue
        try:
            return (read or merge)(found)
        except NoMatch as miss:
            misses.append(miss)
    raise next((miss for miss in misses if miss.reason != NO_PARTS), misses[0])


def _is_inside(node: Node) -> bool:
    return node.target in MOVES or is_step(node)


def before(node: Node) -> Iterator[Node]:
    """A value and all that it is computed from, as far as arithmetic on few numbers reaches."""
    return computed_from(node, lambda found: not _is_inside(found))


NO_PARTS = f"expected 2 to {MOST_PARTS} parts of attention, each with a logarithm"


def merge(node: Node, read: Arithmetic | None = None) -> Merge:
    """Read a value as a merge of several parts, by this arithmetic. Raises NoMatch with the reason if it is none."""
    index = fresh_index(node)
    read = Arithmetic() if read is None else read
    place = read.read(resolve(node, index))
    columns: frozenset[Axis] = next((part.axes for part in reversed(index) if part.axes), frozenset())
    outs = [leaf for leaf, element in read.leaves.items() if columns & element.axes]
    lses = [leaf for leaf in read.leaves if leaf not in outs]
    if len(lses) - len(outs) not in (0, 1) or not 2 <= len(outs) <= MOST_PARTS:
        raise NoMatch(NO_PARTS, node)
    with unset_fake_temporarily():
        drawn = read.points(len(outs), len(lses), (*outs, *lses, *read.free))
        points = _Values(read, place, outs, lses, node, drawn).paired()
        count = range(len(outs))
        blanks = frozenset(filter(points.is_blank, count))
        skips = frozenset(part for part in count if part not in blanks and points.skips(part))
        cleans = frozenset(filter(points.cleans, count))
        points.check_subsets(blanks)
        given, logarithms = (tuple(read.leaves[leaf] for leaf in leaves) for leaves in (outs, points.lses[: len(outs)]))
        sink = read.leaves[points.lses[-1]] if len(lses) > len(outs) else None
        return Merge(node, index, given, logarithms, skips, cleans, blanks, points.blank_if_empty(), sink)


@dataclass(frozen=True)
class _Values:
    """A value as a function of some leaves, evaluated where a merge of these is known."""

    read: Arithmetic
    place: int
    outs: list[int]
    lses: list[int]
    node: Node
    drawn: Points

    def paired(self) -> _Values:
        """Pair each part with its logarithm, and put a sink behind them. Raises NoMatch if the value is no merge."""
        parts, shares = range(len(self.outs)), self.drawn.shares
        pairs = list[int]()
        for part in parts:
            alone = torch.zeros_like(self.drawn.outs)
            alone[part] = 1
            points = self.drawn.with_outs(alone)
            weight = self._value(points)
            pairs += [place for place, share in enumerate(shares) if self.read.is_close(weight, share, points)][:1]
        if len({*pairs}) != len(parts):
            because = "parts are not weighted by the shares that their logarithms give them"
            raise NoMatch(because if len(self.lses) == len(parts) else NO_PARTS, self.node)
        pairs += (place for place in range(len(self.lses)) if place not in pairs)
        found = replace(self, lses=[self.lses[pair] for pair in pairs])
        if not self.read.is_close(found._value(self.drawn), self.drawn.shared(self.drawn.outs), self.drawn):
            raise NoMatch("something else than the parts times their shares is computed", self.node)
        for part, (name, number) in itertools.product(parts, {"NaN": torch.nan, "infinity": torch.inf}.items()):
            value = found._value(self.drawn.where([part], out=number))
            if value[shares[part] > 0].isfinite().any():
                raise NoMatch(f"{name} of a part is replaced, whatever it comes from", self.node)
        return found

    def is_blank(self, part: int) -> bool:
        return self._where([part], -torch.inf, 0.0).isnan().all().item() is True

    def skips(self, part: int) -> bool:
        for finite in (0.0, 1.5):
            if not self._is_left_out([part], self._where([part], -torch.inf, finite)):
                raise NoMatch("a part adds to rows that it does not see", self.node)
        return self._leaves_out_or_is_nan(part, -torch.inf)

    def cleans(self, part: int) -> bool:
        one, other = (self._leaves_out_or_is_nan(part, lse) for lse in (torch.inf, torch.nan))
        if one != other:
            raise NoMatch("logarithms of infinity and NaN count differently", self.node)
        return one

    def check_subsets(self, blanks: frozenset[int]) -> None:
        """Rows that several parts do not see are as each part alone says."""
        draw, parts = Random(0), range(len(self.outs))
        sizes = (draw.randint(2, max(2, len(parts) - 1)) for _ in range(SUBSETS if len(parts) > 2 else 0))
        for subset in (draw.sample(parts, size) for size in sizes):
            value = self._where(subset, -torch.inf, 0.0)
            if not (value.isnan().all() if blanks.intersection(subset) else self._is_left_out(subset, value)):
                raise NoMatch("rows that several parts do not see count differently", self.node)

    def blank_if_empty(self) -> bool:
        value = self._where(range(len(self.outs)), -torch.inf, 0.0)
        if not value.isnan().all() and (value != 0).any():
            raise NoMatch("rows that no part sees are neither zero nor NaN", self.node)
        return value.isnan().all().item() is True

    def _leaves_out_or_is_nan(self, part: int, lse: float) -> bool:
        value = self._where([part], lse, torch.nan)
        if value.isnan().all():
            return False
        if not self._is_left_out([part], value):
            raise NoMatch(f"a part whose logarithm is {lse} is neither left out nor NaN", self.node)
        return True

    def _is_left_out(self, parts: Iterable[int], value: Tensor) -> bool:
        left = self.drawn.where([*parts], out=0.0, lse=-torch.inf)
        return self.read.is_close(value, left.shared(left.outs), left)

    def _where(self, parts: Sequence[int], lse: float, out: float) -> Tensor:
        """The value where some parts have this logarithm and this attention."""
        return self._value(self.drawn.where(parts, out=out, lse=lse))

    def _value(self, points: Points) -> Tensor:
        return self.read.value(self.place, points, (*self.outs, *self.lses, *self.read.free))
