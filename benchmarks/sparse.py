"""A decode step, or a prompt, of sparse attention: to the keys that an indexer chose, and no others.

python benchmarks/sparse.py                          about five minutes, on an otherwise idle machine
python benchmarks/sparse.py --rounds 3 --heads 8     to try the script
python benchmarks/sparse.py --prompt 4096 16384      prompts of so many tokens: time, and memory as in prefill.py

One DeepseekV32Attention layer of DeepSeek-V3.2's sizes in bfloat16, which chooses 2048 keys for a token, compiled by
mla_fx, by mla_fx with attention to all keys under a mask, and by stock Inductor. Variants take turns in one process.
Errors are relative to the layer in float32; where index scores are nearly equal, rounding chooses between them. Prompts
have no cache, and stock Inductor, which would hold the scores of every index head, does not run them: the layer in
float32 takes a part of a prompt at a time.
"""

from __future__ import annotations

import copy
import functools
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from layer import OURS, STOCK, Variant, compiled, hugging_face
from prefill import activations
from results import Results, Row, Time, console, finish, parser, without_caches
from torch import Tensor
from transformers import DeepseekV32Config, DynamicCache
from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32Attention

import mla_fx
from mla_fx.commands import demo

DENSE, EXACT = "mla_fx, all keys", "float32"
CONTEXTS, WARM_UPS = (4096, 16384, 65536), 2
PART = 256  # tokens of a prompt that the layer in float32 takes at once


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
            check(outputs, exact.timed(x.float(), cos, sin, mask)[1], STOCK)
    return {variant.name: statistics.median(variant.milliseconds) for variant in variants}


def check(outputs: dict[str, Tensor], wanted: Tensor, baseline: str) -> None:
    """Raise SystemExit if a variant is more than twice as far off as the baseline."""
    errors = {name: demo.relative_error(output, wanted) for name, output in outputs.items()}
    console.log(f"relative errors: {errors}")
    if not max(errors.values()) <= 2 * errors[baseline]:
        raise SystemExit(f"errors are {errors}; at most twice that of {baseline} is allowed.")


@torch.no_grad()
def race_of_prompts(attention: Any, tokens: int, rounds: int) -> tuple[dict[str, float], dict[str, int]]:
    """Median milliseconds, and bytes of temporaries, of each variant."""
    torch._dynamo.reset()
    config, step = attention.config, hugging_face(attention)
    backends = {
        OURS: mla_fx.get_backend(target="inductor"),
        DENSE: mla_fx.get_backend(target="inductor", disable=("chosen_keys",)),
    }
    variants = [Variant(name, compiled(step, backend=one, dynamic=False)) for name, one in backends.items()]
    mask, angles = torch.ones(tokens, tokens, dtype=torch.bool).tril()[None, None], torch.arange(tokens).view(1, -1, 1)
    angles = angles * 1e4 ** -torch.linspace(0, 1, config.qk_rope_head_dim // 2).repeat(2)
    cos, sin = angles.cos(), angles.sin()
    for turn in range(1 + rounds):
        x, outputs = torch.randn(1, tokens, config.hidden_size, dtype=torch.bfloat16), {}
        given = x, cos.bfloat16(), sin.bfloat16(), mask
        for variant in variants:
            elapsed, outputs[variant.name] = variant.timed(*given)
            console.log(f"S={tokens}, round {turn} of {rounds}: {variant.name} {elapsed / 1e3:.2f} s")
            variant.milliseconds += [elapsed] * (turn > 0)
        if turn == 0:
            check(outputs, in_parts(attention, x.float(), cos, sin, mask), DENSE)
    held = {variant.name: demo.temporaries(functools.partial(variant.timed, *given)) for variant in variants}
    return {variant.name: variant.median for variant in variants}, held


def in_parts(attention: Any, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
    """The layer in float32, of a part of the prompt at a time."""
    exact, cache = hugging_face(copy.deepcopy(attention).float()), DynamicCache(config=attention.config)
    parts = list[Tensor]()
    for first in range(0, x.shape[1], PART):
        rows = slice(first, first + PART)
        seen = mask[:, :, rows, : rows.stop]
        parts.append(exact(x[:, rows], cos[:, rows], sin[:, rows], seen, cache))
    return torch.cat(parts, 1)


def of_steps(attention: Any, rounds: int) -> Iterator[Row | Time]:
    for context in CONTEXTS:
        took = race(attention, context, rounds)
        console.log(f"T={context}: {took}")
        yield Row(f"time / attention to all keys, T={context}", took[OURS] / took[DENSE], 1.0, 0.8)
        yield Row(f"time / stock Inductor, T={context}", took[OURS] / took[STOCK], 1.0, 0.1)
        yield from (Time(name, value, context) for name, value in took.items())


def of_prompts(attention: Any, prompts: Sequence[int], rounds: int) -> Iterator[Row | Time]:
    for tokens in prompts:
        took, held = race_of_prompts(attention, tokens, rounds)
        console.log(f"S={tokens}: {took}, {held}")
        unit = activations(attention.config, tokens)
        yield Row(f"time / attention to all keys, S={tokens}", took[OURS] / took[DENSE], 1.0, 0.8)
        yield Row(f"temporaries / activations, S={tokens}", held[OURS] / unit, 1.5, 1.0)
        yield from (Time(name, value, tokens, tokens) for name, value in took.items())


def main() -> None:
    options = parser(__doc__, rounds=7)
    options.add_argument("--heads", type=int, default=demo.ATTENTION["num_attention_heads"], help="(%(default)s)")
    options.add_argument("--prompt", type=int, nargs="+", default=[], help="tokens of prompts, instead of decode steps")
    given = options.parse_args()
    without_caches()
    torch.manual_seed(0)
    attention = build(given.heads)
    steps = of_prompts(attention, given.prompt, given.rounds) if given.prompt else of_steps(attention, given.rounds)
    found = list(steps)
    rows, times = ([one for one in found if isinstance(one, kind)] for kind in (Row, Time))
    finish(Results(rows, times, [f"{given.heads} heads, {given.rounds} rounds"]), given)


if __name__ == "__main__":
    main()
