"""Makes a failing mutant small: fewer mutations, and the plainest base on which the same ones still fail."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .bases import BASES, captured
from .draw import Mutation
from .judge import Outcome, judge

PLAIN = ("plain", "plain even", "plain level", "absorbed", "complex", "at slice")


@dataclass(frozen=True)
class Mutant:
    """A complete mutant; `str` gives the line that makes it again."""

    base: str
    mutations: tuple[Mutation, ...] = ()

    def __str__(self) -> str:
        return repr((self.base, list(self.mutations)))

    def judge(self, **options: Any) -> Outcome:
        return judge(captured(self.base), list(self.mutations), **options)


def reduce(mutant: Mutant, verdict: str) -> Mutant:
    """The same verdict with less. Hangs are not waited for on base after base."""
    mutant = _fewer(mutant, verdict)
    plain = [name for base in PLAIN if (name := f"{base}{BASES[mutant.base].ending}") in BASES]
    if not mutant.mutations or verdict == "hang" or mutant.base in plain:
        return mutant
    plainer = (Mutant(base, mutant.mutations) for base in plain)
    return next((other for other in plainer if _still(other, verdict)), mutant)


def _fewer(mutant: Mutant, verdict: str) -> Mutant:
    for left_out in range(len(mutant.mutations)):
        less = Mutant(mutant.base, mutant.mutations[:left_out] + mutant.mutations[left_out + 1 :])
        if _still(less, verdict):
            return _fewer(less, verdict)
    return mutant


def _still(mutant: Mutant, verdict: str) -> bool:
    return mutant.judge().verdict == verdict
