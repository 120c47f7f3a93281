"""Refuses paged_attention.batched: no call of it is put into a graph for an NPU."""

from __future__ import annotations

from typing import Any, NoReturn

from mla_fx.errors import NoMatch

from .fused_infer_attention_score import KERNEL
from .surface import Surface

OPERATOR = "paged_attention.batched"
NOT_LOWERED = f"attention over paged keys and values per head is not lowered to {KERNEL} yet"


def lower(surface: Surface, *args: Any, **kwargs: Any) -> NoReturn:
    raise NoMatch(NOT_LOWERED)
