"""The chip, kind of graph and interfaces that a lowering may use, and limits of the vendor's kernels.

Each function for a limit raises NoMatch if that is not known to hold. A symbolic size that meets its limit in the
current call gets a guard for it. Another size recompiles."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar, get_args

import torch
from torch import Tensor

from mla_fx.errors import NoMatch
from mla_fx.ops.common.sizes import statically_known_true

# Prefixes of CANN's chip names, as returned by `torch.npu.get_device_name()`.
A2, A3, A5 = "Ascend910B", "Ascend910_93", "Ascend950"

Prolog = Literal["v1", "v2", "v3"]
Release = Literal["8.5.0.alpha001", "8.5.0", "9.0.0", "9.1.0"]
RELEASES: tuple[Release, ...] = get_args(Release)  # of CANN, those whose limits are known, the oldest first

Rules = TypeVar("Rules")
HALVES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Surface:
    """One chip, and the kind of graph that is compiled for it."""

    chip: str
    mode: Literal["ge", "aclgraph"]
    hoists: bool
    """Whether values that depend only on weights are computed once. A new layout of a weight then costs nothing."""
    cann: Release
    """The release whose limits a call is checked against."""
    reads_ahead: bool = False
    """Whether the host reads lengths that the graph computes before it runs. Kernels then get them as numbers."""
    sinks_tiling: bool = False
    """Whether the device chooses how kernels tile (torchair's `tiling_schedule_optimize`)."""
    trusts_masks: bool = False
    """Whether the user asserts that every mask is causal."""
    prolog: Prolog = "v3"
    """The interface of the vendor's prolog."""


def of_release(surface: Surface, kernel: str) -> str:
    """The kernel's name in sentences about limits that differ between releases."""
    return f"{kernel} of CANN {surface.cann}"


def rules(surface: Surface, kernel: str, table: Mapping[Release, Mapping[str, Rules]]) -> Rules:
    """The rules of the release for the chip. Raises NoMatch if the table has none."""
    by_chip = table[surface.cann]
    is_same = all(tuple(other) == tuple(by_chip) for other in table.values())
    chip(surface, kernel if is_same else of_release(surface, kernel), tuple(by_chip))
    return next(found for prefix, found in by_chip.items() if surface.chip.startswith(prefix))


def chip(surface: Surface, kernel: str, allowed: Sequence[str]) -> None:
    if not surface.chip.startswith(tuple(allowed)):
        raise NoMatch(f"the chip is {surface.chip}; {kernel} exists on {listed(allowed)}")


def size(of: str, value: int, kernel: str, allowed: Sequence[int]) -> None:
    """`of` names the size, as in "weight_dq has Hcq"."""
    if not any(holds(value == one) for one in allowed):
        raise NoMatch(f"{of} = {value}; {kernel} takes {listed(allowed)}")


def between(of: str, value: int, kernel: str, least: int, most: int) -> None:
    if not (holds(value >= least) and holds(value <= most)):
        raise NoMatch(f"{of} = {value}; {kernel} takes {least} to {most}")


def fractals(name: str, pages: Tensor, kernel: str) -> None:
    wanted = 32 // pages.element_size()
    if not holds(pages.shape[-1] == wanted):
        takes = f"{kernel} takes 32 bytes, {wanted} of {pages.dtype}"
        raise NoMatch(f"{name} has n0 = {pages.shape[-1]} columns side by side; {takes}")


def page_size(cache: str, value: int, kernel: str, allowed: Sequence[int]) -> None:
    """A range holds the multiples of its step."""
    if not isinstance(allowed, range):
        size(f"{cache} has BlockSize", value, kernel, allowed)
    elif not (holds(value % allowed.step == 0) and holds(value >= allowed[0]) and holds(value <= allowed[-1])):
        takes = f"{kernel} takes multiples of {allowed.step} up to {allowed[-1]}"
        raise NoMatch(f"{cache} has BlockSize = {value}; {takes}")


def equally_many_blocks(kernel: str, **caches: Tensor) -> None:
    (name, blocks), (other, others) = ((name, cache.shape[0]) for name, cache in caches.items())
    if not holds(blocks == others):
        takes = f"{kernel} takes one table, for caches with equal numbers of blocks"
        raise NoMatch(f"{name} has {blocks} blocks and {other} {others}; {takes}")


def choice(name: str, value: object, kernel: str, allowed: Sequence[object]) -> None:
    """An argument that is no size."""
    if value not in allowed:
        raise NoMatch(f"{name} is {value!r}; {kernel} takes {listed(allowed)}")


def dtype(name: str, tensor: Tensor, kernel: str, allowed: Sequence[torch.dtype]) -> None:
    if tensor.dtype not in allowed:
        raise NoMatch(f"{name} has dtype {tensor.dtype}; {kernel} takes {listed(allowed)}")


def dense(name: str, tensor: Tensor, kernel: str, first: int = 0) -> None:
    """All axes from `first` on must be contiguous."""
    wanted = 1
    for axis in range(tensor.dim() - 1, first - 1, -1):
        if not known_equal(tensor.stride(axis), wanted) and not known_equal(tensor.shape[axis], 1):
            where = "" if first == 0 else f" behind axis {first - 1}"
            has = f"shape {list(tensor.shape)} and strides {list(tensor.stride())}"
            raise NoMatch(f"{name} has {has}; {kernel} takes no gaps{where}")
        wanted = wanted * tensor.shape[axis]


def is_dense(tensor: Tensor) -> bool:
    try:
        dense("it", tensor, "")
    except NoMatch:
        return False
    return True


def holds(condition: bool | torch.SymBool) -> bool:
    """Whether the condition is true for all sizes, or for those of the current call; then it becomes a guard."""
    if statically_known_true(condition):
        return True
    if isinstance(condition, bool):
        return False
    return bool(condition.node.has_hint() and condition.node.hint and condition)


def known_equal(left: int, right: int) -> bool:
    return statically_known_true(left == right)


def listed(values: Sequence[object]) -> str:
    """ "1, 2 or 3" """
    *others, last = map(str, values)
    return f"{', '.join(others)} or {last}" if others else last
