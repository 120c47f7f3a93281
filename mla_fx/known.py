"""What is known about the result of a call before it runs: its shape, strides and type, as a fake tensor."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.utils._pytree import tree_map_only

from .canonical.sizes import size_of
from .errors import NoMatch
from .torch_private import detect_fake_mode, fake_tensor, has_symbolic_sizes, in_kernel_invocation_manager, is_fake

aten = torch.ops.aten

VIEWS = frozenset({aten.reshape.default, aten.permute.default, aten.slice.Tensor, aten.select.int, aten.expand.default})


class KnownValues:
    """Results of calls in one graph. Fused operators check a lot, so equal calls of them are computed once; each
    result still is a tensor of its own, since compilers ask by storage what aliases what."""

    def __init__(self, graph: Graph) -> None:
        self.fake_mode = detect_fake_mode([node.meta.get("val") for node in graph.nodes if node.op == "placeholder"])
        self._values: dict[Any, Any] = {}

    def of_call(self, target: Any, args: Any, kwargs: Any) -> Any:
        """The result of a call whose arguments are nodes. Raises NoMatch if an operator refuses them."""
        if getattr(target, "namespace", "") != "mla_fx":
            return self._computed(target, args, kwargs)
        key = (target, described(args), described(tuple(sorted(kwargs.items()))))
        if key not in self._values:
            self._values[key] = self._computed(target, args, kwargs)
            return self._values[key]
        with self.faking():
            return tree_map_only(torch.Tensor, _another, self._values[key])

    def faking(self) -> contextlib.AbstractContextManager[Any]:
        """Where tensors that are made are fake ones, if those of the graph are."""
        return self.fake_mode or contextlib.nullcontext()

    def _computed(self, target: Any, args: Any, kwargs: Any) -> Any:
        args = _known(args)
        if self.fake_mode is not None and target in VIEWS and not has_symbolic_sizes(args[0]):
            return _viewed(self.fake_mode, target, args)
        kwargs = {name: _known(value) for name, value in kwargs.items()}
        try:
            with self.faking():
                return target(*args, **kwargs)
        except ValueError as refusal:
            raise NoMatch(f"the operator refuses: {refusal}") from refusal


def unshared(value: torch.Tensor) -> torch.Tensor:
    """A tensor of the same shape, strides and type with a storage of its own."""
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def _another(value: torch.Tensor) -> torch.Tensor:
    """A tensor of which the same is known."""
    mode = detect_fake_mode([value])
    if not is_fake(value) or has_symbolic_sizes(value):
        return unshared(value)
    with in_kernel_invocation_manager(mode):
        plain = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return fake_tensor(mode, plain, value.device)


def _viewed(mode: Any, target: Any, args: Any) -> Any:
    """A view of a tensor of known sizes. Rewriting makes a dozen for each layer, and asking the tensor behind the fake
    one is five times quicker than dispatching through fake tensors."""
    with in_kernel_invocation_manager(mode):
        view = target(*args)
    return fake_tensor(mode, view, args[0].device)


def _known(value: Any) -> Any:
    """An argument with nodes replaced by what is known about their values."""
    if isinstance(value, Node):
        return value.meta["val"]
    return [_known(item) for item in value] if isinstance(value, (list, tuple)) else value


def described(value: Any) -> Any:
    """An argument as a key, with nodes replaced by the shape and type of their values."""
    if isinstance(value, Node):
        return signature(value.meta["val"])
    return tuple(map(described, value)) if isinstance(value, (list, tuple)) else (type(value), value)


def signature(value: Any) -> Any:
    """Shape, strides, type and device of a value: equal ones are computed with alike."""
    if isinstance(value, torch.SymInt):
        return size_of(value)
    if not isinstance(value, torch.Tensor):
        return tree_map_only(torch.Tensor, signature, value)
    sizes, strides = (tuple(map(size_of, numbers)) for numbers in (value.shape, value.stride()))
    return sizes, strides, value.dtype, value.device
