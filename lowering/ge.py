"""GE: fused operators become Ascend's own, and torchair converts the graph for CANN's graph engine (max-autotune)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .ascend import toolchain
from .ascend.target import AscendTarget


class Ge(AscendTarget):
    name = "ge"
    kind = "ge"
    modes = (toolchain.GE_MODE,)

    def serves(self, example_inputs: Sequence[Any]) -> bool:
        return toolchain.is_on_npu(example_inputs)
