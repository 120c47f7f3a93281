"""What a softmax, or a choice of keys, gets: products of queries and keys, and the masks that hide some."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch
from torch.fx import Node

from mla_fx.errors import NoMatch
from mla_fx.graph.provenance import name_of

from .algebra import Budget, addends, allowance, as_product, as_sum, spend
from .axes import Index
from .conditions import conditionals
from .constant import constant, rounded
from .contraction import SUMS
from .element import Element, computed_from, operand
from .reading import Reading

aten = torch.ops.aten

Score = TypeVar("Score")
LARGEST = 2.0**64  # no score is as large


@dataclass(frozen=True)
class Mask(Reading):
    """A term of the logits without query and key: a number that is added or, with `fill`, a condition. Where the
    condition is not `keep_where`, the logits *are* `fill`, whatever they were."""

    element: Element
    fill: float | None = None
    keep_where: bool = True


class Masked(Protocol):
    """A reading of scores that masks hide."""

    @property
    def node(self) -> Node: ...
    @property
    def masks(self) -> tuple[Mask, ...]: ...
    @property
    def keys(self) -> Index: ...


def fill_of(masks: Iterable[Mask]) -> float | None:
    """The number that masked scores are; None for minus infinity."""
    return next((mask.fill for mask in masks if mask.fill not in (None, -math.inf)), None)


def logits(
    element: Element, budget: Budget, read: Callable[[Element], Score]
) -> tuple[tuple[Score, ...], tuple[Mask, ...]]:
    """Read what a softmax or a top-k gets as products of queries and keys, each by `read`, and masks: first the numbers
    that are added, then the fills."""
    found = _terms(element, budget, read)
    if not found.scores:
        masks = list(map(added, as_sum(element).terms))
        raise NoMatch(_why_no_score(masks), masks[0].node if masks else element.origin)
    return tuple(found.scores), _in_order(found.masks)


@dataclass(frozen=True)
class _Terms(Generic[Score]):
    scores: list[Score]
    masks: list[Mask]


def _terms(element: Element, budget: Budget, read: Callable[[Element], Score]) -> _Terms[Score]:
    spend(budget, element.origin)
    total = addends(element)
    if total is None:
        return _term(element, budget, read)
    parts = [_terms(term, budget, read) for term in total.terms]
    if not any(part.scores for part in parts):
        return _Terms([], _masks(element))
    if total.constant:
        raise NoMatch("a number is added to the attention scores", element.origin)
    found = _Terms([score for part in parts for score in part.scores], [mask for part in parts for mask in part.masks])
    if sum(bool(part.scores) for part in parts) > 1:
        _check_fills(found.masks, element.origin.meta["val"].dtype, element)
    return found


def _term(element: Element, budget: Budget, read: Callable[[Element], Score]) -> _Terms[Score]:
    """What is not a sum: scores, filled or not, or a mask."""
    filled = _filled(element)
    inner = None if filled is None else _masked_scores(filled[0], budget, read)
    if filled is not None and inner is not None:
        return _Terms([*inner[0]], [*inner[1], filled[1]])
    try:
        return _Terms([read(element)], [])
    except NoMatch:
        return _Terms([], [added(element)])


def _masks(element: Element) -> list[Mask]:
    """A sum without scores: a mask for each term, or one for all if a number is among them. Next to others, that number
    would be rounded otherwise."""
    total = as_sum(element)
    return [added(element)] if total.constant else list(map(added, total.terms))


def _check_fills(masks: Iterable[Mask], dtype: torch.dtype, element: Element) -> None:
    """Raises NoMatch if part of a sum is filled with a number, unless that absorbs any score that is added to it."""
    fills = [-mask.fill / abs(element.factor) for mask in masks if mask.fill not in (None, -math.inf)]
    if len(fills) > 1 or any(fill * torch.finfo(dtype).eps < LARGEST for fill in fills):
        raise NoMatch("only part of the attention scores is filled with a number", element.origin)


def added_scores(element: Element, read: Callable[[Element], Score]) -> tuple[tuple[Score, ...], tuple[Mask, ...]]:
    """Read what is added to a score in at least 32 bits: other scores under masks, or one mask."""
    try:
        scores, masks = logits(element, allowance(), read)
        _check_fills(masks, torch.promote_types(element.dtype, torch.float32), element)
    except NoMatch:
        return (), (added(element),)
    return scores, masks


def _why_no_score(masks: list[Mask]) -> str:
    """Say what comes between the products of query and key and the softmax."""
    for logits in (_unfilled(mask.element) for mask in masks):
        factors = [factor.origin for factor, _ in as_product(logits).factors]
        others = [name_of(factor) for factor in factors if factor.target not in SUMS]
        if len(others) < len(factors):
            by = ", ".join(dict.fromkeys(others)) or "themselves"
            return f"the attention scores are multiplied by {by}, expected a number"
        if any(node.target in SUMS for node in computed_from(logits.origin)):
            return f"the attention scores go through {name_of(logits.origin)} before the softmax, expected a product"
    return "no product of query and key enters the softmax"


def _masked_scores(
    element: Element, budget: Budget, read: Callable[[Element], Score]
) -> tuple[tuple[Score, ...], tuple[Mask, ...]] | None:
    """Read the logits under a fill; None if the filled value is a mask without scores."""
    try:
        return logits(element, budget, read)
    except NoMatch:
        spend(budget, element.origin)  # raises the original reason if the logits are too long
        return None


def added(term: Element) -> Mask:
    return Mask(term.origin, term)


def _in_order(masks: list[Mask]) -> tuple[Mask, ...]:
    """Order the masks. Adding to logits that are minus infinity changes nothing. Logits that are filled with a number
    are that number, so everything else has to come before."""
    fills = {mask.fill for mask in masks if mask.fill is not None}
    if fills <= {-math.inf}:
        return tuple(masks)
    node = next(mask.node for mask in masks if mask.fill is not None)
    if len(fills) > 1:
        raise NoMatch("the attention scores are filled with different numbers", node)
    if any(mask.fill is None for mask in masks):
        raise NoMatch("the attention scores are filled with a number and also masked by addition", node)
    return tuple(masks)


def _unfilled(logits: Element) -> Element:
    """The logits before they were filled under a condition, if they were."""
    filled = _filled(logits)
    return logits if filled is None else _unfilled(filled[0])


def _filled(element: Element) -> tuple[Element, Mask] | None:
    """Read scores that are filled where a condition holds, or does not: the scores and the mask."""
    dtype, peak = element.dtype, element.peak
    factor, element = element.apart()
    node = element.node
    for condition, kept, replaced, keep_where in conditionals(node):
        number = constant(replaced)
        if number is None or constant(kept) is not None:
            continue
        fill = _as_written(number * factor, dtype)
        if -math.inf <= fill < math.inf:
            at_peak = [rounded(number * peak, each) for each in (dtype, node.meta["val"].dtype)]
            if math.isfinite(fill) and not all(map(math.isfinite, at_peak)):
                raise NoMatch(f"scores are filled with {fill:.6g}, which is infinite before the scale is applied", node)
            return operand(kept, element.index, factor), Mask(node, operand(condition, element.index), fill, keep_where)
    return None


def _as_written(number: float, dtype: torch.dtype) -> float:
    """A number that a dtype may round, but for its range: the operator rounds it, and takes none beyond."""
    nearest = rounded(number, dtype)
    return max(number, torch.finfo(dtype).min) if math.isfinite(nearest) else nearest
