"""Kernels for CUDA devices of NVIDIA, in Triton, which comes with PyTorch for CUDA, or in a library of the user's.

A file that lowers an operator names it, `OPERATOR`, and has a function `lower(a)`, as in `loops`. Where it raises
NoMatch, the lowering of that folder is used. With a device and Triton, all files are imported at once: they declare the
operators that compiled code from a cache calls."""

import importlib
import importlib.util
from collections.abc import Mapping

import torch

from mla_fx.graph.torch_private import OpOverload
from mla_fx.target import Lowering, first_of, modules_of_operators

IS_NVIDIA = torch.cuda.is_available() and torch.version.hip is None  # PyTorch calls AMD's devices "cuda", too
HAS_KERNELS = IS_NVIDIA and importlib.util.find_spec("triton") is not None
LOWERINGS = {entry.overload: module for entry, module in modules_of_operators(__name__)} if HAS_KERNELS else {}
LIBRARIES = ("flash_mla", "flashinfer")  # packages of the user's, each with a file here
KERNELS = ("auto", "triton", *LIBRARIES)


def lowerings(others: Mapping[OpOverload, Lowering], kernels: str) -> Mapping[OpOverload, Lowering]:
    """The lowering of each operator: to a kernel if there is one for a call, else that of `others`.

    `kernels` is one of KERNELS. A library is tried first. What it refuses goes on, with a reason if it was named."""
    found = {name: first_of(module, others[name]) for name, module in LOWERINGS.items()}
    if kernels == "triton" or not LOWERINGS:
        return {**others, **found}
    asked = kernels in LIBRARIES
    library = importlib.import_module(f".{kernels if asked else LIBRARIES[0]}", __name__)
    before = importlib.import_module(".libraries", __name__).before
    taken = {name: module for name, module in LOWERINGS.items() if hasattr(module, "lower_to")}
    return {**others, **found, **{name: before(module, found[name], library, asked) for name, module in taken.items()}}


def installed() -> tuple[str, ...]:
    """The libraries that there are, on which compiled code depends."""
    return tuple(name for name in LIBRARIES if LOWERINGS and importlib.util.find_spec(name) is not None)
