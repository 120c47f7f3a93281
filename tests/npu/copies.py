"""What a captured graph calls, and that it copies no cache."""

import torch

PROLOG = "npu.npu_mla_prolog_v3.default"
KEY_SIDE = "npu.npu_kv_rmsnorm_rope_cache_v2.default"
aten = torch.ops.aten


def check_nothing_is_copied(graph):
    """No input as large as a cache is copied, or written back: operators write caches in place."""
    nodes = graph.module.graph.nodes
    copies = [node for node in nodes if node.target in (aten.copy_.default, aten.clone.default)]
    sizes = [copy.args[0].meta["val"].numel() for copy in copies if copy.args[0].op == "placeholder"]
    assert all(size == 1 for size in sizes), graph.module.code
