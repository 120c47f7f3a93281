"""Runs the operators' own bodies eagerly. Available everywhere, and the oracle for every other target."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from mla_fx.errors import OptionError
from mla_fx.graph.torch_compilers import aot_autograd
from mla_fx.ops.emitted.attention.arguments import Arguments
from mla_fx.readings.sizes import Size
from mla_fx.target import Compiled, Compiler, Target

from .cpu import costs


class Reference(Target):
    name = "reference"

    def accepts(self) -> frozenset[str]:
        return frozenset({"pieces"})

    def check(self, options: Mapping[str, Any]) -> None:
        if not isinstance(options.get("pieces", False), bool):
            raise OptionError(f"option pieces is {options['pieces']!r}; it takes False, True")

    def takes_pieces(self, options: Mapping[str, Any]) -> bool:
        """Whether option `pieces` is set. It shows on any machine which operators an NPU target gets."""
        return bool(options.get("pieces"))

    def most_absorbed_tokens(self, device: torch.device, context: Size) -> int:
        return costs.most_absorbed_tokens(device, context)

    def refuse(self, a: Arguments) -> None:
        costs.refuse(a)

    def compile(
        self,
        gm: GraphModule,
        example_inputs: Sequence[Any],
        fusing: Callable[[Compiler], Compiler],
        options: Mapping[str, Any],
    ) -> Compiled:
        def forward(graph_module: GraphModule, inputs: Sequence[Any], is_inference: bool = False) -> Compiled:
            return graph_module.forward

        compiled: Compiled = aot_autograd(fusing(forward), forward)(gm, example_inputs)
        return compiled
