"""What is taken out of a graph before its calls: weights laid out once, which follow the weights, and viewed caches."""

from __future__ import annotations

import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from lib import layers
from lib.comparing import check_same
from lib.layers import CLOSE, Layer, Sizes
from mla_fx.lowering.reference import Reference
from torch.utils._pytree import tree_leaves

import mla_fx
from mla_fx.debug.report import Report
from mla_fx.driver.compilation import Compilation
from mla_fx.options import Options
from mla_fx.passes import hoist
from mla_fx.passes.laid_out import LaidOut

PAGE = 16
SIZES = Sizes(context=2 * PAGE)
made: list[int] = []


def laid(weight):
    """A copy that is told of."""
    made.append(1)
    return weight.clone()


LIBRARY = torch.library.Library("mla_fx_test", "DEF")
LIBRARY.define("laid(Tensor weight) -> Tensor")
LIBRARY.impl("laid", laid, "CPU")
LIBRARY.impl("laid", torch.empty_like, "Meta")


def paged(token_x, *rest, cache_mode, **options):
    """The prolog over pages of caches, with weights that were laid out."""
    *weights, sin, cos, index, kv_cache, kr_cache = rest
    batch, _, positions, _ = kv_cache.shape
    pages = [cache.view(-1, PAGE, 1, cache.shape[-1]) for cache in (kv_cache, kr_cache)]
    slots = index + torch.arange(batch).unsqueeze(-1) * positions
    weights = [torch.ops.mla_fx_test.laid(weight) for weight in weights]
    query, query_rope, *written = torch.ops.mla_fx.mla_prolog(
        token_x, *weights, sin, cos, slots.expand(batch, -1), *pages, **options, cache_mode="PA_BSND"
    )
    return query, query_rope, *(new.view(old.shape) for new, old in zip(written, (kv_cache, kr_cache), strict=True))


class Laying(Reference):
    name = "laying"
    writes_in_place = False
    prepares = True

    def lowerings(self, options, *, prepares):
        return {torch.ops.mla_fx.mla_prolog.default: lambda *_, **__: paged}


class Watched(Compilation):
    """A compilation that shows what it prepared."""

    laid_out = ()

    def rewrite(self, gm, **options):
        run = super().rewrite(gm, **options)
        self.laid_out = run.hoisted.laid_out
        return run


class Compiled:
    """A layer compiled for the target above."""

    def __init__(self, layer, *, lay_out=True, **options):
        self.compilations, self.asked = [], Options(lay_out=lay_out)
        self.run = torch.compile(layer, backend=self, **options)

    def __call__(self, gm, inputs):
        compilation = Watched(self.asked, Laying(), Report(target="laying"))
        self.compilations.append(compilation)
        return compilation.compile(gm, inputs)

    @property
    def kept(self):
        """Bytes of copies of weights."""
        return [memory.weights for compilation in self.compilations for memory in compilation.report.memory]

    @property
    def notes(self):
        return [compilation.report.notes for compilation in self.compilations]


@pytest.fixture(autouse=True)
def nothing_made():
    made.clear()
    with torch.no_grad():
        yield


def arguments(seed, sizes=SIZES):
    draw = torch.Generator().manual_seed(seed)
    x, tables, _, caches = layers.arguments(sizes)
    drawn = [torch.randn(value.shape, generator=draw, dtype=torch.float64) for value in (x, *tables, *caches)]
    return drawn[0], tuple(drawn[1:3]), torch.arange(3, 3 + sizes.tokens), tuple(drawn[3:])


def check_calls(layer, compiled, *seeds):
    """Each call, with arguments of its own, has the results and caches of eager mode."""
    for seed in seeds:
        check_same(layer, arguments(seed, layer.sizes), compiled.run, **CLOSE)


@pytest.mark.slow
@pytest.mark.parametrize("dynamic, tokens", [(False, 3), (True, 1)])
def test_weights_are_laid_out_once_and_caches_viewed(dynamic, tokens):
    layer = Layer(replace(SIZES, tokens=tokens))
    compiled = Compiled(layer, dynamic=dynamic)
    check_calls(layer, compiled, *range(3))
    assert len(made) == 6  # those of the prolog; the seventh is that of the values, which is not told of
    (notes,) = compiled.notes
    assert "2 caches passed as views" in notes[-1] and notes[-1].startswith("7 weights laid out once, ")
    assert compiled.kept == [sum(weight.nbytes for weight in layer.parameters() if weight is not layer.o)]


def test_weights_are_laid_out_at_each_call_where_nothing_is_to_be_kept():
    layer = Layer(SIZES)
    compiled = Compiled(layer, lay_out=False)
    check_calls(layer, compiled, 0, 1)
    assert len(made) == 12 and compiled.kept == [0]


def test_a_weight_that_is_written_is_laid_out_again_alone():
    layer = Layer(SIZES)
    compiled = Compiled(layer)
    check_calls(layer, compiled, 0)
    layer.q_a.mul_(0.5)
    check_calls(layer, compiled, 1)
    assert len(made) == 7
    layer.load_state_dict({name: weight * 0.7 for name, weight in layer.state_dict().items()})
    check_calls(layer, compiled, 2)
    assert len(made) == 13 and len(compiled.compilations) == 1


def test_a_weight_that_is_another_tensor_is_laid_out_again():
    layer = Layer(SIZES)
    compiled = Compiled(layer)
    check_calls(layer, compiled, 0)
    for _ in range(3):  # memory that was freed may come back under its old address
        layer.kv_a.data = torch.randn_like(layer.kv_a)
        check_calls(layer, compiled, 1)
    assert len(made) == 9 and len(compiled.compilations) == 1


def merged(weight):
    """Merges an adapter like PEFT."""
    weight.data += 0.1 * torch.randn_like(weight[:, :1]) @ torch.randn_like(weight[:1])


def through_numpy(weight):
    weight.detach().numpy()[...] *= 0.5


def set_to_another(weight):
    weight.set_(torch.randn_like(weight))


def one_half(weight):
    weight.data[len(weight) // 2 :] *= 0.5


def through_a_view_of_data(weight):
    weight.data.view(-1)[:].neg_()


def addresses(kept):
    return [made.value.data_ptr() for value in kept for of_weight in value.made.values() for made in of_weight.values()]


@pytest.mark.parametrize("write", [merged, through_numpy, set_to_another, one_half, through_a_view_of_data])
def test_a_write_that_nobody_counts_is_noticed(write):
    layer = Layer(SIZES)
    compiled = Compiled(layer)
    weights = layer.q_a, layer.q_b, layer.kv_a
    for weight in weights:
        check_calls(layer, compiled, 0)
        kept = compiled.compilations[0].laid_out
        place, before = weight.data_ptr(), addresses(kept)
        write(weight)
        check_calls(layer, compiled, 1)
        if weight.data_ptr() == place:
            assert addresses(kept) == before  # to which a captured graph may point
        assert len(compiled.compilations) == 1
    assert len(made) == 6 + len(weights)  # and only what was written is laid out again


def element(weight):
    weight.data[1, 3] += 5


@pytest.mark.parametrize("given", [lambda layer, weight: layer, lambda layer, weight: weight])
def test_a_single_element_is_left_to_refresh(given):
    layer = Layer(replace(SIZES, hidden=64))
    compiled = Compiled(layer)
    check_calls(layer, compiled, 0)
    element(layer.q_a)
    mla_fx.refresh(given(layer, layer.q_a))
    check_calls(layer, compiled, 1)
    assert len(compiled.compilations) == 1


def test_refresh_is_of_the_models_it_is_given():
    layer, other = Layer(SIZES), Layer(SIZES)
    compiled = Compiled(layer)
    check_calls(layer, compiled, 0)
    mla_fx.refresh(other)
    check_calls(layer, compiled, 0)
    assert len(made) == 6
    mla_fx.refresh(torch.compile(layer), other)
    check_calls(layer, compiled, 0)
    assert len(made) == 12
    with torch.inference_mode():
        mla_fx.refresh(Layer(SIZES))  # whose weights nobody counts: nothing is kept of them


def test_weights_with_values_that_are_not_equal_to_themselves_are_kept():
    weight = torch.full((4, 4), torch.nan)
    value = LaidOut(lambda weight: made.append(1) or weight * 2, "doubled", [0], 0)
    for _ in range(3):
        value([weight])
    assert len(made) == 1


@pytest.mark.parametrize("shape", [(), (1,), (0, 3), (40, 1, 7), (3, 50)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8, torch.bool, torch.float64, torch.float8_e4m3fn])
def test_a_sample_is_taken_of_any_tensor(shape, dtype):
    weight = torch.ones(shape, dtype=dtype).mT if len(shape) > 1 else torch.ones(shape, dtype=dtype)
    value = LaidOut(lambda weight: weight.float() * 2, "doubled, in float", [0], 0)
    value([weight])
    weight.data.zero_()
    assert not value([weight]).any()


def test_each_call_behind_what_is_laid_out_is_described_once():
    """Values in which each is added to itself have as many paths as 2 to their number."""
    graph = torch.fx.Graph()
    weight = graph.placeholder("weight")
    weight.meta["val"] = torch.ones(2)
    ends = []
    for _ in range(2):
        value = weight
        for _ in range(60):
            value = graph.call_function(torch.ops.aten.add.Tensor, (value, value))
        ends.append(value)
    other = graph.call_function(torch.ops.aten.sub.Tensor, (value, value))
    keys, calls = {}, {}
    first, second, third = (hoist.key_of(node, keys, calls) for node in (*ends, other))
    assert first == second != third and len(calls) == 62


def test_weights_whose_writes_nobody_counts_are_laid_out_at_each_call():
    with torch.inference_mode():
        layer = Layer(SIZES)
    compiled = Compiled(layer)
    check_calls(layer, compiled, 0, 1)
    assert len(made) == 12


def test_what_is_laid_out_never_is_the_weight_itself():
    weight = torch.arange(6.0).view(2, 3)
    value = LaidOut(lambda weight: weight[:1], "first row", [0], 12)
    first = value([weight])
    assert first.data_ptr() != weight.data_ptr()
    weight += 1
    assert value([weight]) is first and torch.equal(first, weight[:1])
    assert torch.equal(weight, 1 + torch.arange(6.0).view(2, 3))


def test_a_value_made_in_inference_mode_follows_its_weight_elsewhere():
    weight = torch.ones(2)
    value = LaidOut(lambda weight: weight * 2, "doubled", [0], 8)
    with torch.inference_mode():
        value([weight])
    weight += 1
    assert value([weight]).tolist() == [4, 4]


# --- several models, threads and graphs ------------------------------------------------------------------------------


class Another(Layer):
    """The same layer with other weights: PyTorch gives both one compiled graph."""

    def __init__(self, factor):
        super().__init__(SIZES)
        for weight in self.parameters():
            weight.mul_(factor)


def two_models(**options):
    """Two models, a compiled form of each, and the calls that each should answer, with the answers."""
    compiled = Compiled(Layer(SIZES))
    models = [Another(factor) for factor in (1.0, 1.1)]
    runs = [torch.compile(model, backend=compiled, **options) for model in models]
    answers = []
    for model in models:
        given = arguments(0)
        answers.append((model(*given), given[-1]))
    return compiled, runs, answers


def is_right(run, answer):
    given = arguments(0)
    found = run(*given), given[-1]
    return all(map(lambda one, other: torch.allclose(one, other, **CLOSE), tree_leaves(found), tree_leaves(answer)))


def test_each_weight_of_two_models_is_laid_out_once():
    compiled, runs, answers = two_models()
    for _ in range(10):
        assert all(map(is_right, runs, answers))
    assert len(made) == 2 * 6 and len(compiled.compilations) == 1


@pytest.mark.slow
def test_threads_may_call_two_models_of_one_graph():
    compiled, runs, answers = two_models()
    assert is_right(runs[0], answers[0])
    barrier = threading.Barrier(2)

    def call(number):
        barrier.wait()
        with torch.no_grad():
            return sum(is_right(runs[number], answers[number]) for _ in range(400))

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(call, range(2))) == [400, 400]
    assert len(made) == 2 * 6 and len(compiled.compilations) == 1


def test_graphs_share_what_they_make_of_a_weight():
    layer = Layer(SIZES)
    compiled = Compiled(layer, dynamic=False)
    for tokens in (3, 1):
        check_same(layer, arguments(0, replace(SIZES, tokens=tokens)), compiled.run, **CLOSE)
    assert len(made) == 6 and len(compiled.compilations) == 2


def test_what_is_made_of_a_weight_is_freed_with_it_and_with_its_graphs():
    weight, other = torch.ones(2, 3), torch.ones(3)
    values = [LaidOut(lambda *sources: sources[0] * 2, "doubled", places, 24) for places in ([0], [0, 1])]
    freed = [weakref.ref(value([weight, other])) for value in values]
    del values[0]
    assert freed[0]() is None and freed[1]() is not None
    other = torch.ones(3)
    values[0]([weight, other])
    assert freed[1]() is None  # the other source is gone
    last = weakref.ref(values[0]([weight, other]))
    assert last() is not None
    del weight
    assert last() is None


def test_what_differs_from_call_to_call_stays_in_the_graph():
    """A rotation by random tables has no operand, as constants have none."""

    class Random(Layer):
        def forward(self, x, tables, *rest):
            return super().forward(x, tuple(torch.rand_like(table) for table in tables), *rest)

    run = Compiled(Random(SIZES)).run
    assert not torch.equal(run(*arguments(0)), run(*arguments(0)))


def test_sizes_may_be_among_what_a_value_is_made_from():
    value = LaidOut(lambda weight, size: weight[:size] * 2, "first rows, doubled", [0, 1], 0)
    weight = torch.arange(6.0)
    for size in (2, 2, 4):
        assert torch.equal(value([weight, size]), weight[:size] * 2)
