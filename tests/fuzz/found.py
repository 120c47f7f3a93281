"""Failures that were found once: a base and the mutations that made it fail, as data."""

from __future__ import annotations

from .reduce import Mutant

FOUND: tuple[Mutant, ...] = ()
