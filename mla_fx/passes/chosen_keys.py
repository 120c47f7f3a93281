"""Keys that a model chooses by top-k before it attends, as an indexer does: fused attention has no sparse form."""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch
from torch.fx import Graph, Node

from mla_fx.debug.outcomes import WHOLE
from mla_fx.graph.provenance import fused_name, module_of
from mla_fx.graph.walk import nearest_first
from mla_fx.readings.calls import argument, named_argument, operands_of
from mla_fx.readings.sizes import size_of

from .triage import PRODUCTS, called

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


def chosen_keys(graph: Graph) -> Iterator[str]:
    """A sentence for each kind of module whose choice of keys became a mask of fused attention."""
    masks = (named_argument(node, "mask") for node in graph.nodes if fused_name(node) is not None)
    modules = (module_of(node) for mask in masks if isinstance(mask, Node) for node in _choices(mask))
    for module in dict.fromkeys(_NUMBER.sub("*", module) for module in modules):
        yield (
            f"what chooses keys by topk in {module or WHOLE} is not fused, and fused attention reads all keys under a "
            "mask of the chosen ones: it has no sparse form"
        )


def _choices(mask: Node) -> Iterator[Node]:
    """The calls of topk over as many values as there are keys that a mask is made of. No product is between them: what
    chose the experts of an earlier layer is behind products."""
    keys, topk = size_of(mask.meta["val"].shape[-1]), torch.ops.aten.topk.default
    for node in nearest_first([mask], operands_of, lambda node: node.target is topk or called(node) in PRODUCTS):
        if node.target is topk and size_of(argument(node, 0).meta["val"].shape[argument(node, 2, "dim", -1)]) == keys:
            yield node
