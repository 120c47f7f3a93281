"""Faults in the calls that the lowering makes of the vendor's operators, and how they are caught."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
from mla_fx.lowering.ascend import fused_infer_attention_score


def caught_by_numbers() -> Any:
    return pytest.raises(AssertionError, match=r"Tensor-likes are not (equal|close)")


def change_call(monkeypatch: pytest.MonkeyPatch, lowering: ModuleType, change: Callable[[Any], dict[str, Any]]) -> None:
    """The operator is called with arguments that are functions of the right ones."""
    whole = lowering.vendor_call

    def vendor_call(*given: Any) -> Any:
        *surface, a = given
        return whole(*surface, replace(a, **change(a)))

    monkeypatch.setattr(lowering, "vendor_call", vendor_call)


def change_results(monkeypatch: pytest.MonkeyPatch, lowering: ModuleType, change: Callable[[Any, Any], Any]) -> None:
    """The results are functions of the arguments and of the right results."""
    whole = lowering.vendor_call
    monkeypatch.setattr(lowering, "vendor_call", lambda *given: change(given[-1], whole(*given)))


def change_attention(monkeypatch: pytest.MonkeyPatch, **changes: Callable[[Any], Any]) -> None:
    """Attention is called with options that are functions of the right ones."""
    whole = fused_infer_attention_score.attend_and_sum

    def attend(*args: Any, **options: Any) -> Any:
        return whole(*args, **options | {name: change(options[name]) for name, change in changes.items()})

    monkeypatch.setattr(fused_infer_attention_score, "attend_and_sum", attend)
