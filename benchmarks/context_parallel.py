"""How fast is a step whose context lies on several processes, beside the same program under stock Inductor?

python benchmarks/context_parallel.py              three minutes, on an otherwise idle machine
python benchmarks/context_parallel.py --ranks 4

Each process has some of the heads and every R-th row of the context; collectives are gloo's.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from layer import compiled
from results import Results, Row, console, finish, parser, without_caches

import mla_fx

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from lib.zoo import parts, servers
from lib.zoo.servers import _dense
from lib.zoo.sizes import Sizes

SIZES = Sizes(2048, 16, 128, 64, 128, 768, 512, context=4096, block=64)
BATCH = 4
TOLERANCE = 0.03  # of the largest number, in bfloat16


@torch.no_grad()
def on_each_rank(rank: int, folder: str, ranks: int, rounds: int) -> None:
    """Write the median milliseconds of both, without and with symbols, as rank 0 sees them."""
    torch.set_num_threads(1)
    without_caches()
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=ranks)
    servers.SMALL = parts.SMALL = SIZES  # type: ignore[attr-defined]  # what their arguments are made of
    found = [race(rank, ranks, dynamic, rounds) for dynamic in (False, True)]
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


def race(rank: int, ranks: int, dynamic: bool, rounds: int) -> tuple[float, float]:
    torch._dynamo.reset()
    layer, whole = parts.ContextParallel(SIZES).bfloat16(), servers.Drafts(SIZES)
    steps = [compiled(_of(layer), backend=backend, dynamic=dynamic) for backend in (_ours(), "inductor")]
    x, positions = _dense(BATCH, 1, SIZES.hidden), torch.full((BATCH, 1), SIZES.context - 2)
    rows = [_dense(BATCH, SIZES.context, width, seed=width) for width in (SIZES.kv_rank, SIZES.rope)]
    kept = [[torch.cat((row[:, rank::ranks], row[:, :1]), 1).bfloat16() for row in rows] for _ in steps]
    exact, took = whole(x, positions, rows), ([], [])
    for turn in range(rounds + 2):
        for step, caches, times in zip(steps, kept, took, strict=True):
            dist.barrier()
            start = time.perf_counter()
            output = step(x.bfloat16(), positions, caches)
            times += [1e3 * (time.perf_counter() - start)] * (turn > 1)
            if turn == 0 and (off := float((output.float() - exact).abs().max() / exact.abs().max())) > TOLERANCE:
                raise SystemExit(f"the output is off by {off:.1e}; at most {TOLERANCE:.0e} is allowed.")
    ours, stock = map(statistics.median, took)
    return ours, stock


def _ours() -> Any:
    return mla_fx.get_backend(target="inductor")


def _of(layer: Any) -> Any:
    def run(*inputs: Any) -> Any:
        return layer(*inputs)

    return run


def main() -> None:
    options = parser(__doc__, rounds=25)
    options.add_argument("--ranks", type=int, default=2)
    given = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(on_each_rank, (folder, given.ranks, given.rounds), given.ranks)
        found = json.loads(Path(folder, "found.json").read_text(encoding="utf-8"))
    rows = []
    for what, (ours, stock) in zip(("fixed sizes", "symbolic sizes"), found, strict=True):
        console.log(f"{given.ranks} processes, {what}: {ours:.2f} ms, stock Inductor {stock:.2f} ms")
        rows.append(Row(f"time / stock Inductor, {given.ranks} processes, {what}", ours / stock, 1.0, 0.9))
    finish(Results(rows), given)


if __name__ == "__main__":
    main()
