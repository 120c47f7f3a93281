"""Attention of prompts by PyTorch's own, in parts: keys and values are expanded for a few heads of one sequence at a
time.

Sizes alone decide about the parts. The host reads nothing without a mask; under one, it reads once per call whether
PyTorch's attention computes the same, and such calls stay out of CUDA graphs."""

from dataclasses import replace

import torch
from torch import Tensor

from mla_fx.errors import NoMatch
from mla_fx.ops.common.lean import define_lean_on
from mla_fx.ops.emitted.attention.arguments import (
    HEADS,
    HIDING,
    RESULTS,
    Arguments,
    Results,
    is_masked,
    refuse_others,
)
from mla_fx.ops.emitted.attention.codes import SCALES
from mla_fx.ops.emitted.attention.heads import joined, tiled
from mla_fx.ops.emitted.attention.operator import fake
from mla_fx.ops.emitted.attention.pages import context_of, unpaged
from mla_fx.ops.emitted.attention.parts import of_heads, of_sequences
from mla_fx.ops.emitted.attention.softmax import aligned, as_mask
from mla_fx.ops.emitted.attention.tiles import by_pytorch, is_expressible, mask_of_rows, parts, seen_keys, tame_limit
from mla_fx.target import Compiled

from ..ascend import limits

# Not measured: no device was there.
LARGE = 2**28  # bytes of the keys and values of all heads; fewer are expanded at once
PART = 2**27  # bytes of keys and values that are expanded at a time
MASK = 2**27  # elements of a mask that are stored at a time

TAKES = (*HEADS, *HIDING, *SCALES.values(), "fill", "block_table")


def lower(a: Arguments) -> Compiled:
    refuse_others(a, "the kernel for prompts", *TAKES)
    if a.query.device.type != "cuda":
        raise NoMatch("parts are for CUDA devices")
    context, batch, heads = context_of(a.kv_cache, a.block_table), a.query.shape[0], a.query.shape[2]
    size = batch * heads * bytes_of_head(a, context)
    if not limits.holds(size > LARGE):
        raise NoMatch(f"keys and values of all heads take {size} bytes; parts are for more than {LARGE}")
    is_same = is_expressible(a.query, context, a.mask, a.scoring)
    if not is_same or (a.is_causal and not a.scale > 0):
        raise NoMatch("PyTorch's own attention, which parts are for, computes something else")
    return under_mask if is_masked(a) else in_parts


def bytes_of_head(a: Arguments, context: int) -> int:
    """What the keys and values of one head of one sequence take."""
    rotary = 0 if a.kr_cache is None else a.kr_cache.shape[-1]
    return context * (sum(weight.shape[1] for weight in a.weights) + rotary) * a.query.element_size()


def run(a: Arguments) -> Results:
    """Compute the expanded form of attention without logarithms. No score may be infinite or NaN under a mask."""
    a, (out, no_sums) = unpaged(a), fake(a)
    a = a if a.mask is None else replace(a, mask=aligned(a.mask, rows_first=False))
    for sequence in range(out.shape[0]):
        some = slice(sequence, sequence + 1)
        _of_sequence(of_sequences(a, some), out[some])
    return out, no_sums


def _of_sequence(a: Arguments, out: Tensor) -> None:
    steps, heads, context = a.query.shape[1], a.query.shape[2], a.kv_cache.shape[1]
    seen, rows = _seen(a), max(1, MASK // max(1, context) if is_masked(a) else steps)
    for first_head, last_head in parts(heads, max(1, PART // max(1, bytes_of_head(a, context)))):
        own = of_heads(a, slice(first_head, last_head))
        query, key, value = joined(own, seen)
        for first, last in parts(steps, rows):
            shown = _mask(own, first, last)
            part = by_pytorch(query[:, :, first:last], key, value, shown, a.scoring, a.is_causal)
            out[:, first:last, first_head:last_head] = part.transpose(1, 2)


def _mask(a: Arguments, first: int, last: int) -> Tensor | None:
    """What hides keys from some rows. Rows before the last one see less than a length."""
    if a.context_lens is None:
        return mask_of_rows(a.mask, first, last)
    lengths = a.context_lens - (a.query.shape[1] - last)
    return as_mask(None, lengths, False, a.query[:, first:last], a.kv_cache.shape[1])


def _seen(a: Arguments) -> Tensor | None:
    """The keys that some row sees. With lengths, the last row sees most."""
    return seen_keys(a.mask if a.context_lens is None else _mask(a, a.query.shape[1] - 1, a.query.shape[1]))


def run_under_mask(a: Arguments) -> Results:
    a = unpaged(a)
    return run(a) if is_tame(a) else tiled(a)


def is_tame(a: Arguments) -> Tensor:
    """Whether no score can be infinite or close to it, by the largest numbers of what keys are expanded from."""
    weight_uk, _ = a.weights
    rotary = 0 if a.query_rope is None else a.query_rope.shape[3]
    limit = tame_limit(a.query.dtype, weight_uk.shape[1] + rotary, a.scale)
    seen = _seen(a)
    assert seen is not None, "there is a mask"
    latent = limit / (a.kv_cache.shape[2] * weight_uk.abs().amax().float())
    numbers = (a.query, limit), (a.query_rope, limit)
    keys = (a.kv_cache, latent), (a.kr_cache, limit)
    small = [value.abs() <= most for value, most in numbers if value is not None]
    small += [(value.abs() <= most) | ~seen for value, most in keys if value is not None]
    return torch.stack([one.all() for one in small]).all()


in_parts = define_lean_on(Arguments, "mla_attention_in_parts", run, fake, returns=RESULTS, device="CUDA")
under_mask = define_lean_on(
    Arguments,
    "mla_attention_in_parts_under_mask",
    run_under_mask,
    fake,
    returns=RESULTS,
    device="CUDA",
    tags=(torch.Tag.cudagraph_unsafe,),
)
