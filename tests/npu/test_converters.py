"""Converters that torchair lacks and mla_fx brings, each against eager PyTorch."""

import pytest
import torch
from mla_fx.lowering.ascend import converters


def check(converted, function, *tensors, dynamic=False):
    converters.register()
    run = converted.compiled(function, dynamic=dynamic)
    torch.testing.assert_close(run(*tensors), function(*tensors))


@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize("dim", [0, -1])
def test_all_along_an_axis(converted, dim, keepdim):
    torch.manual_seed(0)
    x = torch.randint(0, 4, (5, 6))
    check(converted, lambda x: (x.all(dim, keepdim), (x > 0).all(dim, keepdim)), x)


@pytest.mark.parametrize("dim", [(), (1,), (0, -1)], ids=str)
def test_amax(converted, dim):
    torch.manual_seed(0)
    check(converted, lambda x: (x.amax(dim), x.amax(dim, keepdim=True)), torch.randn(3, 4, 5))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("count", [1, 2])
def test_index_put(converted, count, dynamic):
    """Along the first axes, by indices of several shapes; one counts from the end."""
    torch.manual_seed(0)
    x, indices = torch.randn(6, 7, 3), [torch.tensor([[4], [0]]), torch.tensor([2, -1])][:count]
    values = torch.randn(2, *([1, 7, 3] if count == 1 else [1, 3]))
    check(converted, lambda x, values, *indices: x.index_put(indices, values), x, values, *indices, dynamic=dynamic)


@pytest.mark.parametrize("dynamic", [False, True])
def test_index_put_around_a_whole_axis(converted, dynamic):
    """The values have its axis next; one index counts from the end."""
    torch.manual_seed(0)
    x, values = torch.randn(6, 2, 7, 3), torch.randn(2, 3, 2, 3)
    indices = torch.tensor([[4], [0]]), torch.tensor([2, -1, 5])

    def put(x, values, first, third):
        x = x.clone()
        x[first, :, third] = values
        return x

    check(converted, put, x, values, *indices, dynamic=dynamic)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("gaps", [1, 2])
def test_index_put_with_gaps(converted, gaps, dynamic):
    """Along the first and a later axis: the rows come first in the values."""
    torch.manual_seed(0)
    x, indices = torch.randn(6, *[4, 5][:gaps], 7, 3), [torch.tensor([[4], [0]]), torch.tensor([2, -1])]
    values = torch.randn(2, 2, *[4, 5][:gaps], 3)

    def put(x, values, first, last):
        return torch.ops.aten.index_put(x, [first, *[None] * gaps, last], values)

    check(converted, put, x, values, *indices, dynamic=dynamic)


@pytest.mark.parametrize("options", [{"accumulate": True}, {"mask": True}], ids=str)
def test_index_put_that_is_not_converted(converted, options):
    x = torch.randn(6, 3)
    index = torch.tensor([0, 2])

    def put(x, index):
        by = [x[:, 0] > 0] if "mask" in options else [index]
        return x.index_put(by, torch.ones(()), options.get("accumulate", False))

    with pytest.raises(Exception, match=r"aten\.index_put with accumulate=.* is not converted"):
        check(converted, put, x, index)


def test_an_assertion_is_left_out(converted):
    def asserted(x):
        torch._assert_async((x.abs() < 9).all(), "x is large")
        return x + 1

    check(converted, asserted, torch.randn(5))
