"""Readings against an independent oracle: whatever a graph is read as is evaluated from plain numbers and compared."""

import inspect
import itertools
import math

import pytest
import sympy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._inductor.decomposition import select_decomp_table
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F  # noqa: N812

from mla_fx.emitter import Emitter
from mla_fx.errors import NoMatch
from mla_fx.layout import tensor
from mla_fx.readings.algebra import as_product, as_sum
from mla_fx.readings.axes import (
    Axis,
    Digit,
    Index,
    combine,
    composite,
    cuts,
    fresh,
    of_axis,
    reshape,
    substitute,
    whole,
)
from mla_fx.readings.cache_update import cache_update
from mla_fx.readings.contraction import contraction, segments
from mla_fx.readings.element import Element, element_of, resolve
from mla_fx.readings.rms_norm import rms_norm
from mla_fx.readings.rope import rope
from mla_fx.readings.sizes import at_most, ratio, size_of
from mla_fx.readings.softmax import anchors, attention
from mla_fx.readings.views import fresh_index

DECOMPOSITIONS = select_decomp_table()
B, S, N, T, D = 2, 3, 4, 5, 8  # batch, query tokens, heads, context tokens, width

# --- the oracle --------------------------------------------------------------------------------------------------


class Traced:
    """A traced function, and the number that every node of its graph holds for one set of inputs."""

    def __init__(self, function, *inputs, dynamic=False, decompose=True):
        options = {"tracing_mode": "symbolic" if dynamic else "fake", "_allow_non_fake_inputs": True}
        names = inspect.signature(function).parameters
        function = make_fx(function, DECOMPOSITIONS if decompose else None, **options)(*inputs)
        self.module = make_fx(functionalize(function), **options)(*inputs)
        self.inputs = inputs
        self.graph = self.module.graph
        self.out = self.graph.output_node().args[0]
        self.values = {}
        self.symbols = {}
        for node, name, value in zip(self.graph.find_nodes(op="placeholder"), names, inputs, strict=True):
            node._rename(name)
            for size, number in zip(node.meta["val"].shape, value.shape, strict=True):
                self.symbols[size_of(size)] = number
        interpreter = torch.fx.Interpreter(self.module)
        interpreter.run_node = lambda node: self.values.setdefault(node, type(interpreter).run_node(interpreter, node))
        interpreter.run(*inputs)

    def number(self, size):
        return int(size) if isinstance(size, int) else int(size.subs(self.symbols))

    def read(self, element, *dims):
        """The tensor whose element at `dims`, each an index or an axis, is `element`."""
        grid, sizes = {}, []
        dims = [of_axis(dim) if isinstance(dim, Axis) else dim for dim in dims]
        for position, dim in enumerate(dims):
            sizes.append(1 if dim.axis is None else self.number(dim.axis.size))
            steps = torch.arange(sizes[-1]).view([-1 if other == position else 1 for other in range(len(dims))])
            grid[dim.axis] = steps
        factor, element = element.apart()
        value = self.values[element.node]
        if len(element.index) == value.dim() + 1:
            value = torch.view_as_real(value)
        where = [self._where(part, grid) for part in element.index]
        return factor * (value[tuple(where)] if where else value).expand(sizes)

    def _where(self, part, grid):
        return sum((self._step(*term, grid) for term in part.terms), torch.tensor(self.number(part.offset)))

    def _step(self, digit, stride, grid):
        below, size = self.number(digit.below), self.number(digit.size)
        return self.number(stride) * (grid[digit.axis] // below % size)


def agree(actual, expected):
    torch.testing.assert_close(actual, expected.expand(actual.shape), rtol=1e-4, atol=1e-4, check_dtype=False)


def dense(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(math.prod(shape)), dtype=torch.float64).to(dtype)


def assert_resolves(traced):
    """What the output resolves to holds, at every index, what the output holds there."""
    index = fresh_index(traced.out)
    element = resolve(traced.out, index)
    agree(traced.read(element, *index), traced.values[traced.out])
    node, place = element.top
    agree(traced.read(Element(node, place, element.top_factor), *index), traced.values[traced.out])
    return element


# --- index arithmetic --------------------------------------------------------------------------------------------


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
    found = cuts([*reshape([of_axis(axis)], [24], [4, 6]), *reshape([of_axis(axis)], [24], [12, 2])])
    assert [digit.size for digit, _ in found[axis].terms] == [2, 3, 4][::-1]
    assert cuts([*reshape([of_axis(axis)], [24], [4, 6]), *reshape([of_axis(axis)], [24], [6, 4])]) is None


def test_reshape_carries_an_offset_into_the_right_digits():
    axis = Axis(2)
    rows, columns = reshape([of_axis(axis, 1, 9)], [12], [3, 4])
    assert (rows, columns) == (Index(2), of_axis(axis, 1, 1))


def test_reshape_refuses_a_read_across_a_boundary():
    assert reshape([of_axis(Axis(2), 1, 3)], [12], [3, 4]) is None


def test_reshape_of_symbolic_sizes():
    batch, tokens = sympy.symbols("b s", positive=True, integer=True)
    flat = Axis(batch * tokens)
    rows, columns, width = reshape([of_axis(flat), fresh(6)], [batch * tokens, 6], [batch, tokens, 6])
    assert [digit.size for digit, _ in (*rows.terms, *columns.terms)] == [batch, tokens]
    assert width.axis.size == 6


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


# --- views: any chain of them ------------------------------------------------------------------------------------


def _shapes(size):
    """Every way to write `size` as up to four factors, some with a dimension of one."""
    for lead in itertools.product(range(1, size + 1), repeat=3):
        if size % math.prod(lead) == 0 and math.prod(lead) <= size:
            yield [*lead, size // math.prod(lead)]


def _reshaped(draw, x):
    sizes = draw(st.sampled_from(sorted(_shapes(x.numel()))))
    return lambda t: t.reshape(sizes)


def _permuted(draw, x):
    order = draw(st.permutations(range(x.dim())))
    return lambda t: t.permute(order)


def _sliced(draw, x):
    dim, start, stop = _range(draw, x)
    step = draw(st.integers(1, 3))
    return lambda t: torch.ops.aten.slice.Tensor(t, dim, start - t.shape[dim], stop, step)


def _range(draw, x):
    dim = draw(st.integers(0, x.dim() - 1))
    start = draw(st.integers(0, x.shape[dim] - 1))
    return dim, start, draw(st.integers(start + 1, x.shape[dim]))


def _selected(draw, x):
    dim = draw(st.integers(-x.dim(), x.dim() - 1))
    position = draw(st.integers(-x.shape[dim], x.shape[dim] - 1))
    return lambda t: t.select(dim, position).unsqueeze(0)


def _expanded(draw, x):
    repeats = [draw(st.integers(1, 2)) if size == 1 else size for size in x.shape]
    return lambda t: t.expand(2, *repeats)


def _squeezed(draw, x):
    dim = draw(st.integers(-x.dim(), x.dim() - 1))
    return lambda t: t.squeeze(dim).unsqueeze(-1)


def _joined(draw, x):
    dim = draw(st.integers(0, x.dim() - 1))
    return lambda t: torch.cat([t, t + 1000], dim)


def _stacked(draw, x):
    dim = draw(st.integers(-x.dim() - 1, x.dim()))
    return lambda t: torch.stack([t, t + 1000], dim)


def _split(draw, x):
    dim = draw(st.integers(-x.dim(), x.dim() - 1))
    size = draw(st.integers(1, x.shape[dim]))
    piece = draw(st.integers(0, (x.shape[dim] - 1) // size))
    return lambda t: t.split(size, dim)[piece]


def _overwritten(draw, x):
    dim, start, stop = _range(draw, x)
    return lambda t: torch.slice_scatter(t, t.narrow(dim, start, stop - start) + 500, dim, start, stop)


def _row_overwritten(draw, x):
    dim, position, _ = _range(draw, x)
    return lambda t: torch.select_scatter(t, t.select(dim, position) + 500, dim, position - x.shape[dim])


def _padded(draw, x):
    margins = draw(st.lists(st.integers(0, 2), min_size=2, max_size=2))
    return lambda t: F.pad(t, margins)


def _scaled(draw, x):
    factor = draw(st.sampled_from([2.0, -0.5]))
    return lambda t: (t * factor).clone()


VIEWS = (
    _reshaped, _permuted, _sliced, _selected, _expanded, _squeezed, _joined,
    _stacked, _split, _overwritten, _row_overwritten, _padded, _scaled,
)  # fmt: skip


@st.composite
def programs(draw):
    """A short chain of views, and an input in which every number is different."""
    sizes = draw(st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=3))
    x = torch.arange(1.0, 1 + math.prod(sizes)).view(sizes)
    steps, value = [], x
    for view in draw(st.lists(st.sampled_from(VIEWS), min_size=1, max_size=6)):
        step = view(draw, value)
        if 0 < step(value).numel() <= 200:
            steps.append(step)
            value = step(value)

    def run(t):
        for step in steps:
            t = step(t)
        return t.clone()

    return run, x


RANDOM = settings(max_examples=100, deadline=None, database=None, derandomize=True)


@RANDOM
@given(programs())
def test_an_element_is_where_it_is_computed(program):
    assert_resolves(Traced(*program, decompose=False))


@RANDOM
@given(programs(), st.randoms(use_true_random=False))
def test_a_tensor_built_from_an_element_is_the_value(program, random):
    traced = Traced(*program, decompose=False)
    index = fresh_index(traced.out)
    element = resolve(traced.out, index)
    order = list(range(len(index)))
    random.shuffle(order)
    emit = Emitter(traced.graph)
    try:
        with emit.at(traced.graph.output_node(), "test"):
            built = tensor(emit, element, [tuple(index[dim].axes) for dim in order], expand=True)
    except NoMatch:
        return  # a read that is no view is refused, never guessed
    expected = traced.values[traced.out].permute(order)
    traced.graph.output_node().args = (built,)
    traced.module.recompile()
    actual = traced.module(*traced.inputs)
    assert actual.shape == expected.shape
    agree(actual, expected)


def rows(x):
    return x[..., None] * 10 + torch.arange(6.0)


SYMBOLIC = {
    "heads": lambda x: rows(x).view(*x.shape, 2, 3).transpose(1, 2),
    "merged": lambda x: rows(x).view(-1, 2, 3).permute(1, 0, 2).reshape(2 * x.shape[0], x.shape[1], 3),
    "flattened and back": lambda x: rows(x).transpose(1, 2).reshape(x.shape[0], -1).view(x.shape[0], 6, x.shape[1]),
    "from the second token": lambda x: rows(x)[:, 1:],
    "last token": lambda x: rows(x)[:, -1:],
    "all but the last token": lambda x: rows(x)[:, :-1],
    "every other token": lambda x: rows(x)[:, 1::2],
    "second of two joined": lambda x: torch.cat([rows(x), rows(x) + 100], 1)[:, x.shape[1] :],
    "across the joint": lambda x: torch.cat([rows(x), rows(x) + 100], 1)[:, 1 : x.shape[1] + 1],
    "old rows": lambda x: torch.cat([rows(x), rows(x)[:, -1:] + 100], 1)[:, : x.shape[1]],
    "new row": lambda x: torch.cat([rows(x), rows(x)[:, -1:] + 100], 1)[:, -1],
    "first two overwritten": lambda x: torch.slice_scatter(rows(x), rows(x)[:, :2] + 100, 1, 0, 2),
    "rest overwritten": lambda x: torch.slice_scatter(rows(x), rows(x)[:, 2:] + 100, 1, 2, 2**63 - 1)[:, 1],
    "last overwritten": lambda x: torch.slice_scatter(rows(x), rows(x)[:, -1:] + 100, 1, -1)[:, 0],
    "padded before": lambda x: F.pad(rows(x), (0, 0, 1, 0))[:, 1:],
    "padded behind": lambda x: F.pad(rows(x), (0, 0, 0, 2))[:, :2],
    "split": lambda x: rows(x).split([1, x.shape[1] - 1], 1)[1],
    "window of another size": lambda x: rows(x)[:, : x.shape[0]],
    "row of the flattened": lambda x: rows(x).reshape(-1, 6)[3],
    "rows of the flattened": lambda x: rows(x).reshape(-1, 6)[2:4],
    "repeated": lambda x: rows(x)[:, None].expand(-1, 2, -1, -1).reshape(2 * x.shape[0], x.shape[1], 6),
}


@pytest.mark.parametrize("shape", [(3, 5), (5, 3), (2, 4)], ids=str)
@pytest.mark.parametrize("name", SYMBOLIC)
def test_an_element_of_a_symbolic_shape(name, shape):
    assert_resolves(Traced(SYMBOLIC[name], torch.arange(1.0, 1 + math.prod(shape)).view(shape), dynamic=True))


@pytest.mark.parametrize("name", SYMBOLIC)
def test_a_tensor_built_for_a_symbolic_shape(name):
    traced = Traced(SYMBOLIC[name], torch.arange(1.0, 16.0).view(3, 5), dynamic=True)
    index = fresh_index(traced.out)
    emit = Emitter(traced.graph)
    try:
        with emit.at(traced.graph.output_node(), "test"):
            built = tensor(emit, resolve(traced.out, index), [tuple(part.axes) for part in index][::-1], expand=True)
    except NoMatch:
        return
    traced.graph.output_node().args = (built,)
    traced.module.recompile()
    expected = traced.values[traced.out]
    agree(traced.module(*traced.inputs), expected.permute(*reversed(range(expected.dim()))))


def test_equal_calls_on_different_tensors_are_told_apart():
    """Inductor asks by storage what aliases what."""
    traced = Traced(lambda x, y: x + y, dense(S, D), dense(S, D))
    emit = Emitter(traced.graph)
    with emit.at(traced.out, "test"):
        views = [emit.call(torch.ops.aten.reshape.default, node, [S * D]) for node in traced.out.args]
    for node, view in zip(traced.out.args, views, strict=True):
        assert view.meta["val"].untyped_storage()._cdata == node.meta["val"].untyped_storage()._cdata


# --- sums and products -------------------------------------------------------------------------------------------


def test_a_sum_is_flat_with_signs_and_constants():
    traced = Traced(lambda x, y: 2 * (x - y + 3) - 0.5 * (y + 1), dense(D), dense(D) + 1)
    total = as_sum(element_of(traced.out))
    assert total.constant == 5.5
    assert [(term.origin.name, term.factor) for term in total.terms] == [("x", 2.0), ("y", -2.0), ("y", -0.5)]


def test_a_product_is_flat_with_powers():
    traced = Traced(lambda x, y: 3 * x.square() / (y * 2).sqrt(), dense(D), dense(D).abs())
    found = as_product(element_of(traced.out))
    assert [(factor.node.name, power) for factor, power in found.factors] == [("x", 2.0), ("y", -0.5)]
    assert found.number == pytest.approx(3 / math.sqrt(2))


@pytest.mark.parametrize("spelling", [lambda x: (x * x).sqrt(), lambda x: (x**2) ** 0.5])
def test_the_root_of_a_square_is_no_product(spelling):
    found = as_product(element_of(Traced(spelling, dense(D)).out))
    assert all((factor.node.name, power) != ("x", 1.0) for factor, power in found.factors), "|x| was read as x"


def test_division_by_zero_is_left_alone():
    found = as_product(element_of(Traced(lambda x: x / 0, dense(D)).out))
    assert len(found.factors) == 1


# --- RMSNorm -----------------------------------------------------------------------------------------------------

EPSILON = 1e-3


def hugging_face(x, g):
    wide = x.float()
    return g * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPSILON)).to(x.dtype)


def meta(x, g):
    return (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + EPSILON)).type_as(x) * g


NORMS = {
    "Hugging Face": hugging_face,
    "Meta": meta,
    "torch": lambda x, g: F.rms_norm(x, (D,), g, EPSILON),
    "root below": lambda x, g: x / torch.sqrt((x * x).mean(-1, keepdim=True) + EPSILON) * g,
    "sum over length": lambda x, g: x * torch.rsqrt((x * x).sum(-1, keepdim=True) / D + EPSILON) * g,
    "power": lambda x, g: x * (x.square().mean(-1, keepdim=True) + EPSILON) ** -0.5 * g,
    "reciprocal": lambda x, g: x * (x.square().mean(-1, True) + EPSILON).sqrt().reciprocal() * g,
    "no keepdim": lambda x, g: x * torch.rsqrt((x**2).mean(-1) + EPSILON)[..., None] * g,
    "einsum": lambda x, g: x * torch.rsqrt(torch.einsum("bsd,bsd->bs", x, x)[..., None] / D + EPSILON) * g,
    "one plus gamma": lambda x, g: x * torch.rsqrt(x.square().mean(-1, True) + EPSILON) * (1 + (g - 1)),
    "flattened": lambda x, g: NORMS["power"](x.view(-1, D), g).view(x.shape),
    "of a multiple": lambda x, g: NORMS["power"](x * 3, g),
    "of the negative": lambda x, g: -NORMS["power"](x, g),
    "of a negative multiple": lambda x, g: NORMS["power"](x * -3, g),
    "negative gamma": lambda x, g: NORMS["power"](x, -g),
    "of an absolute value": lambda x, g: (x**2) ** 0.5 * torch.rsqrt(x.square().mean(-1, True) + EPSILON) * g,
}


def assert_norm_reads_right(traced, found, index):
    value, gamma = traced.read(found.value, *index), traced.read(found.gamma, *index)
    agree(value * torch.rsqrt(value.square().mean(-1, True) + found.epsilon) * gamma, traced.values[traced.out])


@pytest.mark.parametrize("name", list(NORMS)[:10])
def test_a_norm_is_read(name):
    traced = Traced(NORMS[name], dense(B, S, D), dense(D))
    index = fresh_index(traced.out)
    found = rms_norm(resolve(traced.out, index))
    assert_norm_reads_right(traced, found, index)
    assert found.epsilon == pytest.approx(EPSILON)


@pytest.mark.parametrize("name", list(NORMS)[10:])
def test_a_norm_of_something_odd_is_read_right_or_refused(name):
    traced = Traced(NORMS[name], dense(B, S, D), dense(D))
    index = fresh_index(traced.out)
    try:
        found = rms_norm(resolve(traced.out, index))
    except NoMatch:
        return
    assert_norm_reads_right(traced, found, index)


@pytest.mark.parametrize(
    ("norm", "gamma_type", "expected"),
    [
        (hugging_face, torch.bfloat16, True),
        (hugging_face, torch.float32, False),
        (meta, torch.bfloat16, True),
        (NORMS["torch"], torch.bfloat16, False),
    ],
)
def test_where_a_norm_rounds(norm, gamma_type, expected):
    traced = Traced(norm, dense(B, S, D, dtype=torch.bfloat16), dense(D, dtype=gamma_type))
    assert rms_norm(element_of(traced.out)).gamma_after_cast is expected


def normed(x, g, by):
    return x * torch.rsqrt(by.square().mean(-1, True) + EPSILON) * g


NO_NORMS = {
    "a layer norm": (lambda x, g: F.layer_norm(x, (D,), g), "expected|LayerNorm", (D,)),
    "no gamma": (lambda x, g: normed(x, 1.0, x), "an RMSNorm is multiplied by one weight, found nothing", (D,)),
    "two gammas": (lambda x, g: normed(x, g, x) * g, "multiplied by one weight", (D,)),
    "a scalar gamma": (lambda x, g: normed(x, g, x), "does not run along the normalised dimension", (1,)),
    "a gamma per token": (lambda x, g: normed(x, g, x), "does not run along the normalised dimension", (S, 1)),
    "a gamma per token and column": (lambda x, g: normed(x, g, x), "does not run along", (S, D)),
    "another value's mean": (lambda x, g: normed(x, g, x + 1), "is not the one whose mean square is taken", (D,)),
    "another token's mean": (lambda x, g: normed(x, g, x.flip(1)), "is not the one whose mean square is taken", (D,)),
    "half of the mean": (lambda x, g: normed(x, g, x[..., : D // 2]), "is not the one whose mean square", (D,)),
    "a rotated value": (lambda x, g: normed(torch.cat([x[..., 1:], x[..., :1]], -1), g, x), "is not the one", (D,)),
    "a sum": (lambda x, g: x * torch.rsqrt(x.square().sum(-1, True) + EPSILON) * g, "multiplied by a number", (D,)),
    "twice": (lambda x, g: 2 * normed(x, g, x), "the norm is multiplied by a number", (D,)),
    "a mean of cubes": (lambda x, g: x * torch.rsqrt((x**3).mean(-1, True) + 9) * g, "one value squared", (D,)),
    "a clamp": (lambda x, g: x * torch.rsqrt(x.square().mean(-1, True).clamp(min=1e-3)) * g, "found clamp", (D,)),
    "a tensor epsilon": (lambda x, g: x * torch.rsqrt(x.square().mean(-1, True) + g[0]) * g, "compile-time", (D,)),
    "no norm": (lambda x, g: x * g, "expected an RMSNorm, found mul", (D,)),
}


@pytest.mark.parametrize("name", NO_NORMS)
def test_what_is_no_norm_is_refused_with_a_reason(name):
    function, reason, gamma = NO_NORMS[name]
    with pytest.raises(NoMatch, match=reason):
        rms_norm(element_of(Traced(function, dense(B, S, D), dense(*gamma)).out))


# --- rotary embedding --------------------------------------------------------------------------------------------


def half_tables(seed=0):
    """cos and sin [S, D/2] of no particular angles, so that every entry shows."""
    return dense(S, D // 2), dense(S + seed + 1, D // 2)[:S]


def doubled(table):
    return torch.cat([table, table], -1)


def rotate_half(x):
    return torch.cat([-x[..., D // 2 :], x[..., : D // 2]], -1)


def evens_first(x):
    return x.view(*x.shape[:-1], D // 2, 2).transpose(-1, -2).reshape(x.shape)


def rotate_every_two(x):
    return torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)


def pairs(x, y, cos, sin):
    return x * cos - y * sin, y * cos + x * sin


def complex_product(x, cos, sin):
    number = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2)) * torch.complex(cos, sin)
    return torch.view_as_real(number).flatten(-2)


ROPES = {
    "rotate_half": ("half_half", lambda x, c, s: x * doubled(c) + rotate_half(x) * doubled(s)),
    "halves of a chunk": ("half_half", lambda x, c, s: torch.cat(pairs(*x.chunk(2, -1), c, s), -1)),
    "evens first, then rotate_half": (
        "interleave_half",
        lambda x, c, s: evens_first(x) * doubled(c) + rotate_half(evens_first(x)) * doubled(s),
    ),
    "evens and odds joined": ("interleave_half", lambda x, c, s: torch.cat(pairs(x[..., ::2], x[..., 1::2], c, s), -1)),
    "complex product": ("interleave_interleave", complex_product),
    "stacked": (
        "interleave_interleave",
        lambda x, c, s: torch.stack(pairs(x[..., ::2], x[..., 1::2], c, s), -1).flatten(-2),
    ),
    "rotate_every_two": (
        "interleave_interleave",
        lambda x, c, s: x * c.repeat_interleave(2, -1) + rotate_every_two(x) * s.repeat_interleave(2, -1),
    ),
    "unbound pairs": (
        "interleave_interleave",
        lambda x, c, s: torch.stack(pairs(*x.view(*x.shape[:-1], -1, 2).unbind(-1), c, s), -1).flatten(-2),
    ),
    "halves to pairs": ("half_interleave", lambda x, c, s: torch.stack(pairs(*x.chunk(2, -1), c, s), -1).flatten(-2)),
}


def rotations(traced):
    index = fresh_index(traced.out)
    return index, list(rope(resolve(traced.out, index), index[-1].axis))


def assert_rotation_reads_right(traced, index, found):
    read, written = found.layout.split("_")
    value = traced.read(found.value, *index[:-1], found.along)
    (x, y), (at_x, at_y) = (split_pairs(value, read), split_pairs(traced.values[traced.out], written))

    def table(half):
        return traced.read(half, *index[:-1], found.pair)

    agree(x * table(found.cos.first) - y * table(found.sin.first), at_x)
    agree(y * table(found.cos.second) + x * table(found.sin.second), at_y)


def split_pairs(value, layout):
    return value.chunk(2, -1) if layout == "half" else (value[..., ::2], value[..., 1::2])


@pytest.mark.parametrize("name", ROPES)
def test_a_rotation_is_read(name):
    layout, function = ROPES[name]
    traced = Traced(lambda x, c, s: function(x, c, s), dense(B, N, S, D), *half_tables())
    index, found = rotations(traced)
    ours = [rotation for rotation in found if rotation.value.node.name == "x"]
    assert [rotation.layout for rotation in ours] == [layout]
    for rotation in found:
        assert_rotation_reads_right(traced, index, rotation)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rotation_of_the_last_columns_is_read(dtype):
    def function(x, cos, sin):
        part = x[..., 5:].to(torch.float32)
        return (part * doubled(cos) + rotate_half(part) * doubled(sin)).to(x.dtype)

    traced = Traced(function, dense(B, N, S, D + 5, dtype=torch.float32).to(dtype), *half_tables())
    _, (found, *_) = rotations(traced)
    assert found.value.index[-1].offset == 5


def test_tables_that_differ_in_their_halves_are_kept_apart():
    def function(x, cos, sin, cos2, sin2):
        x1, x2 = x.chunk(2, -1)
        return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin2], -1)

    traced = Traced(function, dense(B, N, S, D), *half_tables(), *half_tables(4))
    index, found = rotations(traced)
    for rotation in found:
        assert_rotation_reads_right(traced, index, rotation)


ODD_ROPES = {
    "both signs plus": lambda x, y, c, s: torch.cat([x * c + y * s, y * c + x * s], -1),
    "turned back": lambda x, y, c, s: torch.cat([x * c + y * s, y * c - x * s], -1),
    "twice as long": lambda x, y, c, s: torch.cat([2 * a for a in pairs(x, y, c, s)], -1),
    "half of it three times as long": lambda x, y, c, s: torch.cat([x * c - 3 * y * s, y * c + x * s], -1),
    "two cosines": lambda x, y, c, s: torch.cat([x * c - y * s, y * s + x * s], -1),
    "a negative value": lambda x, y, c, s: torch.cat(pairs(-x, y, c, s), -1),
    "a conjugate": lambda x, y, c, s: torch.view_as_real(
        torch.complex(x, y) * torch.complex(c, s).conj() * 1.5
    ).transpose(-1, -2).flatten(-2),
}  # fmt: skip


@pytest.mark.parametrize("name", ODD_ROPES)
def test_every_factor_of_a_rotation_is_in_its_tables(name):
    function = ODD_ROPES[name]
    traced = Traced(lambda x, c, s: function(*x.chunk(2, -1), c, s), dense(B, N, S, D), *half_tables())
    index, found = rotations(traced)
    assert [rotation.layout for rotation in found if rotation.value.node.name == "x"] == ["half_half"]
    for rotation in found:
        assert_rotation_reads_right(traced, index, rotation)


NO_ROPES = {
    "no rotation": (lambda x, y, c, s: x + 1.0, "expected a rotary embedding"),
    "only cosines": (lambda x, y, c, s: torch.cat([x * c, y * c], -1), "expected a rotary embedding"),
    "three terms": (lambda x, y, c, s: torch.cat(pairs(x, y, c, s), -1) + torch.cat([c, c], -1), "expected"),
    "two values": (lambda x, y, c, s: torch.cat(pairs(x, (y * y).sin(), c, s), -1), "expected a rotary"),
}


@pytest.mark.parametrize("name", NO_ROPES)
def test_what_is_no_rotation_is_refused_with_a_reason(name):
    function, reason = NO_ROPES[name]
    traced = Traced(lambda x, c, s: function(*x.chunk(2, -1), c, s), dense(B, N, S, D), *half_tables())
    with pytest.raises(NoMatch, match=reason):
        rotations(traced)


def test_an_odd_dimension_is_no_rotary_dimension():
    traced = Traced(lambda x: x.clone(), dense(S, 7))
    with pytest.raises(NoMatch, match="a rotary dimension is even and known, this one is 7"):
        rotations(traced)


# --- contraction -------------------------------------------------------------------------------------------------

PRODUCTS = {
    "matmul": (lambda x, w: x @ w, (B, S, D), (D, T)),
    "linear": (lambda x, w: F.linear(x, w), (B, S, D), (T, D)),
    "linear of one token": (lambda x, w: F.linear(x, w), (1, 1, D), (T, D)),
    "vector": (lambda x, w: x @ w, (D,), (D, T)),
    "matrix vector": (lambda x, w: x @ w, (T, D), (D,)),
    "batched": (lambda x, w: x @ w, (B, N, S, D), (B, N, D, T)),
    "broadcast": (lambda x, w: x @ w, (B, N, S, D), (B, 1, D, T)),
    "transposed": (lambda x, w: x.transpose(1, 2) @ w.transpose(1, 2).mT, (B, S, N, D), (B, T, N, D)),
    "per head": (lambda x, w: torch.einsum("bsnd,ndc->bsnc", x, w), (B, S, N, D), (N, D, T)),
    "scores": (lambda x, w: torch.einsum("bsnd,btd->bsnt", x, w), (B, S, N, D), (B, T, D)),
    "two axes": (lambda x, w: torch.einsum("bsnd,nde->bse", x, w), (B, S, N, D), (N, D, T)),
    "summed": (lambda x, w: (x[..., None] * w).sum(-2), (B, S, D), (D, T)),
    "scaled": (lambda x, w: (x * 0.5) @ (w / -3) * 2, (B, S, D), (D, T)),
    "through bfloat16": (lambda x, w: (x.bfloat16() @ w.bfloat16()).float(), (B, S, D), (D, T)),
}


@pytest.mark.parametrize("decompose", [True, False], ids=["decomposed", "whole"])
@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_is_read(name, decompose):
    function, left, right = PRODUCTS[name]
    traced = Traced(function, dense(*left), dense(*right), decompose=decompose)
    index = fresh_index(traced.out)
    found = contraction(resolve(traced.out, index))
    assert {found.left.node.name, found.right.node.name} == {"x", "w"}
    actual = sum_of(traced, found, index)
    torch.testing.assert_close(actual, traced.values[traced.out], rtol=0.05, atol=0.2 if "bfloat" in name else 1e-4)


def sum_of(traced, found, index):
    dims = (*index, *found.axes)
    summed = traced.read(found.left, *dims) * traced.read(found.right, *dims)
    return found.factor * summed.flatten(len(index)).sum(-1)


def test_a_product_with_joined_operands_is_a_sum_of_products():
    def function(q, k, q_rope, k_rope):
        return torch.cat([q, q_rope], -1) @ torch.cat([k, k_rope], -1).mT

    traced = Traced(function, dense(S, D), dense(T, D), dense(S, 4), dense(T, 4))
    index = fresh_index(traced.out)
    parts = segments(contraction(resolve(traced.out, index)))
    assert [{part.left.node.name, part.right.node.name} for part in parts] == [{"q", "k"}, {"q_rope", "k_rope"}]
    agree(sum(sum_of(traced, part, index) for part in parts), traced.values[traced.out])


NO_PRODUCTS = {
    "a bias": (lambda x, w: F.linear(x, w, w[:, 0]), "the projection has a bias"),
    "elementwise": (lambda x, w: x[0] * w[0], "expected a matrix product, found an elementwise mul"),
    "a sum": (lambda x, w: (x[:, None] + w).sum(-1), "expected a matrix product, found a sum of add"),
    "an input": (lambda x, w: x.clone(), "expected a matrix product, found the graph input x"),
    "a maximum": (lambda x, w: torch.maximum(x[0], w[0]), "expected a matrix product, found maximum"),
}


@pytest.mark.parametrize("name", NO_PRODUCTS)
def test_what_is_no_product_is_refused_with_a_reason(name):
    function, reason = NO_PRODUCTS[name]
    with pytest.raises(NoMatch, match=reason):
        contraction(element_of(Traced(function, dense(S, D), dense(T, D)).out))


# --- attention ---------------------------------------------------------------------------------------------------


def softmax_by_hand(scores):
    raised = torch.exp(scores - scores.amax(-1, keepdim=True))
    return raised / raised.sum(-1, keepdim=True)


MASK = dense(B, 1, S, T) > -0.5
MASK[..., 0] = True
BIAS = torch.zeros(B, 1, S, T).masked_fill(~MASK, -torch.inf)

ATTENTIONS = {
    "softmax": lambda q, k, v: (q @ k.mT * 0.3).softmax(-1) @ v,
    "scaled query": lambda q, k, v: ((q * 0.3) @ k.mT).softmax(-1) @ v,
    "in float": lambda q, k, v: F.softmax(q @ k.mT, -1, dtype=torch.float32).to(q.dtype) @ v,
    "by hand": lambda q, k, v: softmax_by_hand(q @ k.mT) @ v,
    "einsum": lambda q, k, v: torch.einsum("bnst,bntv->bnsv", torch.einsum("bnsd,bntd->bnst", q, k).softmax(-1), v),
    "output transposed": lambda q, k, v: ((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2),
    "bias": lambda q, k, v: (q @ k.mT + BIAS).softmax(-1) @ v,
    "masked_fill": lambda q, k, v: (q @ k.mT).masked_fill(~MASK, -torch.inf).softmax(-1) @ v,
    "where": lambda q, k, v: torch.where(MASK, q @ k.mT, -1e9).softmax(-1) @ v,
    "a filled mask": lambda q, k, v: (q @ k.mT + dense(S, T).masked_fill(~MASK, -3.0)).softmax(-1) @ v,
    "filled with a number": lambda q, k, v: (q @ k.mT).masked_fill(~MASK, 0.25).softmax(-1) @ v,
    "filled, then halved": lambda q, k, v: ((q @ k.mT).masked_fill(~MASK, -3.0) * 0.5).softmax(-1) @ v,
    "scaled probabilities": lambda q, k, v: ((q @ k.mT).softmax(-1) * 2) @ v,
    "scaled after the mask": lambda q, k, v: ((q @ k.mT + BIAS) * 0.5).softmax(-1) @ v,
    "fused": lambda q, k, v: F.scaled_dot_product_attention(q, k, v),
    "fused, scaled": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, scale=0.7),
    "fused, masked": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=MASK),
    "fused, biased": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=BIAS),
    "fused, causal": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
}


def test_a_softmax_that_weighs_no_values_is_no_attention():
    traced = Traced(lambda q, k: (q @ k.mT).softmax(-1).sin(), dense(B, N, S, D), dense(B, N, T, D))
    assert list(anchors(traced.graph)) == []


def read_attention(traced):
    (anchor,) = anchors(traced.graph)
    return attention(anchor)


@pytest.mark.parametrize("value_width", [D, 6], ids=["one width", "two widths"])
@pytest.mark.parametrize("name", ATTENTIONS)
def test_attention_is_read(name, value_width):
    traced = Traced(ATTENTIONS[name], dense(B, N, S, D), dense(B, N, T, D), dense(B, N, T, value_width))
    found = read_attention(traced)
    assert [{score.left.node.name, score.right.node.name} for score in found.scores] == [{"q", "k"}]
    dims = (*found.index, found.keys)
    logits = sum(sum_of(traced, score, dims) for score in found.scores)
    for mask in found.masks:
        term = traced.read(mask.element, *dims)
        logits = logits + term if mask.fill is None else torch.where(term.bool() == mask.keep_where, logits, mask.fill)
    if found.causal:
        rows, keys = torch.arange(S)[:, None], torch.arange(T)
        logits = logits.masked_fill((keys > rows).view(1, 1, S, 1, T), -torch.inf)
    actual = found.value_factor * (logits.softmax(-1) * traced.read(found.value, *dims)).sum(-1)
    agree(actual, traced.values[found.node])


NO_ATTENTIONS = {
    "probabilities masked after": (lambda q, k, v: ((q @ k.mT).softmax(-1) * MASK) @ v, "expected a softmax"),
    "over the queries": (lambda q, k, v: (q @ k.mT).softmax(-2) @ v, "not summed over the softmax axis"),
    "filled, then biased": (
        lambda q, k, v: ((q @ k.mT).masked_fill(~MASK, -3.0) + BIAS).softmax(-1) @ v,
        "filled with a number, and a mask is added",
    ),
    "filled with two numbers": (
        lambda q, k, v: (q @ k.mT).masked_fill(~MASK, -3.0).masked_fill(MASK.flip(-1), 2.0).softmax(-1) @ v,
        "filled with different numbers",
    ),
    "a number added": (lambda q, k, v: (q @ k.mT + 2.0).softmax(-1) @ v, "a number is added to the attention scores"),
}


@pytest.mark.parametrize("name", NO_ATTENTIONS)
def test_what_is_no_attention_is_refused_with_a_reason(name):
    function, reason = NO_ATTENTIONS[name]
    traced = Traced(function, dense(B, N, S, D), dense(B, N, T, D), dense(B, N, T, D))
    with pytest.raises(NoMatch, match=reason):
        read_attention(traced)


# --- caches ------------------------------------------------------------------------------------------------------

SLOTS = torch.tensor([4, 0, 3])
PLACES = torch.tensor([[4, 0, 3], [1, 2, 0]])


def written(cache, where, values):
    cache = cache.clone()
    cache[where] = values
    return cache


def by_scatter(cache, r):
    return cache.scatter(2, SLOTS.view(1, 1, S, 1).expand_as(r), r)


UPDATES = {  # a cache [B, 1, T, D], rows [B, 1, S, D]
    "index_copy": lambda cache, r: cache.index_copy(2, SLOTS, r),
    "index_copy, negative dim": lambda cache, r: cache.index_copy(-2, SLOTS, r),
    "assigned": lambda cache, r: written(cache, (slice(None), slice(None), SLOTS), r),
    "scattered": by_scatter,
    "appended": lambda cache, r: torch.cat([cache, r], 2),
    "sliced": lambda cache, r: written(cache, (slice(None), slice(None), slice(1, 1 + S)), r),
    "per sequence": lambda cache, r: written(cache[:, 0], (torch.arange(B)[:, None], PLACES), r[:, 0]),
    "per sequence, one token": lambda cache, r: written(cache[:, 0], (torch.arange(B), PLACES[:, 0]), r[:, 0, 0]),
}

ODD_UPDATES = {
    "rows of one sequence": lambda cache, r: written(cache, (slice(None), slice(None), SLOTS), r[:1]),
    "one row for all slots": lambda cache, r: written(cache, (slice(None), slice(None), SLOTS), r[:, :, :1]),
    "one column for all": lambda cache, r: written(cache, (slice(None), slice(None), SLOTS), r[..., :1]),
    "only the first sequence": lambda cache, r: cache.scatter(2, SLOTS.view(1, 1, S, 1).expand(1, 1, S, D), r),
    "fewer positions than rows": lambda cache, r: cache.scatter(2, SLOTS[:2].view(1, 1, 2, 1).expand(B, 1, 2, D), r),
    "only the first columns": lambda cache, r: cache.scatter(2, SLOTS.view(1, 1, S, 1).expand(B, 1, S, 4), r),
    "positions per column": lambda cache, r: cache.scatter(2, torch.arange(D).expand(B, 1, S, D) % T, r),
    "a condition": lambda cache, r: written(
        cache, (slice(None), slice(None), torch.tensor([True, False, True, True, False])), r
    ),
    "other sequences": lambda cache, r: written(
        torch.cat([cache, cache])[:, 0], (torch.arange(1, 1 + B)[:, None], PLACES), r[:, 0]
    ),
    "fewer sequences": lambda cache, r: written(
        torch.cat([cache, cache])[:, 0], (torch.arange(B)[:, None], PLACES), r[:, 0]
    ),
    "sequences in reverse": lambda cache, r: written(cache[:, 0], (torch.arange(B).flip(0)[:, None], PLACES), r[:, 0]),
    "one row for each sequence": lambda cache, r: written(cache[:, 0], (torch.arange(B)[:, None], PLACES), r[:, 0, :1]),
    "every other slot": lambda cache, r: written(cache, (slice(None), slice(None), slice(0, 5, 2)), r),
    "three pieces": lambda cache, r: torch.cat([cache, r, r], 2),
    "new rows first": lambda cache, r: torch.cat([r, cache], 2),
}


def replayed(traced, found):
    """The updated cache, rebuilt from nothing but what was read."""
    lead = (*found.index[: found.dim], found.token, *found.index[found.dim + 1 :])
    rows = traced.read(found.row, *lead).movedim(found.dim, 0)
    old = traced.values[found.old].clone()
    if found.position is None:
        return torch.cat([old, rows.movedim(0, found.dim)], found.dim)
    new = old.movedim(found.dim, 0)
    if isinstance(found.position, int):
        new[found.position : found.position + len(rows)] = rows
        return new.movedim(0, found.dim)
    outer = (found.index[0],) if found.position.axes & set(found.index[0].axes) else ()
    positions = traced.read(found.position, *outer, found.token).long()
    for token, row in enumerate(rows):
        for sequence, slot in enumerate(positions[..., token].expand(len(row))):
            assert slot >= 0, "a negative position means skip"
            new[slot, sequence] = row[sequence]
    return new.movedim(0, found.dim)


def read_update(function):
    traced = Traced(function, dense(B, 1, T, D), dense(B, 1, S, D))
    return traced, cache_update(element_of(traced.out))


@pytest.mark.parametrize("name", UPDATES)
def test_a_cache_update_is_read(name):
    traced, found = read_update(UPDATES[name])
    agree(replayed(traced, found), traced.values[found.node])


@pytest.mark.parametrize("name", ODD_UPDATES)
def test_an_odd_cache_update_is_read_right_or_refused(name):
    try:
        traced, found = read_update(ODD_UPDATES[name])
    except NoMatch:
        return
    agree(replayed(traced, found), traced.values[found.node])


NO_UPDATES = {
    "added": ("the cache is added to", lambda cache, r: cache.index_put((SLOTS[1:2],), r[:1, :, :1], accumulate=True)),
    "three pieces": ("expected the old rows and the new ones in one cat", ODD_UPDATES["three pieces"]),
    "a sum": ("expected a cache that is written, found add", lambda cache, r: cache + r[:, :, :1]),
}


@pytest.mark.parametrize("name", NO_UPDATES)
def test_what_is_no_cache_update_is_refused_with_a_reason(name):
    reason, function = NO_UPDATES[name]
    with pytest.raises(NoMatch, match=reason):
        read_update(function)


# --- values joined again -----------------------------------------------------------------------------------------

REJOINED = {
    "split and joined": lambda x: torch.cat(x.split([2, 4], 1), 1),
    "chunks stacked": lambda x: torch.stack(x.chunk(3, 1), 1).flatten(1),
    "rows stacked": lambda x: torch.stack(x.unbind(0)),
    "rows stacked as columns": lambda x: torch.stack(x.unbind(0), 1),
    "every other column": lambda x: torch.cat([x[:, 0:1], x[:, 2:3], x[:, 4:5]], 1),
}
NOT_REJOINED = {
    "exchanged": lambda x: torch.cat(x.chunk(2, 1)[::-1], 1),
    "overlapping": lambda x: torch.cat([x[:, :4], x[:, 2:4]], 1),
    "with a gap": lambda x: torch.cat([x[:, 0:2], x[:, 3:6]], 1),
    "one of them turned": lambda x: torch.cat([x[:2, :2], x[2:4, 2:4].t()], 1),
    "one of them twice": lambda x: torch.stack([x[0], x[1], x[1]]),
    "along another dimension": lambda x: torch.cat([x[:, :3], x[:, 3:]], 0),
}


@pytest.mark.parametrize("name", REJOINED)
def test_neighbours_joined_are_the_whole(name):
    assert assert_resolves(Traced(lambda x: REJOINED[name](x).clone(), dense(4, 6), decompose=False)).node.name == "x"


@pytest.mark.parametrize("name", NOT_REJOINED)
def test_others_joined_are_no_view(name):
    element = assert_resolves(Traced(lambda x: NOT_REJOINED[name](x).clone(), dense(4, 6), decompose=False))
    assert element.node.name.startswith(("cat", "stack"))
