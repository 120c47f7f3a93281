"""Elements of one line and one square, whose indices tests choose."""

from lib.traced import Traced, dense
from mla_fx.readings.axes import Axis, Digit, combine, whole
from mla_fx.readings.element import Element

SQUARE = Traced(lambda x: x.clone(), dense(4, 4)).out.args[0]
LINE = Traced(lambda x: x.clone(), dense(24)).out.args[0]
A4, B4, C4, D4, A2, A3, A12, B6 = (Axis(size) for size in (4, 4, 4, 4, 2, 3, 12, 6))


def line(offset, *terms):
    return Element(LINE, (combine(offset, [(whole(axis), stride) for axis, stride in terms]),))


def digit_of_twelve(below, size):
    return Element(LINE, (combine(0, [(Digit(A12, below, size), 1)]),))
