"""A decode step of sparse attention: to the keys that an indexer chose, and no others.

python benchmarks/sparse.py                          about five minutes, on an otherwise idle machine
python benchmarks/sparse.py --rounds 3 --heads 8     to try the script

One DeepseekV32Attention layer of DeepSeek-V3.2's sizes in bfloat16, which chooses 2048 keys for a token, compiled by
mla_fx, by mla_fx with attention to all keys under a mask, and by stock Inductor. Variants take turns in one process.
Errors are relative to the layer in float32; where index scores are nearly equal, rounding chooses between them.
"""

from __future__ import annotations

import copy
import statistics
from typing import Any

import torch
from layer import OURS, STOCK, Variant, compiled, hugging_face
from results import Results, Row, Time, console, finish, parser, without_caches
from torch import Tensor
from transformers import DeepseekV32Config
from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32Attention

import mla_fx
from mla_fx.commands import demo

DENSE, EXACT = "mla_fx, all keys", "float32"
CONTEXTS, WARM_UPS = (4096, 16384, 65536), 2


def build(heads: int) -> Any:
    sizes = {**demo.ATTENTION, "num_attention_heads": heads, "num_key_value_heads": heads}
    config = DeepseekV32Config(**sizes, num_hidden_layers=1)
    config._attn_implementation = "sdpa"
    attention = DeepseekV32Attention(config, 0).to(torch.bfloat16).eval()
    demo.randomise(attention)
    return attention


def filled(attention: Any, latents: demo.Latents, keys: Tensor, dtype: torch.dtype) -> Any:
    """A StaticCache one token short of full, with the keys of the indexer, [B, T, Di]."""
    cache = demo.filled_cache(attention.config, latents, dtype)
    layer = cache.layers[0]
    layer.lazy_initialization_indexer(keys.to(dtype))
    layer.indexer_keys.copy_(keys)
    return cache


def rewind(cache: Any) -> None:
    demo.rewind(cache)
    cache.layers[0].indexer_cumulative_length.fill_(cache.layers[0].max_cache_len - 1)


@torch.no_grad()
def race(attention: Any, context: int, rounds: int) -> dict[str, float]:
    """Median milliseconds of each variant."""
    torch._dynamo.reset()
    config = attention.config
    latents, keys = demo.random_latents(config, context), torch.randn(1, context, config.index_head_dim)
    reference = hugging_face(copy.deepcopy(attention).float())
    exact = Variant(EXACT, reference, filled(attention, latents, keys, torch.float32))
    backends = {
        OURS: mla_fx.get_backend(target="inductor"),
        DENSE: mla_fx.get_backend(target="inductor", disable=("chosen_keys",)),
        STOCK: "inductor",
    }
    step, bf16 = hugging_face(attention), torch.bfloat16
    variants = [
        Variant(name, compiled(step, backend=backend), filled(attention, latents, keys, bf16))
        for name, backend in backends.items()
    ]
    mask, angles = torch.ones(1, 1, 1, context, dtype=torch.bool), torch.rand(1, 1, config.qk_rope_head_dim // 2) * 6
    cos, sin = angles.cos().repeat(1, 1, 2), angles.sin().repeat(1, 1, 2)
    for turn in range(WARM_UPS + rounds):
        x, outputs = torch.randn(1, 1, config.hidden_size, dtype=torch.bfloat16), {}
        for variant in variants:
            rewind(variant.cache)
            elapsed, outputs[variant.name] = variant.timed(x, cos.bfloat16(), sin.bfloat16(), mask)
            variant.milliseconds += [elapsed] * (turn >= WARM_UPS)
        if turn == 0:
            rewind(exact.cache)
            check(outputs, exact.timed(x.float(), cos, sin, mask)[1])
    return {variant.name: statistics.median(variant.milliseconds) for variant in variants}


def check(outputs: dict[str, Tensor], wanted: Tensor) -> None:
    """Raise SystemExit if a variant is more than twice as far off as stock Inductor's."""
    errors = {name: demo.relative_error(output, wanted) for name, output in outputs.items()}
    console.log(f"relative errors: {errors}")
    if not max(errors.values()) <= 2 * errors[STOCK]:
        raise SystemExit(f"errors are {errors}; at most twice stock Inductor's is allowed.")


def main() -> None:
    options = parser(__doc__, rounds=7)
    options.add_argument("--heads", type=int, default=demo.ATTENTION["num_attention_heads"], help="(%(default)s)")
    given = options.parse_args()
    without_caches()
    torch.manual_seed(0)
    attention, rows, times = build(given.heads), [], []
    for context in CONTEXTS:
        took = race(attention, context, given.rounds)
        console.log(f"T={context}: {took}")
        rows.append(Row(f"time / attention to all keys, T={context}", took[OURS] / took[DENSE], 1.0, 0.8))
        rows.append(Row(f"time / stock Inductor, T={context}", took[OURS] / took[STOCK], 1.0, 0.1))
        times += [Time(name, value, context) for name, value in took.items()]
    finish(Results(rows, times, [f"{given.heads} heads, {given.rounds} rounds"]), given)


if __name__ == "__main__":
    main()
