"""What the Triton kernels need of a GPU, compiled for each architecture here: registers, spills and shared memory.

python benchmarks/cubins.py        half a minute; no device is needed
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from mla_fx.lowering.cuda import split_keys
from results import console
from rich.table import Table
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

ARCHITECTURES = {"sm_80": 80, "sm_90": 90, "sm_100": 100}
SHARED = {"sm_80": 163, "sm_90": 227, "sm_100": 227}  # KiB of a block, at most; CUDA's programming guide
FLAGS = {"HAS_LENGTHS": True, "HAS_FILL": False, "HAS_MASK": False, "IS_BOOL": False}
POINTERS = {"table": "*i32", "lengths": "*i64", "mask": "*u8", "outs": "*fp32", "lses": "*fp32"}


@dataclass(frozen=True)
class Use:
    """What a kernel takes that is compiled for one architecture."""

    kernel: str
    architecture: str
    registers: int
    spilled: int  # bytes
    shared: int  # bytes


def uses() -> Iterator[Use]:
    for name, number in ARCHITECTURES.items():
        for dtype in ("bf16", "fp16"):
            for has_table in (False, True):
                what = f"{dtype}, in {'pages' if has_table else 'one piece'}"
                yield use(what, name, number, dtype, has_table)


def use(what: str, name: str, number: int, dtype: str, has_table: bool) -> Use:
    constants = {
        "R": 512,
        "DR": 64,
        "COLUMNS": 512,
        "ROTARY": 64,
        "ROWS": split_keys.ROWS,
        "KEYS": split_keys.KEYS,
        "HAS_TABLE": has_table,
        **FLAGS,
        "PRECISION": "ieee",
    }
    kernel = split_keys.attend_to_part
    types = {each: kind_of(each, dtype) for each in kernel.arg_names if each not in constants}
    source = ASTSource(fn=kernel, signature={**types, **dict.fromkeys(constants, "constexpr")}, constexprs=constants)
    found = triton.compile(source, GPUTarget("cuda", number, 32), {"num_warps": split_keys.WARPS})
    return Use(what, name, *resources(found.asm["cubin"]), found.metadata.shared)


def kind_of(argument: str, dtype: str) -> str:
    if argument in ("query", "query_rope", "kv_cache", "kr_cache"):
        return f"*{dtype}"
    return POINTERS.get(argument, "fp32" if argument in ("scale", "fill") else "i32")


def resources(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread, and bytes of its stack, which are what spills."""
    tool = Path(triton.backends.__file__).with_name("nvidia") / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        printed = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, spilled = (int(re.findall(rf"{what}:(\d+)", printed)[0]) for what in ("REG", "STACK"))
    return registers, spilled


def main() -> None:
    table = Table("kernel", "architecture", "registers", "spilled", "shared memory", "of at most")
    does_not_fit = 0
    for found in uses():
        row: list[Any] = [found.kernel, found.architecture, found.registers, f"{found.spilled} bytes"]
        table.add_row(*map(str, row), f"{found.shared / 1024:.0f} KiB", f"{SHARED[found.architecture]} KiB")
        does_not_fit += found.spilled > 0 or found.shared > 1024 * SHARED[found.architecture]
    console.print(table)
    if does_not_fit:
        raise SystemExit(f"{does_not_fit} kernels spill registers or take too much shared memory.")


if __name__ == "__main__":
    main()
