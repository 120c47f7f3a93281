"""Mutations that come in scenes: together with what they need, and with how the mutant is run.

A scene is `draw(random, captured)`, which gives a list of mutations or None where it does not apply; what it gives may
be any kind of mutation. Those that are here alone are functions of a bench and literal parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from .bench import Bench

Mutation = tuple[Any, ...]

MUTATIONS: dict[str, Callable[..., None]] = {}


def mutation(apply: Callable[..., None]) -> Callable[..., None]:
    MUTATIONS[apply.__name__] = apply
    return apply


@mutation
def run_by(bench: Bench, runner: str, calls: int) -> None:
    """By another of the runners of runners.py, perhaps several times in a row."""
    bench.way = replace(bench.way, runner=runner, calls=calls)
