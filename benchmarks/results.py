"""Measured numbers and their bars: shown as a table, and saved as JSON for the plots."""

from __future__ import annotations

import argparse
import json
import os
import platform
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

console = Console(log_path=False)


@dataclass(frozen=True)
class Row:
    """A number, its bar, and its goal."""

    what: str
    value: float
    must: float
    goal: float
    unit: str = "x"
    at_least: bool = False

    @property
    def verdict(self) -> str:
        return "goal" if self._meets(self.goal) else "met" if self._meets(self.must) else "NOT MET"

    def _meets(self, bound: float) -> bool:
        return self.value >= bound if self.at_least else self.value <= bound

    def cells(self) -> tuple[str, ...]:
        sign = ">=" if self.at_least else "<="
        return (
            self.what,
            f"{self.value:.3g} {self.unit}",
            f"{sign} {self.must:g}",
            f"{sign} {self.goal:g}",
            self.verdict,
        )


@dataclass(frozen=True)
class Time:
    """The median milliseconds of one variant of the layer; `tokens` of each sequence are new."""

    variant: str
    milliseconds: float
    context: int
    tokens: int = 1
    batch: int = 1


@dataclass(frozen=True)
class Results:
    """What a benchmark found; `notes` are printed below the table."""

    rows: Sequence[Row]
    times: Sequence[Time] = ()
    notes: Sequence[str] = ()

    def show(self) -> None:
        table = Table("what", "measured", "must", "goal", "verdict", box=SIMPLE_HEAD)
        for row in self.rows:
            table.add_row(*row.cells())
        console.print(table)
        for note in (*self.notes, machine()):
            console.print(note, style="dim")

    def save(self, path: Path) -> None:
        kept = {"machine": machine(), **asdict(self)}
        path.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


def machine() -> str:
    release = f"Python {platform.python_version()}, torch {torch.__version__}"
    threads = f"{torch.get_num_threads()} threads, load {os.getloadavg()[0]:.1f}"
    return f"{_processor()} ({' '.join(_instructions())}), {threads}, {release}"


def _instructions() -> Iterator[str]:
    """The instruction sets that multiply bfloat16 or read memory, as far as the processor has them."""
    about = Path("/proc/cpuinfo")
    flags = about.read_text(encoding="utf-8").split() if about.exists() else ()
    return (name for name in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if name in flags)


def _processor() -> str:
    """The name of the processor, which Python does not know on Linux."""
    about = Path("/proc/cpuinfo")
    lines = about.read_text(encoding="utf-8").splitlines() if about.exists() else []
    names = (line.partition(": ")[2] for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def parser(description: str | None, rounds: int = 0) -> argparse.ArgumentParser:
    """The options of every benchmark, with the number of rounds if it times anything."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    if rounds:
        made.add_argument("--rounds", type=int, default=rounds, help="how often each is timed (%(default)s)")
    made.add_argument("--json", type=Path, help="where to keep the numbers")
    return made


def without_caches() -> None:
    """Make everything compile anew."""
    torch._inductor.config.force_disable_caches = True
    warnings.filterwarnings("ignore", message="dynamo_pgo force disabled")


def finish(results: Results, given: Any) -> None:
    results.show()
    if given.json:
        results.save(given.json)
