"""What a program returns and leaves in its arguments, run by run; each run gets its own copies."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor

from mla_fx.comparing.closeness import Closeness, closeness, distance, wide_dtype
from mla_fx.comparing.exact import FLOATS, in_copies, widened

from .models import Call

Found = Mapping[str, Tensor]

# Relative to the largest element, where the program does not run in float64 and eager mode has to do for exact.
ALLOWED = {torch.float64: 1e-6, torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 3e-3}
HIDDEN = ("_parameters", "_buffers", "_modules")  # of a module: members whose path is that of the module


@dataclass(frozen=True)
class Answers:
    """Runs a program: a callable, its arguments and its keyword arguments, which stay as they are."""

    call: Call

    def of(self, compiled: Callable[..., Any] = lambda function: function) -> Found:
        """The tensors that a run returns, and those that are in its arguments or its module afterwards, by name."""
        return _run(copy.deepcopy(self.call), compiled)

    def judge(self) -> Judge:
        plain = self.of()
        try:
            return Judge(plain, self._exact())
        except Exception:  # such as a cast to 16 bits in the program
            return Judge(plain, None)

    def _exact(self) -> Found:
        tensors = dict(_tensors(self.call, ""))
        dtype = wide_dtype(tensors.values())
        narrow = [value for value in tensors.values() if value.dtype in FLOATS or value.is_complex()]
        copies = in_copies(narrow, narrow, partial(widened, dtype))
        memo: dict[int, Any] = dict(zip(map(id, narrow), copies, strict=True))
        wide = _run(copy.deepcopy(self.call, memo), lambda function: function)
        return {name: value.to(dtype) if value.is_floating_point() else value for name, value in wide.items()}


@dataclass(frozen=True)
class Judge:
    """What eager mode computes, in the program's precision and exactly; without the exact values, it counts as
    exact itself."""

    plain: Found
    exact: Found | None

    def of(self, given: Found) -> dict[str, Closeness]:
        if given.keys() != self.plain.keys():
            raise ValueError(f"the run has other results: {', '.join(sorted(given.keys() ^ self.plain.keys()))}")
        return {name: self._one(name, value) for name, value in given.items()}

    def _one(self, name: str, value: Tensor) -> Closeness:
        plain = self.plain[name]
        if self.exact is None:
            error = distance(value, plain)
            return Closeness(name, error, 0.0, error / ALLOWED.get(plain.dtype, ALLOWED[torch.float32]))
        exact = self.exact[name]
        if not plain.is_floating_point() and not plain.is_complex() and not torch.equal(plain, exact):
            return Closeness(name, 0.0, 0.0, 0.0)  # rounding decides
        return closeness(name, value, plain, exact)


def _run(call: Call, compiled: Callable[..., Any]) -> Found:
    function, args, kwargs = call
    torch.manual_seed(0)
    with torch.no_grad():
        outputs = compiled(function)(*args, **kwargs)
    arguments = [(f"argument {name}", value) for name, value in (*enumerate(args), *kwargs.items())]
    seen: set[int] = set()
    left = [found for name, value in (*arguments, ("", function)) for found in _tensors(value, name, seen)]
    return {path: value.detach() for path, value in (*left, *_tensors(outputs, "output"))}


def _tensors(value: Any, path: str, seen: set[int] | None = None) -> Iterator[tuple[str, Tensor]]:
    """The tensors in a value and their paths, each once."""
    seen = set() if seen is None else seen
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield path or "the tensor", value
        return
    for name, member in _members(value):
        yield from _tensors(member, f"{path}{name}".strip("."), seen)


def _members(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((f".{name}" if isinstance(name, str) else f"[{name!r}]", member) for name, member in value.items())
    elif isinstance(value, (list, tuple)):
        yield from ((f"[{place}]", member) for place, member in enumerate(value))
    elif isinstance(value, MethodType):
        yield "", value.__self__
    elif hasattr(value, "__dict__") and not isinstance(value, (type, ModuleType, FunctionType)):
        yield from (("" if name in HIDDEN else f".{name}", member) for name, member in vars(value).items())
