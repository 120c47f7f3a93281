"""GE: fused operators become Ascend's own, and torchair converts the graph for CANN's graph engine (max-autotune)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch.fx import Graph

from mla_fx.graph.provenance import label_of
from mla_fx.graph.torch_private import OpOverload
from mla_fx.target import Compiled

from .ascend import converters, toolchain
from .ascend.ge_text import ge_text
from .ascend.target import AscendTarget


class Ge(AscendTarget):
    name = "ge"
    kind = "ge"
    modes = (toolchain.GE_MODE,)

    def takes(self, operator: OpOverload) -> bool:
        return hasattr(operator, "_ge_converter")  # set by torchair's registration

    def remarks(self, graph: Graph) -> Iterable[str]:
        return converters.copied_caches(graph)

    def serves(self, example_inputs: Sequence[Any]) -> bool:
        return toolchain.is_on_npu(example_inputs)

    def shown(self, made: Compiled, graph: Graph) -> list[str] | None:
        """The GE graph that torchair made, after its own passes."""
        found = getattr(toolchain.runner(made), "graph", None)
        if found is None or not hasattr(found, "op"):
            return None  # torchair's options for debugging run the operator graph instead
        labels = {node.name: label_of(node) for node in graph.find_nodes(op="placeholder")}
        return ge_text(found, labels)
