"""Ratios of decode speed and rewrite cost, each against its bar.

python benchmarks/decode.py                    about ten minutes, on an otherwise idle machine
python benchmarks/decode.py --bars C1,C2 --quick

One DeepseekV3Attention layer of DeepSeek-V3's dimensions with its StaticCache, bfloat16, one token. Variants take
turns in one process; medians of 11 rounds after 3 to warm up; fresh input in each round. Each variant has its own
code object, else Dynamo would hand all of them the code that it compiled first. Two calibrations run in the same
rounds, and a race in which the reading speed moved by more than 15 % is run again. Every output and cache is checked
against float32.
"""

from __future__ import annotations

import argparse
import copy
import math
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import torch
from hand_absorbed import HandAbsorbed
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import AutoModelForCausalLM, DeepseekV3Config, LlamaConfig, StaticCache
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

import mla_fx
from mla_fx.commands import demo

BARS = ("C1", "C2", "C3", "C9")
CONTEXT = 4096
CONTEXTS = (512, 4096, 16384)
TOLERANCE = 1e-2
DRIFT = 0.15
ATTEMPTS = 3
MM_SIZE = 2048
SMALL = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
SMALL_MLA = {"q_lora_rank": 48, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}

Step = Callable[[Tensor, Tensor, Tensor, Tensor, Any], Tensor]
"""(hidden states, cos, sin, mask, cache) -> output of the layer."""


@dataclass(frozen=True)
class Effort:
    """How long to measure."""

    warm_ups: int = 3
    rounds: int = 11
    compiles: int = 3
    few_layers: int = 8
    many_layers: int = 61


QUICK = Effort(warm_ups=1, rounds=3, compiles=1, many_layers=16)


@dataclass(frozen=True)
class Row:
    """One line of the table: a number and the bars it is held against."""

    bar: str
    what: str
    value: float
    must: float
    stretch: float
    unit: str = "x"
    at_least: bool = False

    def __iter__(self) -> Iterator[str]:
        sign = ">=" if self.at_least else "<="
        yield self.bar
        yield self.what
        yield f"{self.value:.3g} {self.unit}"
        yield f"{sign} {self.must:g}"
        yield f"{sign} {self.stretch:g}"
        yield "stretch" if self._meets(self.stretch) else "met" if self._meets(self.must) else "NOT MET"

    def _meets(self, bound: float) -> bool:
        return self.value >= bound if self.at_least else self.value <= bound


# The layer and its variants


@dataclass
class Variant:
    """One way to compute the layer, with a cache of its own."""

    name: str
    step: Step
    cache: Any
    milliseconds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.milliseconds)


@dataclass(frozen=True)
class Layer:
    """The layer in bfloat16, and in float32 as the reference: absorbed, which is quick at every context length."""

    attention: Any
    exact: HandAbsorbed
    config: DeepseekV3Config

    @classmethod
    def build(cls, **dimensions: int) -> Layer:
        config = DeepseekV3Config(**{**demo.ATTENTION, "num_hidden_layers": 1, **dimensions})
        config._attn_implementation = "sdpa"
        attention = DeepseekV3Attention(config, 0).to(torch.bfloat16).eval()
        demo.randomise(attention)
        return cls(attention, HandAbsorbed(copy.deepcopy(attention).float()), config)

    def tables(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The rotation at positions [1, S]."""
        return DeepseekV3RotaryEmbedding(self.config)(torch.empty(0, dtype=dtype), positions)

    def bytes_read(self, context: int) -> int:
        weights = sum(weight.numel() * weight.element_size() for weight in self.attention.parameters())
        return weights + context * (self.config.kv_lora_rank + self.config.qk_rope_head_dim) * 2

    def attention_flops(self, context: int) -> int:
        config = self.config
        return 2 * config.num_attention_heads * context * (2 * config.kv_lora_rank + config.qk_rope_head_dim)

    def hugging_face(self) -> Step:
        attention = self.attention

        def step(x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor, cache: Any) -> Tensor:
            return attention(x, (cos, sin), mask, past_key_values=cache)[0]

        return step

    def by_hand(self) -> Step:
        absorbed = HandAbsorbed(self.attention)

        def step(x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor, cache: Any) -> Tensor:
            return absorbed(x, cos, sin, mask, cache)

        return step


def compiled(step: Step, name: str, **options: Any) -> Step:
    """Compiles a copy of a function that shares no code object with any other, and so no compiled code."""
    code = step.__code__.replace(co_name=name.replace(" ", "_"))
    return torch.compile(FunctionType(code, step.__globals__, name, None, step.__closure__), fullgraph=True, **options)


def steps(layer: Layer, names: Sequence[str], context: int) -> dict[str, Step]:
    made = {
        "HF eager": lambda: layer.hugging_face(),
        "HF compiled": lambda: compiled(layer.hugging_face(), f"hf {context}"),
        "by hand": lambda: compiled(layer.by_hand(), f"hand {context}"),
        "mla_fx": lambda: compiled(layer.hugging_face(), f"mla_fx {context}", backend=mla_fx.mla_backend),
    }
    return {name: made[name]() for name in names}


# Racing


@dataclass
class Race:
    """Variants and calibrations, timed in turns at one context length."""

    layer: Layer
    context: int
    variants: list[Variant]
    read: list[float] = field(default_factory=list)
    multiply: list[float] = field(default_factory=list)

    def __getitem__(self, name: str) -> float:
        return next(variant.median for variant in self.variants if variant.name == name)

    @property
    def floor(self) -> float:
        """Milliseconds to read weights and cache and to do the arithmetic of attention, at the calibrated rates."""
        rate = 2 * MM_SIZE**3 / statistics.median(self.multiply)
        return statistics.median(self.read) + self.layer.attention_flops(self.context) / rate

    @property
    def drift(self) -> float:
        """How far the reading rate moved between the first and the last third of the rounds."""
        third = max(1, len(self.read) // 3)
        first, last = statistics.median(self.read[:third]), statistics.median(self.read[-third:])
        return abs(first / last - 1)


def race(layer: Layer, context: int, names: Sequence[str], effort: Effort, say: Callable[[str], None]) -> Race:
    """A race in which the machine held still, or the last of three."""
    ready = steps(layer, names, context)
    for attempt in range(ATTEMPTS):
        say(f"T={context}: {', '.join(names)}" + (f", attempt {attempt + 1}" if attempt else ""))
        result = _race_once(layer, context, ready, effort)
        if result.drift <= DRIFT:
            return result
    say(f"T={context}: reading speed moved by {result.drift:.0%} in the last of {ATTEMPTS} attempts; do not trust it")
    return result


@torch.no_grad()
def _race_once(layer: Layer, context: int, ready: dict[str, Step], effort: Effort) -> Race:
    latents = demo.random_latents(layer.config, context)
    bf16, fp32 = torch.bfloat16, torch.float32
    variants = [Variant(name, step, demo.filled_cache(layer.config, latents, bf16)) for name, step in ready.items()]
    exact = Variant("float32", layer.exact, demo.filled_cache(layer.config, latents, fp32))
    result = Race(layer, context, variants)
    # As the model makes it: True where the query may look, which at the last position is everywhere.
    mask = torch.ones(1, 1, 1, context, dtype=torch.bool)
    last = torch.tensor([[context - 1]])
    tables, exact_tables = layer.tables(last, bf16), layer.tables(last, fp32)
    weights_and_cache = torch.ones(layer.bytes_read(context) // 8, dtype=torch.int64)
    square = torch.randn(MM_SIZE, MM_SIZE, dtype=bf16)
    for turn in range(effort.warm_ups + effort.rounds):
        keep = turn >= effort.warm_ups
        x = torch.randn(1, 1, layer.config.hidden_size, dtype=bf16)
        _, wanted = _timed(exact, x.float(), exact_tables, mask)
        for variant in variants:
            elapsed, output = _timed(variant, x, tables, mask)
            check(variant, output, exact, wanted)
            variant.milliseconds += [elapsed] * keep
        result.read += [_clock(weights_and_cache.sum)] * keep
        result.multiply += [_clock(lambda: square @ square)] * keep
    return result


def _timed(variant: Variant, x: Tensor, tables: tuple[Tensor, Tensor], mask: Tensor) -> tuple[float, Tensor]:
    demo.rewind(variant.cache)
    start = time.perf_counter()
    output = variant.step(x, *tables, mask, variant.cache)
    return (time.perf_counter() - start) * 1e3, output


def _clock(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return (time.perf_counter() - start) * 1e3


def check(variant: Variant, output: Tensor, exact: Variant, wanted: Tensor, new: int = 1) -> None:
    """A fast wrong answer is no result."""
    for what, error in (
        ("output", demo.relative_error(output, wanted)),
        ("cache", demo.cache_error(variant.cache, exact.cache, new)),
    ):
        if not error <= TOLERANCE:
            raise SystemExit(f"{variant.name}: the {what} is off by {error:.1e}; at most {TOLERANCE:.0e} is allowed.")


# The bars


def decode_bars(bars: Sequence[str], effort: Effort, say: Callable[[str], None]) -> tuple[list[Row], list[Race]]:
    """C1, C2 and C3 share one race at 4096 tokens; C3 adds one at each other context length."""
    say("building the layer")
    layer = Layer.build()
    rivals = {"C1": ("HF eager", "HF compiled"), "C2": ("by hand",)}
    names = [*(name for bar in bars for name in rivals.get(bar, ())), "mla_fx"]
    races = [race(layer, CONTEXT, names, effort, say)]
    if "C3" in bars:
        races += [race(layer, context, ["mla_fx"], effort, say) for context in CONTEXTS if context != CONTEXT]
    main, rows = races[0], []
    if "C1" in bars:
        for name, must, stretch in (("HF compiled", 20, 30), ("HF eager", 38, 55)):
            rows.append(Row("C1", f"{name} / mla_fx", main[name] / main["mla_fx"], must, stretch, at_least=True))
    if "C2" in bars:
        rows.append(Row("C2", "mla_fx / by hand", main["mla_fx"] / main["by hand"], 1.03, 0.78))
    if "C3" in bars:
        for result in sorted(races, key=lambda result: result.context):
            rows.append(Row("C3", f"mla_fx / floor, T={result.context}", result["mla_fx"] / result.floor, 1.55, 1.20))
    return rows, races


def rewrite_bars(effort: Effort, say: Callable[[str], None]) -> list[Row]:
    """C9: what the passes cost, by mla_fx's own clock, on small models; and what importing the package costs."""
    few, many = effort.few_layers, effort.many_layers
    say(f"C9: {few} layers")
    time_few = rewrite_time(deepseek(few), {"mla_prolog": few, "latent_attention": few}, effort.compiles)
    say(f"C9: {many} layers")
    time_many = rewrite_time(deepseek(many), {"mla_prolog": many, "latent_attention": many}, effort.compiles)
    say("C9: a Llama")
    time_llama = rewrite_time(llama(few), {}, effort.compiles)
    say("C9: import")
    seconds, loaded = import_time(effort.rounds)
    exponent = math.log(time_many / time_few) / math.log(many / few)
    return [
        Row("C9", f"rewrite per layer, {many} that match", time_many / many, 10, 3, "ms"),
        Row("C9", f"rewrite per layer, {few} that do not", time_llama / few, 1, 0.2, "ms"),
        Row("C9", f"growth exponent, {few} to {many}", exponent, 1.15, 1.05, ""),
        Row("C9", "import and registration", seconds, 0.25, 0.05, "s"),
        Row("C9", "rules and targets loaded by it", loaded, 0, 0, ""),
    ]


def deepseek(layers: int) -> Any:
    return AutoModelForCausalLM.from_config(
        DeepseekV3Config(num_hidden_layers=layers, first_k_dense_replace=layers, **SMALL, **SMALL_MLA)
    ).eval()


def llama(layers: int) -> Any:
    return AutoModelForCausalLM.from_config(LlamaConfig(num_hidden_layers=layers, **SMALL)).eval()


@torch.no_grad()
def rewrite_time(model: Any, fused: dict[str, int], compiles: int) -> float:
    """Median milliseconds in the passes for one decode step, after a compilation that loads everything."""
    token, elapsed = torch.tensor([[5]]), []
    cache = StaticCache(config=model.config, max_cache_len=64)
    model(input_ids=token.expand(1, 4), past_key_values=cache)
    for _ in range(1 + compiles):
        torch._dynamo.reset()
        step = torch.compile(model, fullgraph=True, backend=mla_fx.get_backend(target="reference"))
        step(input_ids=token, past_key_values=cache)
        report = mla_fx.last_report()
        if report.fused != fused:
            raise SystemExit(f"C9: expected {fused}, fused {report.fused}.\n{report}")
        elapsed.append(report.milliseconds)
    return statistics.median(elapsed[1:])


# torch.compile loads Dynamo and its list of backends for whichever backend is named, so neither is counted.
IMPORT = """
import sys, time, torch, torch._dynamo
torch._dynamo.lookup_backend("inductor")
before = time.perf_counter()
import mla_fx
torch._dynamo.lookup_backend("mla")
after = time.perf_counter()
print(after - before, sum(name.startswith(("mla_fx.patterns.", "mla_fx.lowering.")) for name in sys.modules))
"""


def import_time(repeats: int) -> tuple[float, int]:
    """Median seconds in fresh processes, and how many rules and targets, which can wait, were loaded."""
    answers = [
        subprocess.run([sys.executable, "-c", IMPORT], check=True, capture_output=True, text=True).stdout.split()
        for _ in range(repeats)
    ]
    return statistics.median(float(seconds) for seconds, _ in answers), max(int(loaded) for _, loaded in answers)


# The command line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bars", default=",".join(BARS), help="comma-separated (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="few rounds and layers, to try the script")
    options = parser.parse_args()
    bars = options.bars.split(",")
    unknown = sorted(set(bars) - set(BARS))
    if unknown:
        parser.error(f"there is no bar {', '.join(unknown)}; there are {', '.join(BARS)}.")
    effort = QUICK if options.quick else Effort()
    torch._inductor.config.force_disable_caches = True
    warnings.filterwarnings("ignore", message="dynamo_pgo force disabled")
    console = Console(log_path=False)
    rows, races = [], []
    if set(bars) - {"C9"}:
        rows, races = decode_bars(bars, effort, console.log)
    if "C9" in bars:
        rows += rewrite_bars(effort, console.log)
    show(console, rows, races)


def show(console: Console, rows: Sequence[Row], races: Sequence[Race]) -> None:
    console.print(table_of(rows))
    for result in races:
        times = [f"{variant.name} {variant.median:.2f} ms" for variant in result.variants]
        notes = ", ".join([*times, f"floor {result.floor:.2f} ms", f"reading speed moved {result.drift:.0%}"])
        console.print(f"T={result.context}: {notes}", style="dim")
    console.print(machine(), style="dim")


def table_of(rows: Sequence[Row]) -> Table:
    table = Table("bar", "what", "measured", "must", "stretch", "verdict", box=SIMPLE_HEAD)
    for row in rows:
        table.add_row(*row)
    return table


def machine() -> str:
    return f"{torch.get_num_threads()} threads, load {os.getloadavg()[0]:.1f}, torch {torch.__version__}"


if __name__ == "__main__":
    main()
