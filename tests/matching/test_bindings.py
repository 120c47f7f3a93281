"""One name that is read twice: two elements are one, or the match is refused."""

from dataclasses import replace

import pytest
import torch
from lib.elements import A2, A3, A4, A12, B4, B6, C4, D4, LINE, SQUARE, digit_of_twelve, line
from lib.traced import D, S, T, Traced, dense, refused

from mla_fx.matching.match import Match, NearestMiss
from mla_fx.matching.words import stored, var
from mla_fx.readings.axes import Index, combine, composite, of_axis, whole
from mla_fx.readings.element import Element, Scales, element_of
from mla_fx.readings.rope import _layout_read


def scaled_line(scales, row=0, dtype=torch.float32):
    """An element of LINE with scales: the first numbers of a tensor, from a row on."""
    index = (combine(row, [(whole(B4), 1)]),) if scales is LINE else (Index(row), of_axis(B4))
    return replace(line(0, (A4, 4), (B4, 1)), scales=Scales((Element(scales, index),), dtype))


TWICE = {  # one element, another, what is known already
    "transposed": (Element(SQUARE, (of_axis(A4), of_axis(B4))), Element(SQUARE, (of_axis(B4), of_axis(A4))), {}),
    "on the diagonal": (Element(SQUARE, (of_axis(A4), of_axis(B4))), Element(SQUARE, (of_axis(C4), of_axis(C4))), {}),
    "parted elsewhere": (digit_of_twelve(6, 2), digit_of_twelve(4, 3), {}),
    "across what is known": (digit_of_twelve(4, 3), digit_of_twelve(4, 3), {"same": {A12: composite([A2, B6])}}),
    "fewer terms": (line(0, (A4, 4), (B4, 1)), line(0, (C4, 4)), {}),
    "further on": (line(0, (A4, 4), (B4, 1)), line(1, (C4, 4), (D4, 1)), {}),
    "in other steps": (line(0, (A4, 4), (B4, 1)), line(0, (C4, 5), (D4, 1)), {}),
    "another size": (line(0, (A4, 4), (B4, 1)), line(0, (A3, 4), (D4, 1)), {}),
    "fixed": (line(0, (A4, 4), (B4, 1)), line(0, (C4, 4), (D4, 1)), {"fixed": frozenset({A4, C4})}),
    "with scales and without": (scaled_line(LINE), line(0, (A4, 4), (B4, 1)), {}),
    "with scales of another tensor": (scaled_line(LINE), scaled_line(SQUARE), {}),
    "in another dtype": (scaled_line(LINE), scaled_line(LINE, dtype=torch.bfloat16), {}),
    "with scales of another row": (scaled_line(LINE), scaled_line(LINE, row=1), {}),
}


@pytest.mark.parametrize("name", TWICE)
def test_two_elements_that_are_not_one(name):
    one, other, known = TWICE[name]
    with refused("x is read in two different ways"):
        Match(**known).bind("x", one).bind("x", other)


def test_a_pair_along_a_diagonal_has_no_layout():
    """Pairs of columns 4 apart, but each in a row of its own."""
    first, second = (Element(LINE, (of_axis(A4), combine(start, [(whole(A4), 1)]))) for start in (0, 4))
    across = [replace(part, index=(of_axis(B4), part.index[1])) for part in (first, second)]
    assert _layout_read(*across, A4) == "half"
    assert _layout_read(first, second, A4) is None


def test_scaled_elements_that_are_one():
    Match().bind("x", scaled_line(LINE)).bind("x", scaled_line(LINE))


def test_two_elements_that_are_one():
    one, other = line(0, (A4, 4), (B4, 1)), line(0, (C4, 4), (D4, 1))
    assert Match().bind("x", one).bind("x", other).same == {C4: of_axis(A4), D4: of_axis(B4)}


def test_two_readings_that_part_one_dimension_differently():
    with refused("split one dimension in incompatible ways"):
        Match().bind("x", digit_of_twelve(6, 2)).bind("y", digit_of_twelve(4, 3)).settled()


def test_a_cache_that_is_written_in_an_unknown_way_is_no_row():
    slots = torch.tensor([4, 0, 3])
    added = Traced(lambda cache, r: cache.index_put((slots,), r, accumulate=True), dense(T, D), dense(S, D))
    element, nearest = element_of(added.out), NearestMiss()
    assert not list(stored(var("x"), name="kept").bindings(element, Match(), nearest))
    assert nearest.miss.reason == "the cache is added to, not written"
