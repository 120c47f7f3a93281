"""What the lowerings to users' libraries share: their common limits, and the choice of a library by the user.

A file that lowers an operator to libraries, too, has a function `lower_to(library, a)`; it returns the function to
trace, or raises NoMatch with a sentence: what the library does not take."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import torch

from mla_fx.errors import NoMatch
from mla_fx.ops.common.define import on_arguments
from mla_fx.ops.emitted.attention.arguments import Arguments, refuse_others
from mla_fx.target import Compiled, Instead, Lowering

from ..ascend import limits
from .split_keys import MOST_TOKENS

RANK, ROPE = 512, 64  # of all libraries
TAKES = "context_lens", "is_causal", "block_table", "return_lse"


def before(module: ModuleType, other: Lowering, library: ModuleType, asked: bool) -> Lowering:
    """The lowering of a module to a library, or the other one with the reason, if the user `asked` for the library."""
    name = library.KERNEL

    def lower(*args: Any, **kwargs: Any) -> Compiled:
        try:
            return on_arguments(module.lower_to(library, module.Arguments(*args, **kwargs)), module.Arguments)
        except NoMatch as refusal:
            reason = f"it does not go to {name}: {refusal.reason}"
        if not asked:
            return other(*args, **kwargs)
        try:
            return Instead(other(*args, **kwargs), reason)
        except NoMatch as refusal:
            raise NoMatch(f"{refusal.reason}; {reason}", refusal.node) from refusal

    return lower


def imported(name: str) -> Any:
    """A library. Raises NoMatch if it cannot be imported: some load code that was built for another CUDA."""
    try:
        return importlib.import_module(name)
    except (ImportError, OSError, RuntimeError) as error:
        cause = str(error).strip().partition("\n")[0]
        raise NoMatch(f"{name} cannot be imported: {cause}") from error


def check_chip(device: torch.device, kernel: str, allowed: tuple[int, ...]) -> None:
    if device.type != "cuda":
        raise NoMatch(f"the device is {device.type}; {kernel} takes cuda")
    major, minor = torch.cuda.get_device_capability(device)
    limits.choice("the device's sm", 10 * major + minor, kernel, allowed)


def check_operands(a: Arguments, kernel: str) -> None:
    """Check what all libraries refuse. Each query token is a sequence to them, so that many of one sequence are better
    multiplied in another way."""
    refuse_others(a, kernel, *TAKES)
    if a.kr_cache is None:
        raise NoMatch(f"kr_cache is None; {kernel} takes latents with a rotary part")
    if a.kv_cache.dim() != 3:
        raise NoMatch(f"kv_cache is in FRACTAL_NZ; {kernel} takes rows")
    limits.dtype("kv_cache", a.kv_cache, kernel, limits.HALVES)
    limits.dtype("query", a.query, kernel, [a.kv_cache.dtype])
    limits.size("kv_cache has Hckv", a.kv_cache.shape[2], kernel, [RANK])
    limits.size("kr_cache has Dr", a.kr_cache.shape[2], kernel, [ROPE])
    limits.size("kr_cache has BlockNum", a.kr_cache.shape[0], kernel, [a.kv_cache.shape[0]])
    if isinstance(a.query.shape[1], int):
        limits.between("query has S", a.query.shape[1], kernel, 1, MOST_TOKENS)
