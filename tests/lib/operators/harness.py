"""Shared by the tests of all operators: refusals, fake kernels with free sizes, one compilation for many sizes."""

import copy
import inspect
from functools import cache

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

import mla_fx.ops

CATALOGUE = mla_fx.ops.catalogue()

# (rtol, atol) between two correct evaluations of one operator that sum in different orders.
TOLERANCE = {
    torch.float64: (1e-10, 1e-10),
    torch.float32: (1e-4, 1e-4),
    torch.float16: (1e-2, 1e-2),
    torch.bfloat16: (5e-2, 5e-2),
}


@cache
def samples(name, dtype):
    """The samples of an operator, drawn once: the same tensors for every test, which writes to none of them."""
    return tuple(CATALOGUE[name].samples(dtype))


def first_of(mode, name, dtype):
    """The arguments by name of the first sample of a mode, as tensors of the caller's own."""
    sample = next(sample for sample in samples(name, dtype) if sample.mode == mode)
    return copy.deepcopy(by_name(CATALOGUE[name], sample.args, sample.kwargs))


def cases(dtypes, operators=tuple(CATALOGUE)):
    """One pytest parameter (operator, args, kwargs) per operator, dtype and sample."""
    return list(_each_case(dtypes, operators))


def _each_case(dtypes, operators):
    for name in operators:
        for dtype in dtypes:
            for number, (mode, args, kwargs) in enumerate(samples(name, dtype)):
                label = f"{name}-{str(dtype).removeprefix('torch.')}-{number}-{mode}"
                yield pytest.param(CATALOGUE[name], args, kwargs, id=label)


def mapped(change, values):
    """`change` applied to every tensor in `values`, and in lists among them."""

    def of(value):
        if isinstance(value, list):
            return mapped(change, value)
        return change(value) if isinstance(value, torch.Tensor) else value

    return [of(value) for value in values]


def double(values):
    """The floating-point tensors in `values` in float64."""
    return mapped(lambda tensor: tensor.double() if tensor.is_floating_point() else tensor, values)


def as_tuple(result):
    if result is None:
        return ()
    return result if isinstance(result, tuple) else (result,)


def same_tensors(actual, wanted):
    """The tensors among two rows of values are equal bit by bit."""
    for left, right in zip(actual, wanted, strict=True):
        if isinstance(left, torch.Tensor):
            torch.testing.assert_close(left, right, rtol=0, atol=0, equal_nan=True)


def by_name(operator, args, kwargs):
    """All arguments of a call by name, defaults included."""
    bound = inspect.signature(operator.body).bind(*args, **kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)


def schema_names(overload):
    return [argument.name for argument in overload._schema.arguments]


def result_names(overload):
    return [result.name for result in overload._schema.returns]


def written_names(overload):
    """The arguments that an overload declares to write."""
    return [argument.name for argument in overload._schema.arguments if argument.alias_info is not None]


def twin_call(operator, args, kwargs):
    """Run the in-place form on copies: all results by name, returned or written, and the arguments afterwards.

    An output that only the in-place form has starts as the functional form's result filled with 77.
    """
    arguments = {name: value.clone() if torch.is_tensor(value) else value
                 for name, value in by_name(operator, args, kwargs).items()}  # fmt: skip
    if missing := [name for name in written_names(operator.inplace) if name not in arguments]:
        results = as_tuple(operator.overload(*args, **kwargs))
        functional = dict(zip(result_names(operator.overload), results, strict=True))
        arguments |= {name: torch.full_like(functional[name], 77) for name in missing}
    returned = dict(zip(result_names(operator.inplace), as_tuple(operator.inplace(**arguments)), strict=True))
    return returned, arguments


def with_lists(operator, overload, args, kwargs):
    """The arguments by name with host lists where `overload` takes lists."""
    arguments = by_name(operator, args, kwargs)
    wanted = {argument.name for argument in overload._schema.arguments if "List" in str(argument.type)}
    return {name: value.tolist() if name in wanted and value is not None else value
            for name, value in arguments.items()}  # fmt: skip


def change(position, edit):
    """Spoil a call: replace one argument by `edit` of it."""
    return lambda args, kwargs: args.__setitem__(position, edit(args[position]))


def option(**options):
    return lambda args, kwargs: kwargs.update(options)


def drop(_):
    return None


def changed(arguments, name, change):
    """The arguments by name with one changed by a function, or replaced."""
    return arguments | {name: change(arguments[name]) if callable(change) else change}


def refuses(operator, args, kwargs, message):
    """Every form raises a ValueError that matches `message`, and has written nothing."""
    for overload in filter(None, (operator.overload, operator.inplace)):
        arguments = by_name(operator, args, kwargs)
        for name in set(written_names(overload)) - set(arguments):
            arguments[name] = torch.full((1,), 77.0)
        before = {name: value.clone() if torch.is_tensor(value) else value for name, value in arguments.items()}
        with pytest.raises(ValueError, match=message):
            overload(**arguments)
        for name, value in arguments.items():
            if torch.is_tensor(value) and not value.is_meta:
                torch.testing.assert_close(value, before[name], rtol=0, atol=0, equal_nan=True)


def fake_with_free_sizes(operator, args, kwargs, fixed=()):
    """The results of the fake kernel with every axis except the last of each tensor a symbol, and the guards it added.

    Arguments in `fixed` keep their sizes. No two axes share a symbol, as in a graph with unrelated inputs.
    """
    shapes = ShapeEnv(duck_shape=False)
    with FakeTensorMode(shape_env=shapes, allow_non_fake_inputs=True) as mode:
        arguments = by_name(operator, args, kwargs)
        for name, value in arguments.items():
            if torch.is_tensor(value):
                arguments[name] = mode.from_tensor(value, symbolic_context=None if name in fixed else _free(value))
        results = as_tuple(operator.overload(**arguments))
    return results, [str(guard.expr) for guard in shapes.guards]


def _free(tensor):
    sizes = [DimDynamic.DYNAMIC] * (tensor.dim() - 1) + [DimDynamic.STATIC]
    return StatelessSymbolicContext(dynamic_sizes=sizes[-tensor.dim() :] if tensor.dim() else [])


def hints(sizes):
    """Sizes as the numbers of their symbols."""
    return tuple(size.node.hint if isinstance(size, torch.SymInt) else size for size in sizes)


def compiles_once(layer, inputs):
    """Check that `layer` with dynamic sizes compiles one graph for all `inputs`, with eager's results."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, backend=counter, fullgraph=True, dynamic=True)
    with torch.no_grad():
        for tensors in inputs:
            torch.testing.assert_close(compiled(*tensors), layer(*tensors), rtol=0, atol=0, equal_nan=True)
    assert counter.frame_count == 1


def nz_offset(slot, column, block_size, width, element_size):
    """Bytes from the start of an NZ cache to element (slot, column): a page is bands of 32 bytes a row."""
    fractal = 32 // element_size
    page, row = divmod(slot, block_size)
    band, lane = divmod(column, fractal)
    return ((page * (width // fractal) + band) * block_size + row) * 32 + lane * element_size


def nd_offset(slot, column, block_size, width, element_size):
    """Bytes from the start of a plain cache to element (slot, column)."""
    return (slot * width + column) * element_size


def element_at(cache, offset):
    """The element of a contiguous cache that starts at byte `offset`, read from its raw bytes."""
    raw = cache.contiguous().view(torch.uint8).flatten()[offset : offset + cache.element_size()]
    return raw.clone().view(cache.dtype)[0]


DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def bfloat16(x):
    """float32 rounded to bfloat16, ties to even, by its bits."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def to_int8(x):
    return np.clip(np.rint(x), -128, 127).astype(np.int8)
