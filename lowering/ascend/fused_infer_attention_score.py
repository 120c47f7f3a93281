"""FusedInferAttentionScore, the vendor's attention kernel: its limits and the calls of it.

In all calls the rows of a sequence are its last tokens: row s of S attends to keys t < length - S + 1 + s.

A call has the lengths of sequences as a tensor, or as numbers that the kernel takes from the host. A captured graph
replays what it once computed, and torchair updates only numbers that are graph inputs. So numbers that the graph
computes are read before it runs (see `mla_fx.passes.read_ahead`), all of them in one copy to the host.

The source is the public host code of gitcode.com/cann/ops-transformer, in attention/. `feature` is
fused_infer_attention_score_tiling_check_feature.cpp in fused_infer_attention_score/op_host (in v8.5.0 and v9.0.0 in its
arch32, in 9.1.0 in its arch22), `pfa` is prompt_flash_attention_tiling.cpp in prompt_flash_attention/op_host. Lines are
those of v8.5.0, or of the tag or commit that is named. `document` is that of npu_fused_infer_attention_score_v2 in
torch_npu 2.13; where it is narrower than the host code, it counts."""

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mla_fx.errors import NoMatch
from mla_fx.graph.torch_private import detect_fake_mode, unknown_number
from mla_fx.ops.emitted.attention.arguments import Arguments
from mla_fx.ops.emitted.attention.pages import context_of

from . import causal_masks, limits
from .limits import A2, A3, Release, Surface

KERNEL = "FusedInferAttentionScore"
CHIPS = (A2, A3)

Named = tuple[str, Tensor]
Lengths = Tensor | Sequence[int]
READ = frozenset({"host_number"})


# --- what the kernel takes in all releases ---------------------------------------------------------------------------

LATENT_HEADS = (1, 2, 4, 8, 16, 32, 64, 128)  # feature 82; commit c29bc106: feature 62
RANK, ROPE = 512, 64  # feature 30 and 36
# Per sequence: document. Commit c29bc106, feature 406, refuses more; later host code does not.
LATENT_TOKENS = 16
# Over expanded keys, which lie in the layout TND, nothing is captured: document; pfa 3578 and 4134; c29bc106: pfa 3690
# and 4270. From v8.5.0, the host code checks calls with a rotary part by `feature` instead, which does not mind.
EXPANDED = 128  # columns of a head's nope part, and of its values: feature 30
# Columns of a head's queries -> of its values: pfa 3681.
EXPANDED_UNROTATED = {128: (128,), 192: (128, 192)}
CAUSAL = 3  # the sparse mode in which the last row sees all keys, and each row before it one less: feature 206
CAUSAL_SIZE = 2048  # of the mask that CAUSAL takes, for any lengths: OPT_ATTEN_MASK_LEN

# Keys and values of heads, in pages, for one query row: document. v9.0.0: feature 105, and up to 1024 for 64 and 128.
HEAD_SIZES = tuple(range(16, 257, 16))
HEAD_PAGES = range(16, 513, 16)
# The same in int8, with scales for each column: document; commit c29bc106: CheckInputQKVTypeMatch of
# incre_flash_attention, and fused_infer_attention_score_tiling.cpp 667, which wants it of several query rows only.
CODED_HEAD_SIZES = tuple(range(32, 257, 32))
CODED_PAGE_SIZES = (128, 32)  # the better one first; the smaller divides all
GROUP = 64  # heads of queries for each of keys, at most
MOST_HEADS = 256  # of queries
MOST_COLUMNS = 65535  # of all heads in a row of a page


# --- what it takes, by release ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rules:
    """What latents in pages may be."""

    pages: tuple[int, ...] | range
    nz_pages: tuple[int, ...] | range
    """In FRACTAL_NZ."""
    layouts: tuple[str, ...]
    nz_layouts: tuple[str, ...]


# Commit c29bc106 of 2025-11-15, as in mla_prolog_v3.
FIRST = Rules(
    pages=(16, 128),  # feature 192
    nz_pages=(128,),  # feature 177
    layouts=("BSH", "BSND", "BNSD", "TND", "BSH_NBSD", "BSND_NBSD", "BNSD_NBSD", "TND_NTD"),  # feature 102
    nz_layouts=("BSH", "BSND", "TND", "BSH_NBSD", "BSND_NBSD", "TND_NTD"),  # feature 111
)

# Tag v8.5.0, whose document says up to 512; v9.0.0: feature 79; branch 9.1.0, commit 06be6c2c: feature 70.
PAGED = replace(FIRST, pages=range(16, 1025, 16), nz_pages=range(16, 1025, 16), nz_layouts=FIRST.layouts)

RULES: Mapping[Release, Rules] = {"8.5.0.alpha001": FIRST, "8.5.0": PAGED, "9.0.0": PAGED, "9.1.0": PAGED}


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


def refuse_masks(surface: Surface, a: Arguments, tokens: int) -> None:
    if a.fill is not None and a.fill > causal_masks.HIDDEN:
        raise NoMatch(f"hidden scores are {a.fill:.6g}; {KERNEL} takes {causal_masks.HIDDEN:.6g} or less")
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


def refuse_computed(surface: Surface, a: Arguments) -> None:
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


def rows(tokens: int, device: torch.device) -> dict[str, Any]:
    """The options for a causal mask. A single row sees all keys and needs none."""
    return {} if limits.known_equal(tokens, 1) else causal(device)


def causal(device: torch.device) -> dict[str, Any]:
    hidden = torch.ones(CAUSAL_SIZE, CAUSAL_SIZE, dtype=torch.bool, device=device).triu(1)
    return {"sparse_mode": CAUSAL, "atten_mask": hidden}


# --- lengths ---------------------------------------------------------------------------------------------------------


@torch.library.custom_op("mla_fx_ascend::host_number", mutates_args=())
def host_number(values: Tensor, position: int) -> int:
    """One element of a tensor of whole numbers."""
    return int(values[position])


@host_number.register_fake
def _(values: Tensor, position: int) -> int:
    return unknown_number(detect_fake_mode([values]))  # type: ignore[no-any-return]


def on_host(surface: Surface, lengths: Lengths) -> Lengths:
    """The lengths as numbers for the host, if the surface has such, and their count is known."""
    if not isinstance(lengths, Tensor) or not surface.reads_ahead or not isinstance(lengths.shape[0], int):
        return lengths
    values = lengths.to(torch.int64)
    return [torch.ops.mla_fx_ascend.host_number(values, position) for position in range(lengths.shape[0])]


def as_tensor(lengths: Lengths, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The lengths as a tensor. Host numbers become part of the graph."""
    if isinstance(lengths, Tensor):
        return lengths.to(dtype)
    return torch.cat([torch.full((1,), length, dtype=dtype, device=device) for length in lengths])


def lengths(a: Arguments) -> Tensor | None:
    """The number of keys that the last row of each sequence sees, [B] or [1]; None if the call does not compute it."""
    if a.context_lens is not None:
        return a.context_lens.clamp(0, context_of(a.kv_cache, a.block_table))
    return None if a.mask is None else causal_masks.lengths(a.mask)


def of_all(batch: int | torch.SymInt, lengths: Tensor | None, length: int, device: torch.device) -> Lengths:
    """One length for each sequence. Without lengths, all are equally long: a list if the batch is a number."""
    if lengths is not None:
        return lengths.expand(batch)
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
