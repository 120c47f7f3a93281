"""Checks the weights of a match that an operator takes in the form in which the program keeps them."""

from __future__ import annotations

import torch
from torch.fx import Node

from mla_fx.errors import NoMatch
from mla_fx.readings.element import Element, computed_from, has_8_bits, is_parameter


def check_weight(weight: Element, name: str) -> None:
    """Raises NoMatch unless a weight and its scales are parameters."""
    scales = () if weight.scales is None else weight.scales.by
    computed = [part.origin for part in (weight, *scales) if not is_parameter(part.origin)]
    if not computed:
        return
    packed = sorted({str(dtype) for node in computed for dtype in _packed(node)})
    if packed:
        raise NoMatch(f"{name} is dequantised in the graph, from {packed[0]}; expected a plain parameter", computed[0])
    raise NoMatch(f"{name} is computed in the graph, expected a parameter", computed[0])


def _packed(value: Node) -> set[torch.dtype]:
    """The 8-bit dtypes of the graph inputs that a value is computed from."""
    return {node.meta["val"].dtype for node in computed_from(value) if is_parameter(node) and has_8_bits(node)}
