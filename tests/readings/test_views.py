"""Any chain of views: an element is where it is computed, and a tensor built from it is the value."""

import itertools
import math

import pytest
import torch
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from lib.traced import D, S, Traced, agree, assert_resolves, dense, rows
from torch.nn import functional as F  # noqa: N812

from mla_fx.errors import NoMatch
from mla_fx.readings.element import resolve
from mla_fx.readings.views import fresh_index
from mla_fx.rewriting.emitter import Emitter
from mla_fx.rewriting.materialize import tensor

# --- views: any chain of them -----------------------------------------------------------------------------------------


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


@pytest.mark.slow
@RANDOM
@given(programs())
def test_an_element_is_where_it_is_computed(program):
    assert_resolves(Traced(*program, decompose=False))


@pytest.mark.slow
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
            built = emit._node(emit.evaluate(tensor(element, [tuple(index[dim].axes) for dim in order], expand=True)))
    except NoMatch:
        reject()  # a read that is no view is refused, never guessed; if most were, hypothesis would say so
    expected = traced.values[traced.out].permute(order)
    traced.graph.output_node().args = (built,)
    traced.module.recompile()
    actual = traced.module(*traced.inputs)
    assert actual.shape == expected.shape
    agree(actual, expected)


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


# No view of the program's tensor gives these, whatever the sizes are.
NO_VIEWS = {
    "window of another size": "is read in steps of 1, which no view does",
    "rows of the flattened": "is read in steps of 1, which no view does",
}


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(3, 5), (5, 3), (2, 4)], ids=str)
@pytest.mark.parametrize("name", SYMBOLIC)
def test_an_element_of_a_symbolic_shape(name, shape):
    assert_resolves(Traced(SYMBOLIC[name], torch.arange(1.0, 1 + math.prod(shape)).view(shape), dynamic=True))


def built_for(traced):
    """The traced value built anew from its elements, its dimensions in reverse."""
    index = fresh_index(traced.out)
    emit = Emitter(traced.graph)
    with emit.at(traced.graph.output_node(), "test"):
        built = tensor(resolve(traced.out, index), [tuple(part.axes) for part in index][::-1], expand=True)
        return emit._node(emit.evaluate(built))


def symbolic(name):
    return Traced(SYMBOLIC[name], torch.arange(1.0, 16.0).view(3, 5), dynamic=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in SYMBOLIC if name not in NO_VIEWS])
def test_a_tensor_built_for_a_symbolic_shape(name):
    traced = symbolic(name)
    traced.graph.output_node().args = (built_for(traced),)
    traced.module.recompile()
    expected = traced.values[traced.out]
    agree(traced.module(*traced.inputs), expected.permute(*reversed(range(expected.dim()))))


@pytest.mark.parametrize("name", NO_VIEWS)
def test_what_is_no_view_is_not_built(name):
    with pytest.raises(NoMatch, match=NO_VIEWS[name]):
        built_for(symbolic(name))


def test_equal_calls_on_different_tensors_are_told_apart():
    """Inductor asks by storage what aliases what."""
    traced = Traced(lambda x, y: x + y, dense(S, D), dense(S, D))
    emit = Emitter(traced.graph)
    with emit.at(traced.out, "test"):
        views = [emit._node(emit.call(torch.ops.aten.reshape.default, node, [S * D])) for node in traced.out.args]
    for node, view in zip(traced.out.args, views, strict=True):
        assert view.meta["val"].untyped_storage()._cdata == node.meta["val"].untyped_storage()._cdata


# --- values joined again ----------------------------------------------------------------------------------------------


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
