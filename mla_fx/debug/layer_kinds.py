"""Models of many layers, for `explain`: of equal layers, the first is computed, and the others pass their input on.
Only for meta tensors, where no result is lost."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from mla_fx.graph.torch_private import memory_of, tree_map

PLAIN = (bool, int, float, str, bytes, set, torch.dtype, torch.device)
EqualLayers = Mapping[str, list[str]]  # the paths of all layers that the one at this path represents


@dataclass
class Kind:
    """Equal layers: the first and its place, the others by their places, and what the first returned last."""

    first: nn.Module
    place: int
    others: dict[int, nn.Module] = field(default_factory=dict)
    returned: Any = None

    def holds(self, layer: nn.Module, place: int) -> bool:
        is_own = "forward" in vars(layer)  # which would lose it
        return not is_own and _are_alike(self.first, layer, (self.place, place), {})

    def remember(self, module: nn.Module, args: Any, returned: Any) -> None:
        self.returned = returned

    def pass_on(self, *args: Any, **kwargs: Any) -> Any:
        """What a layer of this kind returns, with its own arguments in place of their new values."""
        given = [value for value in chain(args, kwargs.values()) if isinstance(value, Tensor)]

        def passed(result: Any) -> Any:
            for number, value in enumerate(given):
                if isinstance(result, Tensor) and (value.shape, value.dtype) == (result.shape, result.dtype):
                    return given.pop(number)
            return result

        return tree_map(passed, self.returned)


@contextlib.contextmanager
def one_of_each_kind(function: Callable[..., Any]) -> Iterator[EqualLayers]:
    """Compute only the first layer of each kind in a model on meta tensors.

    Yields the paths of the layers that each of those represents; empty if no layer is skipped."""
    path, layers = _layers(function) if isinstance(function, nn.Module) else ("", nn.ModuleList())
    kinds = [kind for kind in _kinds(layers) if kind.others]
    with contextlib.ExitStack() as restored:
        for kind in kinds:
            restored.callback(kind.first.register_forward_hook(kind.remember).remove)
            for layer in kind.others.values():
                layer.forward = kind.pass_on
                restored.callback(delattr, layer, "forward")
        yield {f"{path}.{kind.place}": [f"{path}.{place}" for place in (kind.place, *kind.others)] for kind in kinds}


def _kinds(layers: nn.ModuleList) -> list[Kind]:
    kinds: list[Kind] = []
    for place, layer in enumerate(layers):
        kind = next((kind for kind in kinds if kind.holds(layer, place)), None)
        if kind is None:
            kinds.append(Kind(layer, place))
        else:
            kind.others[place] = layer
    return kinds


def _layers(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """The list of modules with most of the parameters, and its path, if the whole model is on meta."""
    lists = [(path, found) for path, found in model.named_modules() if isinstance(found, nn.ModuleList)]
    is_on_meta = all(parameter.is_meta for parameter in model.parameters())
    if not lists or not is_on_meta:
        return "", nn.ModuleList()
    path, largest = max(lists, key=lambda found: sum(parameter.numel() for parameter in found[1].parameters()))
    is_composed = all(list(layer.children()) for layer in largest)  # else it is a list of projections
    return (path, largest) if is_composed else ("", nn.ModuleList())


def _are_alike(one: Any, other: Any, places: tuple[int, int], met: dict[Any, Any]) -> bool:
    """Whether two layers do the same with their own weights. Everything they hold, dtypes, numbers and sizes of
    tensors, is equal, or is the layer's own number in both; and what is one object in the first is one in the
    second."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return _layout(one) == _layout(other) and _are_partners(_memory(one), _memory(other), met)
    if isinstance(one, nn.Module):
        is_known = met.get(id(one)) == id(other)
        return is_known or (_are_partners(id(one), id(other), met) and _are_alike(vars(one), vars(other), places, met))
    if one is other:
        return True
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(_are_alike(*pair, places, met) for pair in zip(one, other, strict=True))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_are_alike(one[name], other[name], places, met) for name in one)
    if type(one) is int and (one, other) == places:
        return True
    return isinstance(one, PLAIN) and bool(one == other)


def _are_partners(one: Any, other: Any, met: dict[Any, Any]) -> bool:
    """Whether neither was paired with another before; records both."""
    return bool(met.setdefault(one, other) == other and met.setdefault(("of the other", other), one) == one)


def _memory(tensor: Tensor) -> tuple[str, int]:
    return "memory", memory_of(tensor)


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.device
