"""A traced function, and the numbers in its graph: the oracle for readings."""

import inspect
import math

import pytest
import torch
from torch._inductor.decomposition import select_decomp_table
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import make_fx

from mla_fx.errors import NoMatch
from mla_fx.graph.schemas import written
from mla_fx.readings.axes import Axis, of_axis
from mla_fx.readings.element import Element, resolve
from mla_fx.readings.sizes import size_of
from mla_fx.readings.views import fresh_index

DECOMPOSITIONS = select_decomp_table()
B, S, N, T, D = 2, 3, 4, 5, 8  # batch, query tokens, heads, context tokens, width


class Traced:
    """A traced function, and the number of every node of its graph for one set of inputs."""

    def __init__(self, function, *inputs, dynamic=False, decompose=True):
        options = {"tracing_mode": "symbolic" if dynamic else "fake", "_allow_non_fake_inputs": True}
        names = inspect.signature(function).parameters
        self.module = make_fx(function, DECOMPOSITIONS if decompose else None, **options)(*inputs)
        if any(map(written, self.module.graph.nodes)):
            self.module = make_fx(functionalize(self.module), **options)(*inputs)
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


MASK = dense(B, 1, S, T) > -0.5
MASK[..., 0] = True
BIAS = torch.zeros(B, 1, S, T).masked_fill(~MASK, -torch.inf)


def rows(x):
    return x[..., None] * 10 + torch.arange(6.0)


def refused(reason):
    return pytest.raises(NoMatch, match=reason)


def assert_resolves(traced):
    """Check that what the output resolves to has, at every index, the output's numbers."""
    index = fresh_index(traced.out)
    element = resolve(traced.out, index)
    agree(traced.read(element, *index), traced.values[traced.out])
    node, place = element.top
    agree(traced.read(Element(node, place, element.top_factor), *index), traced.values[traced.out])
    return element


def sum_of(traced, found, index):
    dims = (*index, *found.axes)
    summed = traced.read(found.left, *dims) * traced.read(found.right, *dims)
    return found.factor * summed.flatten(len(index)).sum(-1)
