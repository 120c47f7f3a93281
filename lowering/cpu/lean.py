"""Declares an operator that only lowered graphs call. It has no checks and no autograd kernel, which take longer than a
small call: the operator that it replaces checked the same arguments when the graph was made."""

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import torch

from mla_fx.ops.common.define import NAMESPACE, on_arguments

LIBRARY: Any = torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]  # torch has no types here


def define_lean(
    name: str, record: Any, run: Callable[[Any], Any], fake: Callable[[Any], Any], *, returns: Sequence[str]
) -> Callable[[Any], Any]:
    """Register `mla_fx::name` for CPUs, and return a function of the record that calls it."""
    kernel = on_arguments(run, record)
    arguments, _ = torch.library.infer_schema(kernel, mutates_args=()).rsplit(" -> ", 1)
    LIBRARY.define(f"{name}{arguments} -> ({', '.join(f'Tensor {result}' for result in returns)})")
    LIBRARY.impl(name, kernel, "CPU")
    torch.library.register_fake(f"{NAMESPACE}::{name}", on_arguments(fake, record), lib=LIBRARY)
    overload = getattr(getattr(torch.ops, NAMESPACE), name).default
    given = [field.name for field in fields(record) if not field.kw_only]
    options = [field.name for field in fields(record) if field.kw_only]

    def call(a: Any) -> Any:
        return overload(*(getattr(a, name) for name in given), **{name: getattr(a, name) for name in options})

    return call
