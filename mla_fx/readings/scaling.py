"""A value multiplied by a smaller tensor, for example by one number per token or per head."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch

from mla_fx.errors import NoMatch
from mla_fx.graph.provenance import name_of

from .element import Element, operands
from .quantised_product import holds_codes
from .reading import Reading

aten = torch.ops.aten


@dataclass(frozen=True)
class Scaling(Reading):
    """`value * scale`, where the scale is the same along some axes of the value."""

    value: Element
    scale: Element


def scaling(element: Element) -> Scaling:
    """Read `element` as a scaled value. Raises NoMatch if it is not one."""
    factor, element = element.apart()
    node = element.node
    if node.target is not aten.mul.Tensor:
        raise NoMatch(f"expected a value multiplied by a scale, found {name_of(node)}", node)
    for value, scale in itertools.permutations(operands(element), 2):
        if scale.axes < value.axes:
            if holds_codes(value):
                raise NoMatch("a product of codes is multiplied by their scales", node)
            return Scaling(node, value.times(factor), scale)
    raise NoMatch("expected a value multiplied by a scale, found the product of two values", node)
