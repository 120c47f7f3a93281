"""What torchair would capture of a test's functions: operator graphs, which run eagerly on the CPU.

Importing this replaces capture and replay (`NPUGraph`) by an eager run. Everything that torchair does before is real:
its
passes, the operators that write in place, and the source that it makes of the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch._functorch import config as functorch_config
from torch.fx import GraphModule
from torchair._acl_concrete_graph import acl_graph, fx2acl_converter

from npu import converted, cpu_kernels  # noqa: F401  `converted` is the machine that both modes see


class EagerGraph:
    """Replaces torchair's `AclGraph`, which is made twice: of a graph, and of the source made of that graph.

    `module` is the graph, `info` what torchair found out about it, such as what it updates between replays."""

    def __init__(
        self, fx_graph: GraphModule | None = None, fx_forward: Callable[..., Any] | None = None, config: Any = None
    ) -> None:
        self.module, self.forward = fx_graph, fx_forward
        if fx_graph is not None:
            graphs.append(self)

    def load(self, info: acl_graph.AclGraphCacheInfo) -> None:
        self.info, self.name = info, info.fx_graph_name

    def __call__(self, *inputs: Any) -> Any:
        return self.forward(*inputs)

    def calls(self, *names: str) -> list[int]:
        """How often it calls each of these operators."""
        found = [str(node.target) for node in self.module.graph.nodes if node.op == "call_function"]
        return [found.count(name) for name in names]


graphs: list[EagerGraph] = []
"""What was handed over for capture since the test began, in order."""

# torch_npu declares what its `.out` operators return as new tensors, though they return what they write. Where the
# variable CI is set, torch raises for that instead of warning.
functorch_config.error_on_custom_op_aliasing = False

acl_graph.AclGraph = fx2acl_converter.AclGraph = EagerGraph
cpu_kernels.register()
