"""The scenes by name, and how often each is drawn."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from . import apart, flaws, garbage, numbers, outside, ranges, shares, state, users
from .capture import Captured
from .scene import Mutation

SCENES: dict[str, Callable[[Random, Captured], list[Mutation] | None]] = {
    "garbage": garbage.draw,
    "outside": outside.draw,
    "state": state.draw,
    "ranges": ranges.draw,
    "shares": shares.draw,
    "users": users.draw,
    "apart": apart.draw,
    "flaws": flaws.draw,
    "whole": numbers.draw_whole,
    "nested": numbers.draw_nested,
    "changed": numbers.draw_changed,
}
