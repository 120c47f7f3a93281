"""Memory that a C++ kernel cannot have is a Python error, which says how much it is: on the thread of the call, and on
those of a parallel region, which no exception may leave. Where there is no rotary part, a kernel copies no memory."""

import os
import subprocess
import sys

import pytest
from mla_fx.lowering.cpu import few_rows

BYTES = 2**20
BEGIN = f"""
import resource
import torch
from mla_fx.lowering.cpu import attention_over_rows, few_rows, lightning_index
from mla_fx.ops.emitted.attention.arguments import Arguments
from mla_fx.ops.emitted.lightning_index import Arguments as Index

torch.set_num_threads(2)

def draw(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))

def attend(pages, width, heads=16):
    table = torch.zeros(1, pages, dtype=torch.int64)
    a = Arguments(draw(1, 1, heads, width), None, draw(1, 256, width), None, None, block_table=table, scale=width**-0.5)
    return lambda: attention_over_rows.run(a)[0]

def choose(width):
    operands, out = (draw(1, 1, 4, width), draw(2, 128, width), draw(1, 1, 4)), draw(1, 1, 256)
    a = Index(*operands, block_table=torch.tensor([[1, 0]]), sparse_count=3)
    return lambda: lightning_index.index_scores_into(a, out) or out

def multiply(inner):
    rows, weight = draw(16, inner).bfloat16(), draw(1, inner).bfloat16().mT
    return lambda: few_rows.run(rows, weight)

def limited(few, many, free):
    few()  # threads start, and libraries are loaded
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + free * {BYTES}, resource.RLIM_INFINITY))
    try:
        many()
    except MemoryError as error:
        print(error)
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
    assert bool(many().isfinite().all()) and bool(many().any()), "the process goes on"
"""
CASES = {  # the call, MiB that are free, and what is wanted at once
    "sums of parts": ("attend(1, 64), attend(4, 2**16, 32)", 24, "attention over pages", 32 * BYTES),
    "rows of a thread": ("attend(1, 64), attend(1, 2**16)", 32, "attention over pages", 64 * BYTES),
    "keys of a thread": ("choose(64), choose(2**16)", 24, "the choice of keys", 64 * BYTES),
    "pairs": ("multiply(64), multiply(2**20)", 16, "a product of few rows", 32 * BYTES),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_memory_that_the_system_does_not_give_is_an_error(name):
    call, free, kernel, size = CASES[name]
    if name == "pairs" and not few_rows.library().has_tiles():
        pytest.skip("without tiles, the kernel takes no memory")
    script = f"{BEGIN}\nlimited(*({call}), {free})\n"
    done = subprocess.run([sys.executable, "-c", script], check=True, stdout=subprocess.PIPE, text=True)
    assert done.stdout == f"{kernel} takes {size} bytes of memory at once, which the system does not give.\n"


@pytest.mark.slow
def test_no_rotary_part_is_not_copied(tmp_path):
    """A compiler's checks stop the process at a copy from nowhere, even of no bytes."""
    compiler = tmp_path / "checked"
    flags = "-fsanitize=nonnull-attribute -fsanitize-undefined-trap-on-error"
    compiler.write_text(f'#!/bin/sh\nexec {os.environ.get("CXX", "g++")} "$@" {flags}\n', encoding="utf-8")
    compiler.chmod(0o755)
    script = f"{BEGIN}\nassert bool(attend(2, 64)().isfinite().all()) and attention_over_rows.is_built()\n"
    own = {"CXX": str(compiler), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    subprocess.run([sys.executable, "-c", script], check=True, env=os.environ | own)
