"""The speed of a decode step, compared with the model in eager mode, compiled, absorbed by hand, and the machine's
floor.

python benchmarks/decode.py                         a quarter of an hour, on an otherwise idle machine
python benchmarks/decode.py --rounds 3 --heads 8    to try the script

One DeepseekV3Attention layer of DeepSeek-V3's sizes with its StaticCache, bfloat16, one token. Variants take turns in
one process: medians of the rounds after three to warm up, with a new input in each round. floor.py says what the floor
is; if the reading rate changed by more than 15 %, the race is run again. Every output and cache is checked against
float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from floor import DRIFT, Floor
from layer import ATTENTION, EAGER, HAND, OURS, STOCK, Layer, Step, Variant, check
from results import Results, Row, Time, console, finish, parser, without_caches

from mla_fx.commands import demo

CONTEXT, CONTEXTS, BATCHES = 4096, (512, 4096, 16384), (4, 8, 16)
WARM_UPS, ATTEMPTS = 3, 3


@dataclass
class Race:
    """Variants and the floor, timed in turns."""

    context: int
    batch: int
    variants: list[Variant]
    floor: Floor

    def __getitem__(self, name: str) -> float:
        return next(variant.median for variant in self.variants if variant.name == name)

    def times(self) -> Iterator[Time]:
        named = [*((variant.name, variant.median) for variant in self.variants), ("floor", self.floor.milliseconds)]
        return (Time(name, median, self.context, batch=self.batch) for name, median in named)

    def __str__(self) -> str:
        times = (f"{time.variant} {time.milliseconds:.2f} ms" for time in self.times())
        return f"T={self.context}, B={self.batch}: {', '.join(times)}, {self.floor}"


def race(layer: Layer, names: Sequence[str], rounds: int, context: int = CONTEXT, batch: int = 1) -> Race:
    """A race with a steady machine, or the last of three."""
    steps = {name: layer.way(name) for name in names}
    for _ in range(ATTEMPTS):
        torch._dynamo.reset()
        result = _race_once(layer, steps, rounds, context, batch)
        console.log(str(result))
        if result.floor.drift <= DRIFT:
            break
    return result


@torch.no_grad()
def _race_once(layer: Layer, steps: dict[str, Step], rounds: int, context: int, batch: int) -> Race:
    latents = demo.random_latents(layer.config, context, batch=batch)
    bf16, fp32 = torch.bfloat16, torch.float32
    variants = [Variant(name, step, demo.filled_cache(layer.config, latents, bf16)) for name, step in steps.items()]
    exact = Variant("float32", layer.exact, demo.filled_cache(layer.config, latents, fp32))
    floor = Floor(layer.bytes_read(context, batch), layer.attention_flops(context, batch))
    # As the model makes it: True where the query may look, which is everywhere for the last position.
    mask = torch.ones(batch, 1, 1, context, dtype=torch.bool)
    last = torch.tensor([[context - 1]])
    tables, exact_tables = layer.tables(last, bf16), layer.tables(last, fp32)
    for turn in range(WARM_UPS + rounds):
        keep = turn >= WARM_UPS
        x = layer.hidden(1, batch)
        demo.rewind(exact.cache)
        wanted = exact.step(x.float(), *exact_tables, mask, exact.cache)
        for variant in variants:
            demo.rewind(variant.cache)
            elapsed, output = variant.timed(x, *tables, mask)
            check(variant, output, exact, wanted)
            variant.milliseconds += [elapsed] * keep
        if keep:
            floor.measure()
    return Race(context, batch, variants, floor)


def rows_of(contexts: dict[int, Race], batches: dict[int, Race]) -> Iterator[Row]:
    main, (short, *_, long) = contexts[CONTEXT], contexts.values()
    yield Row("speed-up over stock Inductor", main[STOCK] / main[OURS], 20, 30, at_least=True)
    yield Row("speed-up over eager", main[EAGER] / main[OURS], 38, 55, at_least=True)
    yield Row("time / absorbed by hand under Inductor", main[OURS] / main[HAND], 1.03, 0.70)
    yield Row("the same without dot products for weights", main[ATTENTION] / main[HAND], 1.03, 1.0)
    for context, result in contexts.items():
        yield Row(f"time / floor, T={context}", result[OURS] / result.floor.milliseconds, 1.55, 1.15)
        yield Row(f"time / floor by torch.sum, T={context}", result[OURS] / result.floor.by_torch, 1.55, 1.15)
    ours, stock = (long[name] - short[name] for name in (OURS, STOCK))
    yield Row(
        "growth with T / that of attention's arithmetic",
        ours / (long.floor.arithmetic - short.floor.arithmetic),
        1.8,
        1.3,
    )
    yield Row("growth with T, stock Inductor / mla_fx", stock / ours, 50, 100, at_least=True)
    for batch, result in batches.items():
        yield Row(f"time / floor, B={batch}", result[OURS] / result.floor.milliseconds, 1.6, 1.25)
        yield Row(f"time / floor by torch.sum, B={batch}", result[OURS] / result.floor.by_torch, 1.6, 1.25)
        yield Row(f"time / absorbed by hand, B={batch}", result[OURS] / result[HAND], 1.03, 0.70)
        yield Row(f"speed-up over stock Inductor, B={batch}", result[STOCK] / result[OURS], 50, 90, at_least=True)


def main() -> None:
    options = parser(__doc__, rounds=11)
    options.add_argument("--heads", type=int, default=demo.ATTENTION["num_attention_heads"], help="(%(default)s)")
    given = options.parse_args()
    without_caches()
    layer = Layer.build(given.heads)
    ways = (EAGER, STOCK, HAND, ATTENTION, OURS)
    contexts = {context: race(layer, ways, given.rounds, context) for context in CONTEXTS}
    batches = {batch: race(layer, (STOCK, HAND, OURS), given.rounds, batch=batch) for batch in BATCHES}
    races = [*contexts.values(), *batches.values()]
    times = [time for result in races for time in result.times()]
    finish(Results([*rows_of(contexts, batches)], times, [f"{given.heads} heads, {given.rounds} rounds"]), given)


if __name__ == "__main__":
    main()
