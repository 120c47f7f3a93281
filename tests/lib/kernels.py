"""What the tests of C++ kernels share."""

import contextlib
import functools
import inspect
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from mla_fx.lowering.cpu import built
from torch._inductor.utils import run_and_get_code

# Without AMX, without 512 bits, and without any instructions of vectors.
LESSER_PROCESSORS = "DNNL_MAX_CPU_ISA=AVX512_CORE_BF16", "ATEN_CPU_CAPABILITY=avx2", "ATEN_CPU_CAPABILITY=default"

LANGUAGES = {"triton.language", "triton.language.core"}  # what Triton's interpreter patches


def check_on(processor, chosen, *files):
    """Run the chosen tests of some files in a process that uses no more of the processor."""
    name, value = processor.split("=")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files, "-k", chosen]
    subprocess.run(command, check=True, env=os.environ | {name: value}, stdout=subprocess.DEVNULL)


@contextlib.contextmanager
def threads(count):
    """Torch and the kernels run on so many threads, in a block or in a function that this decorates."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def compiled(function, *inputs, **options):
    """What it returns, Inductor's code, and the compiled function."""
    torch._dynamo.reset()
    with torch._inductor.config.patch(force_disable_caches=True):
        step = torch.compile(function, backend="mla", fullgraph=True, **options)
        found, (code,) = run_and_get_code(step, *inputs)
    return found, code, step


def compiled_call(operator, a, **options):
    """What a compiled call of an operator on a record returns, attention without its empty logarithms, and Inductor's
    code."""
    given = {name: value for name, value in vars(a).items() if isinstance(value, torch.Tensor)}
    found, code, _ = compiled(lambda tensors: operator.overload(**{**vars(a), **tensors}), given, options=options)
    return found if getattr(a, "return_lse", True) else found[0], code


def doubled(a):
    """A record with its numbers in float64; codes stay."""
    tensors = {name: value for name, value in vars(a).items() if isinstance(value, torch.Tensor)}
    floats = {name: value for name, value in tensors.items() if value.is_floating_point() and value.itemsize > 1}
    return replace(a, **{name: value.double() for name, value in floats.items()})


class Patched:
    """Triton's interpreter patches its language at each call of a function in a kernel, which takes half of its time.
    Here the language stays patched until the kernel returns."""

    def __init__(self, patch):
        self.patch, self.depth, self.scopes = patch, 0, {}

    def __call__(self, function):
        self.depth += 1
        languages = LANGUAGES & {value.__name__ for value in vars_of_modules(function)}
        if any(language not in self.scopes for language in languages):
            self.scopes |= dict.fromkeys(languages, self.patch(function))
        return self

    def restore(self):
        self.depth -= 1
        while self.depth == 0 and self.scopes:
            self.scopes.popitem()[1].restore()


def vars_of_modules(function):
    return filter(inspect.ismodule, function.__globals__.values())


@functools.cache
def hasten_the_interpreter():
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    interpreter._patch_lang = Patched(interpreter._patch_lang)


def interpretable(a):
    """Triton's interpreter multiplies no bfloat16. With a query of float32, a kernel multiplies that."""
    hasten_the_interpreter()
    return replace(a, query=a.query.float()) if a.query.dtype == torch.bfloat16 else a


def error(found, exact):
    return float((found.double() - exact).norm() / exact.norm())


def without_a_compiler(monkeypatch, kernel):
    """Nothing can be built, and nothing was, for the module of a kernel."""

    def refuse(source):
        raise RuntimeError("no compiler\nand its log")

    monkeypatch.setattr(built, "cpp_library", refuse)
    monkeypatch.setattr(kernel, "built", functools.cache(built.built.__wrapped__))
