"""Checks the weights of a match: parameters as they are, or dequantised from parameters."""

from __future__ import annotations

import torch
from torch.fx import Node

from mla_fx.errors import NoMatch
from mla_fx.graph.aliasing import written
from mla_fx.graph.torch_private import OpOverload
from mla_fx.readings.calls import CASTS, operands_of
from mla_fx.readings.element import Element, computed_from, is_parameter
from mla_fx.readings.views import MOVERS


def check_weight(weight: Element, name: str, *, may_be_dequantised: bool = False) -> None:
    """Raises NoMatch unless a weight is a parameter in the form in which it is multiplied, or is dequantised from
    parameters where that is allowed."""
    scales = () if weight.scales is None else weight.scales.by
    computed = [part.origin for part in (weight, *scales) if not is_parameter(part.origin)]
    if not computed or (may_be_dequantised and all(map(_is_dequantised, computed))):
        return
    packed = sorted({str(dtype) for node in computed for dtype in _packed(node)})
    if packed:
        raise NoMatch(f"{name} is dequantised in the graph, from {packed[0]}; expected a plain parameter", computed[0])
    raise NoMatch(f"{name} is computed in the graph, expected a parameter", computed[0])


def _packed(value: Node) -> set[torch.dtype]:
    """The 8-bit dtypes of the graph inputs that a value is computed from."""
    given = (node.meta["val"] for node in (value, *computed_from(value)) if is_parameter(node))
    stored = {part.dtype for part in given if isinstance(part, torch.Tensor)}
    return {dtype for dtype in stored if dtype.itemsize == 1 and dtype is not torch.bool}


def _is_dequantised(value: Node) -> bool:
    """Whether a value is computed from graph inputs of 8 bits by views, casts, elementwise arithmetic, and operators
    that say so."""
    nodes = (value, *computed_from(value))
    calls = (node for node in nodes if not is_parameter(node))
    return bool(_packed(value)) and all(node.target in MOVERS or _is_elementwise(node) for node in calls)


def _is_elementwise(node: Node) -> bool:
    if not isinstance(node.target, OpOverload) or written(node):
        return False
    if not operands_of(node):  # a tensor of constants, if it is the same at each call
        return torch.Tag.nondeterministic_seeded not in node.target.tags
    is_named = node.target._opname.startswith("dequantize_")  # of quantized_decomposed and torchao
    return is_named or node.target in CASTS or torch.Tag.pointwise in node.target.tags
