"""A failing mutant made small: fewer mutations, and the plainest base on which the same ones still fail."""

from __future__ import annotations

from dataclasses import dataclass

from .bases import BASES, captured
from .draw import Mutation
from .judge import Outcome, judge

PLAIN = ("plain", "plain even", "plain level", "absorbed", "complex", "at slice")


@dataclass(frozen=True)
class Mutant:
    """All there is to a mutant; `str` gives the line from which it is made again."""

    base: str
    mutations: tuple[Mutation, ...] = ()

    def __str__(self) -> str:
        return repr((self.base, list(self.mutations)))

    def judge(self) -> Outcome:
        return judge(captured(self.base), list(self.mutations))


def reduce(mutant: Mutant, verdict: str) -> Mutant:
    """The same verdict from less."""
    mutant = _fewer(mutant, verdict)
    for base in PLAIN:
        simpler = Mutant(base, mutant.mutations)
        if base in BASES and mutant.mutations and base != mutant.base and _still(simpler, verdict):
            return simpler if mutant.base not in PLAIN or PLAIN.index(base) < PLAIN.index(mutant.base) else mutant
    return mutant


def _fewer(mutant: Mutant, verdict: str) -> Mutant:
    for left_out in range(len(mutant.mutations)):
        less = Mutant(mutant.base, mutant.mutations[:left_out] + mutant.mutations[left_out + 1 :])
        if _still(less, verdict):
            return _fewer(less, verdict)
    return mutant


def _still(mutant: Mutant, verdict: str) -> bool:
    return mutant.judge().verdict == verdict
