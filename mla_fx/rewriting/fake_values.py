"""Computes the fake values of calls: shape, strides and dtype of a result before the call runs."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node

from mla_fx.errors import NoMatch
from mla_fx.graph.torch_private import (
    OpOverload,
    detect_fake_mode,
    fake_tensor,
    has_symbolic_sizes,
    in_kernel_invocation_manager,
    is_fake,
    share_storage,
    tree_map_only,
)
from mla_fx.readings.sizes import size_of

from .draft import Draft, fake_of, is_value, value_of

aten = torch.ops.aten

VIEWS = frozenset({aten.reshape.default, aten.permute.default, aten.slice.Tensor, aten.select.int, aten.expand.default})

DEPENDS_ON_DATA = frozenset({torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output})


class FakeValues:
    """The fake results of calls in one graph.

    Fused operators check a lot, and dispatching fake tensors is slow, so equal calls are computed once. Each result is
    still a separate tensor, because compilers detect aliasing by storage."""

    def __init__(self, graph: Graph) -> None:
        self.fake_mode = detect_fake_mode([node.meta.get("val") for node in graph.nodes if node.op == "placeholder"])
        self._values: dict[Any, Any] = {}
        self._views: dict[Any, _View | None] = {}
        self._signatures: dict[Node, tuple[Any, Any]] = {}

    def of_call(self, target: Any, args: Any, kwargs: Any) -> Any:
        """The fake result of a call on nodes and drafts. Raises NoMatch if an operator refuses them."""
        if not _makes_new_tensors(target):
            return self._computed(target, args, kwargs)
        key = (target, hashable(args, self.signature), hashable(kwargs, self.signature))
        found = self._values.get(key)
        if found is not None:
            return self._others(found)
        self._values[key] = found = self._computed(target, args, kwargs)
        return found

    def of_equal_call(self, known: Any, target: Any, args: Any, kwargs: Any) -> Any:
        """The fake result of a call whose result on operands with the same signatures is known."""
        return self._others(known) if _makes_new_tensors(target) else self._computed(target, args, kwargs)

    def signature(self, part: Node | Draft) -> Any:
        """The signature of a value. It is cached for nodes, because several rules ask for it."""
        if isinstance(part, Draft):
            return signature(part.value)
        node, value = part, part.meta.get("val")
        asked, found = self._signatures.get(node, (None, None))
        if asked is None or asked is not value:
            found = signature(value)
            self._signatures[node] = value, found
        return found

    def faking(self) -> contextlib.AbstractContextManager[Any]:
        """A context in which new tensors are fake if those of the graph are."""
        return self.fake_mode or contextlib.nullcontext()

    def _computed(self, target: Any, args: Any, kwargs: Any) -> Any:
        if self.fake_mode is not None and target in VIEWS and not has_symbolic_sizes(value_of(args[0])):
            return self._viewed(target, args)
        args = fake_of(args)
        kwargs = {name: fake_of(value) for name, value in kwargs.items()}
        refuses = RuntimeError if target is aten.view.dtype else ValueError  # bytes at odd places cannot be viewed
        try:
            with self.faking():
                return target(*args, **kwargs)
        except refuses as refusal:
            raise NoMatch(f"the operator refuses: {refusal}") from refusal

    def _viewed(self, target: Any, args: Any) -> Any:
        """A view of a tensor of known sizes.

        Rewriting makes a dozen of these for each layer. Calling the operator on the meta tensor behind the fake one is
        five times faster than dispatching through fake tensors. The geometry of a repeated view is cached."""
        source = value_of(args[0])
        key = (target, source.shape, source.stride(), source.dtype, hashable(args[1:], self.signature))
        seen = self._views.get(key)
        with in_kernel_invocation_manager(self.fake_mode):
            if seen is not None:
                view = source.as_strided(seen.sizes, seen.strides, source.storage_offset() + seen.offset)
            else:
                view = target(*fake_of(args))
                self._views[key] = _view(source, view)
        return fake_tensor(self.fake_mode, view, source.device)

    def _others(self, values: Any) -> Any:
        is_one = isinstance(values, torch.Tensor)
        return self._another(values) if is_one else tree_map_only(torch.Tensor, self._another, values)

    def _another(self, value: torch.Tensor) -> torch.Tensor:
        """A new tensor with the same shape, strides, dtype and device."""
        if self.fake_mode is None or not is_fake(value) or has_symbolic_sizes(value):
            with self.faking():
                return unshared(value)
        with in_kernel_invocation_manager(self.fake_mode):
            plain = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        return fake_tensor(self.fake_mode, plain, value.device)


class _View(NamedTuple):
    """The geometry of a view. Its offset is relative to the source's."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


def _view(source: torch.Tensor, result: torch.Tensor) -> _View | None:
    """The geometry of a view; None for a copy, which a reshape may make, and for symbolic sizes."""
    if has_symbolic_sizes(result) or not share_storage(source, result):
        return None
    return _View(result.shape, result.stride(), int(result.storage_offset() - source.storage_offset()))


@functools.cache
def _makes_new_tensors(target: Any) -> bool:
    """Whether an operator's results alias no operand and have sizes that do not depend on data."""
    if not isinstance(target, OpOverload) or not DEPENDS_ON_DATA.isdisjoint(target.tags):
        return False
    return not any(result.alias_info for result in target._schema.returns)


def unshared(value: torch.Tensor) -> torch.Tensor:
    """A tensor of the same shape, strides and dtype with its own storage."""
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def hashable(value: Any, of_value: Callable[[Any], Any] | None = None) -> Any:
    """Arguments as a dictionary key, with nodes and drafts replaced by `of_value` of them, if it is given."""
    if is_value(value):
        return value if of_value is None else of_value(value)
    if isinstance(value, (list, tuple)):
        return tuple([hashable(item, of_value) for item in value])
    if isinstance(value, dict):
        return tuple([(name, hashable(item, of_value)) for name, item in sorted(value.items())])
    return type(value), value


def signature(value: Any) -> Any:
    """Shape, strides, dtype, device, and the conjugate and negative bits of a value.

    Operators treat values with equal signatures alike."""
    if isinstance(value, torch.SymInt):
        return size_of(value)
    if not isinstance(value, torch.Tensor):
        return tree_map_only(torch.Tensor, signature, value)
    sizes: Any = value.shape
    strides: Any = value.stride()
    if has_symbolic_sizes(value):
        sizes, strides = (tuple(map(size_of, numbers)) for numbers in (sizes, strides))
    return sizes, strides, value.dtype, value.device, value.is_conj(), value.is_neg()
