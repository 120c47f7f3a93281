"""Argument checks whose messages are sentences; none adds a guard on a symbolic size."""

import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from .machine import is_on_cpu
from .sizes import statically_known_true

_VALUES_ON_DEVICES = ContextVar("check_values", default=False)

Sizes = dict[str, int]  # of axes, by their letters

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
INTEGERS = (torch.int32, torch.int64)


def scale_dtypes(dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    """Return the dtypes of scales and offsets beside tensors of a dtype: float32, and float64 for float64."""
    return (torch.float32, torch.float64) if dtype == torch.float64 else (torch.float32,)


def known_to_differ(left: int, right: int) -> bool:
    """Whether two sizes are known to differ; unknown symbolic sizes are left to run time."""
    return statically_known_true(left != right)


def check_rank(name: str, tensor: Tensor, letters: str) -> None:
    """Check the rank. `letters` names the axes, as in "B, S, He"; alternatives are separated by " or "."""
    if tensor.dim() not in {option.count(",") + 1 for option in letters.split(" or ")}:
        wanted = " or ".join(f"[{option}]" for option in letters.split(" or "))
        raise ValueError(f"{name} has shape {list(tensor.shape)}; it must be {wanted}.")


def check_shape(name: str, tensor: Tensor, letters: str, sizes: Sequence[int | None], broadcast: bool = False) -> None:
    """Check the shape. `sizes` gives the size of each axis in `letters`; None allows any.

    With `broadcast`, the first axis may also be 1.
    """
    check_rank(name, tensor, letters)
    for axis, (actual, wanted) in enumerate(zip(tensor.shape, sizes, strict=True)):
        if (
            wanted is None
            or not known_to_differ(actual, wanted)
            or (broadcast and axis == 0 and not known_to_differ(actual, 1))
        ):
            continue
        shown = ", ".join("*" if size is None else str(size) for size in sizes)
        note = " (the first may be 1)" if broadcast else ""
        raise ValueError(f"{name} has shape {list(tensor.shape)}; it must be [{letters}] = [{shown}]{note}.")


def check_letters(arguments: object, sizes: Sizes, **letters: str) -> None:
    """Check that each named argument, if given, has the axes of its letters.

    `sizes` holds the sizes of axes; the first argument that has an axis sets its size. Alternatives are as in
    `check_rank`. An axis named by a number has that size.
    """
    for name, named in letters.items():
        tensor = getattr(arguments, name)
        if tensor is None:
            continue
        axes = _axes(named).get(tensor.dim())
        if axes is None:
            check_rank(name, tensor, named)
            continue
        before = sizes.copy()
        for (axis, number), actual in zip(axes, tensor.shape, strict=True):
            wanted = sizes.setdefault(axis, actual) if number is None else number
            if wanted is not actual and known_to_differ(actual, wanted):
                shown = ", ".join(axis for axis, _ in axes)
                check_shape(name, tensor, shown, [before.get(axis, number) for axis, number in axes])


@functools.cache
def _axes(named: str) -> dict[int, list[tuple[str, int | None]]]:
    """Map each rank of the alternatives to its axes and to the sizes of axes named by a number."""
    options = [option.split(", ") for option in named.split(" or ")]
    return {len(axes): [(axis, int(axis) if axis.isdecimal() else None) for axis in axes] for axes in options}


def check_dtype(name: str, tensor: Tensor, allowed: Sequence[torch.dtype]) -> None:
    if tensor.dtype in allowed:
        return
    raise ValueError(f"{name} has dtype {tensor.dtype}; allowed: {', '.join(str(dtype) for dtype in allowed)}.")


def check_dtypes(arguments: object, allowed: Mapping[str, Sequence[torch.dtype]]) -> None:
    """Check the dtypes of several arguments; those that are None are skipped."""
    for name, dtypes in allowed.items():
        if getattr(arguments, name) is not None:
            check_dtype(name, getattr(arguments, name), dtypes)


def check_tensors(arguments: Mapping[str, Any], free: Sequence[str] = (), skip: Collection[str] = ()) -> None:
    """Check that all tensors have the device and dtype of the first, except `skip`; `free` may have any floating
    dtype."""
    check_devices(arguments)
    tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
    first, lead = next(iter(tensors.items()))
    check_dtype(first, lead, FLOATS)
    for name, tensor in tensors.items():
        if name in free:
            check_dtype(name, tensor, FLOATS)
        elif name not in skip and tensor.dtype != lead.dtype:
            raise ValueError(f"{name} has dtype {tensor.dtype}; it must be {lead.dtype}, the dtype of {first}.")


def check_devices(arguments: Mapping[str, Any], lengths: Sequence[str] = ()) -> None:
    """Check that all tensors are on the device of the first; `lengths` may be anywhere."""
    tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor) and name not in lengths}
    first, lead = next(iter(tensors.items()))
    for name, tensor in tensors.items():
        if tensor.device != lead.device:
            raise ValueError(f"{name} is on {tensor.device}; it must be on {lead.device}, the device of {first}.")


def check_choice(name: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}; allowed: {', '.join(repr(choice) for choice in allowed)}.")


def check_index(name: str, index: Tensor, slots: int, of: str = "slots") -> None:
    """Check that every index is below `slots`, or another number `of` the cache; a negative index skips its token."""
    check_dtype(name, index, (torch.int64,))
    if not readable(index) or index.numel() == 0:
        return
    largest = int(index.max())
    if largest >= slots:
        raise ValueError(f"{name} holds {largest}; it must be below {slots}, the number of {of} of the cache.")


def check_optional(name: str, tensor: Tensor | None, wanted: bool, when: str) -> bool:
    """Check that an optional tensor is given if `wanted`, and None otherwise; `when` says what decides that."""
    if (tensor is not None) != wanted:
        fault = "None; it must be a tensor" if wanted else "given; it must be None"
        raise ValueError(f"{name} is {fault} with {when}.")
    return wanted


def check_multiple(name: str, value: int, of: int, allowed: str) -> None:
    """Raise ValueError unless `holds`; `allowed` describes the allowed values in words."""
    if statically_known_true(value % of != 0) or statically_known_true(value < 1):
        raise ValueError(f"{name} is {value}; it must be {allowed}.")


def check_dense_pages(name: str, cache: Tensor) -> None:
    """Check that each page (all axes but the first) is contiguous, so that its bytes can be read as another shape."""
    wanted = 1
    for axis in range(cache.dim() - 1, 0, -1):
        if (
            known_to_differ(cache.shape[axis], 1)
            and known_to_differ(cache.stride(axis), wanted)
            and known_to_differ(cache.numel(), 0)
        ):
            raise ValueError(
                f"{name} has shape {list(cache.shape)} and strides {list(cache.stride())}; only axis 0 may be strided."
            )
        wanted *= cache.shape[axis]


def check_fractals(name: str, pages: Tensor, width: str) -> None:
    """Check that pages have the shape of FRACTAL_NZ. n0 may be any number: kernels want 32 bytes, but a call may be
    repeated in a wider dtype."""
    check_rank(name, pages, f"BlockNum, {width}/n0, BlockSize, n0")
    check_dense_pages(name, pages)


@contextmanager
def check_values() -> Iterator[None]:
    """Make operators also check the values of indices, lengths and block tables on a device.

    On the CPU they always check values. Reading values on a device means waiting for it, so without this context they
    are left to the device's own bounds checks."""
    token = _VALUES_ON_DEVICES.set(True)
    try:
        yield
    finally:
        _VALUES_ON_DEVICES.reset(token)


def readable(tensor: Tensor) -> bool:
    """Whether the values of a tensor can be checked now; fake and meta tensors have none."""
    has_values = not is_fake(tensor) and not tensor.is_meta
    return has_values and (is_on_cpu(tensor) or _VALUES_ON_DEVICES.get())
