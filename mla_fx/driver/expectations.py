"""What a user expects to fuse: in one graph by the option `expect`, over several by `expecting`."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mla_fx.errors import FusionError, OptionError

from .report_log import listening

TAKES = "it takes operators, or a mapping of operators to numbers of calls, or to tuples of them"


@dataclass(frozen=True)
class Expectation:
    """Operator -> the numbers of calls that will do; None is any number but zero.

    If `is_complete`, no other operator may have been fused."""

    counts: Mapping[str, tuple[int, ...] | None]
    is_complete: bool

    def is_met(self, fused: Mapping[str, int]) -> bool:
        if self.is_complete and set(fused) - set(self.counts):
            return False
        return all(_will_do(fused.get(name, 0), wanted) for name, wanted in self.counts.items())

    def __str__(self) -> str:
        if not self.is_complete:
            return " and ".join(map(repr, self.counts))
        return repr(
            {name: wanted[0] if wanted and len(wanted) == 1 else wanted for name, wanted in self.counts.items()}
        )


def _will_do(count: int, wanted: tuple[int, ...] | None) -> bool:
    return count > 0 if wanted is None else count in wanted


def expectation(given: Any) -> Expectation:
    """What `expect` was given as. Raises OptionError for anything but operators and numbers."""
    if isinstance(given, Mapping):
        counts: dict[str, tuple[int, ...] | None] = {_operator(name): _numbers(given[name]) for name in given}
        return Expectation(counts, is_complete=True)
    if isinstance(given, str):
        return Expectation({_operator(given): None}, is_complete=False)
    if isinstance(given, Collection) and not isinstance(given, bytes):
        return Expectation({_operator(name): None for name in given}, is_complete=False)
    raise OptionError(f"option expect is {given!r}; {TAKES}")


def _operator(name: Any) -> str:
    from mla_fx.ops import catalogue

    known = sorted({name.partition(".")[0] for name in catalogue()})
    if name not in known:
        raise OptionError(f"option expect names {name!r}; known operators are {', '.join(map(repr, known))}")
    return str(name)


def _numbers(given: Any) -> tuple[int, ...]:
    numbers = given if isinstance(given, tuple) else (given,)
    if numbers and all(type(number) is int and number >= 0 for number in numbers):
        return numbers
    raise OptionError(f"option expect holds the number {given!r}; {TAKES}")


@contextlib.contextmanager
def expecting(**counts: int | tuple[int, ...]) -> Iterator[None]:
    """Raises FusionError at its end if what was compiled within it, in this thread, did not fuse just these operators.

    `with expecting(mla_prolog=61, latent_attention=61): model(...)` counts over all graphs of the model, whether they
    come from graph breaks or from several models. What was compiled before and is only run counts nothing."""
    wanted = expectation(counts)
    with listening() as reports:
        yield
    from mla_fx.debug.report import Report

    fused = Report.merged(reports).fused
    if not wanted.is_met(fused):
        told = "\n".join(map(str, reports)) or "nothing was compiled"
        raise FusionError(f"expected {wanted}, fused {fused} in {len(reports)} graphs\n{told}")
