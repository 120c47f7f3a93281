"""Near twins of what is read. Without one refusal, each would be read wrongly; each says why it is refused."""

import math
import operator
from dataclasses import replace

import pytest
import sympy
import torch
from lib.layers import QUIET, Layer, Reporting, Sizes, arguments_of, check, check_no_further, in_type
from lib.traced import B, D, N, S, T, Traced, assert_resolves, dense
from readings.test_attentions import BIAS, MASK
from readings.test_cache_updates import SLOTS, read_update, written
from readings.test_norms import EPSILON, normed
from readings.test_rotations import half_tables, pairs, rotations
from readings.test_views import rows
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F  # noqa: N812

from mla_fx.errors import NoMatch
from mla_fx.graph.aliasing import may_share, surely_shares
from mla_fx.matching.match import Match, NearestMiss
from mla_fx.matching.words import stored, var
from mla_fx.passes.reinplace import reinplace
from mla_fx.readings.algebra import as_product, as_sum
from mla_fx.readings.attention import Causal, anchors, attention
from mla_fx.readings.axes import (
    Axis,
    Digit,
    Index,
    axes,
    axes_of,
    combine,
    composite,
    difference,
    digit_of,
    digits_of,
    of_axis,
    slowest_first,
    whole,
)
from mla_fx.readings.cache_update import cache_update
from mla_fx.readings.causal import CausalByPosition, causal_by_position
from mla_fx.readings.constant import constant
from mla_fx.readings.contraction import contraction
from mla_fx.readings.element import Element, Scales, element_of, resolve
from mla_fx.readings.integers import integer_sum, whole_number
from mla_fx.readings.reading import renamed
from mla_fx.readings.rms_norm import rms_norm
from mla_fx.readings.rope import _layout_read
from mla_fx.readings.sizes import at_most, ratio
from mla_fx.rewriting.emitter import Emitter
from mla_fx.rewriting.masks import check_is_causal, joined_masks, mask_operands
from mla_fx.rewriting.materialize import tensor
from mla_fx.rewriting.replacement import check_nothing_is_lost

aten = torch.ops.aten
pytestmark = [pytest.mark.filterwarnings(line) for line in QUIET]


def refused(reason):
    return pytest.raises(NoMatch, match=reason)


# --- index arithmetic ------------------------------------------------------------------------------------------------


def test_an_index_that_is_more_than_an_axis_is_none():
    axis = Axis(4)
    assert of_axis(axis).axis is axis
    assert of_axis(axis, 2).axis is None
    assert of_axis(axis, 1, 1).axis is None
    assert Index(0, ((Digit(axis, 1, 2), 1),)).axis is None


def test_digits_that_an_index_does_not_count_through():
    axis, other = Axis(4), Axis(3)
    assert digits_of(composite([axis, other])) == (whole(axis), whole(other))
    assert digits_of(of_axis(axis, 2)) is None
    assert digits_of(of_axis(axis, 1, 1)) is None
    part = Index(0, ((Digit(axis, 2, 2), 1),))
    assert digits_of(part) == (Digit(axis, 2, 2),)
    assert axes_of(part) is None


def test_terms_whose_order_depends_on_a_size_have_none():
    one, two = (sympy.Symbol(name, integer=True, positive=True) for name in "mn")
    assert slowest_first([(whole(Axis(2)), one), (whole(Axis(2)), two)]) is None
    assert slowest_first([(whole(Axis(2)), one), (whole(Axis(2)), one * two)])[0][1] == one * two


def test_indices_cut_at_places_that_do_not_go_together_have_no_difference():
    axis = Axis(12)
    halves, thirds = (Index(0, ((Digit(axis, 1, size), 1),)) for size in (6, 4))
    assert difference(halves, thirds) is None


def test_a_digit_that_does_not_divide_its_axis_is_no_index():
    assert digit_of(of_axis(Axis(2), 3), Digit(Axis(7), 1, 3)) is None


def test_nothing_is_known_of_a_size_without_bounds():
    size = sympy.Symbol("u", integer=True)
    assert not at_most(0, size)
    assert ratio(size, sympy.Integer(0)) is None


# --- elements --------------------------------------------------------------------------------------------------------


def in_every_second(x):
    return x.slice_scatter(x[..., ::2] + 100, -1, 0, D, 2)


VALUES = {  # elements that resolve no further, because the next step would read something else
    "whole numbers": ("_to_copy", lambda x: (x * 0.7).to(torch.int64).to(torch.float32)),
    "whole numbers copied": ("copy", lambda x: aten.copy.default(x, (x * 0.7).to(torch.int64))),
    "bytes that wrap": ("mul", lambda x: x.abs().to(torch.uint8).mul(200)),
    "repeated": ("repeat", lambda x: x.repeat(1, 2)),
    "every second written": ("slice_scatter", in_every_second),
    "some of every second written": (
        "slice_scatter", lambda x: x.slice_scatter(x[..., :2] + 100, -1, 0, 4, 2)[..., ::2]
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", VALUES)
def test_what_an_element_is_not_followed_through(name):
    origin, function = VALUES[name]
    element = assert_resolves(Traced(function, dense(S, D) * 3, decompose=False))
    assert element.origin.target._opname == origin


UNKNOWN = {  # of x [s0, s1], where s0 is 3 or more: positions that may count from the end
    "window": lambda x: rows(x)[:, x.shape[0] - 3 :],
    "part": lambda x: rows(x)[:, x.shape[0] - 3 : x.shape[0] - 1],
    "token": lambda x: rows(x).select(1, x.shape[0] - 3),
    "rows written": lambda x: rows(x).slice_scatter(rows(x)[:, :1] + 100, 1, x.shape[0] - 3, x.shape[0] - 2),
    "row written": lambda x: rows(x).select_scatter(rows(x)[:, 0] + 100, 1, x.shape[0] - 3),
}


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(3, 5), (4, 5)], ids=str)
@pytest.mark.parametrize("name", UNKNOWN)
def test_a_position_that_may_count_from_the_end(name, shape):
    values = torch.arange(1.0, 1 + math.prod(shape)).view(shape)
    assert_resolves(Traced(UNKNOWN[name], values, dynamic=True))


def test_a_copy_to_another_type_rounds():
    traced = Traced(lambda x: aten.copy.default(x.bfloat16(), x).float(), dense(D), decompose=False)
    assert element_of(traced.out).roundings == (torch.bfloat16,)


def test_an_element_read_across_a_boundary():
    traced = Traced(lambda x: x.view(12).clone(), dense(3, 4))
    axis = Axis(12)
    element = resolve(traced.out, (of_axis(axis),))
    across = {axis: of_axis(Axis(4), 3)}
    for read in (element.at, element.renamed, lambda names: renamed(element.index[0], names)):
        with refused("read across a boundary"):
            read(across)


def test_a_factor_is_not_left_behind():
    element = element_of(Traced(lambda x: x * 2, dense(D)).out)
    with refused("the graph input x is multiplied by a number, 2"):
        print(element.node)


def test_flags_and_complex_numbers_are_no_constants():
    traced = Traced(
        lambda x: [torch.full((), 2, dtype=torch.complex64), x > torch.zeros((), dtype=torch.bool)], dense(D)
    )
    number, compared = traced.out
    assert constant(True) is None
    assert constant(number) is None
    assert [constant(value) for value in compared.all_input_nodes] == [None, None]


def test_a_whole_number_that_a_float_may_not_hold_is_no_constant():
    assert constant(2**53) == 2.0**53
    assert constant(2**53 + 1) is None and constant(-(2**60)) is None


def test_a_whole_number_cast_from_a_float_is_not_followed():
    found = integer_sum(element_of(Traced(lambda x: (x * 4).long() + 3, dense(S)).out))
    ((summand, times),) = found.elements
    assert (times, found.index.offset) == (1, 3) and summand.node.meta["val"].dtype == torch.int64


def test_a_sum_that_is_too_long():
    def function(x, y):
        for _ in range(120):
            x = x + y
        return x

    with refused("a sum or product of more than 100 operations"):
        as_sum(element_of(Traced(function, dense(D), dense(D)).out))


def test_the_root_of_a_negative_number():
    with refused("-2 to the power 0.5 is not a number"):
        as_product(element_of(Traced(lambda x: (x * -2) ** 0.5, dense(D)).out))


@pytest.mark.parametrize("factor", [1e-200, 1e200])
def test_a_product_of_no_finite_multiple(factor):
    with refused("a matrix product is multiplied by (0|inf)"):
        contraction(element_of(Traced(lambda x, w: (x * factor) @ (w * factor), dense(S, D), dense(D, T)).out))


# --- norms -----------------------------------------------------------------------------------------------------------


def root_of(x, radicand):
    return x * torch.rsqrt(radicand + EPSILON)


def twice(x):
    return x[:, None].expand(B, 2, S, D)


NORMS = {
    "a negative epsilon": (lambda x, g: g * x * torch.rsqrt(x.square().mean(-1, True) - EPSILON), "compile-time"),
    "negative squares": (lambda x, g: g * root_of(x, -x.square().mean(-1, True)), "root are multiplied by -"),
    "the token before": (lambda x, g: normed(x[:, 1:], g, x[:, :-1]), "is not the value whose mean square"),
    "the other half": (lambda x, g: normed(x[..., 4:], g[:4], x[..., :4]), "is not the value whose mean square"),
    "every other": (lambda x, g: normed(x[..., ::2], g[:4], x[..., :4]), "is not the value whose mean square"),
    "first instead of every other": (lambda x, g: normed(x[..., :4], g[:4], x[..., ::2]), "is not the value"),
    "rounded": (lambda x, g: normed(x.bfloat16().float(), g, x), "is not the value whose mean square"),
    "times nothing": (lambda x, g: normed(x, g, x) * 1e-200 * 1e-200, "the norm is multiplied by a number, 0"),
    "repeated": (lambda x, g: g * root_of(x, twice(x).square().mean((1, -1))[..., None]), "is not the value"),
    "the diagonal": (lambda x, g: normed(x, g, x.diagonal(0, 1, 2)[:, None]), "is not the value|expected"),
}


@pytest.mark.parametrize("name", NORMS)
def test_near_twins_of_a_norm(name):
    function, reason = NORMS[name]
    with refused(reason):
        rms_norm(element_of(Traced(function, dense(B, S, D), dense(D)).out))


@pytest.mark.parametrize(("order", "power"), [(3, 2), (2, 1)])
def test_a_norm_of_another_order_or_power(order, power):
    def function(x, g):
        return g * root_of(x, torch.linalg.vector_norm(x, order, -1, True) ** power / D)

    with refused("expected the square of a Euclidean norm under the root"):
        rms_norm(element_of(Traced(function, dense(B, S, D), dense(D), decompose=False).out))


@pytest.mark.parametrize(
    ("squares", "reason"),
    [
        (lambda x: x.square().sum(-1, True), "the norm is over a dimension of unknown size"),
        (lambda x: x.square().mean(-1, True), "the mean is over a dimension of unknown size"),
    ],
)
def test_a_norm_of_unknown_width(squares, reason):
    traced = Traced(lambda x, g: g * root_of(x, squares(x)), dense(S, D), dense(D), dynamic=True)
    with refused(reason):
        rms_norm(element_of(traced.out))


def test_a_norm_of_what_is_parted_in_another_way():
    def function(x, g):
        firsts = x.view(2, 6)[:, :1].expand(2, 6).reshape(12)
        mean = x.view(3, 4).square().mean(-1, True).expand(3, 4).reshape(12)
        return g * firsts * torch.rsqrt(mean + EPSILON)

    with refused("is not the value whose mean square"):
        rms_norm(element_of(Traced(function, dense(12), dense(12)).out))


def test_a_norm_that_is_divided_last():
    traced = Traced(lambda x, g: x * g / torch.sqrt(x.square().mean(-1, True) + EPSILON), dense(S, D), dense(D))
    assert not rms_norm(element_of(traced.out)).gamma_after_cast


# --- rotations -------------------------------------------------------------------------------------------------------


def turned(x):
    return x.transpose(-1, -2)


def tokens(x, first):
    return x[..., first : first + 2, :]


ROTATIONS = {
    "another token": lambda x, c, s: pairs(tokens(x[..., :4], 0), tokens(x[..., 4:], 1), c[:2], s[:2]),
    "every other and neighbours": lambda x, c, s: pairs(x[..., ::2], x[..., 1:5], c, s),
}


@pytest.mark.parametrize("name", ROTATIONS)
def test_near_twins_of_a_rotation(name):
    traced = Traced(lambda x, c, s: torch.cat(ROTATIONS[name](turned(x), c, s), -1), dense(B, N, D, S), *half_tables())
    with refused("expected a rotary embedding"):
        rotations(traced)


def test_a_complex_sum_is_no_rotation():
    def function(x, c, s):
        return torch.view_as_real(torch.complex(x[..., :4], x[..., 4:]) + torch.complex(c, s)).flatten(-2)

    with refused("expected a rotary embedding"):
        rotations(Traced(function, dense(S, D), *half_tables()))


# --- attention -------------------------------------------------------------------------------------------------------


def raised(q, k):
    return torch.exp(q @ k.mT)


def is_masked(logits):
    return ~(logits != -torch.inf).any(-1, keepdim=True)


def guarded(condition):
    """A softmax that is zero where a condition of its logits holds."""

    def function(q, k, v):
        logits = q @ k.mT + BIAS
        return torch.where(condition(logits), 0.0, logits.softmax(-1)) @ v

    return function


ATTENTIONS = {
    "the sum of the first head": (lambda e: e / e[:, :1].sum(-1, keepdim=True), "by the sum of others"),
    "the sum over all queries": (lambda e: e / e.sum((-1, -2), keepdim=True), "are not divided by their sum"),
    "the sum of other values": (lambda e: e / e.sin().sum(-1, keepdim=True), "are not divided by their sum"),
    "a maximum": (lambda e: e / e.amax(-1, keepdim=True), "expected a softmax"),
}


@pytest.mark.parametrize("name", ATTENTIONS)
def test_near_twins_of_a_softmax_by_hand(name):
    divided, reason = ATTENTIONS[name]
    with refused(reason):
        read(lambda q, k, v: divided(raised(q, k)) @ v)


def test_a_maximum_over_the_queries_is_no_softmax():
    def function(q, k, v):
        logits = q @ k.mT
        e = torch.exp(logits - logits.amax(-2, keepdim=True))
        return (e / (e * 1).sum(-1, keepdim=True)) @ v

    with refused("not the maximum of the scores"):
        read(function)


GUARDS = {
    "none": is_masked,
    "not at all": lambda logits: (logits != -torch.inf).any(-1, keepdim=True),
    "masked logits": lambda logits: ~(logits != -torch.inf),
    "all queries": lambda logits: ~(logits != -torch.inf).any(-1, keepdim=True).any(-2, keepdim=True),
    "all queries at once": lambda logits: ~aten.any.dims(logits != -torch.inf, [-1, -2], True),
    "anything but all": lambda logits: (logits != -torch.inf).any(-1, keepdim=True) & MASK,
    "some masked": lambda logits: ~(logits == -torch.inf).any(-1, keepdim=True),
    "positive": lambda logits: ~(logits > -torch.inf).any(-1, keepdim=True),
    "infinite": lambda logits: ~(logits != torch.inf).any(-1, keepdim=True),
    "other logits": lambda logits: ~(logits * 2 != -torch.inf).any(-1, keepdim=True),
    "another query": lambda logits: ~(logits[..., :1, :] != -torch.inf).any(-1, keepdim=True),
}


@pytest.mark.parametrize("name", list(GUARDS)[1:])
def test_near_twins_of_a_guarded_softmax(name):
    with refused("masked after the softmax"):
        read(guarded(GUARDS[name]))


def test_a_guarded_softmax():
    assert len(read(guarded(GUARDS["none"])).scores) == 1


def test_probabilities_that_are_replaced_by_a_number():
    with refused("replaced under a condition"):
        read(lambda q, k, v: torch.where(MASK, 0.5, (q @ k.mT).softmax(-1)) @ v)


def test_probabilities_that_are_left_out():
    with refused("only some of the softmax's probabilities"):
        read(lambda q, k, v: (q @ k.mT).softmax(-1)[..., 2:] @ v[..., 2:, :])


@pytest.mark.parametrize("divided", [lambda x: torch.cat([x, x], -1) / 2, lambda x: x.exp().sin() / x.sum()])
def test_a_quotient_that_begins_no_attention(divided):
    def function(x, v):
        value = divided(x)
        return value @ v[: value.shape[-1]]

    assert not list(anchors(Traced(function, dense(S, 4), dense(D, D), decompose=False).graph))


def test_a_number_subtracted_before_the_exponential_is_no_maximum():
    def function(q, k, v):
        e = torch.exp(q @ k.mT - 3.0)
        return (e / e.sum(-1, keepdim=True)) @ v

    with refused("not the maximum of the scores"):
        read(function)


def test_a_triangle_of_many_numbers_is_no_causal_mask():
    position = torch.arange(T)
    distance = (position - position[:, None]).float()
    found = read(lambda q, k, v: (q @ k.mT + distance.triu(1)).softmax(-1) @ v, *[(B, T, D)] * 3, decompose=False)
    with refused("more than one number above its diagonal"):
        causal_by_position(found, (), axes_of(found.index[1]))


def test_is_causal_together_with_a_mask():
    masked = read(lambda q, k, v, m: (q @ k.mT + m).softmax(-1) @ v, *[(B, N, S, D)] * 3, (S, S))
    rows = masked.index[-2]
    with refused("is_causal is given together with a mask"):
        check_is_causal(replace(masked, causal=Causal(masked.node, rows)), axes_of(rows))


def test_positions_on_another_device_leave_the_mask_a_tensor():
    masked = read(lambda q, k, v, m: (q @ k.mT + m).softmax(-1) @ v, *[(B, S, D)] * 3, (S, S))
    positions = masked.node.graph.placeholder("positions")
    sequences, rows, _ = (axes_of(part) for part in masked.index)
    dims = sequences, (), rows, axes_of(masked.keys)
    for device, is_length in (("cpu", True), ("meta", False)):
        positions.meta["val"] = torch.empty(B, dtype=torch.int64, device=device)
        counted = CausalByPosition(Element(positions, masked.index[:1]), 0, None)
        mask, lengths, _ = mask_operands(masked, counted, dims)
        assert (mask is None, lengths is not None) == (is_length, is_length)


FUSED = {
    "with dropout": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=0.5),
    "over a single key": lambda q, k, v: F.scaled_dot_product_attention(q, k[..., :1, :], v[..., :1, :]),
    "belongs to other sequences than the query": lambda q, k, v: F.scaled_dot_product_attention(q, k[0], v[0]),
    "output is not used": lambda q, k, v: aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)[1],
}


@pytest.mark.parametrize("reason", FUSED)
def test_near_twins_of_fused_attention(reason):
    values = [dense(B, N, size, D) for size in (S, T, T)]
    graph = make_fx(FUSED[reason], tracing_mode="fake", pre_dispatch=True)(*values).graph
    graph.eliminate_dead_code()
    (anchor,) = anchors(graph)
    with refused(reason):
        attention(anchor)


def test_fused_attention_over_columns_of_unknown_number():
    values = [dense(B, N, size, D) for size in (S, T, T)]
    function = make_fx(F.scaled_dot_product_attention, tracing_mode="symbolic", pre_dispatch=True)
    (anchor,) = anchors(function(*values).graph)
    with refused("the softmax scale is not a compile-time number"):
        attention(anchor)


def read(function, *shapes, **options):
    shapes = shapes or ((B, N, S, D), (B, N, T, D), (B, N, T, D))
    traced = Traced(function, *(dense(*shape) for shape in shapes), **options)
    (anchor,) = anchors(traced.graph)
    return attention(anchor)


# --- caches ----------------------------------------------------------------------------------------------------------

ALL = slice(None)
UPDATES = {
    "by a boolean mask": lambda cache, r: written(cache, (ALL, ALL, torch.ones(T).bool()), cache + 1),
    "along several dimensions": lambda cache, r: written(cache, (torch.arange(B), ALL, SLOTS[:B]), r[:, :, 0]),
    "broadcast into the cache": lambda cache, r: written(cache, (ALL, ALL, SLOTS), r[..., :1]),
    "in steps of 2": lambda cache, r: written(cache, (ALL, ALL, slice(0, 5, 2)), r),
    "only some of the rows": lambda cache, r: cache.scatter(2, SLOTS.view(1, 1, S, 1).expand(B, 1, S, 4), r),
    "to different positions": lambda cache, r: cache.scatter(2, torch.arange(D).expand(B, 1, S, D) % T, r),
    "one cat of the old and the new rows": lambda cache, r: torch.cat([cache, r[:, :, :1].expand_as(cache)], -1),
    "not 0, 1, 2": lambda cache, r: written(
        cache[:, 0], (torch.arange(B)[None], SLOTS.expand(B, S)[:, :B]), r[:, 0, :B]
    ),
}


@pytest.mark.parametrize("reason", UPDATES)
def test_near_twins_of_a_cache_update(reason):
    with refused(reason):
        read_update(UPDATES[reason])


def test_one_row_at_a_position_that_may_be_negative():
    def function(cache, row, positions):
        return torch.select_scatter(cache, row, 2, positions.shape[0] - 4)

    traced = Traced(function, dense(B, 1, T, D), dense(B, 1, D), dense(6), dynamic=True)
    with refused("from a position that may be negative"):
        cache_update(element_of(traced.out))


def joined(function, *shapes):
    """Two updates, the second read together with the first."""
    traced = Traced(function, *(dense(*shape) for shape in shapes))
    first, second = (cache_update(element_of(value)) for value in traced.out)
    return second.beside(first)


def test_two_caches_of_different_layouts():
    with refused("only one of latent and rotary key is cached by blocks and offsets"):
        joined(
            lambda a, r: (written(a, (ALL, SLOTS), r), written(a.unsqueeze(2), (ALL, SLOTS, 0 * SLOTS), r)),
            *((B, T, D), (B, S, D)),
        )


def test_two_caches_of_different_numbers_of_rows():
    with refused("have different numbers of rows or slots"):
        joined(lambda a, r, p: (torch.cat([a, r], 1), torch.cat([a, p], 1)), (B, T, D), (B, 1, D), (B, 2, D))


@pytest.mark.parametrize(("number", "whole"), [(3, 3), (3.0, 3), (2.5, None), (2.0**53, None), (None, None)])
def test_numbers_that_are_no_whole_ones(number, whole):
    assert whole_number(number) == whole


# --- products --------------------------------------------------------------------------------------------------------


def test_a_product_times_a_number_known_at_run_time():
    given = dense(S, T), dense(S, D), dense(D, T)
    traced = Traced(lambda b, x, w: torch.addmm(b, x, w, beta=0), *given, decompose=False)
    traced.out.kwargs = {"beta": 0, "alpha": traced.out.args[0]}
    with refused("a matrix product is multiplied by a number known at run time"):
        contraction(element_of(traced.out))


# --- one element twice -----------------------------------------------------------------------------------------------

SQUARE = Traced(lambda x: x.clone(), dense(4, 4)).out.args[0]
LINE = Traced(lambda x: x.clone(), dense(24)).out.args[0]
A4, B4, C4, D4, A2, A3, A12, B6 = (Axis(size) for size in (4, 4, 4, 4, 2, 3, 12, 6))


def line(offset, *terms):
    return Element(LINE, (combine(offset, [(whole(axis), stride) for axis, stride in terms]),))


def digit_of_twelve(below, size):
    return Element(LINE, (combine(0, [(Digit(A12, below, size), 1)]),))


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
    graph = Traced(lambda cache, r: cache.index_put((SLOTS,), r, accumulate=True), dense(T, D), dense(S, D)).graph
    element, nearest = element_of(graph.output_node().args[0]), NearestMiss()
    assert not list(stored(var("x"), name="kept").bindings(element, Match(), nearest))
    assert nearest.miss.reason == "the cache is added to, not written"


# --- from elements to tensors ----------------------------------------------------------------------------------------

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


# --- layers ----------------------------------------------------------------------------------------------------------


class OneAppended(Layer):
    def store(self, latent, k_rope, position, kv_cache, kr_cache):
        kv_cache.index_copy_(2, position, latent)
        return kv_cache, torch.cat((kr_cache[:, :, self.sizes.tokens :], k_rope), dim=2)


class ComputedQuery(Layer):
    def query(self, x):
        z, scale = self.sizes, torch.linspace(0.5, 1.5, len(self.q_b), dtype=torch.float64)
        q = self.norm(x @ self.q_a.T, self.q_gamma) @ (self.q_b * scale[:, None]).T
        return q.unflatten(-1, (z.heads, z.query)).transpose(1, 2)


class ScaledStates(Layer):
    def query(self, x):
        return super().query(x * torch.tensor(1.5, dtype=torch.float64))


class CrossedQuery(Layer):
    """The rotary columns of a head come before the others."""

    def query(self, x):
        q = super().query(x)
        return torch.cat((q[..., self.sizes.rope :], q[..., : self.sizes.rope]), dim=-1)


class ApartRows(Layer):
    """Latent and rotary key are projected by two matrices."""

    def __init__(self):
        super().__init__()
        latent, k_rope = self.kv_a.split([self.sizes.rank, self.sizes.rope])
        self.latent, self.k_rope = nn.Parameter(latent.clone()), nn.Parameter(k_rope.clone())

    def rows(self, x):
        return self.norm(x @ self.latent.T, self.kv_gamma).unsqueeze(1), (x @ self.k_rope.T).unsqueeze(1)


class CrossedRows(Layer):
    """The rotary key comes before the latent in their matrix."""

    def rows(self, x):
        k_rope, latent = (x @ self.kv_a.T).split([self.sizes.rope, self.sizes.rank], dim=-1)
        return self.norm(latent, self.kv_gamma).unsqueeze(1), k_rope.unsqueeze(1)


class KeyAsItIs(Layer):
    def rotate_key(self, x, *tables):
        return x


class KeyInPairs(Layer):
    def rotate_key(self, x, cos, sin):
        half = self.sizes.rope // 2
        first, second, cos, sin = x[..., ::2], x[..., 1::2], cos[..., :half], sin[..., :half]
        return torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2)


class TurnedCaches(Layer):
    """Caches in the layout [B,1,width,T]."""

    def __init__(self):
        super().__init__(Sizes(rank=6))

    def store(self, latent, k_rope, position, *caches):
        turned = [cache.transpose(2, 3).contiguous() for cache in caches]
        for cache, new in zip(turned, (latent, k_rope), strict=True):
            cache.index_copy_(3, position, new.transpose(2, 3))
        return [cache.transpose(2, 3) for cache in turned]


class GroupsOfOneWeight(Layer):
    """The latent is normalised in two groups of columns, each by the same weight."""

    def rows(self, x):
        latent, k_rope = (x @ self.kv_a.T).split([self.sizes.rank, self.sizes.rope], dim=-1)
        groups = self.norm(latent.unflatten(-1, (2, -1)), self.kv_gamma[: self.sizes.rank // 2])
        return groups.flatten(-2).unsqueeze(1), k_rope.unsqueeze(1)


class TwoMatrices(Layer):
    """The latent comes from one matrix, the rotary key from the same rows of another."""

    def __init__(self):
        super().__init__()
        self.other = nn.Parameter(self.kv_a.flip(0))

    def rows(self, x):
        latent, k_rope = x @ self.kv_a[: self.sizes.rank].T, x @ self.other[self.sizes.rank :].T
        return self.norm(latent, self.kv_gamma).unsqueeze(1), k_rope.unsqueeze(1)


class OneRow(Layer):
    """Every column of latent and rotary key is the same."""

    def __init__(self):
        super().__init__()
        self.kv_a = nn.Parameter(self.kv_a[:1].clone())

    def rows(self, x):
        z = self.sizes
        latent, k_rope = (x @ self.kv_a.expand(z.rank + z.rope, -1).T).split([z.rank, z.rope], dim=-1)
        return self.norm(latent, self.kv_gamma).unsqueeze(1), k_rope.unsqueeze(1)


class TurnedRows(Layer):
    """Sequences are cached as tokens, and tokens as sequences."""

    def __init__(self):
        super().__init__(Sizes(batch=3))

    def rows(self, x):
        return super().rows(x.transpose(0, 1))


class NarrowAttention(Layer):
    """Without caches, and in single precision after the projections."""

    def __init__(self):
        super().__init__(Sizes(context=3))

    def mask(self, position):
        return torch.zeros(len(position), len(position))

    def store(self, latent, k_rope, position, *caches):
        return latent.float(), k_rope.float()

    def attend(self, q_nope, q_rope, latent, k_rope, mask):
        return super().attend(q_nope.float(), q_rope.float(), latent, k_rope, mask.float()).double()

    def keys(self, latent, k_rope):
        z = self.sizes
        expanded = (latent.squeeze(1) @ self.kv_b.float().T).unflatten(-1, (z.heads, -1)).transpose(1, 2)
        k_nope, value = expanded.split([z.nope, z.value], dim=-1)
        return torch.cat((k_nope, k_rope.expand(-1, z.heads, -1, -1)), dim=-1), value


class OneContext(Layer):
    """Attention sees only the latent of one token."""

    def keys(self, latent, k_rope):
        return super().keys(latent[:, :, 3:4].expand_as(latent), k_rope)


class OneColumn(Layer):
    """A rotary part of one column, which cannot be rotated."""

    def __init__(self):
        super().__init__(Sizes(rope=1))

    def rotate(self, x, *tables):
        return x


class KeyByQuery(Layer):
    """Each query token has its own rotary keys."""

    def attend(self, q_nope, q_rope, latent, k_rope, mask):
        key, value = self.keys(latent, k_rope)
        times = torch.arange(1.0, 1 + self.sizes.tokens, dtype=torch.float64).view(-1, 1, 1)
        rotary = (q_rope.unsqueeze(3) * (k_rope.unsqueeze(2) * times)).sum(-1)
        scores = q_nope @ key[..., : self.sizes.nope].transpose(-1, -2) + rotary
        return self.combine(scores * self.sizes.query**-0.5 + mask, value)


LAYERS = {
    KeyByQuery: ("k_rope depends on more than its own dimensions",),
    OneAppended: ("are not cached in the same way", "latent and rotary key are written to different positions"),
    ComputedQuery: ("weight_uq is computed in the graph, expected a parameter",),
    ScaledStates: ("a projection of the prolog is multiplied by 1.5",),
    CrossedQuery: ("the weights of q_nope and q_rope are not adjacent in one matrix",),
    ApartRows: ("the weights of latent and rotary key are two parameters; the operator takes one matrix",),
    CrossedRows: ("the weights of latent and rotary key are not adjacent in one matrix",),
    KeyAsItIs: ("only one of query and key is rotated",),
    KeyInPairs: ("the query is rotated in layout half_half, the key in interleave_interleave",),
    TurnedCaches: ("the cache is written along the last dimension, expected whole rows",),
    GroupsOfOneWeight: ("the norm is not over the columns of a row",),
    TwoMatrices: ("the weights of latent and rotary key are two parameters; the operator takes one matrix",),
    OneRow: ("the weights of latent and rotary key are not adjacent in one matrix",),
    TurnedRows: ("query and cached rows are not computed from the same tokens",),
    OneContext: ("the latent is not along the context",),
    OneColumn: (),
}


@pytest.mark.parametrize("kind", LAYERS, ids=lambda kind: kind.__name__)
def test_near_twins_of_a_layer(kind):
    report = check(kind())
    reasons = {miss.reason for miss in report.misses}
    for reason in LAYERS[kind]:
        assert any(reason in told for told in reasons), reasons


def test_single_precision_behind_the_projections():
    layer = NarrowAttention()
    given, backend = arguments_of(layer), Reporting()
    with torch.no_grad():
        found, expected = torch.compile(layer, backend=backend)(*given), layer(*given)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert "token_x is torch.float64, the cache torch.float32" in {miss.reason for miss in backend.report.misses}


class NormsApart(Layer):
    """The query's norm rounds before its weight is multiplied, the latent's after it."""

    def norm(self, x, gamma):
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return gamma * normed.to(x.dtype) if gamma is self.q_gamma else (gamma.float() * normed).to(x.dtype)


def test_norms_that_round_in_different_places():
    layer = NormsApart().bfloat16()
    report = check_no_further(layer, in_type(arguments_of(layer), torch.bfloat16))
    assert "the two norms of the prolog round in different places" in {miss.reason for miss in report.misses}


# --- what is put together from readings ------------------------------------------------------------------------------


def test_a_size_that_no_value_has():
    with refused("the size u is not known to the graph"):
        Emitter(LINE.graph).size(sympy.Symbol("u"))


def test_no_masks_are_no_operand():
    assert joined_masks((), ()) is None


def test_flags_on_the_way_are_no_rounding():
    out = Traced(lambda x, y: torch.where(y > 0, x.sin(), x), dense(D), dense(D)).out
    sources = set(out.graph.find_nodes(op="placeholder"))
    check_nothing_is_lost([out], sources, torch.float32)
    with refused("the graph input y enters the result"):
        check_nothing_is_lost([out], sources - {out.args[0].args[0]}, torch.float32)


# --- caches in place -------------------------------------------------------------------------------------------------


def fused(kv, gamma, cos, sin, index, k_cache, ckv_cache):
    return torch.ops.mla_fx.kv_rmsnorm_rope_cache.default(kv, gamma, cos, sin, index, k_cache, ckv_cache)


def copied_back(*given):
    results = fused(*given)
    for cache, result in zip(given[-2:], results[:2], strict=True):
        cache.copy_(result)
    return results[2:]


def in_one_input(*given):
    both = given[-1]
    return copied_back(*given[:-2], both[..., :6], both[..., 6:])


def written_twice(*given):
    copied_back(*given)
    given[-2].mul_(2)


def written_by_columns(*given):
    k_cache, ckv_cache = fused(*given)[:2]
    given[-2].view(-1).copy_(k_cache.view(-1))
    given[-1].copy_(ckv_cache)


def scaled(*given):
    k_cache, ckv_cache = fused(*given)[:2]
    given[-2].copy_(k_cache * 2)
    given[-1].copy_(ckv_cache)


def held(*given):
    return copied_back(*given[:-2], HELD, given[-1])


def read_by_strides(*given):
    results = fused(*given)
    for cache, result in zip(given[-2:], results[:2], strict=True):
        cache.copy_(result)
    return results[0].as_strided((T, 6), (6, 1)).clone()


HELD = torch.zeros(B, 1, T, 6)
IN_PLACE = {
    written_twice: "the graph input of k_cache is not written exactly once and completely",
    written_by_columns: "the graph input of k_cache is not written exactly once and completely",
    scaled: "the updated k_cache differs from what the graph input becomes",
    held: "k_cache is not a view of a graph input",
}


def reinplaced(function, width=20, room=T):
    """The notes about writing the caches of a traced call in place."""
    given = dense(B, 1, S, 26), dense(20), dense(B, 1, S, 6), dense(B, 1, S, 6), torch.arange(S).expand(B, S)
    caches = dense(B, 1, room, 6)[:, :, :T], dense(B, 1, T, width)
    graph = make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)(*given, *caches).graph
    return [sentence.partition(": ")[2] for sentence in reinplace(graph, lambda emit, what, plan: emit.apply(plan))]


def test_caches_that_may_be_written_in_place():
    assert reinplaced(copied_back) == []


@pytest.mark.parametrize("function", IN_PLACE, ids=lambda function: function.__name__)
def test_caches_that_may_not_be_written_in_place(function):
    assert reinplaced(function) == [IN_PLACE[function]]


def test_a_cache_with_gaps_that_is_read_by_strides():
    reason = "the updated k_cache is read by its strides, and the graph input has other strides"
    assert reinplaced(read_by_strides) == []
    assert reinplaced(read_by_strides, room=2 * T) == [reason]


def test_caches_in_one_graph_input():
    assert reinplaced(in_one_input, 26) == ["another operand is in the same graph input as k_cache"]


def test_what_is_no_view_shares_nothing_surely():
    graph = make_fx(lambda x: x.split(2)[0].add_(1), tracing_mode="fake")(dense(4, 4)).graph
    item, *_ = graph.find_nodes(op="call_function", target=operator.getitem)
    (added,) = graph.find_nodes(op="call_function", target=aten.add_.Tensor)
    assert may_share(item) and surely_shares(item) is None
    assert may_share(added) and surely_shares(added) is None
