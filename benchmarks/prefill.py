"""Time and temporaries of a prompt, each against its bar.

python benchmarks/prefill.py                                 about ten minutes, on an otherwise idle machine
python benchmarks/prefill.py --tokens 2048 --rounds 3        a shorter prompt, to try the script

One DeepseekV3Attention layer of DeepSeek-V3's dimensions but for the number of heads, bfloat16, without a cache: as it
is, under stock Inductor, and with mla_fx. Variants take turns in one process; medians of the rounds after one to warm
up; fresh input in each round. Every output is checked against float32: no further off than twice eager's own error.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence

import torch
from decode import Layer, Row, Step, Variant, compiled, machine, table_of
from rich.console import Console
from torch import Tensor

import mla_fx
from mla_fx.commands import demo

HEADS, TOKENS, ROUNDS = 32, 4096, 3
EAGER, STOCK, OURS = "HF eager", "HF compiled", "mla_fx"


def variants(layer: Layer) -> list[Variant]:
    """With nothing fused mla_fx would only be stock Inductor, so that is an error."""
    ours = mla_fx.get_backend(target="inductor", expect=("mla_attention",))
    steps: dict[str, Step] = {
        EAGER: layer.hugging_face(),
        STOCK: compiled(layer.hugging_face(), "hf prompt"),
        OURS: compiled(layer.hugging_face(), "mla_fx prompt", backend=ours),
    }
    return [Variant(name, step, None) for name, step in steps.items()]


@torch.no_grad()
def race(layer: Layer, racing: Sequence[Variant], tokens: int, rounds: int, say: Callable[[str], None]) -> None:
    tables = rotations(layer, tokens, torch.bfloat16)
    for turn in range(1 + rounds):
        x = torch.randn(1, tokens, layer.config.hidden_size, dtype=torch.bfloat16)
        outputs = {}
        for variant in racing:
            say(f"round {turn} of {rounds}: {variant.name}")
            start = time.perf_counter()
            outputs[variant.name] = variant.step(x, *tables, None, None)
            variant.milliseconds += [(time.perf_counter() - start) * 1e3] * (turn > 0)
        if turn == 0:
            check(layer, x, outputs)


def check(layer: Layer, x: Tensor, outputs: dict[str, Tensor]) -> None:
    """A fast wrong answer is no result."""
    exact = layer.exact.layer(x.float(), rotations(layer, x.shape[1], torch.float32), None)[0]
    errors = {name: demo.relative_error(output, exact) for name, output in outputs.items()}
    if not errors[OURS] <= 2 * errors[EAGER]:
        raise SystemExit(f"mla_fx is off by {errors[OURS]:.1e}, eager by {errors[EAGER]:.1e}; twice that is allowed.")


def rotations(layer: Layer, tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return layer.tables(torch.arange(tokens).unsqueeze(0), dtype)


@torch.no_grad()
def temporaries(layer: Layer, variant: Variant, tokens: int) -> int:
    """The most bytes at once."""
    x = torch.randn(1, tokens, layer.config.hidden_size, dtype=torch.bfloat16)
    tables = rotations(layer, tokens, torch.bfloat16)
    return demo.temporaries(lambda: variant.step(x, *tables, None, None))


def activations(layer: Layer, tokens: int) -> int:
    """Bytes of query, keys, values and result of all heads."""
    config = layer.config
    query = config.qk_nope_head_dim + config.qk_rope_head_dim
    return 2 * tokens * config.num_attention_heads * 2 * (query + config.v_head_dim)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=HEADS, help="(%(default)s)")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="(%(default)s)")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="(%(default)s)")
    options = parser.parse_args()
    torch._inductor.config.force_disable_caches = True
    console = Console(log_path=False)
    layer = Layer.build(num_attention_heads=options.heads, num_key_value_heads=options.heads)
    racing = variants(layer)
    race(layer, racing, options.tokens, options.rounds, console.log)
    took = {variant.name: variant.median for variant in racing}
    held = {variant.name: temporaries(layer, variant, options.tokens) for variant in racing}
    rows = [
        Row("time", "mla_fx / stock Inductor", took[OURS] / took[STOCK], 0.5, 0.3),
        Row("time", "mla_fx / eager", took[OURS] / took[EAGER], 0.5, 0.3),
        Row("memory", "temporaries / activations", held[OURS] / activations(layer, options.tokens), 3, 2),
    ]
    console.print(table_of(rows))
    for name in took:
        console.print(f"{name}: {took[name] / 1e3:.2f} s, {held[name] / 2**20:.0f} MiB of temporaries", style="dim")
    sizes = f"{options.tokens} tokens, {options.heads} heads, {options.rounds} rounds"
    console.print(f"{sizes}; {machine()}", style="dim")


if __name__ == "__main__":
    main()
