"""FusedInferAttentionScore, the vendor's attention kernel: its limits and the calls of it.

In all calls the rows of a sequence are its last tokens: row s of S attends to keys t < length - S + 1 + s."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mla_fx.errors import NoMatch
from mla_fx.ops.emitted import latent_attention, mla_attention
from mla_fx.ops.emitted.pages import context_of

from . import causal_masks, limits
from .fused_infer_attention_score_rules import CAUSAL, CAUSAL_SIZE, CHIPS, LATENT_HEADS, RANK, ROPE
from .lengths import Lengths, as_tensor, on_host
from .surface import Surface

KERNEL = "FusedInferAttentionScore"

Named = tuple[str, Tensor]


# --- what the kernel cannot do ---------------------------------------------------------------------------------------


def refuse_chip(surface: Surface) -> None:
    limits.chip(surface, KERNEL, CHIPS)


def refuse_latent(surface: Surface, query: Named, rope: Named, caches: Sequence[Named]) -> None:
    """Raises NoMatch for attention over latents that the kernel cannot compute.

    The queries are absorbed, [...,N,Hckv] and [...,N,Dr]. `caches` are those of both parts."""
    name, absorbed = query
    refuse_chip(surface)
    limits.size(f"{name} has N", absorbed.shape[-2], KERNEL, LATENT_HEADS)
    limits.size(f"{name} has Hckv", absorbed.shape[-1], KERNEL, (RANK,))
    limits.size(f"{rope[0]} has Dr", rope[1].shape[-1], KERNEL, (ROPE,))
    limits.dtype(name, absorbed, KERNEL, limits.HALVES)
    for cache in caches:
        limits.dense(*cache, KERNEL)


def refuse_masks(surface: Surface, a: latent_attention.Arguments | mla_attention.Arguments, tokens: int) -> None:
    """Raises NoMatch for masks that the kernel cannot take."""
    if a.mask is not None:
        causal_masks.refuse(surface, a.mask, tokens, KERNEL)
    is_one = limits.known_equal(tokens, 1)
    if a.mask is None and a.context_lens is None and not a.is_causal and not is_one:
        visible = f"all keys are visible to each of S = {tokens} tokens"
        raise NoMatch(f"{visible}; {KERNEL} lets only the last token see all keys")


def refuse_packed(surface: Surface, what: str) -> None:
    """Raises NoMatch where the kernel does not take the layout TND, the rows of all sequences one behind the other."""
    if surface.sinks_tiling:
        raise NoMatch(f"{what}; {KERNEL} takes them in the layout TND, which excludes tiling_schedule_optimize")


def refuse_computed(surface: Surface, a: latent_attention.Arguments) -> None:
    """Raises NoMatch for lengths that a captured graph would have to compute: between replays torchair updates only
    lengths that are graph inputs."""
    is_computed = a.context_lens is not None or a.mask is not None
    if is_computed and not surface.reads_ahead:
        raise NoMatch(f"the lengths of sequences are computed; a captured {KERNEL} takes them as numbers on the host")
    batch, tokens = a.query.shape[:2]
    visible = tokens if a.is_causal else context_of(a.kv_cache, a.block_table)
    if not isinstance(batch, int):
        raise NoMatch(f"the batch is {batch}; a captured {KERNEL} takes a number known at compile time")
    if not is_computed and not isinstance(visible, int):
        raise NoMatch(f"{visible} keys are visible; a captured {KERNEL} takes a number known at compile time")


# --- the call --------------------------------------------------------------------------------------------------------


def attend(surface: Surface, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    return attend_and_sum(surface, query, key, value, **options)[0]


def attend_and_sum(
    surface: Surface, query: Tensor, key: Tensor, value: Tensor, **options: Any
) -> tuple[Tensor, Tensor]:
    """Call the kernel's newest interface, or torchair's, which takes lengths as tensors, if the graph computes them.

    Returns attention and, with `return_softmax_lse`, logarithms of sums: [B,N,S,1], or [T,N,1] in the layout TND."""
    names = [name for name in ("actual_seq_qlen", "actual_seq_kvlen") if name in options]
    lengths = {name: on_host(surface, options[name]) for name in names}
    if not any(isinstance(value, Tensor) for value in lengths.values()):
        out, lse = torch.ops.npu.npu_fused_infer_attention_score_v2(query, key, value, **options | lengths)
        return out, lse
    importlib.import_module("torchair.ops._npu_fused_infer_attention_score_v2")  # registers the operator
    tensors = {name: as_tensor(value, torch.int64, query.device) for name, value in lengths.items()}
    out, lse = torch.ops.air.npu_fused_infer_attention_score_v2(query, key, value, **options | tensors)
    return out, lse


def lengths(a: latent_attention.Arguments | mla_attention.Arguments) -> Tensor | None:
    """The number of keys that the last row of each sequence sees, [B] or [1]; None if the call does not compute it."""
    if a.context_lens is not None:
        return a.context_lens.clamp(0, context_of(a.kv_cache, a.block_table))
    return None if a.mask is None else causal_masks.lengths(a.mask)


def equal(batch: int | torch.SymInt, length: int, device: torch.device) -> Lengths:
    """The lengths of equally long sequences: a list if the batch is a number, else a tensor."""
    return [length] * batch if isinstance(batch, int) else torch.full((batch,), length, device=device)


def ends(batch: int | torch.SymInt, length: int, device: torch.device) -> Lengths:
    """The ends of equally long sequences that are concatenated."""
    if isinstance(batch, int):
        return [end * length for end in range(1, batch + 1)]
    return torch.full((batch,), length, device=device).cumsum(0)


def ends_of_parts(
    batch: int | torch.SymInt, tokens: int, seen: Tensor | int, positions: int, device: torch.device
) -> tuple[Lengths, Lengths]:
    """The ends of queries and keys if each sequence sees only the first of its `positions` keys.

    The kernel wants the last sequence to end where the keys do. So another sequence follows each, without queries, and
    with the keys that are left. CANN's checks allow that: CheckActSeqWhenLayoutIsTND of prompt_flash_attention_tiling
    wants ends that do not decrease."""
    queries, keys = (ends(batch, count, device) for count in (tokens, positions))
    starts = keys - positions if isinstance(keys, Tensor) else [end - positions for end in keys]
    return _alternating(queries, queries), _alternating(_behind(starts, seen), keys)


def _behind(starts: Lengths, count: Tensor | int) -> Lengths:
    if isinstance(count, Tensor):
        return as_tensor(starts, torch.int64, count.device) + count
    return starts + count if isinstance(starts, Tensor) else [start + count for start in starts]


def _alternating(first: Lengths, second: Lengths) -> Lengths:
    """The first of both, the second of both, and so on."""
    if isinstance(first, Tensor):
        return torch.stack((first, as_tensor(second, first.dtype, first.device)), -1).flatten()
    assert not isinstance(second, Tensor), "lengths are computed from those that come first here"
    return [end for pair in zip(first, second, strict=True) for end in pair]


def rows(tokens: int, device: torch.device) -> dict[str, Any]:
    """The options for a causal mask. A single row sees all keys and needs none."""
    return {} if limits.known_equal(tokens, 1) else causal(device)


def causal(device: torch.device) -> dict[str, Any]:
    hidden = torch.ones(CAUSAL_SIZE, CAUSAL_SIZE, dtype=torch.bool, device=device).triu(1)
    return {"sparse_mode": CAUSAL, "atten_mask": hidden}
