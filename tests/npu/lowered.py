"""A call of an operator as the vendor's: lowered, traced, converted by torchair and run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import torch_npu
from lib.ascend_calls import module_of
from mla_fx.lowering.ascend import toolchain
from mla_fx.lowering.ascend.limits import Surface
from torch import Tensor
from torch.func import functionalize

from mla_fx.graph.torch_private import make_fx
from mla_fx.ops import catalogue
from npu import cpu_kernels

A2 = Surface("Ascend910B3", "ge", hoists=False, cann="8.5.0")
NZ = 29
WEIGHTS = ("weight_dq", "weight_uq_qr", "weight_dkv_kr")  # what kernels read in FRACTAL_NZ


class Call:
    """One call; the arguments that it updates are those that a result is named after."""

    def __init__(self, operator: str, args: Sequence[Any], options: dict[str, Any], surface: Surface = A2) -> None:
        entry = catalogue()[operator]
        is_host = any(isinstance(value, list) for value in args)
        self.overload = entry.host if is_host else entry.overload
        names = [argument.name for argument in self.overload._schema.arguments]
        self.given = dict(zip(names, args, strict=False)) | options
        results = [result.name.removesuffix("_out") for result in self.overload._schema.returns]
        self.updated = {number: name for number, name in enumerate(results) if name in self.given}
        self.surface, module = surface, module_of(operator)
        self.lowered = lambda surface: toolchain.lowered(module, surface, *args, **options)

    def wanted(self) -> tuple[Tensor, ...]:
        return as_tuple(self.overload(**self.given))

    def on_npu(self, converted: Any) -> tuple[Tensor, ...]:
        """The same results. Those that are caches are what was written to the caches that were given."""
        tensors, lowered = self.tensors(), self.lowered(self.surface)

        def call(tensors: dict[str, Tensor]) -> tuple[Tensor, ...]:
            return as_tuple(lowered(**(self.given | tensors)))

        traced = make_fx(functionalize(call), tracing_mode="fake")(tensors)

        def step(tensors: dict[str, Tensor]) -> list[Tensor]:
            results = traced(tensors)
            for number, name in self.updated.items():
                tensors[name].copy_(results[number])
            return [result for number, result in enumerate(results) if number not in self.updated]

        kept = iter(converted.compiled(step)(tensors))
        count = len(self.overload._schema.returns)
        updated = {number: tensors[name] for number, name in self.updated.items()}
        return tuple(updated[number] if number in updated else next(kept) for number in range(count))

    def by_kernels(self) -> tuple[Tensor, ...]:
        """Run the vendor's operators one by one, without a graph. Lengths are numbers of the host."""
        cpu_kernels.register()
        lowered = self.lowered(replace(self.surface, reads_ahead=True))
        with mock.patch.object(cpu_kernels, "is_in_a_graph", True):
            return as_tuple(lowered(**(self.given | self.tensors())))

    def tensors(self) -> dict[str, Tensor]:
        """Copies of those that are given; weights are laid out, unless the lowering does that."""
        tensors = {name: value.clone() for name, value in self.given.items() if isinstance(value, Tensor)}
        if not self.surface.hoists:
            for name in tensors.keys() & set(WEIGHTS):
                tensors[name] = torch_npu.npu_format_cast(tensors[name].contiguous(), NZ)
        return tensors


def as_tuple(value: Any) -> tuple[Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)
