"""The vendor's operators in an FX graph, checked by releases of CANN without running it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from npu import ge_releases
from npu.cpu_kernels import attention_call, named

KERNELS: dict[str, tuple[str, Callable[..., dict[str, Any]]]] = {
    "npu_mla_prolog_v3_functional": ("MlaPrologV3", dict),
    "npu_kv_rmsnorm_rope_cache_v2_functional": ("KvRmsNormRopeCache", dict),
    "npu_fused_infer_attention_score_v2": ("FusedInferAttentionScore", attention_call),
}


def check(graph_module: GraphModule) -> None:
    """Does what `ge_releases.check` does. Symbolic sizes are those of the current call."""
    for node in graph_module.graph.nodes:
        name = str(node.target).partition(".")[2].removesuffix(".default")
        if name in KERNELS:
            kernel, form = KERNELS[name]
            args, options = map_arg((node.args, node.kwargs), _value)
            ge_releases.check(kernel, form(**named(node.target.overloadpacket, args, options)))


def _value(node: Node) -> Any:
    value = node.meta["val"]
    if not isinstance(value, Tensor):
        return value
    return torch.empty([_number(size) for size in value.shape], dtype=value.dtype, device="meta")


def _number(size: int | torch.SymInt) -> int:
    return size if isinstance(size, int) else size.node.hint
