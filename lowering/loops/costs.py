"""Which of two forms takes less time in loops on CPUs: measured numbers."""

from mla_fx.ops.common.machine import multiplies_tiles
from mla_fx.ops.emitted.attention.arguments import Arguments
from mla_fx.ops.emitted.attention.pages import context_of
from mla_fx.ops.emitted.attention.tiles import count_of_scores

FEW_SCORES = 2**23  # 724 tokens of 16 heads, 256 of 128
WITHOUT_TILES = 4  # times as many on a CPU without AMX


def has_few_scores(a: Arguments) -> bool:
    """Whether PyTorch's own attention is slower than plain products."""
    scores = count_of_scores(a.query, context_of(a.kv_cache, a.block_table))
    few = FEW_SCORES * (1 if multiplies_tiles() else WITHOUT_TILES)
    return a.query.device.type == "cpu" and scores is not None and scores <= few
