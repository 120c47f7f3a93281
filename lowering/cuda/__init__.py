"""Kernels for CUDA devices of NVIDIA, in Triton, which comes with PyTorch for CUDA.

A file that lowers an operator names it, `OPERATOR`, and has a function `lower(a)`, as in `loops`. Where it raises
NoMatch, the lowering of that folder is used. With a device and Triton, all files are imported at once: they declare the
operators that compiled code from a cache calls."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping

import torch

from mla_fx.graph.torch_private import OpOverload
from mla_fx.target import Lowering, first_of, modules_of_operators

IS_NVIDIA = torch.cuda.is_available() and torch.version.hip is None  # PyTorch calls AMD's devices "cuda", too
HAS_KERNELS = IS_NVIDIA and importlib.util.find_spec("triton") is not None
LOWERINGS = {entry.overload: module for entry, module in modules_of_operators(__name__)} if HAS_KERNELS else {}


def lowerings(others: Mapping[OpOverload, Lowering]) -> Mapping[OpOverload, Lowering]:
    """The lowering of each operator: to a kernel if there is one for a call, else that of `others`."""
    return {**others, **{name: first_of(module, others[name]) for name, module in LOWERINGS.items()}}
