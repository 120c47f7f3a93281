"""Runs the calls of graphs and plans on small tensors, of float64 or of the program's own dtypes."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.node import map_aggregate

from mla_fx.graph.schemas import names_of
from mla_fx.graph.torch_private import HigherOrderOperator, OpOverload, python_dispatcher_off, unset_fake_temporarily
from mla_fx.rewriting.draft import fake_of, is_value, value_of

from .exact import FILLS
from .region import CASTS, PURE, UncheckedError
from .small_sizes import Numbers, Value, never_sizes

aten = torch.ops.aten

COMPLEX = (torch.complex32, torch.complex64, torch.complex128)
TWICE = "a row is written twice: what it then holds is not defined"
# Calls an operator that writes in place, and returns what it would write.
WRAPPER = torch.ops.higher_order.auto_functionalized_v2
PLACES = ("_base_index", "_dim")  # of its arguments, those that say which base and which dimension an operator writes
# Of operators that compute a scale or an epsilon if none is given.
COMPUTED = frozenset({"query", "normalized_shape"})


def may_run(part: Value) -> bool:
    """Branches of `torch.cond` do not: their sizes are their own. Nor do vendors' modes for caches in FRACTAL_NZ: how
    many columns these have depends on the dtype."""
    target: Any = part.args[0] if part.target is WRAPPER else part.target
    mode = str(part.kwargs.get("cache_mode", "")).upper()
    if "NZ" in mode and mode != "NZ":
        return False
    if isinstance(target, OpOverload):
        return target.namespace in PURE
    return not isinstance(target, HigherOrderOperator)


@contextlib.contextmanager
def on_real_tensors() -> Iterator[None]:
    """What runs graphs and compares results runs in this context."""
    with unset_fake_temporarily(), python_dispatcher_off(), torch.no_grad():
        yield


def _topk_in_order(value: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    return aten.topk.default(value, k, dim, largest)


class Interpreter:
    """Runs calls with the numbers of `small` in place of their sizes. `values` begins with those of the leaves.

    Numbers are of float64. A result whose dtype has larger steps than `coarsest` is rounded to it, and so is a number
    that fills a tensor. No other is. Without `coarsest`, all numbers are of the program's dtypes."""

    instead: Mapping[Any, Any] = {
        **dict.fromkeys((aten.view.default, aten._unsafe_view.default), aten.reshape.default),
        aten.copy_.default: aten.copy.default,  # a leaf is read again
        aten.topk.default: _topk_in_order,
    }
    """Calls for numbers of any strides, and in any order that the program leaves open."""

    def __init__(
        self, numbers: Numbers, small: Mapping[int, int], values: dict[Value, Any], coarsest: torch.dtype | None
    ) -> None:
        self.numbers, self.small, self.coarsest = numbers, small, coarsest
        self.values = {part: self._in_steps(value, value_of(part)) for part, value in values.items()}
        self.leaves = tuple(values)

    def run(self, part: Value) -> Any:
        if part not in self.values:
            self.values[part] = self._result(part)
        return self.values[part]

    def _result(self, part: Value) -> Any:
        target: Any = part.target
        if isinstance(target, GraphModule):
            return target
        if not may_run(part):
            raise UncheckedError(f"{target} may do more than compute")
        if target is WRAPPER:
            given = {name: self._argument(value, name.endswith(PLACES)) for name, value in part.kwargs.items()}
            return self.called(target, part.args, given, None)
        if not isinstance(target, OpOverload):
            args, kwargs = map_aggregate((part.args, part.kwargs), self._operand)
            return self.called(target, args, kwargs, None)
        if target is aten.as_strided.default and _is_read_as_it_lies(part):
            return self._operand(part.args[0])
        if target is aten.view.dtype and self.coarsest is not None:
            return self._bytes(*part.args)
        names, kept = names_of(target), never_sizes(part)
        args = [self._argument(value, name in kept) for name, value in zip(names, part.args, strict=False)]
        kwargs = {name: self._argument(value, name in kept) for name, value in part.kwargs.items()}
        if target.namespace == "aten" and not COMPUTED.isdisjoint(names):
            args, kwargs = [], {**dict(zip(names, args, strict=False)), **kwargs}
            self._set_defaults(part.args[0], kwargs)
        if target.namespace == "mla_fx":
            _check_slots_differ(**dict(zip(names, args, strict=False)), **kwargs)
        result = self.called(target, args, kwargs, value_of(part))
        return self._rounded(result, part) if self.coarsest is not None and _is_number(part) else result

    def _rounded(self, result: Any, part: Value) -> Any:
        """A floating result as its own dtype stores it."""
        dtype = value_of(part).dtype
        if not dtype.is_floating_point:
            return result
        stored = self.called(aten._to_copy.default, [result], {"dtype": dtype}, None)
        return self.called(aten._to_copy.default, [stored], {"dtype": torch.float64}, None)

    def _bytes(self, value: Any, dtype: torch.dtype) -> Any:
        """A view of the same bytes. Those of numbers are those of float32, in which no rounding of float64 is seen."""
        given = self.run(value)
        if value_of(value).is_floating_point():
            given = self.called(aten._to_copy.default, [given], {"dtype": torch.float32}, None)
        if not dtype.is_floating_point:
            return self.called(aten.view.dtype, [given, dtype], {}, None)
        viewed = self.called(aten.view.dtype, [given, torch.float32], {}, None)
        return self.called(aten._to_copy.default, [viewed], {"dtype": torch.float64}, None)

    def called(self, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], fake: Any) -> Any:
        """The result of a call; `fake` is that of the graph. Its strides are not those of other sizes."""
        target = self.instead.get(target, target)
        result = target(*args, **kwargs)
        if target in READ_BACK and not torch.allclose(*READ_BACK[target](result, *args), 0, 0, equal_nan=True):
            raise UncheckedError(TWICE)
        if isinstance(target, OpOverload) and "empty" in target._opname:
            result.fill_(1)  # the same each time
        return self._in_steps(result, fake)

    def _in_steps(self, value: Any, fake: Any) -> Any:
        """A value, rounded to its dtype if the steps of that are larger than those of the coarsest."""
        dtype = getattr(fake, "dtype", None)
        if dtype is None or not dtype.is_floating_point or not isinstance(value, Tensor):
            return value
        if self.coarsest is None or _step(dtype) <= _step(self.coarsest):
            return value
        return value.to(dtype).double()

    def _operand(self, leaf: Any) -> Any:
        return self.run(leaf) if is_value(leaf) else leaf

    def _argument(self, value: Any, is_kept: bool) -> Any:
        if is_value(value):
            return self.run(value)
        if type(value) is int:
            sign = -1 if value < 0 else 1
            return value if is_kept else sign * self.small.get(abs(value), abs(value))
        if isinstance(value, (list, tuple)):
            return [self._argument(part, is_kept) for part in value]
        if isinstance(value, torch.dtype) and self.coarsest is not None:
            return torch.float64 if value.is_floating_point else torch.complex128 if value in COMPLEX else value
        return torch.device("cpu") if isinstance(value, torch.device) else value

    def _set_defaults(self, first: Any, given: dict[str, Any]) -> None:
        """Write down what PyTorch would compute from a size or a dtype, which are others here."""
        if "query" in given and given.get("scale") is None:
            given["scale"] = self.numbers.of(value_of(first).shape[-1]) ** -0.5
        if "normalized_shape" in given and given.get("eps") is None:
            given["eps"] = torch.finfo(value_of(first).dtype).eps


def _is_number(part: Value) -> bool:
    """Whether it is filled with a number of the program."""
    operand = part.args[0] if part.args else None
    return part.target in FILLS or (part.target in CASTS and is_value(operand) and _is_number(operand))


def _check_slots_differ(cache_mode: str = "", cache_index: Any = None, index: Any = None, **_: Any) -> None:
    """Raises UncheckedError if one of our operators would write a row twice; negative slots are not written. Slots are
    those of one sequence, or of pages for all."""
    slots = index if cache_index is None else cache_index
    if not isinstance(slots, Tensor) or slots.dim() == 0 or slots.numel() == 0:
        return
    is_paged = cache_mode.startswith("PA")
    for row in slots.reshape(-1, slots.numel() if is_paged else slots.shape[-1]).tolist():
        written = [slot for slot in row if slot >= 0]
        if len({*written}) < len(written):
            raise UncheckedError(TWICE)


def _put(result: Tensor, cache: Tensor, indices: Any, values: Tensor, is_added: bool = False) -> tuple[Tensor, Tensor]:
    rows = aten.index.Tensor(result, indices)
    return rows, rows if is_added else values.to(rows.dtype).expand_as(rows)


def _copied(result: Tensor, cache: Tensor, dim: int, index: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    return result.index_select(dim, index), rows.to(result.dtype)


READ_BACK: dict[Any, Callable[..., tuple[Tensor, Tensor]]] = {
    aten.index_put.default: _put,
    aten.index_copy.default: _copied,
}
"""Operators that write rows in no particular order give what is in these rows, and what was written."""


def _is_read_as_it_lies(part: Value) -> bool:
    """Whether a read by strides, which are others here, is a view of all elements in their order."""
    value, *sizes = part.args
    given = fake_of(value)
    return list(map(list, sizes)) == [list(given.shape), list(given.stride())]


@functools.cache
def _step(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps
