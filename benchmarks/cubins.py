"""What the Triton kernels need of a GPU, compiled for each architecture here: registers, spills and shared memory; and
how long a device takes at least, by what it reads and multiplies.

python benchmarks/cubins.py        a minute; no device is needed
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
from mla_fx.lowering.cuda import lightning_index, split_keys
from results import console
from rich.table import Table
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

ARCHITECTURES = {"sm_80": 80, "sm_90": 90, "sm_100": 100}
SHARED = {"sm_80": 163, "sm_90": 227, "sm_100": 227}  # KiB of a block, at most; CUDA's programming guide
REGISTERS, WARP = 2**16, 32  # registers of a multiprocessor, threads of a warp
DEVICES = {"H100": (3.35, 989), "H200": (4.8, 989)}  # TB/s, TFLOP/s in bfloat16; NVIDIA's data sheets
POINTERS = {"table": "*i32", "lengths": "*i64", "mask": "*u8", "weights": "*fp32"}
POINTERS |= dict.fromkeys(("out", "outs", "lses", "kv_scales", "kr_scales"), "*fp32")
STORED = "query", "query_rope", "kv_cache", "kr_cache", "key"  # in the dtype of the model
OPTIONS = {"HAS_MASK": False, "IS_BOOL": False, "PRECISION": "ieee"}
ABSORBED = "attention of an absorbed query"  # in float32, of latents in float16
ATTENTION = {
    "R": 512,
    "DR": 64,
    "COLUMNS": 512,
    "ROTARY": 64,
    "ROWS": split_keys.ROWS,
    "KEYS": split_keys.KEYS,
    "HAS_LENGTHS": True,
    "HAS_FILL": False,
    "IS_ABSORBED": False,
    **dict.fromkeys(("KV_CODES", "KV_TILE", "KV_STEP", "KR_CODES", "KR_TILE", "KR_STEP"), 0),
    **OPTIONS,
}
CODES = {
    "int8": {"KV_CODES": 1, "KV_STEP": 0},
    "float8": {"KV_CODES": 2, "KV_STEP": 0},
    "tiles of float8": {"KV_CODES": 2, "KV_STEP": 1},
}
BYTES = ("", "*i8", "*u8", "*u8")  # of codes, by KV_CODES
INDEX = {"D": 128, "COLUMNS": 128, "HEADS": lightning_index.HEADS, "KEYS": lightning_index.KEYS, **OPTIONS}
WARPS = split_keys.WARPS
KERNELS: dict[str, tuple[Any, dict[str, Any], int]] = {
    "attention": (split_keys.attend_to_part, ATTENTION, WARPS),
    ABSORBED: (split_keys.attend_to_part, {**ATTENTION, "IS_ABSORBED": True}, WARPS),
    **{
        f"attention to {name}": (split_keys.attend_to_part, {**ATTENTION, **codes, "KV_TILE": split_keys.TILE}, WARPS)
        for name, codes in CODES.items()
    },
    "index scores": (lightning_index.score_keys, INDEX, lightning_index.WARPS),
}


@dataclass(frozen=True)
class Use:
    """What a kernel takes that is compiled for one architecture."""

    kernel: str
    architecture: str
    registers: int
    spilled: int  # bytes
    shared: int  # bytes
    warps: int

    @property
    def programs(self) -> int:
        """How many fit a multiprocessor at once."""
        by_registers = REGISTERS // (self.registers * WARP * self.warps)
        return min(by_registers, 1024 * SHARED[self.architecture] // max(1, self.shared))

    @property
    def fits(self) -> bool:
        return self.spilled == 0 and self.programs > 0


def uses() -> Iterator[Use]:
    for name, number in ARCHITECTURES.items():
        for kernel in KERNELS:
            for dtype in ("bf16", "fp16") if kernel != ABSORBED else ("fp16",):
                for has_table in (False, True) if not KERNELS[kernel][1].get("KV_CODES") else (True,):
                    what = f"{kernel}, {dtype}, in {'pages' if has_table else 'one piece'}"
                    yield Use(what, name, *compiled(*KERNELS[kernel], number, dtype, has_table), KERNELS[kernel][2])


def compiled(
    kernel: Any, options: dict[str, Any], warps: int, number: int, dtype: str, has_table: bool
) -> tuple[int, int, int]:
    """Registers of a thread, bytes of its stack, and bytes of shared memory."""
    constants = {**options, "HAS_TABLE": has_table}
    types = {each: kind_of(each, dtype) for each in kernel.arg_names if each not in constants}
    types |= {"query": "*fp32", "query_rope": "*fp32"} if options.get("IS_ABSORBED") else {}
    types |= {"kv_cache": BYTES[options["KV_CODES"]]} if options.get("KV_CODES") else {}
    source = ASTSource(fn=kernel, signature={**types, **dict.fromkeys(constants, "constexpr")}, constexprs=constants)
    found = triton.compile(source, GPUTarget("cuda", number, 32), {"num_warps": warps})
    return *resources(found.asm["cubin"]), found.metadata.shared


def kind_of(argument: str, dtype: str) -> str:
    if argument in STORED:
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


@dataclass(frozen=True)
class Work:
    """What a call reads, in bytes, and the operations of its products."""

    call: str
    read: float
    operations: float

    def least(self, device: str) -> tuple[float, float]:
        """Microseconds by what is read, and by what is multiplied."""
        terabytes, teraflops = DEVICES[device]
        return self.read / terabytes / 1e6, self.operations / teraflops / 1e6


def works() -> Iterator[Work]:
    """Attention with 512 + 64 columns, one new token of each sequence; index scores with 64 heads of 128 columns."""
    for batch, heads, context in ((1, 16, 4096), (1, 128, 4096), (1, 128, 65536), (32, 128, 4096), (128, 16, 8192)):
        keys = batch * context
        yield Work(f"attention, {batch} x {context}, {heads} heads", 2 * keys * 576, 2 * keys * heads * (576 + 512))
    keys = 32 * 4096
    yield Work("attention to rows of 656 bytes, 32 x 4096, 128 heads", 656 * keys, 2 * keys * 128 * (576 + 512))
    for context in (16384, 65536):
        chosen = 2048
        yield Work(f"index scores, 1 x {context}", 2 * context * 128, 2 * context * 64 * 128)
        yield Work(f"attention to {chosen} of {context}, 128 heads", 2 * chosen * 576, 2 * chosen * 128 * (576 + 512))


def main() -> None:
    table = Table("kernel", "architecture", "registers", "spilled", "shared memory", "programs at once")
    found = list(uses())
    for use in found:
        row: list[Any] = [use.kernel, use.architecture, use.registers, f"{use.spilled} bytes"]
        table.add_row(*map(str, [*row, f"{use.shared / 1024:.0f} KiB", use.programs]))
    console.print(table)
    paper = Table("call", "reads", "multiplies", *(f"{device}, at least" for device in DEVICES))
    for work in works():
        times = ("{:.1f} and {:.1f} us".format(*work.least(device)) for device in DEVICES)
        paper.add_row(work.call, f"{work.read / 2**20:.1f} MiB", f"{work.operations / 1e9:.1f} GFLOP", *times)
    console.print(paper, "Microseconds by what is read and by what is multiplied; the longer of the two is the least.")
    if does_not_fit := sum(not use.fits for use in found):
        raise SystemExit(f"{does_not_fit} kernels spill registers or take too much shared memory.")


if __name__ == "__main__":
    main()
