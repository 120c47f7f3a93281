"""Values computed from weights, such as weights in another layout.

What is made from a weight belongs to that weight: compiled graphs share it, and calls with another model's weights make
their own. It is freed with the weight, or with the last graph that reads it."""

from __future__ import annotations

import threading
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from mla_fx.graph.torch_private import (
    StorageWeakRef,
    WeakIdKeyDictionary,
    memory_of,
    share_storage,
    version_of,
)

Source = Tensor | int
Make = Callable[..., Tensor]


class LaidOut:
    """A value computed from some of a graph's inputs, made once for each set of them until one of them is written.

    Values with equal recipes are computed alike, so graphs share what they make from the same tensors."""

    def __init__(self, make: Make, recipe: str, sources: Sequence[int], bytes: int) -> None:
        self.make, self.recipe, self.sources, self.bytes = make, recipe, sources, bytes
        self.made: MutableMapping[torch.UntypedStorage, dict[Any, _Made]] = WeakIdKeyDictionary()
        """The tensors that were made, by the storage of their first source."""
        self._constants = torch.empty(0).untyped_storage()  # what is made from no tensor belongs to the graph

    def __call__(self, inputs: Sequence[Any]) -> Tensor:
        sources = [inputs[position] for position in self.sources]
        with _lock:
            return self._of(sources).value_of(self.make, sources)

    def _of(self, sources: Sequence[Source]) -> _Made:
        storages = (source.untyped_storage() for source in sources if isinstance(source, Tensor))
        made = self.made.setdefault(next(storages, self._constants), {})
        key = tuple(map(_identity, sources))
        if key not in made:
            for old in [old for old, value in made.items() if value.is_orphan]:
                del made[old]
            made[key] = _shared.setdefault((self.recipe, key), _Made(sources))
        return made[key]


class _Made:
    """A value that was made from sources in the state that they had then."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self.storages: list[Any] = [_weak(source) for source in sources if isinstance(source, Tensor)]
        self.states: list[_State] = []
        self.value: Tensor | None = None

    @property
    def is_orphan(self) -> bool:
        return any(storage.expired() for storage in self.storages)

    def value_of(self, make: Make, sources: Sequence[Source]) -> Tensor:
        """The value, made anew in its own memory if a source was written: a captured graph may point there."""
        if self.value is None or not all(map(_State.is_of, self.states, sources)):
            fresh = _own(make, sources)
            self.value = fresh if self.value is None else self.value.copy_(fresh)
            self.states = [_State(source) for source in sources]
        return self.value


# Shares values between graphs, but keeps none of them alive. The storages in a value keep their addresses from being
# used again while it lives.
_shared: WeakValueDictionary[Any, _Made] = WeakValueDictionary()
_lock = threading.Lock()  # two threads must neither make the same value nor read one that is being made


def _weak(source: Tensor) -> StorageWeakRef:
    return StorageWeakRef(source.untyped_storage())  # type: ignore[no-untyped-call]  # torch left it so


def _identity(source: Source) -> Any:
    """A size, or the place of a tensor: its storage, and where its elements are in it."""
    if not isinstance(source, Tensor):
        return source
    return memory_of(source), source.data_ptr(), source.dtype, source.shape, source.stride()


def _own(make: Make, sources: Sequence[Source]) -> Tensor:
    """Call `make`; the result is contiguous, may be written in any mode, and never aliases a weight, because an update
    would then overwrite it."""
    with torch.inference_mode(False), torch.no_grad():
        made = make(*sources).contiguous()
        tensors = (source for source in sources if isinstance(source, Tensor))
        return made.clone() if any(share_storage(made, source) for source in tensors) else made


class _State:
    """The state of a graph input at one time: a tensor's version and sampled elements.

    A tensor is unchanged while PyTorch has counted no write. On a CPU a sample of the elements also detects writes
    that bypass the counter, through `.data` or `.numpy()`. Another device would need a synchronisation at each call,
    and a sample may miss single elements: call `refresh` in these cases."""

    def __init__(self, source: Source) -> None:
        self.version = _version(source)
        self.sample = _sample(source)

    def is_of(self, source: Source) -> bool:
        if self.version is None or self.version != _version(source):
            return False
        sample = _sample(source)
        return self.sample is None or sample is None or torch.equal(self.sample, sample)


def _version(source: Source) -> int | None:
    """A tensor's version counter. An inference tensor has none: None. A size has one version."""
    if not isinstance(source, Tensor):
        return 0
    return None if source.is_inference() else version_of(source)


SAMPLES = 8  # at least this many along each dimension (fewer if it is shorter): microseconds a call for any weight


def _sample(source: Source) -> Tensor | None:
    """The bytes of some elements spread over a CPU tensor, or of all if there are few. None for anything else."""
    if not isinstance(source, Tensor) or source.device.type != "cpu":
        return None
    steps = tuple(slice(None, None, max(1, size // SAMPLES)) for size in source.shape)
    return source.detach()[steps].clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


def refresh(*sources: torch.nn.Module | Tensor) -> None:
    """Recompute the values derived from these models' weights, or from these tensors, at the next call.

    Call this after a write that PyTorch does not count: through `.data` (as when adapters are merged into weights),
    through `.numpy()`, or through a pointer. In-place operations such as `load_state_dict` and `copy_` are counted, and
    another tensor in place of a weight is detected. The derived values are recomputed in their own memory, so a
    captured graph stays valid. Nothing is recompiled."""
    for source in sources:
        tensors = [source] if isinstance(source, Tensor) else [*source.parameters(), *source.buffers()]
        for tensor in tensors:
            if not tensor.is_inference():  # values derived from inference tensors are recomputed at every call
                torch.autograd.graph.increment_version(tensor)
