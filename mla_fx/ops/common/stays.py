"""The answer that a call of an operator stays as it is."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Stays:
    """A call stays: why, as a sentence for the report, or nothing where there is nothing to tell."""

    reason: str = ""


def unless(reason: str | None, function: Callable[..., Any]) -> Callable[..., Any] | Stays:
    """`function` in the place of a call, unless there is a reason why the call stays."""
    return Stays(reason) if reason else function
