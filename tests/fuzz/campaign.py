"""Many mutants of one base, or of all, and the counts of their verdicts."""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from random import Random

from .bases import BASES, captured
from .bench import InvalidError, operands, tensor
from .draw import INSERTIONS, PRESERVING, draw, draw_scene, sites
from .judge import Outcome
from .reduce import Mutant, reduce

SCENE_SHARE = 0.5  # of the mutants drawn
PRESERVING_SHARE = 0.3  # of the others


@dataclass(frozen=True)
class Result:
    mutant: Mutant
    outcome: Outcome
    preserving: bool
    can_fuse: bool  # something fuses in the base
    keeps_fusing: bool  # the same as there
    reduced: Mutant | None = None
    reduced_outcome: Outcome | None = None


def mutants(base: str, seed: int, numbers: Iterable[int], scene: str | None = None) -> Iterator[tuple[Mutant, bool]]:
    """Yield mutants of a base and whether they preserve meaning; all of one scene if that is named. Each number has its
    own random sequence."""
    for number in numbers:
        random = Random(f"{seed}/{base}/{number}")
        if scene or random.random() < SCENE_SHARE:
            with contextlib.suppress(InvalidError):
                yield Mutant(base, tuple(draw_scene(random, captured(base), scene))), False
            continue
        preserving = random.random() < PRESERVING_SHARE
        yield Mutant(base, tuple(draw(random, captured(base), preserving=preserving))), preserving


def everywhere(base: str, seed: int, kind: str) -> Iterator[tuple[Mutant, bool]]:
    """An insertion of one kind at every use of every value, with parameters drawn for each."""
    for group, found in sites(captured(base).gm.graph).items():
        for node, operand in found if group.startswith("into") else ():
            random = Random(f"{seed}/{base}/{node.name}/{operand}")
            parameters = INSERTIONS[kind].draw(random, tensor(operands(node)[operand]))
            if parameters is not None:
                yield Mutant(base, ((kind, node.name, operand, *parameters),)), kind in PRESERVING


def campaign(
    base: str, seed: int, numbers: Iterable[int], scene: str | None = None, *, reducing: bool = True
) -> Iterator[Result]:
    return judged(base, mutants(base, seed, numbers, scene), reducing=reducing)


def judged(base: str, drawn: Iterable[tuple[Mutant, bool]], *, reducing: bool = True) -> Iterator[Result]:
    """Judge a base and mutants of it. If the base itself fails, its mutants say no more."""
    plain = Mutant(base)
    untouched = plain.judge()
    can_fuse = bool(untouched.fused)
    yield Result(plain, untouched, True, can_fuse, True)
    if untouched.is_failure:
        return
    for mutant, preserving in drawn:
        outcome = mutant.judge()
        keeps = outcome.fused == untouched.fused and not outcome.is_failure
        if not outcome.is_failure or not reducing:
            yield Result(mutant, outcome, preserving, can_fuse, keeps)
            continue
        reduced = reduce(mutant, outcome.verdict)
        seen = outcome if reduced == mutant else reduced.judge()
        yield Result(mutant, outcome, preserving, can_fuse, keeps, reduced, seen)


def batches(total: int, size: int) -> Iterator[tuple[str, range]]:
    """`total` mutants as evenly as possible over all bases, in pieces of at most `size` numbers of one base."""
    share, more = divmod(total, len(BASES))
    for place, base in enumerate(BASES):
        numbers = range(share + (place < more))
        for first in range(0, len(numbers), size):
            yield base, numbers[first : first + size]


@dataclass
class Tally:
    """Counts over results."""

    verdicts: Counter[str] = field(default_factory=Counter)
    kinds: dict[str, Counter[str]] = field(default_factory=dict)
    preserving: Counter[str] = field(default_factory=Counter)
    lost: Counter[str] = field(default_factory=Counter)
    alone: Counter[str] = field(default_factory=Counter)
    changing: Counter[str] = field(default_factory=Counter)
    strides: int = 0
    failures: list[Result] = field(default_factory=list)

    def add(self, result: Result) -> None:
        verdict = result.outcome.verdict
        self.verdicts[verdict] += 1
        for mutation in result.mutant.mutations:
            self.kinds.setdefault(mutation[0], Counter())[verdict] += 1
        self.strides += result.outcome.strides_differ
        if result.outcome.is_failure:
            self.failures.append(result)
        if verdict == "invalid" or not result.mutant.mutations:
            return
        if not result.preserving:
            self.changing[verdict] += 1
            return
        if not result.can_fuse:
            return
        self.preserving["kept" if result.keeps_fusing else "lost"] += 1
        if len(result.mutant.mutations) == 1:
            kind = result.mutant.mutations[0][0]
            self.alone[kind] += 1
            self.lost[kind] += not result.keeps_fusing

    @property
    def distinct(self) -> dict[str, dict[str, Result]]:
        """Failures that differ after reduction, by verdict and kinds of mutations."""
        kept: dict[str, dict[str, Result]] = {}
        for result in self.failures:
            mutant = result.reduced or result.mutant
            kinds = ", ".join(sorted(mutation[0] for mutation in mutant.mutations))
            kept.setdefault(f"{result.outcome.verdict}: {kinds or 'no mutation'}", {})[str(mutant)] = result
        return kept


def quiet() -> None:
    """Warnings about single graphs are provoked here on purpose."""
    import logging

    warnings.simplefilter("ignore")
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
