"""Refusals that are switched off, one at a time, in a fork of this process.

The compiler's source has been rewritten so that every refusal first asks `_is_made(number)` (see refusals.py). That
records which refusals something reaches, and switches one off without a new process."""

from __future__ import annotations

import builtins
import os
import pickle
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Switch:
    """Which refusal is off in this process, and which were reached since `reached` was emptied."""

    removed: int | None = None
    reached: set[int] = field(default_factory=set)

    def is_made(self, number: int) -> bool:
        self.reached.add(number)
        return number != self.removed


SWITCH = Switch()
builtins._is_made = SWITCH.is_made  # type: ignore[attr-defined]  # the rewritten source calls it


def forked(work: Callable[[], Any], seconds: float) -> Any:
    """What `work` returns in a fork of this process; None if it took too long or died."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.close(reading)
            with os.fdopen(writing, "wb") as pipe:
                pickle.dump(work(), pipe)
        finally:
            os._exit(0)
    os.close(writing)
    clock = threading.Timer(seconds, os.kill, (child, signal.SIGKILL))
    clock.start()
    with os.fdopen(reading, "rb") as pipe:
        told = pipe.read()
    clock.cancel()
    os.waitpid(child, 0)
    return pickle.loads(told) if told else None
