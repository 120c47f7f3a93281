"""Index arithmetic: axes, their digits, and what is known of sizes."""

import sympy

from mla_fx.readings import axes
from mla_fx.readings.axes import Axis, Digit, Index, combine, composite, of_axis, reshape, shifted, substitute, whole
from mla_fx.readings.sizes import at_most, ratio


def test_reshape_merges_two_dimensions():
    rows, columns = Axis(3), Axis(4)
    (merged,) = reshape([of_axis(rows), of_axis(columns)], [3, 4], [12])
    assert merged == composite([rows, columns])


def test_reshape_reads_digits_of_an_axis_that_it_parts():
    axis = Axis(12)
    rows, columns = reshape([of_axis(axis)], [12], [3, 4])
    assert (rows.terms, columns.terms) == (((Digit(axis, 4, 3), 1),), ((Digit(axis, 1, 4), 1),))


def test_reshape_there_and_back_is_nothing():
    axis = Axis(12)
    assert reshape(reshape([of_axis(axis)], [12], [3, 4]), [3, 4], [12]) == (of_axis(axis),)


def test_two_ways_to_part_an_axis_do_not_depend_on_each_other():
    axis = Axis(12)
    ways = [reshape([of_axis(axis)], [12], sizes) for sizes in ([3, 4], [4, 3], [3, 4])]
    assert ways[0] == ways[2] != ways[1]


def test_a_digit_of_what_stands_for_an_axis():
    axis, rows, columns = Axis(12), Axis(3), Axis(4)
    upper, lower = reshape([of_axis(axis)], [12], [3, 4])
    named = {axis: composite([rows, columns])}
    assert (substitute(upper, named), substitute(lower, named)) == (of_axis(rows), of_axis(columns))
    assert substitute(reshape([of_axis(axis)], [12], [2, 6])[0], named) is None


def test_cuts_part_an_axis_wherever_a_digit_begins():
    axis = Axis(24)
    four, six, twelve = (reshape([of_axis(axis)], [24], [size, 24 // size]) for size in (4, 6, 12))
    found = axes.without_digits([*four, *twelve])
    assert [digit.size for digit, _ in found[axis].terms] == [2, 3, 4][::-1]
    assert axes.without_digits([*four, *six]) is None


def test_reshape_carries_an_offset_into_the_right_digits():
    axis = Axis(2)
    rows, columns = reshape([of_axis(axis, 1, 9)], [12], [3, 4])
    assert (rows, columns) == (Index(2), of_axis(axis, 1, 1))


def test_reshape_refuses_a_read_across_a_boundary():
    assert reshape([of_axis(Axis(2), 1, 3)], [12], [3, 4]) is None


def test_reshape_follows_steps_that_do_not_divide_a_dimension():
    rows, tokens = Axis(2), Axis(3)
    read = of_axis(rows), of_axis(tokens, stride=2)
    assert reshape(read, [2, 5], [10])[0] == combine(0, [(whole(rows), 5), (whole(tokens), 2)])
    assert reshape([combine(0, [(whole(rows), 5), (whole(tokens), 2)])], [10], [2, 5]) == read
    assert reshape([combine(1, [(whole(rows), 5), (whole(tokens), 2)])], [10], [2, 5]) is None


def test_reshape_of_symbolic_sizes():
    batch, tokens = sympy.symbols("b s", positive=True, integer=True)
    flat = Axis(batch * tokens)
    rows, columns, width = reshape([of_axis(flat), axes.fresh(6)], [batch * tokens, 6], [batch, tokens, 6])
    assert [digit.size for digit, _ in (*rows.terms, *columns.terms)] == [batch, tokens]
    assert width.axis.size == 6


def test_an_offset_of_rows_and_columns_is_carried_into_both():
    first, tokens = sympy.symbols("f t", positive=True, integer=True)
    row, column = Axis(tokens), Axis(2)
    read = shifted(of_axis(row), first), shifted(of_axis(column), 3)
    flat = reshape(read, [first + tokens, 6], [6 * (first + tokens)])
    assert reshape(flat, [6 * (first + tokens)], [first + tokens, 6]) == read
    assert reshape([shifted(flat[0], 2)], [6 * (first + tokens)], [first + tokens, 6]) is None


def test_a_number_is_not_placed_below_a_size_that_may_be_smaller():
    tokens = sympy.Symbol("s", positive=True, integer=True)
    assert reshape([Index(7)], [3 * tokens], [3, tokens]) is None


def test_what_is_known_of_a_size_is_what_its_symbol_was_made_with():
    backed, unbacked = sympy.Symbol("s", positive=True, integer=True), sympy.Symbol("u", integer=True)
    assert at_most(1, backed)
    assert at_most(3 * backed, 4 * backed)
    assert not at_most(backed, 0)
    assert not at_most(2, backed)
    assert not at_most(0, unbacked)
    assert not at_most(unbacked, 2 * unbacked)
    assert at_most(unbacked, unbacked + 1)


def test_ratio_is_exact_or_none():
    tokens = sympy.Symbol("s", positive=True, integer=True)
    assert ratio(12, 4) == 3
    assert ratio(12, 5) is None
    assert ratio(6 * tokens, 2) == 3 * tokens
    assert ratio(tokens, 2) is None
    assert ratio(4, 0) is None


def test_combine_adds_equal_axes_and_drops_those_of_one():
    axis, single = Axis(4), Axis(1)
    assert combine(1, [(whole(axis), 2), (whole(single), 7), (whole(axis), 3)]) == of_axis(axis, 5, 1)
    assert combine(0, [(whole(axis), 2), (whole(axis), -2)]) == Index()


def test_reshape_parts_an_offset_within_dimensions_that_any_number_may_stand_before():
    """An element is in no dimension of none: with `tokens` of them, whatever that is, a row is not less than 72."""
    batch, tokens = sympy.Symbol("b", positive=True, integer=True), sympy.Symbol("t", integer=True)
    row, place, head, column = Axis(batch), Axis(tokens), Axis(4), Axis(10)
    index = [of_axis(row), of_axis(place), of_axis(head), shifted(of_axis(column), 8)]
    kept, _, joined = reshape(index, [batch, tokens, 4, 18], [batch, tokens, 72])
    assert kept == of_axis(row) and joined == combine(8, [(whole(head), 18), (whole(column), 1)])


def test_an_index_that_is_more_than_an_axis_is_none():
    axis = Axis(4)
    assert of_axis(axis).axis is axis
    assert of_axis(axis, 2).axis is None
    assert of_axis(axis, 1, 1).axis is None
    assert Index(0, ((Digit(axis, 1, 2), 1),)).axis is None


def test_digits_that_an_index_does_not_count_through():
    axis, other = Axis(4), Axis(3)
    assert axes.digits_of(composite([axis, other])) == (whole(axis), whole(other))
    assert axes.digits_of(of_axis(axis, 2)) is None
    assert axes.digits_of(of_axis(axis, 1, 1)) is None
    part = Index(0, ((Digit(axis, 2, 2), 1),))
    assert axes.digits_of(part) == (Digit(axis, 2, 2),)
    assert axes.axes_of(part) is None


def test_terms_whose_order_depends_on_a_size_have_none():
    one, two = (sympy.Symbol(name, integer=True, positive=True) for name in "mn")
    assert axes.slowest_first([(whole(Axis(2)), one), (whole(Axis(2)), two)]) is None
    assert axes.slowest_first([(whole(Axis(2)), one), (whole(Axis(2)), one * two)])[0][1] == one * two


def test_indices_cut_at_places_that_do_not_go_together_have_no_difference():
    axis = Axis(12)
    halves, thirds = (Index(0, ((Digit(axis, 1, size), 1),)) for size in (6, 4))
    assert axes.subtract(halves, thirds) is None


def test_a_digit_that_does_not_divide_its_axis_is_no_index():
    assert axes.digit_of(of_axis(Axis(2), 3), Digit(Axis(7), 1, 3)) is None


def test_nothing_is_known_of_a_size_without_bounds():
    size = sympy.Symbol("u", integer=True)
    assert not at_most(0, size)
    assert ratio(size, sympy.Integer(0)) is None
