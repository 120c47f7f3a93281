"""Two ways to compute the same result; each call of a compiled graph chooses one."""

import importlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

Traced = Callable[..., Tensor]


def conditional(condition: Any, one: Traced, other: Traced, given: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """Call the first of two functions of the same tensors if `condition` holds, else the second. Under Inductor's
    tracing this is a conditional. Both functions return a tensor of the given sizes."""
    importlib.import_module("torch._inductor.inductor_prims")  # registers the operator below, and is slow to import

    # Inductor may choose other layouts, but compiles branches for the strides that tensors have here.
    whole = [value.contiguous() for value in given]
    operands = tuple(torch.ops.prims.inductor_force_stride_order(value, value.stride()) for value in whole)
    # Flat, because strides over sizes that were Python numbers contain a Max, which a conditional does not support.
    branches = (lambda *read: (one(*read).flatten(),)), (lambda *read: (other(*read).flatten(),))
    (result,) = torch.ops.higher_order.cond(condition, *branches, operands)
    assert isinstance(result, Tensor)
    return result.view(sizes)


def can_choose(given: Iterable[Tensor]) -> bool:
    """Whether Inductor compiles a conditional over these tensors. It finds the symbols of their sizes only in sizes
    that are a single symbol."""
    sizes: list[Any] = [size for value in given for size in value.shape]
    expressions = [size.node.expr for size in sizes if isinstance(size, torch.SymInt)]
    symbols = {expression for expression in expressions if expression.is_Symbol}
    return all(expression.free_symbols <= symbols for expression in expressions)
