"""Declares an operator that only lowered graphs call. It has no checks and no autograd kernel, which take longer than a
small call: the operator that it replaces checked the same arguments when the graph was made."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import torch

from .define import NAMESPACE, on_arguments

LIBRARY: Any = torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]  # torch has no types here


def define_lean(
    name: str, run: Any, fake: Any, *, returns: Sequence[str], device: str = "CPU", tags: Sequence[torch.Tag] = ()
) -> Any:
    """Register `mla_fx::name` for a kind of device, with the arguments that `run` takes."""
    arguments, _ = torch.library.infer_schema(run, mutates_args=()).rsplit(" -> ", 1)
    LIBRARY.define(f"{name}{arguments} -> ({', '.join(f'Tensor {result}' for result in returns)})", tags=tags)
    LIBRARY.impl(name, run, device)
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=LIBRARY)
    return getattr(getattr(torch.ops, NAMESPACE), name).default


def define_lean_on(
    record: Any,
    name: str,
    run: Callable[[Any], Any],
    fake: Callable[[Any], Any],
    *,
    returns: Sequence[str],
    device: str = "CPU",
    tags: Sequence[torch.Tag] = (),
) -> Callable[[Any], Any]:
    """Register an operator whose arguments are the fields of a record, and return a function of the record that calls
    it."""
    forms = on_arguments(run, record), on_arguments(fake, record)
    overload = define_lean(name, *forms, returns=returns, device=device, tags=tags)
    given = [field.name for field in fields(record) if not field.kw_only]
    options = [field.name for field in fields(record) if field.kw_only]

    @functools.wraps(run)
    def call(a: Any) -> Any:
        return overload(*(getattr(a, name) for name in given), **{name: getattr(a, name) for name in options})

    return call
