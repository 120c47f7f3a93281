"""Declares an operator from plain functions: its meaning, its checks, its fake kernel, its samples."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload

Sample = tuple[tuple[Any, ...], dict[str, Any]]
Samples = Callable[[torch.dtype], Iterator[Sample]]
Kernel = Callable[..., Any]

NAMESPACE = "mla_fx"

# (rtol, atol) for two correct evaluations of one operator whose sums were taken in different orders.
TOLERANCE: Mapping[torch.dtype, tuple[float, float]] = {
    torch.float64: (1e-10, 1e-10),
    torch.float32: (1e-4, 1e-4),
    torch.float16: (1e-2, 1e-2),
    torch.bfloat16: (5e-2, 5e-2),
}


@dataclass(frozen=True)
class Operator:
    """One operator: `overload` is what graphs call, `body` its meaning in plain PyTorch on the same arguments.

    `samples(dtype)` yields seeded dense `(args, kwargs)`; `tolerance[dtype]` is `(rtol, atol)`; `inplace` is the twin
    that writes its cache arguments and returns the other results, or None where there is no cache.
    """

    name: str
    overload: OpOverload
    body: Kernel
    samples: Samples
    tolerance: Mapping[torch.dtype, tuple[float, float]]
    inplace: OpOverload | None


def define(
    name: str,
    body: Kernel,
    *,
    returns: Sequence[str],
    check: Kernel,
    fake: Kernel,
    samples: Samples,
    in_place: Kernel | None = None,
    writes: Mapping[str, str] | None = None,
) -> Operator:
    """Register `mla_fx::name` with the arguments of `body` and the result names `returns`.

    `check`, `fake` and `in_place` receive all arguments by name. `writes` maps each result that is an updated cache to
    the argument that holds the old one; with it the twin `mla_fx::name_` is registered, run by `in_place`.
    """
    signature = inspect.signature(body)

    def named(*args: Any, **kwargs: Any) -> dict[str, Any]:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return bound.arguments

    def run(*args: Any, **kwargs: Any) -> Any:
        check(**named(*args, **kwargs))
        return body(*args, **kwargs)

    def run_fake(*args: Any, **kwargs: Any) -> Any:
        arguments = named(*args, **kwargs)
        check(**arguments)
        return fake(**arguments)

    overload = _register(name, body, run, run_fake, returns, mutates=())
    if in_place is None or writes is None:
        return Operator(name, overload, body, samples, TOLERANCE, None)

    kept = [position for position, result in enumerate(returns) if result not in writes]

    def run_in_place(*args: Any, **kwargs: Any) -> Any:
        arguments = named(*args, **kwargs)
        check(**arguments)
        return in_place(**arguments)

    def run_fake_in_place(*args: Any, **kwargs: Any) -> Any:
        results = run_fake(*args, **kwargs)
        return tuple(results[position] for position in kept)

    kept_names = [returns[position] for position in kept]
    mutates = tuple(writes.values())
    twin = _register(f"{name}_", body, run_in_place, run_fake_in_place, kept_names, mutates=mutates)
    return Operator(name, overload, body, samples, TOLERANCE, twin)


def _register(
    name: str, body: Kernel, run: Kernel, fake: Kernel, returns: Sequence[str], mutates: Sequence[str]
) -> OpOverload:
    arguments, _ = torch.library.infer_schema(body, mutates_args=mutates).rsplit(" -> ", 1)
    results = ", ".join(f"Tensor {result}" for result in returns)
    schema = f"{arguments} -> ({results})"
    definition = torch.library.custom_op(f"{NAMESPACE}::{name}", run, mutates_args=mutates, schema=schema)
    definition.register_fake(fake)
    overload: OpOverload = getattr(getattr(torch.ops, NAMESPACE), name).default
    return overload
