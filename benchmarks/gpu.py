"""How fast is attention over latents on a CUDA device, beside the time to read them and beside stock Inductor?

python benchmarks/gpu.py                a few minutes
python benchmarks/gpu.py --bandwidth 4800   of the device in GB/s; measured by a copy if not given
python benchmarks/gpu.py --kernels flash_mla    or flashinfer: a library in place of our kernel, in compiled code
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from results import Results, Row, console, finish, parser

import mla_fx
from mla_fx.ops.emitted.attention import operator as attention
from mla_fx.ops.emitted.attention.arguments import Arguments

RANK, ROPE, PAGE = 512, 64, 64
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


def paged(a: Arguments) -> Arguments:
    """The same call over pages of one cache."""
    assert a.kr_cache is not None
    pool = torch.cat((a.kv_cache, a.kr_cache), -1).view(-1, PAGE, RANK + ROPE)
    table = torch.arange(len(pool), dtype=torch.int32, device="cuda").view(len(a.query), -1)
    return replace(a, kv_cache=pool[..., :RANK], kr_cache=pool[..., RANK:], block_table=table)


def attending(kernels: str) -> Callable[[Arguments], torch.Tensor]:
    from mla_fx.lowering.cuda import split_keys

    if kernels == "triton":
        return split_keys.attend

    def step(given: dict[str, torch.Tensor], scale: float) -> torch.Tensor:
        out: torch.Tensor = attention.operator.overload(**given, mask=None, scale=scale)
        return out

    fused = torch.compile(step, backend=mla_fx.get_backend(kernels=kernels), dynamic=False)
    return lambda a: fused({name: value for name, value in vars(a).items() if torch.is_tensor(value)}, a.scale)


def rows(rate: float, rounds: int, kernels: str) -> Iterator[Row]:
    attend = attending(kernels)
    stock = torch.compile(plain, dynamic=False)
    for batch, heads, context in itertools.product(BATCHES, HEADS, CONTEXTS):
        read = batch * context * (RANK + ROPE) * 2
        if read > MOST:
            continue
        a = arguments(batch, heads, context)
        given = a if kernels == "triton" else paged(a)
        exact = attention.body(a)[0].double()
        error = float((attend(given).double() - exact).norm() / exact.norm())
        assert error < 2**-6, f"the kernel is off by {error}"
        ours = milliseconds(lambda given=given: attend(given), rounds)  # type: ignore[misc]  # mypy drops the default
        theirs = milliseconds(lambda a=a: stock(a), rounds)  # type: ignore[misc]  # mypy drops the default
        what = f"{batch} x {context}, {heads} heads"
        console.log(f"{what}: {ours:.3f} ms, stock Inductor {theirs:.3f} ms, reading alone {read / rate:.3f} ms")
        yield Row(f"time / stock Inductor, {what}", ours / theirs, 1.0, 0.5)
        yield Row(f"time / reading the latents, {what}", ours * rate / read, 2.0, 1.3)


@torch.no_grad()
def main() -> None:
    options = parser(__doc__, rounds=20)
    options.add_argument("--bandwidth", type=float, help="of the device's memory, in GB/s")
    options.add_argument("--kernels", choices=("triton", "flash_mla", "flashinfer"), default="triton")
    given = options.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("gpu.py needs a CUDA device; there is none.")
    rate = given.bandwidth * 1e6 if given.bandwidth else bandwidth(given.rounds)
    notes = [f"{given.kernels} on {torch.cuda.get_device_name()}, {rate / 1e6:.0f} GB/s"]
    finish(Results(list(rows(rate, given.rounds, given.kernels)), notes=notes), given)


if __name__ == "__main__":
    main()
