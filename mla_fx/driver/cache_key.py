"""The key under which a compiled graph outlives its process."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mla_fx.graph.torch_private import is_traceable_wrapper_subclass, memory_of
from mla_fx.options import Options

from . import discovery


def key(options: Options, inputs: Sequence[Any] = ()) -> str:
    """Changes with the options, with the source of every rule, operator and lowering, and with which of a graph's
    inputs lie in one memory, of which PyTorch's own key knows nothing.

    A target's own options are not among them: what compiles the graph keys its cache by those itself."""
    decides = source_hash(), dataclasses.replace(options, extra={}), _memories(inputs)
    return hashlib.sha256(repr(decides).encode()).hexdigest()


def _memories(inputs: Sequence[Any]) -> list[int]:
    """For each input that is a tensor, the number of the first that lies in the same memory."""
    first: dict[int, int] = {}
    tensors = [value for value in inputs if isinstance(value, Tensor)]
    return [first.setdefault(memory_of(value), place) for place, value in enumerate(tensors)]


def are_plain(inputs: Sequence[Any]) -> bool:
    """Whether it can be told of all tensors in which memory they lie."""
    tensors = (value for value in inputs if isinstance(value, Tensor))
    return all(value.layout is torch.strided and not is_traceable_wrapper_subclass(value) for value in tensors)


def source_hash() -> str:
    """A hash of the sources that decide what a graph is rewritten to; not of what these import from elsewhere."""
    return _hash_of(discovery.found_rules())


@functools.lru_cache(maxsize=1)
def _hash_of(rules: discovery.Found) -> str:
    """The hash as long as these are the rules; one that cannot be used is none, whatever its source says."""
    digest = hashlib.sha256(repr([str(fault) for fault in rules.faults]).encode())
    for package in ("mla_fx", discovery.LOWERING, *discovery.packages()):
        for name, path in discovery.sources(package):
            digest.update(name.encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()
