"""Memory of a decode step with a long context: what it holds at once, and copies of weights.

python benchmarks/memory.py                    about a minute
python benchmarks/memory.py --heads 8          to try the script

One DeepseekV3Attention layer of DeepSeek-V3's sizes, bfloat16, one token, 16384 tokens in its StaticCache. Temporaries
are read from PyTorch's record of allocations, weights from the report.
"""

from __future__ import annotations

from typing import Any

import torch
from layer import OURS, STOCK, Layer, Variant
from results import Results, Row, finish, parser, without_caches

import mla_fx
from mla_fx.commands import demo

CONTEXT, MIB = 16384, 2**20


@torch.no_grad()
def measured(layer: Layer, name: str, **options: Any) -> float:
    """MiB of temporaries in the second step."""
    latents = demo.random_latents(layer.config, CONTEXT)
    cache = demo.filled_cache(layer.config, latents, torch.bfloat16)
    variant = Variant(name, layer.way(name, **options), cache)
    mask, x = torch.ones(1, 1, 1, CONTEXT, dtype=torch.bool), layer.hidden(1)
    arguments = x, *layer.tables(torch.tensor([[CONTEXT - 1]]), torch.bfloat16), mask
    for _ in range(2):
        demo.rewind(cache)
        variant.timed(*arguments)
    demo.rewind(cache)
    return demo.temporaries(lambda: variant.timed(*arguments)) / MIB


def kept() -> float:
    """MiB of copies of weights per layer, in the last compilation."""
    return sum(memory.weights / memory.layers for memory in mla_fx.last_report().memory) / MIB


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--heads", type=int, default=demo.ATTENTION["num_attention_heads"], help="(%(default)s)")
    given = options.parse_args()
    without_caches()
    layer, rows = Layer.build(given.heads), []
    for lay_out, limit in ((True, 34), (False, 0)):
        held = measured(layer, OURS, backend=mla_fx.get_backend(lay_out=lay_out))
        rows.append(Row(f"temporaries, T={CONTEXT}, lay_out={lay_out}", held, 64, 16, "MiB"))
        rows.append(Row(f"weights kept per layer, lay_out={lay_out}", kept(), limit, 0, "MiB"))
    stock = measured(layer, STOCK)
    finish(Results(rows, notes=[f"stock Inductor: {stock:.0f} MiB of temporaries; {given.heads} heads"]), given)


if __name__ == "__main__":
    main()
