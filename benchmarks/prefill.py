"""The speed and memory of a prompt.

python benchmarks/prefill.py                                      about ten minutes, on an otherwise idle machine
python benchmarks/prefill.py --tokens 128 512 2048 --heads 128    shorter prompts, all heads

One DeepseekV3Attention layer of DeepSeek-V3's sizes except for the number of heads, bfloat16, without a cache: in eager
mode, under stock Inductor, and with mla_fx. Variants take turns in one process: medians of the rounds after one to warm
up, with a new input in each round. Every output is checked against float32: at most twice eager's own error.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from layer import EAGER, OURS, STOCK, Layer, Variant
from results import Results, Row, Time, console, finish, parser, without_caches
from torch import Tensor

import mla_fx
from mla_fx.commands import demo

HEADS, TOKENS = 32, 4096


def variants(layer: Layer) -> list[Variant]:
    """If nothing fused, mla_fx would be stock Inductor, so that is an error."""
    ours = mla_fx.get_backend(target="inductor", expect=("mla_attention",))
    options = {EAGER: {}, STOCK: {"dynamic": False}, OURS: {"dynamic": False, "backend": ours}}
    return [Variant(name, layer.way(name, **given)) for name, given in options.items()]


@torch.no_grad()
def race(layer: Layer, racing: Sequence[Variant], tokens: int, rounds: int) -> None:
    tables = rotations(layer, tokens, torch.bfloat16)
    for turn in range(1 + rounds):
        x, outputs = layer.hidden(tokens), {}
        for variant in racing:
            elapsed, outputs[variant.name] = variant.timed(x, *tables, None)
            console.log(f"S={tokens}, round {turn} of {rounds}: {variant.name} {elapsed / 1e3:.2f} s")
            variant.milliseconds += [elapsed] * (turn > 0)
        if turn == 0:
            check(layer, x, outputs)


def check(layer: Layer, x: Tensor, outputs: dict[str, Tensor]) -> None:
    """Checks the output."""
    exact = layer.exact.layer(x.float(), rotations(layer, x.shape[1], torch.float32), None)[0]
    errors = {name: demo.relative_error(output, exact) for name, output in outputs.items()}
    if not errors[OURS] <= 2 * errors[EAGER]:
        raise SystemExit(f"mla_fx is off by {errors[OURS]:.1e}, eager by {errors[EAGER]:.1e}; twice that is allowed.")


def rotations(layer: Layer, tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return layer.tables(torch.arange(tokens).unsqueeze(0), dtype)


@torch.no_grad()
def temporaries(layer: Layer, variant: Variant, tokens: int) -> int:
    """The most bytes at once."""
    x, tables = layer.hidden(tokens), rotations(layer, tokens, torch.bfloat16)
    return demo.temporaries(lambda: variant.step(x, *tables, None, None))


def activations(config: Any, tokens: int) -> int:
    """Bytes of query, keys, values and result of all heads."""
    query = config.qk_nope_head_dim + config.qk_rope_head_dim
    return 2 * tokens * config.num_attention_heads * 2 * (query + config.v_head_dim)


def rows_of(layer: Layer, racing: Sequence[Variant], tokens: int) -> Iterator[Row]:
    took = {variant.name: variant.median for variant in racing}
    held = temporaries(layer, racing[-1], tokens)
    must, goal = (0.5, 0.3) if tokens >= TOKENS else (1.0, 0.85)
    yield Row(f"time / stock Inductor, S={tokens}", took[OURS] / took[STOCK], must, goal)
    yield Row(f"time / eager, S={tokens}", took[OURS] / took[EAGER], 1.0, 0.85)
    yield Row(f"temporaries / activations, S={tokens}", held / activations(layer.config, tokens), 3, 2)


def main() -> None:
    options = parser(__doc__, rounds=3)
    options.add_argument("--heads", type=int, default=HEADS, help="(%(default)s)")
    options.add_argument("--tokens", type=int, nargs="+", default=[TOKENS], help="(%(default)s)")
    given = options.parse_args()
    without_caches()
    layer, rows, times = Layer.build(given.heads), [], []
    for tokens in given.tokens:
        racing = variants(layer)
        race(layer, racing, tokens, given.rounds)
        rows += rows_of(layer, racing, tokens)
        times += [Time(variant.name, variant.median, tokens, tokens) for variant in racing]
    finish(Results(rows, times, [f"{given.heads} heads, {given.rounds} rounds"]), given)


if __name__ == "__main__":
    main()
