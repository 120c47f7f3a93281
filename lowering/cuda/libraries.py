"""What the lowerings to users' libraries share: their common limits, and the choice of a library by the user.

They get attention over latents in one form: each query token is a sequence of its own, which sees at least one key.
Then a length hides all that is hidden, so the rule of a library for several tokens of a sequence does not matter, and
lengths may be any numbers. The conversion is compiled: layers that share lengths and tables share it.

A file that lowers an operator to libraries, too, has a function `lower_to(library, a)`; it returns the function to
trace, or raises NoMatch with a sentence: what the library does not take."""

import functools
import importlib
from collections.abc import Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from mla_fx.errors import NoMatch, first_line
from mla_fx.ops.common.define import on_arguments
from mla_fx.ops.common.lean import define_lean_on
from mla_fx.ops.emitted.attention.arguments import RESULTS, Arguments, Attend, Results, refuse_others
from mla_fx.ops.emitted.attention.kernel_operands import asked, lengths_of
from mla_fx.ops.emitted.attention.pages import context_of, from_start
from mla_fx.ops.emitted.attention.parts import each_token
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
        raise NoMatch(f"{name} cannot be imported: {first_line(error)}") from error


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


# --- each query token as a sequence ----------------------------------------------------------------------------------


def lowered(name: str, run: Attend, tags: Sequence[torch.Tag] = ()) -> Compiled:
    """Register a library's attention over latents of sequences of one token; return a function for any calls."""
    operator = define_lean_on(Arguments, name, run, asked, returns=RESULTS, device="CUDA", tags=tags)

    @functools.wraps(run)
    def attend(a: Arguments) -> Results:
        return by_tokens(operator, a)

    return attend


def by_tokens(attend: Attend, a: Arguments) -> Results:
    """Compute attention over latents without mask, sinks and fill.

    `attend` gets sequences of one token with lengths int32 [B * S], 1 to T, and a block_table int32 of pages that
    exist. A row that sees no key becomes zeros, and one whose page does not exist NaN: a device cannot raise."""
    sizes, seen = a.query.shape[:3], seen_keys(a)
    pages = pages_of(a)
    count, read = a.kv_cache.shape[0], torch.arange(pages.shape[1], device=pages.device) * a.kv_cache.shape[1]
    is_lost = ((read < seen.unsqueeze(-1)) & ((pages < 0) | (pages >= count)).unsqueeze(1)).any(-1)
    out, lse = attend(
        replace(
            a,
            **each_token(a),
            context_lens=seen.clamp(min=1).flatten().int(),
            block_table=pages.clamp(0, count - 1).int().repeat_interleave(sizes[1], 0),
            is_causal=False,
            return_lse=True,
        )
    )
    unseen, lost = (seen == 0).unsqueeze(-1), is_lost.unsqueeze(-1)
    lse = lse.view(sizes).masked_fill(unseen, -torch.inf).masked_fill(lost, torch.nan)
    out = out.view(a.query.shape).masked_fill(unseen.unsqueeze(-1), 0)
    return out.masked_fill(lost.unsqueeze(-1), torch.nan), lse if a.return_lse else lse.new_empty(0)


def seen_keys(a: Arguments) -> Tensor:
    """How many keys each token sees, [B, S]."""
    batch, steps = a.query.shape[:2]
    context, lengths = context_of(a.kv_cache, a.block_table), lengths_of(a)
    if lengths is None:
        return a.query.new_full((batch, steps), context, dtype=torch.int64)
    before = torch.arange(1 - steps, 1, device=lengths.device)
    return (lengths.unsqueeze(1) + before).clamp(0, context)


def pages_of(a: Arguments) -> Tensor:
    """The pages of each sequence [B, Blocks], counted from the start. Without a table, a sequence is one page."""
    count = a.kv_cache.shape[0]
    if a.block_table is None:
        return torch.arange(count, device=a.kv_cache.device).unsqueeze(1)
    return from_start(a.block_table, count)
