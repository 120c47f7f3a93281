"""Keys that a model chooses by top-k before it attends, where attention to them is not fused in its sparse form."""

import re
from collections.abc import Iterator

from torch.fx import Graph, Node

from mla_fx.debug.outcomes import WHOLE
from mla_fx.graph.provenance import fused_name, module_of
from mla_fx.readings.calls import named_argument
from mla_fx.readings.selection import choices

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


def chosen_keys(graph: Graph) -> Iterator[str]:
    """A sentence for each kind of module whose choice of keys became a mask of fused attention."""
    fused = (node for node in graph.nodes if fused_name(node) is not None)
    masks = (named_argument(node, "mask") for node in fused if named_argument(node, "indices") is None)
    modules = (module_of(node) for mask in masks if isinstance(mask, Node) for node in choices(mask))
    for module in dict.fromkeys(_NUMBER.sub("*", module) for module in modules):
        yield (
            f"what chooses keys by topk in {module or WHOLE} is not fused, and fused attention reads all keys under a "
            "mask of the chosen ones"
        )
