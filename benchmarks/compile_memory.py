"""Memory that compiling a whole model takes, compared with stock Inductor.

python benchmarks/compile_memory.py                  about seven minutes
python benchmarks/compile_memory.py --layers 8       to try the script

A small model of transformers decodes one token: what compiling needs takes the memory, and not the model. Each
compilation has a process of its own, and its first step is counted.
"""

from __future__ import annotations

import multiprocessing
import resource
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import small_models
import torch
from results import Results, Row, console, finish, parser, without_caches

MANY, CONTEXT, MIB = 61, 64, 2**20


@torch.no_grad()
def growth(layers: int, backend: str) -> float:
    """MiB by which the process grows at most. A model of one layer has loaded everything that compiling needs."""
    without_caches()
    held = 0.0
    for count in (1, layers):
        torch._dynamo.reset()
        model = small_models.deepseek(count)
        cache, token, held = small_models.prefilled(model, length=CONTEXT), small_models.tokens(), resident()
        torch.compile(model, backend=backend)(input_ids=token, past_key_values=cache)
    return peak() - held


def resident() -> float:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize() / MIB


def peak() -> float:
    """The most memory that this process ever held, in MiB. Linux counts KiB, macOS bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (MIB if sys.platform == "darwin" else 2**10)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--layers", type=int, default=MANY, help="(%(default)s)")
    given = options.parse_args()
    held = {}
    for backend in ("mla", "inductor"):
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            held[backend] = pool.submit(growth, given.layers, backend).result()
        console.log(f"{backend}: {held[backend]:.0f} MiB")
    what = f"compiling {given.layers} layers, peak / stock Inductor"
    rows = [Row(what, held["mla"] / held["inductor"], 1.1, 0.8)]
    finish(Results(rows), given)


if __name__ == "__main__":
    main()
