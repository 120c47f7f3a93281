"""Programs that the compiler refuses, or parts of, as the fuzzer judges them: the patterns' own cases, and what tests
compile."""

from __future__ import annotations

import copy
import io
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule

from mla_fx.cases import inputs
from mla_fx.driver import discovery
from mla_fx.driver.compilation import Compilation

from .capture import Captured, capture, copies
from .judge import Outcome, judge

HERE = Path(__file__).parents[1]
COARSE = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class Twin:
    """A whole program; `base` is its name."""

    base: str
    captured: Captured

    def __str__(self) -> str:
        return self.base

    def judge(self, **options: Any) -> Outcome:
        try:
            return judge(self.captured, [], **options)
        except Exception as error:  # numbers that are kept as bytes, or in eight bits, have no float64
            return Outcome("invalid", str(error))


def rejected() -> Iterator[Twin]:
    """The rejected cases of all patterns."""
    for rule in discovery.rules():
        for case in rule.rejects:
            yield Twin(f"{rule.name}: {case.name}", capture(case.build().eval(), inputs(), dtype=torch.float32))


def compiled_by(tests: Sequence[str]) -> Iterator[Twin]:
    """The first graph that each test of these files gives the compiler, if its sizes are known. The tests end there."""
    keeping = _Keeping()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Compilation, "compile", keeping.keep)
        patch.setattr(sys, "stdout", io.StringIO())
        pytest.main(
            ["-n", "0", "--slow", "--tb=no", "-p", "no:cacheprovider", *(str(HERE / path) for path in tests)],
            plugins=[keeping],
        )
    for name, (gm, given) in keeping.found.items():
        if not all(isinstance(value, Tensor) for value in given):
            continue
        try:
            yield Twin(name, capture(gm, given, dtype=_coarsest(given)))
        except Exception:
            continue


class _Keeping:
    """Keeps graphs and their inputs, by the test that compiles them, and compiles nothing."""

    def __init__(self) -> None:
        self.test = ""
        self.found: dict[str, tuple[GraphModule, tuple[Any, ...]]] = {}

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self.test = item.nodeid

    def keep(self, gm: GraphModule, given: Sequence[Any]) -> NoReturn:
        self.found.setdefault(self.test, (GraphModule(gm, copy.deepcopy(gm.graph)), copies(tuple(given))))
        raise NotImplementedError("the test ends here")


def _coarsest(given: Sequence[Tensor]) -> torch.dtype:
    dtypes = {value.dtype for value in given}
    return next((dtype for dtype in COARSE if dtype in dtypes), torch.float64)
