"""Mutations in scenes: together with what they need, and with how the mutant runs.

A scene is `draw(random, captured)`, which returns a list of mutations, or None if it does not apply; these may be any
kind
of mutation. Those that exist only here are functions of a bench and literal parameters."""

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
    """Runs it by another of the runners of runners.py, perhaps several times in a row."""
    bench.way = replace(bench.way, runner=runner, calls=calls)
