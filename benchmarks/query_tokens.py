"""Whether attention uses the cheaper form for every number of new tokens, compared with both forms forced, and how
fast it is.

python benchmarks/query_tokens.py                            about half an hour, on an otherwise idle machine
python benchmarks/query_tokens.py --heads 8 --rounds 3       fewer heads, to try the script

One DeepseekV3Attention layer of DeepSeek-V3's sizes, bfloat16, 4096 tokens in its StaticCache, the last S of them new.
Each variant is compiled once for any S, and once for S=1, which has its own graph in any backend. Variants take turns
in one process: medians of the rounds after one to warm up, with a new input in each round. The outputs of the first
round, and the caches, agree with the layer absorbed by hand in float32.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from layer import EAGER, HAND, OURS, STOCK, Layer, Variant, check
from results import Results, Row, Time, console, finish, parser, without_caches

import mla_fx
from mla_fx.commands import demo

CONTEXT = 4096
TOKENS = (1, 2, 4, 8, 16, 64, 128, 192, 256, 320, 512)
ABSORBED, EXPANDED = "always absorbed", "never absorbed"
NAMES = (OURS, ABSORBED, EXPANDED, STOCK, HAND, EAGER)


def variants(layer: Layer, names: tuple[str, ...]) -> list[Variant]:
    latents = demo.random_latents(layer.config, CONTEXT)
    policies = {ABSORBED: "always", EXPANDED: "never"}
    made = []
    for name in names:
        options = {"dynamic": None if name == EAGER else True}
        if name in policies:
            options["backend"] = mla_fx.get_backend(absorb=policies[name], strict=True)
        step = layer.way(OURS if name in policies else name, **options)
        made.append(Variant(name, step, demo.filled_cache(layer.config, latents, torch.bfloat16)))
    return [*made, Variant("float32", layer.exact, demo.filled_cache(layer.config, latents, torch.float32))]


@torch.no_grad()
def race(layer: Layer, racing: list[Variant], count: int, rounds: int) -> dict[str, float]:
    """Median milliseconds of each variant for this many new tokens."""
    *timed, exact = racing
    position = torch.arange(CONTEXT - count, CONTEXT)
    mask = (torch.arange(CONTEXT) <= position.unsqueeze(1))[None, None]
    tables, exact_tables = (layer.tables(position[None], dtype) for dtype in (torch.bfloat16, torch.float32))
    for variant in timed:
        variant.milliseconds.clear()
    for turn in range(1 + rounds):
        x = layer.hidden(count)
        if turn == 0:
            demo.rewind(exact.cache, count)
            wanted = exact.step(x.float(), *exact_tables, mask, exact.cache)
        for variant in timed:
            demo.rewind(variant.cache, count)
            elapsed, output = variant.timed(x, *tables, mask)
            variant.milliseconds += [elapsed] * (turn > 0)
            if turn == 0:
                check(variant, output, exact, wanted, count)
    return {variant.name: variant.median for variant in timed}


def rows_of(count: int, took: dict[str, float]) -> Iterator[Row]:
    yield Row(f"chosen / better form, S={count}", took[OURS] / min(took[ABSORBED], took[EXPANDED]), 1.10, 1.05)
    if STOCK in took:
        yield Row(f"chosen / stock Inductor, S={count}", took[OURS] / took[STOCK], 1.03, 0.9)


def main() -> None:
    options = parser(__doc__, rounds=5)
    options.add_argument("--heads", type=int, default=demo.ATTENTION["num_attention_heads"], help="(%(default)s)")
    options.add_argument("--forms", action="store_true", help="mla_fx's own variants alone")
    given = options.parse_args()
    without_caches()
    layer = Layer.build(given.heads)
    racing, rows, times = variants(layer, NAMES[:3] if given.forms else NAMES), [], []
    for count in TOKENS:
        took = race(layer, racing, count, given.rounds)
        console.log(f"S={count}: " + ", ".join(f"{name} {time:.1f} ms" for name, time in took.items()))
        rows += rows_of(count, took)
        times += [Time(name, median, CONTEXT, count) for name, median in took.items()]
    finish(Results(rows, times, [f"{given.heads} heads, {given.rounds} rounds"]), given)


if __name__ == "__main__":
    main()
