"""ACL graph: fused operators become Ascend's own, and torchair captures the graph (npugraph_ex, reduce-overhead)."""

from torch.fx import Graph

from mla_fx.target import Compiled

from .ascend import toolchain
from .ascend.target import AscendTarget


class AclGraph(AscendTarget):
    name = "aclgraph"
    kind = "aclgraph"
    modes = ("npugraph_ex", "reduce-overhead")

    def shown(self, made: Compiled, graph: Graph) -> Graph | None:
        """The graph that torchair captures, after its own passes."""
        captured = getattr(toolchain.runner(made), "fx_graph", None)
        return captured.graph if captured is not None else None
