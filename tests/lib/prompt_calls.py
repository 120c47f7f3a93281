"""Calls of attention of heads with prompts, for tests of their parts on each device."""

from dataclasses import replace

import torch

from lib.kernels import draw
from mla_fx.ops.emitted.attention import operator as attention

BATCH, HEADS, STEPS, KEYS, NOPE, RANK, ROPE, VALUE = 2, 5, 30, 48, 16, 24, 8, 12
SEEN = torch.arange(KEYS) <= torch.arange(STEPS).unsqueeze(-1)


def call(dtype=torch.bfloat16, steps=STEPS, keys=KEYS, **options):
    up = draw(HEADS, NOPE + VALUE, RANK) * RANK**-0.5
    queries = (draw(BATCH, steps, HEADS, width, seed=1) for width in (NOPE, ROPE))
    caches = (draw(BATCH, keys, width, seed=2) for width in (RANK, ROPE))
    operands = (value.to(dtype) for value in (*queries, *caches))
    weights = {"weight_uk": up[:, :NOPE].to(dtype), "weight_uv": up[:, NOPE:].to(dtype)}
    return attention.Arguments(*operands, **{**weights, "scale": 0.2, **options})


CALLS = {
    "condition": call(mask=SEEN),
    "condition of each sequence": call(mask=draw(BATCH, 1, STEPS, KEYS) > 0),
    "condition of each head": call(mask=draw(BATCH, HEADS, STEPS, KEYS) > 0),
    "the same for all rows": call(mask=draw(BATCH, 1, 1, KEYS) > 0),
    "the same for all keys": call(mask=draw(BATCH, 1, STEPS, 1) > -1),
    "numbers": call(mask=torch.where(SEEN, draw(STEPS, KEYS), -torch.inf)),
    "one number": call(mask=torch.tensor(0.5)),
    "rows that see nothing": call(mask=SEEN & (torch.arange(STEPS) > 9).unsqueeze(-1)),
    "fill": call(mask=SEEN, fill=-1.5),
    "lengths": call(context_lens=torch.tensor([40, 20])),
    "float16": call(torch.float16, mask=SEEN),
    "float32": call(torch.float32, mask=SEEN),
    "sinks": call(mask=SEEN, sinks=draw(HEADS)),
    "first token": call(is_causal=True),
    "no mask": call(),
    "no rotary part": replace(call(mask=SEEN), query_rope=None, kr_cache=None),
}
