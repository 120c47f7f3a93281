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
    """A key that changes with the options, the sources of all rules, operators and lowerings, and which of a graph's
    inputs share memory, which PyTorch's own key does not contain.

    A target's own options are not part of it: the compiler has them in the key of its own cache."""
    decides = source_hash(), dataclasses.replace(options, extra={}), _memories(inputs)
    return hashlib.sha256(repr(decides).encode()).hexdigest()


def _memories(inputs: Sequence[Any]) -> list[int]:
    """For each tensor input, the number of the first input that shares its memory."""
    first: dict[int, int] = {}
    tensors = [value for value in inputs if isinstance(value, Tensor)]
    return [first.setdefault(memory_of(value), place) for place, value in enumerate(tensors)]


def are_plain(inputs: Sequence[Any]) -> bool:
    """Whether it is known for all tensors which memory they use."""
    tensors = (value for value in inputs if isinstance(value, Tensor))
    return all(value.layout is torch.strided and not is_traceable_wrapper_subclass(value) for value in tensors)


def source_hash() -> str:
    """A hash of the sources that decide how a graph is rewritten; not of their imports from elsewhere."""
    return _hash_of(discovery.found_rules())


@functools.lru_cache(maxsize=1)
def _hash_of(rules: discovery.Found) -> str:
    """The hash while these are the rules; a rule that cannot be used does not count, whatever its source is."""
    digest = hashlib.sha256(repr([str(fault) for fault in rules.faults]).encode())
    for package in ("mla_fx", discovery.LOWERING, *discovery.packages()):
        for name, path in discovery.sources(package):
            digest.update(name.encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()
