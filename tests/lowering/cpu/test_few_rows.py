"""The C++ kernel for a few rows times a large weight: when compiled code calls it, and that it multiplies.

The oracle is the product in float64. The library's own product says which error is allowed."""

import itertools
import math
import re
from pathlib import Path

import pytest
import torch
from lib.kernels import LESSER_PROCESSORS, check_on, compiled, draw, without_a_compiler
from mla_fx.lowering.cpu import few_rows

import mla_fx
from mla_fx.errors import NoMatch

pytestmark = pytest.mark.usefixtures("no_gradients")

DTYPES = (torch.bfloat16, torch.float16)
COUNTS = (1, 2, 3, 5, 8, 16)
SHAPES = ((1, 32, 1), (1, 96, 37), (3, 64, 70), (2, 320, 300))  # products, numbers of a row, results of a row


def by_columns(batch, inner, columns):
    return (draw(batch, columns, inner) * inner**-0.5).mT


def in_a_larger_weight(batch, inner, columns):
    """Columns, as those of values are in the projection of keys and values."""
    return (draw(batch, columns + 5, inner + 8) * inner**-0.5).mT[:, 8:, 3 : columns + 3]


def by_rows(batch, inner, columns):
    """Rows, as those of keys are there."""
    return (draw(batch, inner + 5, columns + 8) * inner**-0.5)[:, 5:, 3 : columns + 3]


STORED = (by_columns, in_a_larger_weight, by_rows)


def stored(dtype):
    """How a weight of this dtype may be stored here."""
    has_tiles = few_rows.library().has_tiles()
    return STORED if dtype == torch.bfloat16 and has_tiles else STORED[:2]


def check(rows, weight):
    found, exact = few_rows.run(rows, weight), rows.double() @ weight.double()
    error, plain = ((one.double() - exact).norm() / exact.norm() for one in (found, rows @ weight))
    assert found.dtype == rows.dtype and found.is_contiguous()
    assert error <= 2 * plain + torch.finfo(torch.float32).eps
    return found


def test_it_is_a_product():
    for dtype, shape, count in itertools.product(DTYPES, SHAPES, COUNTS):
        for make in stored(dtype):
            weight = make(*shape).to(dtype)
            rows = draw(shape[0], count, shape[1], seed=1).to(dtype)
            check(rows, weight)
            assert torch.equal(check(rows[0], weight[0]), few_rows.run(rows, weight)[0])


def test_rows_of_any_strides():
    rows = draw(3, 4, 64).bfloat16()
    apart, turned = rows.transpose(0, 1).contiguous().transpose(0, 1), rows.mT.contiguous().mT
    for make in stored(torch.bfloat16):
        weight = make(3, 64, 70).bfloat16()
        for same in (apart, turned, rows[:, :1].expand(-1, 4, -1), rows[:, :1].as_strided((3, 1, 64), (256, 0, 1))):
            check(same, weight)


def test_other_numbers_of_rows_and_dtypes_are_left_to_the_library():
    weight = by_columns(1, 64, 70)[0]
    for rows in (draw(17, 64), draw(0, 64), draw(2, 64).double()):
        dtype = torch.bfloat16 if rows.dtype == torch.float32 else rows.dtype
        rows, given = rows.to(dtype), weight.to(dtype)
        assert torch.equal(few_rows.run(rows, given), rows @ given)


EXTREMES = (math.nan, math.inf, -math.inf, 6e4, -6e4, 0.0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_extreme_numbers_meet_as_in_a_product(dtype):
    """Each pair of them, one in the rows and one in the weight."""
    for (left, right), make in itertools.product(itertools.product(EXTREMES, EXTREMES), stored(dtype)):
        rows, weight = draw(3, 64).to(dtype), make(1, 64, 40)[0].to(dtype)
        rows[1, 3], weight[3, 2] = left, right
        meant, found = (rows.float() @ weight.float()).to(dtype), few_rows.run(rows, weight)
        assert torch.equal(found.isnan(), meant.isnan()) and torch.equal(found.isinf(), meant.isinf())
        torch.testing.assert_close(found, meant, rtol=2e-2, atol=2e-2, equal_nan=True)


def large(*shape, dtype=torch.bfloat16):
    return torch.empty(*shape, dtype=dtype)


DENSE = "the kernel is for rows of a multiple of 32 numbers, and weights that are stored densely"
REFUSED = {
    "the kernel is for large weights of fixed sizes": (large(1, 512), large(1000, 512).mT),
    "the kernel is for CPUs and 16 bits": (large(1, 512).float(), large(2048, 512).float().mT),
    DENSE: (large(1, 520), large(2048, 520).mT),
    "a library multiplies such rows faster": (large(17, 512), large(2048, 512).mT),
    "the kernel multiplies rows of a weight by AMX alone": (
        large(1, 512, dtype=torch.float16), large(512, 2048, dtype=torch.float16)
    ),
}  # fmt: skip


@pytest.mark.parametrize("reason", REFUSED)
def test_what_it_is_not_for(reason):
    with pytest.raises(NoMatch, match=f"^{reason}$"):
        few_rows.lower(*REFUSED[reason])


@pytest.mark.parametrize(
    "weight",
    [large(512).expand(2048, 512).mT, large(1024, 512, 2)[..., 0].mT, large(2**20).as_strided((512, 2048), (1, 9))],
)
def test_weights_that_overlap_or_have_gaps(weight):
    with pytest.raises(NoMatch, match=DENSE):
        few_rows.lower(large(1, 512), weight)


def test_several_rows_are_worth_a_call_sooner_than_one():
    weight = large(512, 256).mT
    assert few_rows.lower(large(2, 256), weight) is few_rows.few_rows
    with pytest.raises(NoMatch, match="large weights"):
        few_rows.lower(large(1, 256), weight)


class Layer(torch.nn.Module):
    """Latent attention of eight heads over a context that is given."""

    def __init__(self):
        super().__init__()
        self.query = torch.nn.Linear(1024, 8 * 96, bias=False)
        self.up = torch.nn.Parameter(draw(8, 128, 256) * 256**-0.5)
        self.out = torch.nn.Linear(8 * 64, 1024, bias=False)
        for linear in (self.query, self.out):
            torch.nn.init.normal_(linear.weight, std=linear.in_features**-0.5)

    def forward(self, x, latents, keys):
        query = self.query(x).unflatten(-1, (8, 96)).transpose(1, 2)
        k_nope, value = torch.einsum("btr,ndr->bntd", latents, self.up).split(64, -1)
        key = torch.cat((k_nope, keys.unsqueeze(1).expand(-1, 8, -1, -1)), -1)
        weights = (query @ key.mT * 96**-0.5).float().softmax(-1).to(value.dtype)
        return self.out((weights @ value).transpose(1, 2).flatten(2))


def inputs(batch):
    return (draw(batch, 1, 1024), draw(batch, 40, 256), draw(batch, 40, 32, seed=1))


def check_layer(layer, found, given):
    exact = layer.double()(*(one.double() for one in given))
    layer.bfloat16()
    error, eager = ((one.double() - exact).norm() for one in (found, layer(*given)))
    assert error <= 2 * eager


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_code_calls_it(dynamic):
    """With a symbolic number of rows, one graph serves few and many."""
    layer, given = Layer().bfloat16(), tuple(one.bfloat16() for one in inputs(4))
    found, code, step = compiled(layer, *given, dynamic=dynamic)
    assert code.count("= torch.ops.mla_fx.few_rows.default(") >= 2
    check_layer(layer, found, given)
    with torch.compiler.set_stance("fail_on_recompile"):
        for batch in (2, 16, 17, 30) if dynamic else ():
            given = tuple(one.bfloat16() for one in inputs(batch))
            check_layer(layer, step(*given), given)


@pytest.mark.slow
def test_a_weight_that_the_graph_computes_is_read_by_loops():
    """From its codes, which a kernel would have stored as numbers of 16 bits first."""

    class Coded(Layer):
        def forward(self, x, latents, keys):
            scale = self.query.weight.abs().amax(-1, keepdim=True)
            codes = (self.query.weight / scale * 127).to(torch.int8).to(torch.bfloat16)
            return torch.nn.functional.linear(super().forward(x, latents, keys), codes * scale)

    compiled(Coded().bfloat16(), *(one.bfloat16() for one in inputs(4)))
    assert "mm is computed as few_rows (2 times)" in mla_fx.last_report().notes  # the layer's own two


def test_without_a_compiler_the_library_multiplies_and_a_warning_says_so(monkeypatch):
    without_a_compiler(monkeypatch, few_rows)
    rows, weight = draw(2, 64).bfloat16(), by_columns(1, 64, 70)[0].bfloat16()
    with pytest.warns(mla_fx.MlaWarning, match="a product of few rows runs without its C.. kernel: no compiler$"):
        assert torch.equal(few_rows.run(rows, weight), rows @ weight)
    with pytest.raises(NoMatch, match=re.escape("its C++ kernel was not built")):
        few_rows.lower(large(1, 1024), large(2048, 1024).mT)


@pytest.mark.slow
@pytest.mark.parametrize("processor", LESSER_PROCESSORS)
def test_on_lesser_processors(processor):
    coded = Path(__file__).with_name("test_few_coded_rows.py")
    check_on(processor, "product or strides or extreme or points or every", __file__, coded)
