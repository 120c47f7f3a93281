"""Elements that no view makes tensors, and operands that a graph does not have."""

import pytest
import sympy
import torch
from lib.elements import A4, A12, B4, B6, LINE, SQUARE, digit_of_twelve, line
from lib.traced import refused

from mla_fx.readings.axes import axes, of_axis
from mla_fx.readings.element import Element
from mla_fx.rewriting.emitter import Emitter
from mla_fx.rewriting.materialize import tensor
from mla_fx.rewriting.operands import joined_masks

SIZES = [sympy.Symbol(name, integer=True, positive=True) for name in "mn"]
TENSORS = {  # an element, and the dimensions to lay it out along
    "would be rounded to torch.bfloat16 by the operator": (line(0, (A4, 6)), [[A4]], {"dtype": torch.bfloat16}),
    "run over one axis": (line(0, (A4, 6)), [[A4], [A4]], {}),
    "in incompatible parts": (
        Element(SQUARE, (digit_of_twelve(6, 2).index[0], digit_of_twelve(4, 3).index[0])), [[A12]], {}
    ),
    "on an axis that it must not": (line(0, (A4, 6), (B6, 1)), [[A4]], {}),
    "along a diagonal": (Element(SQUARE, (of_axis(A4), of_axis(A4))), [[A4]], {}),
    "on only part of a dimension": (line(0, (A4, 6)), [[A4, B6]], {}),
    "none of them provably the largest": (line(0, *zip((A4, B4), SIZES, strict=True)), [[A4], [B4]], {}),
    "in steps of 1, which no view": (line(0, (A4, 2), (B4, 1)), [[A4], [B4]], {}),  # windows that overlap
}  # fmt: skip


@pytest.mark.parametrize("reason", TENSORS)
def test_an_element_that_is_no_tensor(reason):
    element, dims, options = TENSORS[reason]
    with refused(reason):
        tensor(element, dims, **options)


def test_a_dimension_that_is_no_whole_axis():
    with refused("the width is read in steps or from an offset"):
        axes(of_axis(A4, 2), "the width", LINE)


def test_a_size_that_no_value_has():
    with refused("the size u is not known to the graph"):
        Emitter(LINE.graph).size(sympy.Symbol("u"))


def test_no_masks_are_no_operand():
    assert joined_masks((), ()) is None
