"""A CPU library reads one row of integers by its stride, which Inductor makes 0: our target goes around that."""

import pytest
import torch
from torch import nn

import mla_fx
from mla_fx import cases

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_gradients", "seeded")]
WIDTH = 64


class Quantised(nn.Module):
    """A projection of int8 tokens and weights."""

    def __init__(self):
        super().__init__()
        self.codes = nn.Buffer(torch.randint(-127, 128, (WIDTH, cases.HE), dtype=torch.int8))

    def forward(self, x):
        step = x.abs().amax(-1, keepdim=True) / 127
        codes = (x / step).round().clamp(-128, 127).to(torch.int8)
        product = torch._int_mm(codes.view(-1, cases.HE), self.codes.t())
        return product.view(*x.shape[:-1], WIDTH).float() * step * 1e-3


def error(compiled, model, *inputs):
    return float((compiled(*inputs) - model(*inputs)).abs().max())


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.attention = Quantised(), cases.Layer()

    def forward(self, x, *rest):
        out = self.attention(x, *rest)
        return out, self.before(x[:1, :1])


def test_ours_is_right():
    model = Model()
    given = cases.inputs()
    expected = model.before(given[0][:1, :1])
    _, found = torch.compile(model, backend="mla")(*given)
    report = mla_fx.last_report()
    assert report.fused and "_int_mm is computed as product_of_one_row" in report.notes, str(report)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(not torch.cpu._is_amx_tile_supported(), reason="seen on an Intel Xeon with AVX-512 VNNI and AMX")
def test_inductor_has_the_fault_still():
    """If this fails, `product_of_one_row` may go."""
    model = Quantised()
    compiled = torch.compile(model)
    assert error(compiled, model, torch.randn(1, 4, cases.HE)) < 1e-3
    assert error(compiled, model, torch.randn(1, 1, cases.HE)) > 1
