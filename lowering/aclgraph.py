"""ACL graph: fused operators become Ascend's own, and torchair captures the graph (npugraph_ex, reduce-overhead)."""

from __future__ import annotations

from .ascend.target import AscendTarget


class AclGraph(AscendTarget):
    name = "aclgraph"
    kind = "aclgraph"
    modes = ("npugraph_ex", "reduce-overhead")
