"""Whether attention takes the cheaper form for every number of query tokens, against both forms forced.

python benchmarks/query_tokens.py                            about ten minutes, on an otherwise idle machine
python benchmarks/query_tokens.py --heads 8 --rounds 3       fewer heads, to try the script

One DeepseekV3Attention layer of DeepSeek-V3's dimensions but for the number of heads, bfloat16, 4096 tokens in its
StaticCache, the last S of them new. Each variant is compiled once, with a symbolic S. Variants take turns in one
process; medians of the rounds after one to warm up; fresh input in each round. The outputs of the first round, and the
caches, agree with the layer absorbed by hand in float32.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from decode import Layer, Row, Variant, check, compiled, machine, table_of
from rich.console import Console

import mla_fx
from mla_fx.commands import demo

CONTEXT, HEADS, ROUNDS = 4096, 32, 5
TOKENS = (2, 4, 8, 16, 64, 128, 192, 256, 512)
AUTO, ABSORBED, EXPANDED = "auto", "always", "never"


def variants(layer: Layer) -> list[Variant]:
    latents = demo.random_latents(layer.config, CONTEXT)
    made = []
    for policy in (AUTO, ABSORBED, EXPANDED):
        backend = mla_fx.get_backend(absorb=policy, strict=True)
        step = compiled(layer.hugging_face(), f"absorb {policy}", backend=backend, dynamic=True)
        made.append(Variant(policy, step, demo.filled_cache(layer.config, latents, torch.bfloat16)))
    exact = demo.filled_cache(layer.config, latents, torch.float32)
    return [*made, Variant("float32", layer.exact, exact)]


@torch.no_grad()
def race(layer: Layer, racing: list[Variant], count: int, rounds: int) -> dict[str, float]:
    """Median milliseconds of each variant for so many new tokens."""
    *timed, exact = racing
    position = torch.arange(CONTEXT - count, CONTEXT)
    mask = (torch.arange(CONTEXT) <= position.unsqueeze(1))[None, None]
    tables, exact_tables = (layer.tables(position[None], dtype) for dtype in (torch.bfloat16, torch.float32))
    for variant in timed:
        variant.milliseconds.clear()
    for turn in range(1 + rounds):
        x = torch.randn(1, count, layer.config.hidden_size, dtype=torch.bfloat16)
        if turn == 0:
            demo.rewind(exact.cache, count)
            wanted = exact.step(x.float(), *exact_tables, mask, exact.cache)
        for variant in timed:
            demo.rewind(variant.cache, count)
            start = time.perf_counter()
            output = variant.step(x, *tables, mask, variant.cache)
            variant.milliseconds += [(time.perf_counter() - start) * 1e3] * (turn > 0)
            if turn == 0:
                check(variant, output, exact, wanted, count)
    return {variant.name: variant.median for variant in timed}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=HEADS, help="(%(default)s)")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="(%(default)s)")
    options: Any = parser.parse_args()
    torch._inductor.config.force_disable_caches = True
    console = Console(log_path=False)
    layer = Layer.build(num_attention_heads=options.heads, num_key_value_heads=options.heads)
    racing, rows = variants(layer), []
    for count in TOKENS:
        took = race(layer, racing, count, options.rounds)
        console.log(f"S={count}: " + ", ".join(f"{name} {time:.1f} ms" for name, time in took.items()))
        better = min(took[ABSORBED], took[EXPANDED])
        rows.append(Row("choice", f"chosen / better form, S={count}", took[AUTO] / better, 1.10, 1.05))
    console.print(table_of(rows))
    console.print(f"{options.heads} heads, {options.rounds} rounds; {machine()}", style="dim")


if __name__ == "__main__":
    main()
