"""Argument checks whose messages are sentences; none adds a guard on a symbolic size."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def differ(left: int, right: int) -> bool:
    """Whether two sizes are known to differ; unknown symbolic sizes are left to run time."""
    return statically_known_true(left != right)


def check_rank(name: str, tensor: Tensor, letters: str) -> None:
    """`letters` names the wanted axes, as in "B, S, He"; alternatives are separated by " or "."""
    if tensor.dim() not in {option.count(",") + 1 for option in letters.split(" or ")}:
        wanted = " or ".join(f"[{option}]" for option in letters.split(" or "))
        raise ValueError(f"{name} has shape {list(tensor.shape)}; it must be {wanted}.")


def check_shape(name: str, tensor: Tensor, letters: str, sizes: Sequence[int | None], broadcast: bool = False) -> None:
    """`sizes` gives the wanted size of each axis in `letters`, None where any will do.

    With `broadcast` the first axis may also be 1.
    """
    check_rank(name, tensor, letters)
    for axis, (actual, wanted) in enumerate(zip(tensor.shape, sizes, strict=True)):
        if wanted is None or not differ(actual, wanted) or (broadcast and axis == 0 and not differ(actual, 1)):
            continue
        shown = ", ".join("*" if size is None else str(size) for size in sizes)
        note = " (the first may be 1)" if broadcast else ""
        raise ValueError(f"{name} has shape {list(tensor.shape)}; it must be [{letters}] = [{shown}]{note}.")


def check_dtype(name: str, tensor: Tensor, allowed: Sequence[torch.dtype]) -> None:
    if tensor.dtype in allowed:
        return
    raise ValueError(f"{name} has dtype {tensor.dtype}; allowed: {', '.join(str(dtype) for dtype in allowed)}.")


def check_tensors(arguments: Mapping[str, Any], free: Sequence[str] = (), skip: str | None = None) -> None:
    """All tensors lie on the device of the first and have its dtype, except `skip`; `free` may be any float."""
    tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
    first, lead = next(iter(tensors.items()))
    check_dtype(first, lead, FLOATS)
    for name, tensor in tensors.items():
        if tensor.device != lead.device:
            raise ValueError(f"{name} is on {tensor.device}; it must be on {lead.device}, the device of {first}.")
        if name in free:
            check_dtype(name, tensor, FLOATS)
        elif name != skip and tensor.dtype != lead.dtype:
            raise ValueError(f"{name} has dtype {tensor.dtype}; it must be {lead.dtype}, the dtype of {first}.")


def check_choice(name: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}; allowed: {', '.join(repr(choice) for choice in allowed)}.")


def check_index(name: str, index: Tensor, slots: int) -> None:
    """Every index is below `slots`; negative ones mean skip.

    Values are read on the CPU only: elsewhere that would wait for the device, whose own bounds check must do.
    """
    check_dtype(name, index, (torch.int64,))
    if isinstance(index, FakeTensor) or index.device.type != "cpu" or index.numel() == 0:
        return
    largest = int(index.max())
    if largest >= slots:
        raise ValueError(f"{name} holds {largest}; it must be below {slots}, the number of slots of the cache.")
