"""How fast is attention over latents on a CUDA device, beside the time to read them and beside stock Inductor?

python benchmarks/gpu.py                a few minutes
python benchmarks/gpu.py --bandwidth 4800   of the device in GB/s; measured by a copy if not given
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
from results import Results, Row, console, finish, parser

from mla_fx.ops.emitted import latent_attention
from mla_fx.ops.emitted.latent_attention import Arguments

RANK, ROPE = 512, 64
HEADS, BATCHES, CONTEXTS = (16, 64, 128), (1, 8, 32, 128), (1024, 8192, 65536)
MOST = 2**33  # bytes of caches
LARGE = 2**30  # bytes of the copy that measures the bandwidth


def milliseconds(run: Callable[[], Any], rounds: int) -> float:
    """The median, on the device's own clock."""
    taken = []
    for _ in range(rounds + 2):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        run()
        last.record()
        torch.cuda.synchronize()
        taken.append(first.elapsed_time(last))
    return statistics.median(taken[2:])


def bandwidth(rounds: int) -> float:
    """Bytes per millisecond that are read, or written."""
    given = torch.empty(LARGE, dtype=torch.uint8, device="cuda")
    taken = torch.empty_like(given)
    return 2 * LARGE / milliseconds(lambda: taken.copy_(given), rounds)


def arguments(batch: int, heads: int, context: int) -> Arguments:
    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device="cuda")

    queries = drawn(batch, 1, heads, RANK), drawn(batch, 1, heads, ROPE)
    return Arguments(*queries, drawn(batch, context, RANK), drawn(batch, context, ROPE), None, scale=0.07)


def plain(a: Arguments) -> torch.Tensor:
    """What a model writes."""
    assert a.query_rope is not None and a.kr_cache is not None
    scores = a.query.squeeze(1) @ a.kv_cache.mT + a.query_rope.squeeze(1) @ a.kr_cache.mT
    return ((scores.float() * a.scale).softmax(-1).to(a.query.dtype) @ a.kv_cache).unsqueeze(1)


def rows(rate: float, rounds: int) -> Iterator[Row]:
    from mla_fx.lowering.cuda import split_keys

    stock = torch.compile(plain, dynamic=False)
    for batch, heads, context in itertools.product(BATCHES, HEADS, CONTEXTS):
        read = batch * context * (RANK + ROPE) * 2
        if read > MOST:
            continue
        a = arguments(batch, heads, context)
        exact = latent_attention.body(a).double()
        error = float((split_keys.run(a)[0].double() - exact).norm() / exact.norm())
        assert error < 2**-6, f"the kernel is off by {error}"
        ours = milliseconds(lambda a=a: split_keys.run(a), rounds)  # type: ignore[misc]  # mypy drops the default
        theirs = milliseconds(lambda a=a: stock(a), rounds)  # type: ignore[misc]  # mypy drops the default
        what = f"{batch} x {context}, {heads} heads"
        console.log(f"{what}: {ours:.3f} ms, stock Inductor {theirs:.3f} ms, reading alone {read / rate:.3f} ms")
        yield Row(f"time / stock Inductor, {what}", ours / theirs, 1.0, 0.5)
        yield Row(f"time / reading the latents, {what}", ours * rate / read, 2.0, 1.3)


@torch.no_grad()
def main() -> None:
    options = parser(__doc__, rounds=20)
    options.add_argument("--bandwidth", type=float, help="of the device's memory, in GB/s")
    given = options.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("gpu.py needs a CUDA device; there is none.")
    rate = given.bandwidth * 1e6 if given.bandwidth else bandwidth(given.rounds)
    notes = [f"{torch.cuda.get_device_name()}, {rate / 1e6:.0f} GB/s"]
    finish(Results(list(rows(rate, given.rounds)), notes=notes), given)


if __name__ == "__main__":
    main()
