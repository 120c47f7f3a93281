"""Faults planted into the calls that the lowering makes of the vendor's operators, one at a time.

A file for each kernel has `CALLS`, `run`, which makes one of them and compares its results, and `FAULTS`: for each the
call that shows it, a function that plants it, and what the kernel says if it refuses. No graph is made of the calls,
so that a fault takes milliseconds; those of models are in test_planted_faults.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from mla_fx.lowering.ascend import fused_infer_attention_score

Plant = Callable[[pytest.MonkeyPatch], None]


def caught(sentence: str | None = None) -> Any:
    """What catches a fault: the numbers, or a kernel that says so."""
    if sentence is not None:
        return pytest.raises(ValueError, match=sentence)
    return pytest.raises(AssertionError, match=r"Tensor-likes are not (equal|close)")


def replaced(module: ModuleType, name: str, change: Callable[[Any], Any]) -> Plant:
    """A function of a module is made another one."""
    return lambda patch: patch.setattr(module, name, change(getattr(module, name)))


def arguments(lowering: ModuleType, change: Callable[[Any], dict[str, Any]]) -> Plant:
    """The operator is called with arguments that are functions of the right ones."""

    def changed(whole: Any) -> Any:
        return lambda *given: whole(*given[:-1], replace(given[-1], **change(given[-1])))

    return replaced(lowering, "vendor_call", changed)


def results(lowering: ModuleType, change: Callable[[Any, Any], Any]) -> Plant:
    """The results are functions of the arguments and of the right results."""
    return replaced(lowering, "vendor_call", lambda whole: lambda *given: change(given[-1], whole(*given)))


def options(**changes: Callable[[Any], Any]) -> Plant:
    """Attention is called with options that are functions of the right ones."""

    def changed(whole: Any) -> Any:
        def attend(*args: Any, **options: Any) -> Any:
            return whole(*args, **options | {name: change(options[name]) for name, change in changes.items()})

        return attend

    return replaced(fused_infer_attention_score, "attend_and_sum", changed)


def moved(x: torch.Tensor, count: int, dim: int = -1) -> torch.Tensor:
    """Each element at the place of another, `count` further."""
    size = x.shape[dim]
    return torch.cat((x.narrow(dim, size - count, count), x.narrow(dim, 0, size - count)), dim)
