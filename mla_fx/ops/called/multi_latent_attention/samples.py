"""Arguments to try multi_latent_attention with, one set or more per mode."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from mla_fx.ops.common.cast import i8_trunc
from mla_fx.ops.common.define import Sample
from mla_fx.ops.common.paged import TILE
from mla_fx.ops.common.sample import Sampler

from .arguments import DECODE, FREE_MASK, INT8, MERGED, NO_MASK, RANK, RING, ROPE, SPEC, SPEC_MASK

WORDS = {DECODE: "decode", SPEC: "SPEC", RING: "RING", SPEC_MASK: "mask SPEC", FREE_MASK: "MASK_FREE"}


def samples(dtype: torch.dtype) -> Iterator[Sample]:
    """Every cache mode with every calculation and mask that it supports, and every head count."""
    for number, cache in enumerate(("krope_ctkv", "nzcache", MERGED)):
        yield sample(dtype, number, cache, heads=8, contexts=(130, 0, 128))
        yield sample(dtype, number, cache, heads=(64, 32, 16)[number], contexts=(200,), calc_type=RING)
        yield sample(dtype, number, cache, heads=16, contexts=(129, 0, 3), steps=(2, 1, 3))
        yield sample(dtype, number, cache, heads=128, contexts=(129, 5), steps=(2, 1))
        yield sample(dtype, number, cache, heads=8, contexts=(140, 4, 0), steps=(3, 1, 2), mask_type=SPEC_MASK)
        yield sample(dtype, number, cache, heads=8, contexts=(130, 128, 257), steps=(4, 4, 4), mask_type=FREE_MASK)
    for split in (False, True):
        yield sample(
            dtype, 3, "krope_ctkv", heads=8, contexts=(129, 256), steps=(3, 1), mask_type=FREE_MASK, split=split
        )
    if dtype not in (torch.float16, torch.bfloat16):
        return
    yield sample(dtype, 4, INT8, heads=8, contexts=(130, 0, 128))
    yield sample(dtype, 5, INT8, heads=32, contexts=(200, 1), calc_type=RING)
    yield sample(dtype, 6, INT8, heads=16, contexts=(129, 0, 7), steps=(2, 1, 4))
    yield sample(dtype, 7, INT8, heads=128, contexts=(130, 1))


def sample(
    dtype: torch.dtype,
    seed: int,
    cache_mode: str,
    *,
    heads: int,
    contexts: Sequence[int],
    steps: Sequence[int] | None = None,
    calc_type: str = DECODE,
    mask_type: str = NO_MASK,
    split: bool = False,
) -> Sample:
    """`steps` per sequence make the calculation SPEC. `split` gives each sequence a mask_type_free mask."""
    draw = Sampler(dtype, seed)
    rows = len(contexts) if steps is None else sum(steps)
    columns = [-(-context // TILE) for context in contexts]
    blocks = sum(columns) + 1
    quantized = cache_mode == INT8
    nope = RANK + ROPE * (cache_mode == MERGED)
    query, latent = draw.normal(rows, heads, nope), draw.normal(blocks, TILE, nope)
    arguments: dict[str, Any] = {
        "q_nope": i8_trunc(40 * query) if quantized else query,
        "q_rope": None if cache_mode == MERGED else draw.normal(rows, heads, ROPE),
        "ctkv": stored(i8_trunc(40 * latent) if quantized else latent, cache_mode),
        "k_rope": None if cache_mode == MERGED else stored(draw.normal(blocks, TILE, ROPE), cache_mode),
        "block_tables": draw.block_tables(columns, blocks),
        "context_lens": torch.tensor(contexts, dtype=torch.int32),
        "mask": drawn_mask(draw, mask_type, contexts, steps or (), split),
        "q_seqlen": None if steps is None else torch.tensor(steps, dtype=torch.int32),
        # An int8 product is about 40 * 40 times a product of the values it represents.
        "qk_descale": draw.gamma(heads).float() / 1600 if quantized else None,
        "pv_descale": draw.gamma(heads).float() / 40 if quantized else None,
    }
    options = {
        "head_num": heads,
        "qk_scale": 0.08,
        "mask_type": mask_type,
        "calc_type": calc_type if steps is None else SPEC,
        "cache_mode": cache_mode,
    }
    words = [cache_mode.upper(), WORDS[calc_type if steps is None else SPEC]]
    words += [WORDS[mask_type]] if mask_type in WORDS else []
    words += ["128 heads"] if heads == 128 else []
    return Sample(", ".join(words), tuple(arguments.values()), options)


def stored(rows: Tensor, cache_mode: str) -> Tensor:
    """A cache with the rows [BlockNum, 128, width]."""
    if not cache_mode.endswith("nzcache"):
        return rows.unsqueeze(2)
    lanes = 32 if rows.dtype == torch.int8 else 16
    blocks, _, width = rows.shape
    return rows.view(blocks, TILE, width // lanes, lanes).transpose(1, 2).contiguous()


def drawn_mask(
    draw: Sampler, mask_type: str, contexts: Sequence[int], steps: Sequence[int], split: bool
) -> Tensor | None:
    if mask_type == SPEC_MASK:
        return draw.normal(sum(steps), max(contexts))
    if mask_type != FREE_MASK:
        return None
    # The document's mask, plus finite terms below its diagonal. An implementation that computes the causal mask instead
    # of reading it would not add them.
    corners = [corner_mask(max(steps), of_sequence) for of_sequence in (steps if split else (max(steps),))]
    corner = torch.stack(corners) if split else corners[0]
    return corner.to(draw.dtype) + draw.normal(*corner.shape).tril_(-1)


def corner_mask(most_steps: int, steps: int) -> Tensor:
    """The document's mask for `steps` query rows, with as many lines as one for `most_steps`."""
    return torch.full((125 + 2 * most_steps, TILE), -10000.0).triu(2 - steps)
