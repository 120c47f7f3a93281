"""The cost of compiling: passes per layer, a whole model compared with stock Inductor, and importing the package.

python benchmarks/compile_time.py                        about ten minutes, on an otherwise idle machine
python benchmarks/compile_time.py --layers 16            fewer layers, to try the script

Small models of transformers decode one token. The passes are timed by mla_fx's own clock, after a compilation that
loads everything. Whole compilations alternate with stock Inductor's, each with a new model, with all of PyTorch's
caches off.
"""

from __future__ import annotations

import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import small_models
import torch
from results import Results, Row, console, finish, parser, without_caches

import mla_fx

FEW, MANY, CONTEXT = 8, 61, 64
WHOLE = 2  # rounds of whole compilations, which take a minute each


@torch.no_grad()
def rewrite_time(model: Any, fused: dict[str, int], rounds: int) -> float:
    """Median milliseconds in the passes for one decode step."""
    cache, token, elapsed = small_models.prefilled(model, length=CONTEXT), small_models.tokens(), []
    for _ in range(1 + rounds):
        torch._dynamo.reset()
        step = torch.compile(model, fullgraph=True, backend=mla_fx.get_backend(target="reference"))
        step(input_ids=token, past_key_values=cache)
        report = mla_fx.last_report()
        if report.fused != fused:
            raise SystemExit(f"Expected {fused}, fused {report.fused}.\n{report}")
        elapsed.append(report.milliseconds)
    return statistics.median(elapsed[1:])


def rewriting(many: int, rounds: int) -> Iterator[Row]:
    def deepseek(layers: int) -> float:
        console.log(f"rewriting {layers} layers")
        fused = {"mla_prolog": layers, "latent_attention": layers}
        return rewrite_time(small_models.deepseek(layers), fused, rounds)

    time_few, time_many = deepseek(FEW), deepseek(many)
    time_llama = rewrite_time(small_models.llama(FEW), {}, rounds)
    yield Row(f"rewriting, per layer, {many} that match", time_many / many, 10, 3, "ms")
    yield Row(f"rewriting, per layer, {FEW} that do not", time_llama / FEW, 1, 0.2, "ms")
    yield Row(
        f"rewriting, exponent of growth, {FEW} to {many} layers",
        math.log(time_many / time_few) / math.log(many / FEW),
        1.15,
        1.05,
        "",
    )


@torch.no_grad()
def compile_time(layers: int, backend: Any) -> float:
    """Seconds until the first step of a new model is done."""
    model = small_models.deepseek(layers)
    cache, token = small_models.prefilled(model, length=CONTEXT), small_models.tokens()
    torch._dynamo.reset()
    step = torch.compile(model, fullgraph=True, backend=backend)
    start = time.perf_counter()
    step(input_ids=token, past_key_values=cache)
    return time.perf_counter() - start


def whole(layers: int) -> Iterator[Row]:
    seconds: dict[str, list[float]] = {"inductor": [], "mla": []}
    for backend in seconds:
        compile_time(1, backend)
    for turn in range(WHOLE):
        for backend, taken in seconds.items():
            taken.append(compile_time(layers, backend))
            console.log(f"compiling {layers} layers, round {turn + 1} of {WHOLE}, {backend}: {taken[-1]:.1f} s")
    ours, stock = (statistics.median(seconds[backend]) for backend in ("mla", "inductor"))
    yield Row(f"compiling {layers} layers, time / stock Inductor", ours / stock, 1.05, 0.8)


# torch.compile loads Dynamo and its list of backends for any backend, so neither is counted.
IMPORT = """
import sys, time, torch, torch._dynamo
torch._dynamo.lookup_backend("inductor")
before = time.perf_counter()
import mla_fx
torch._dynamo.lookup_backend("mla")
after = time.perf_counter()
print(after - before, sum(name.startswith(("mla_fx.patterns.", "mla_fx.lowering.")) for name in sys.modules))
"""


def importing(rounds: int) -> Iterator[Row]:
    """Median seconds in fresh processes, and how many rules and targets were loaded, which could wait. The first one
    writes byte code, as an installation does."""
    command = [sys.executable, "-c", IMPORT]
    cached = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    answers = [
        subprocess.run(command, check=True, capture_output=True, text=True, env=cached).stdout.split()
        for _ in range(1 + rounds)
    ][1:]
    yield Row("import and registration", statistics.median(float(seconds) for seconds, _ in answers), 0.25, 0.05, "s")
    yield Row("rules and targets loaded by it", max(int(loaded) for _, loaded in answers), 0, 0, "")


def main() -> None:
    options = parser(__doc__, rounds=3)
    options.add_argument("--layers", type=int, default=MANY, help="(%(default)s)")
    given = options.parse_args()
    without_caches()
    rows = [*rewriting(given.layers, given.rounds), *importing(given.rounds), *whole(given.layers)]
    finish(Results(rows), given)


if __name__ == "__main__":
    main()
