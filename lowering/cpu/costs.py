"""Which form of attention takes less time: numbers that were measured on CPUs."""

import torch

from mla_fx.errors import ByDesign
from mla_fx.ops.common.machine import multiplies_tiles
from mla_fx.ops.emitted.attention.arguments import Arguments
from mla_fx.ops.emitted.attention.pages import context_of
from mla_fx.readings.sizes import Size

from . import wide_products

MOST_ABSORBED = 128  # query tokens
MOST_WITHOUT_TILES = 64  # the same without AMX, for contexts of at most SHORT tokens
SHORT = 2048

# Scores of all heads, at most, for which loops that are compiled with what is around them take no longer than a kernel
SCORES_IN_PAGES = 2**13
SCORES_IN_ONE_PIECE = 2**17  # of contexts that are no pages, or that have few keys and are copied out of them
SCORES_OF_HEADS = 2**20
SCORES_OF_AN_INDEXER = 2**14
COPIED_KEYS = 2**8  # of a context, at most

CHOSEN = 4  # times as many keys as are chosen: with fewer, attention of latents to all of them takes less time
OF_HEADS, SHARED = 3, 64  # the same for heads, without AMX: times as many keys, and more for each head that shares them


def of_loops(scores: int, dtype: torch.dtype) -> int:
    """So many scores at most are for loops: none where loops multiply the dtype slowly."""
    return 0 if wide_products.are_faster(dtype) else scores


def most_absorbed_tokens(device: torch.device, context: Size) -> int:
    """The number of query tokens from which on heads are expanded."""
    is_short = device.type == "cpu" and isinstance(context, int) and context <= SHORT
    return min(MOST_ABSORBED, MOST_WITHOUT_TILES) if is_short and not multiplies_tiles() else MOST_ABSORBED


def refuse(a: Arguments) -> None:
    """Raise ByDesign for a call that takes longer than what it would replace. Where a size is known at run time only,
    the kernel chooses then."""
    is_on_cpu = a.query.device.type == "cpu"
    if a.lens is not None and not is_on_cpu:
        raise ByDesign("only CPUs attend to packed sequences by one call")
    if a.indices is None:
        return
    if a.weight_uk is not None and not is_on_cpu:
        raise ByDesign("only CPUs read the chosen keys alone for a prompt")
    keys, count, heads = context_of(a.kv_cache, a.block_table), a.indices.shape[-1], a.query.shape[2]
    if not all(isinstance(size, int) for size in (keys, count, heads)):
        return
    if keys < (CHOSEN * count if a.weight_uk is None else fewest(count, heads)):
        raise ByDesign(f"attention to all {keys} keys costs less than to {count} chosen ones")


def fewest(chosen: int, heads: int) -> int:
    """The number of keys from which on a prompt that reads the chosen ones alone takes less time. Heads share what is
    read."""
    return OF_HEADS * chosen + SHARED * chosen // heads
