"""One decode step of a DeepSeek-V3-shaped model, run in several ways and compared: the core of demo and quickstart."""

from __future__ import annotations

import copy
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mla_fx.debug import require
from mla_fx.debug.memory import readable_size

ATTENTION = {
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
"""DeepSeek-V3's attention; everything around it is small, to fit into a laptop's memory."""
SURROUNDINGS = {"vocab_size": 256, "intermediate_size": 512, "max_position_embeddings": 163840}
WARM_UPS = 2
CAPTION = "temporaries: peak in PyTorch's allocator; error: against float32"

Way = Callable[..., Any]
"""A model, compiled or not: called with `input_ids` and `past_key_values`, it returns an object with `logits`."""
Latents = list[tuple[Tensor, Tensor]]
Announce = Callable[[str], None]


def deepseek_v3(layers: int = 1, dtype: torch.dtype = torch.bfloat16, **dimensions: int) -> Any:
    """Hugging Face's DeepseekV3ForCausalLM with random dense weights; DeepSeek-V3's attention by default."""
    require("transformers")
    from transformers import AutoModelForCausalLM, DeepseekV3Config

    sizes: dict[str, Any] = {**ATTENTION, **SURROUNDINGS, **dimensions}
    config = DeepseekV3Config(num_hidden_layers=layers, first_k_dense_replace=layers, **sizes)
    build: Any = AutoModelForCausalLM.from_config
    model = build(config, dtype=dtype).eval()
    randomise(model)
    return model


@torch.no_grad()
def randomise(module: torch.nn.Module) -> None:
    """Dense weights: matrices of scale 1/sqrt(fan_in), norms around one.

    Embeddings are drawn like any matrix, so they are small, and attention decides the result."""
    for weight in module.parameters():
        if weight.dim() > 1:
            weight.normal_(std=weight.shape[-1] ** -0.5)
        else:
            weight.normal_(mean=1.0, std=0.3)


def random_latents(config: Any, context: int, dtype: torch.dtype = torch.bfloat16, batch: int = 1) -> Latents:
    """For each layer, `context` tokens of latents and of rotary keys."""
    widths = (config.kv_lora_rank, config.qk_rope_head_dim)
    return [
        (torch.randn(batch, 1, context, widths[0], dtype=dtype), torch.randn(batch, 1, context, widths[1], dtype=dtype))
        for _ in range(config.num_hidden_layers)
    ]


def filled_cache(config: Any, latents: Latents, dtype: torch.dtype) -> Any:
    """A StaticCache with these latents, one token short of full."""
    from transformers import StaticCache

    cache: Any = StaticCache(config=config, max_cache_len=latents[0][0].shape[2])
    for layer, (latent, rope) in zip(cache.layers, latents, strict=True):
        layer.lazy_initialization(latent.to(dtype), rope.to(dtype))
        layer.keys.copy_(latent)
        layer.values.copy_(rope)
    rewind(cache)
    return cache


def rewind(cache: Any, new: int = 1) -> None:
    """Reset a StaticCache so that the next `new` tokens fill its last rows."""
    for layer in cache.layers:
        layer.cumulative_length.fill_(layer.max_cache_len - new)


@dataclass
class Run:
    """One way to run the step, with its own cache and its measurements."""

    name: str
    way: Way
    token: Tensor
    cache: Any
    first_call: float = 0.0
    milliseconds: list[float] = field(default_factory=list)
    temporaries: int = 0
    output_error: float = 0.0
    cache_error: float = 0.0

    def step(self) -> Tensor:
        rewind(self.cache)
        logits: Tensor = self.way(input_ids=self.token, past_key_values=self.cache).logits
        return logits

    def timed_step(self) -> float:
        start = time.perf_counter()
        self.step()
        return (time.perf_counter() - start) * 1e3

    @property
    def median(self) -> float:
        return statistics.median(self.milliseconds)

    def agrees_with(self, eager: Run) -> bool:
        """Whether logits and cache are as close to the float32 result as eager mode, within a factor of two."""
        return self.output_error <= 2 * eager.output_error and self.cache_error <= 2 * eager.cache_error


@dataclass(frozen=True)
class Comparison:
    """The runs; all are compared with the first, the unmodified model."""

    runs: tuple[Run, ...]

    @property
    def agree(self) -> bool:
        return all(run.agrees_with(self.runs[0]) for run in self.runs)


@torch.no_grad()
def compare(
    model: Any, ways: Mapping[str, Way], context: int = 4096, repeats: int = 7, announce: Announce = lambda stage: None
) -> Comparison:
    """Run one decode step in every way and check each against the model in float32; the first is the baseline."""
    announce("float32 reference")
    latents = random_latents(model.config, context)
    token = torch.randint(model.config.vocab_size, (1, 1))
    exact = Run("float32", copy.deepcopy(model).float(), token, filled_cache(model.config, latents, torch.float32))
    runs = tuple(Run(name, way, token, filled_cache(model.config, latents, model.dtype)) for name, way in ways.items())
    for run in runs:
        announce(f"{run.name}: first call")
        run.first_call = run.timed_step() / 1e3
        run.output_error = relative_error(run.step(), exact.step())
        run.cache_error = cache_error(run.cache, exact.cache)
        run.temporaries = temporaries(run.step)
    announce("timing")
    # In turns, so that other load on the machine affects all alike.
    for turn in range(WARM_UPS + repeats):
        for run in runs:
            elapsed = run.timed_step()
            if turn >= WARM_UPS:
                run.milliseconds.append(elapsed)
    return Comparison(runs)


def relative_error(value: Tensor, exact: Tensor) -> float:
    return float((value.double() - exact.double()).norm() / exact.double().norm())


def cache_error(cache: Any, exact: Any, new: int = 1) -> float:
    """The largest relative error of the last `new` rows, just written; infinite if any other row changed."""
    worst = 0.0
    for layer, wanted in zip(cache.layers, exact.layers, strict=True):
        for rows, exact_rows in ((layer.keys, wanted.keys), (layer.values, wanted.values)):
            old = rows.shape[2] - new
            if not torch.equal(rows[:, :, :old].to(exact_rows.dtype), exact_rows[:, :, :old]):
                return float("inf")
            worst = max(worst, relative_error(rows[:, :, old:], exact_rows[:, :, old:]))
    return worst


def temporaries(step: Callable[[], object]) -> int:
    """The most bytes that a step holds at once in PyTorch's CPU allocator, in addition to those at its start.

    Read from the profiler's record of every allocation and release. Scratch memory that a math library gets from the
    system itself is not included, for any of the ways."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # otherwise the profiler logs its own start and stop
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    allocated = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        allocated += event.nbytes()
        peak = max(peak, allocated)
    return peak


def show(comparison: Comparison) -> None:
    require("rich")
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    eager = comparison.runs[0]
    table = Table(box=SIMPLE_HEAD, collapse_padding=True, title="one decode step", caption=CAPTION)
    table.add_column("way", no_wrap=True)
    for heading in ("first call", "per step", "speed-up", "temporaries", "error", "agrees"):
        table.add_column(heading, justify="right", no_wrap=True)
    for run in comparison.runs:
        table.add_row(
            run.name,
            f"{run.first_call:.1f} s",
            f"{run.median:.1f} ms",
            f"{eager.median / run.median:.1f}x",
            readable_size(run.temporaries),
            f"{run.output_error:.1e}",
            "yes" if run.agrees_with(eager) else "NO",
        )
    Console().print(table)


@contextmanager
def progress() -> Iterator[Announce]:
    """A line on the terminal that says what is running."""
    require("rich")
    from rich.console import Console

    with Console(stderr=True).status("starting") as status:
        yield lambda stage: status.update(stage)


def run_demo(context: int = 4096, layers: int = 1) -> Comparison:
    """Build the model, compile it with and without `mla_backend`, compare the two, and print the result."""
    import mla_fx

    with progress() as announce:
        announce("building the model")
        model = deepseek_v3(layers)
        ways = {
            "eager": model,
            "torch.compile": torch.compile(model, fullgraph=True),
            "mla_fx": torch.compile(model, fullgraph=True, backend=mla_fx.mla_backend),
        }
        comparison = compare(model, ways, context, announce=announce)
    print(mla_fx.last_report())
    show(comparison)
    return comparison
