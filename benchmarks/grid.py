"""Whether a layer is ever slower than under stock Inductor: sizes from a grid, over caches in one piece and in pages.

python benchmarks/grid.py                a few hours, on an otherwise idle machine
python benchmarks/grid.py --number 8     to try the script
python benchmarks/grid.py --seed 3       other sizes

The layer and the race are those of pages.py. The picture has one point for each size.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import torch
from pages import FLAT, FLAT_STOCK, LARGE, OURS, STOCK, Layer, Sizes, Step, race
from results import Results, Row, console, finish, parser, without_caches

HIDDEN, HEADS, BATCHES = (256, 512, 1024, 2048, 4096, 7168), (4, 8, 16, 32, 64, 128), (1, 2, 4, 8, 16)
TOKENS, CONTEXTS = (1, 2, 4, 8, 16, 32, 64, 128, 256), (64, 256, 1024, 4096, 16384)
MOST = 2**30  # elements of the keys and values of all heads, which stock Inductor's code expands


def drawn(number: int, seed: int) -> Iterator[tuple[Sizes, Step]]:
    """Sizes of layers and of steps: small ones with the ranks of a small model, others with DeepSeek-V3's."""
    choose = random.Random(seed).choice
    while number:
        hidden, heads, batch = choose(HIDDEN), choose(HEADS), choose(BATCHES)
        tokens, context = choose(TOKENS), choose(CONTEXTS)
        small = Sizes() if hidden <= 512 else LARGE
        sizes = Sizes(hidden, heads, small.query_rank, small.rank, small.nope, small.rope, small.value)
        if tokens > context or batch * context * heads * (small.nope + small.value) > MOST:
            continue
        yield sizes, Step((context,) * batch, tokens)
        number -= 1


def picture(found: dict[str, list[float]], path: Path) -> None:
    """Ratios in order: flat and paged."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4), layout="constrained")
    for name, ratios in found.items():
        axes.plot(sorted(ratios), marker="o", markersize=4, label=name)
    axes.axhline(1.03, color="black", linestyle=":")
    axes.set(yscale="log", xlabel="sizes, in order", ylabel="time / stock Inductor")
    axes.legend()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    options = parser(__doc__, rounds=9)
    options.add_argument("--number", type=int, default=60, help="how many sizes (%(default)s)")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--picture", type=Path, help="where to draw the ratios")
    given = options.parse_args()
    without_caches()
    torch.manual_seed(0)
    rows: list[Row] = []
    found: dict[str, list[float]] = {"one piece": [], "pages": []}
    for sizes, step in drawn(given.number, given.seed):
        torch._dynamo.reset()
        took = race(Layer(sizes).to(torch.bfloat16), step, given.rounds)
        for name, ours, stock in (("one piece", FLAT, FLAT_STOCK), ("pages", OURS, STOCK)):
            found[name].append(took[ours] / took[stock])
            what = f"{name}: {step}, hidden {sizes.hidden}, {sizes.heads} heads"
            rows.append(Row(what, took[ours] / took[stock], 1.03, 1.0))
            console.log(f"{what}: {took[ours]:.2f} ms, stock {took[stock]:.2f} ms, {rows[-1].verdict}")
    if given.picture:
        picture(found, given.picture)
    finish(Results(rows, notes=[f"{given.number} sizes, seed {given.seed}"]), given)


if __name__ == "__main__":
    main()
