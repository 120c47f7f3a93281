"""The time that a step takes at least: to read its bytes once, and to do the arithmetic of attention, at rates that the
machine reached in the same rounds.

All threads read with the widest instructions, from several places at once. `torch.sum` over int64 is timed beside: it
is how this floor was measured before, and it reads more slowly on some processors.
"""

from __future__ import annotations

import ctypes
import functools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from mla_fx.graph.torch_compilers import cpp_library

MM_SIZE = 2048
DRIFT = 0.15  # of the reading rate; a race that sees more is run again

READ = """
#include <ATen/cpu/vec/vec.h>
#include <omp.h>
using Lanes = at::vec::Vectorized<int64_t>;
constexpr int64_t STREAMS = 8;

// The sum of the values, except for a last part that is smaller than a step of all threads.
extern "C" int64_t sum(const int64_t* values, int64_t count) {
  int64_t total = 0;
#pragma omp parallel reduction(+ : total)
  {
    const int64_t part = count / omp_get_num_threads() / STREAMS / Lanes::size() * Lanes::size();
    const int64_t* first = values + omp_get_thread_num() * STREAMS * part;
    Lanes sums[STREAMS];
    for (auto& sum : sums) sum = Lanes(0);
    for (int64_t i = 0; i < part; i += Lanes::size())
      for (int64_t stream = 0; stream < STREAMS; ++stream)
        sums[stream] = sums[stream] + Lanes::loadu(first + stream * part + i);
    for (auto& sum : sums) {
      int64_t lanes[Lanes::size()];
      sum.store(lanes);
      for (int64_t lane : lanes) total += lane;
    }
  }
  return total;
}
"""


@functools.cache
def _sum() -> Any:
    function = cpp_library(READ).sum
    function.argtypes, function.restype = (ctypes.c_void_p, ctypes.c_int64), ctypes.c_int64
    return function


@dataclass
class Floor:
    """Milliseconds of each round for `bytes_read` and for a product of two squares; `flops` are those of attention."""

    bytes_read: int
    flops: float
    read: list[float] = field(default_factory=list)
    read_by_torch: list[float] = field(default_factory=list)
    multiply: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.values = torch.ones(self.bytes_read // 8, dtype=torch.int64)
        self.square = torch.randn(MM_SIZE, MM_SIZE, dtype=torch.bfloat16)

    def measure(self) -> None:
        """One round."""
        self.read.append(clock(lambda: _sum()(self.values.data_ptr(), len(self.values))))
        self.read_by_torch.append(clock(self.values.sum))
        self.multiply.append(clock(lambda: self.square @ self.square))

    @property
    def arithmetic(self) -> float:
        return self.flops * statistics.median(self.multiply) / (2 * MM_SIZE**3)

    @property
    def milliseconds(self) -> float:
        return statistics.median(self.read) + self.arithmetic

    @property
    def by_torch(self) -> float:
        """The same with the bytes read by `torch.sum`."""
        return statistics.median(self.read_by_torch) + self.arithmetic

    @property
    def drift(self) -> float:
        """The change of the reading rate between the first and the last third of the rounds."""
        third = max(1, len(self.read) // 3)
        first, last = statistics.median(self.read[:third]), statistics.median(self.read[-third:])
        return abs(first / last - 1)

    def __str__(self) -> str:
        rates = (self.bytes_read / statistics.median(read) / 1e6 for read in (self.read, self.read_by_torch))
        return "reads {:.0f} GB/s, by torch.sum {:.0f}".format(*rates) + f", moved {self.drift:.0%}"


def clock(work: Callable[[], object]) -> float:
    """Milliseconds."""
    start = time.perf_counter()
    work()
    return (time.perf_counter() - start) * 1e3
