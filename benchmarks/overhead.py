"""The cost of a step with hardly anything to compute: guards, wrappers and kernel calls.

python benchmarks/overhead.py                  about three minutes, on an otherwise idle machine

DeepseekV3ForCausalLM of toy sizes (hidden size 64, two heads, eight layers), one token, StaticCache: mla_fx and stock
Inductor in turns; medians of the rounds.
"""

from __future__ import annotations

import statistics
import time

import small_models
import torch
from results import Results, Row, finish, parser, without_caches

from mla_fx.commands import demo

LAYERS, CONTEXT, WARM_UPS = 8, 64, 20


@torch.no_grad()
def main() -> None:
    given = parser(__doc__, rounds=500).parse_args()
    without_caches()
    token, steps = small_models.tokens(), {}
    for backend in ("inductor", "mla"):
        model = small_models.deepseek(LAYERS, num_attention_heads=2, num_key_value_heads=2)
        steps[backend] = (
            torch.compile(model, fullgraph=True, backend=backend),
            small_models.prefilled(model, length=CONTEXT),
        )
    took: dict[str, list[float]] = {backend: [] for backend in steps}
    for turn in range(WARM_UPS + given.rounds):
        for backend, (step, cache) in steps.items():
            demo.rewind(cache, CONTEXT // 2)
            start = time.perf_counter()
            step(input_ids=token, past_key_values=cache)
            took[backend] += [(time.perf_counter() - start) * 1e3] * (turn >= WARM_UPS)
    ours, stock = (statistics.median(took[backend]) for backend in ("mla", "inductor"))
    rows = [Row(f"time / stock Inductor, {LAYERS} toy layers", ours / stock, 1.0, 0.8)]
    finish(Results(rows, notes=[f"mla_fx {ours:.2f} ms, stock Inductor {stock:.2f} ms a step"]), given)


if __name__ == "__main__":
    main()
