"""What a reproducer runs: the unfused and the fused graph on random inputs.

These are of the same shapes, strides and dtypes as the user's, and about as large. Of the user's numbers they know only
rounded statistics; equal numbers are kept."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from mla_fx.errors import VerificationError
from mla_fx.graph.torch_private import tree_leaves

from .closeness import SAME, distance, wide_dtype
from .exact import Wide

Function = Callable[[Mapping[str, Any]], Any]
AGREE = "With random inputs nothing differs; the difference needs numbers like those of the model."
MOST_DISTINCT = 2**24  # numbers from which distinct ones are drawn


def reproduce(unfused: Function, fused: Function, inputs: Mapping[str, Any], names: Sequence[str]) -> int:
    """Run both, print what differs, and return the exit status: 1 if something does. `names` are those of the
    results."""
    values = drawn(inputs)
    errors = distances(unfused, fused, values)
    name = str(_dtype(values)).removeprefix("torch.")
    for what, error in zip(names, errors, strict=True):
        print(f"{what}: fused and unfused are {error:.3g} apart in {name}, relative to the largest element")
    limit = SAME[_dtype(values)]
    if all(error <= limit for error in errors):
        print(AGREE)
        return 0
    print(f"The limit is {limit:.3g}.")
    return 1


def reproduce_compiled(fused: Function, inputs: Mapping[str, Any], **options: Any) -> int:
    """Compile a fused graph, print how what was compiled differs, and return the exit status: 1 if it does."""
    try:
        with torch.no_grad():
            torch.compile(fused, backend="mla", options={**options, "verify": "first"})(drawn(inputs))
    except VerificationError as error:
        print(error)
        return 1
    print(AGREE)
    return 0


def drawn(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs; the same numbers in each process."""
    generator = torch.Generator().manual_seed(0)
    return {name: value.draw(generator) if isinstance(value, Like) else value for name, value in inputs.items()}


def distances(unfused: Function, fused: Function, values: Mapping[str, Any]) -> list[float]:
    """The distance of each result of two functions in a dtype that hardly rounds."""
    graphs, dtype = (traced(function, values) for function in (unfused, fused)), _dtype(values)
    found = (Wide(gm, dtype).results([*values.values()]).outputs for gm in graphs)
    return [distance(mine, theirs) for theirs, mine in zip(*map(tree_leaves, found), strict=True)]


def traced(function: Function, values: Mapping[str, Any]) -> GraphModule:
    """The graph of a function, with what compilers note of each value."""

    def named(*given: Any) -> Any:
        inputs = dict(zip(values, given, strict=True))
        if not isinstance(function, GraphModule):
            return function(inputs)
        return function(*(inputs[str(node.target)] for node in function.graph.find_nodes(op="placeholder")))

    with torch.no_grad():
        return make_fx(named)(*values.values())


def _dtype(values: Mapping[str, Any]) -> torch.dtype:
    return wide_dtype(values.values())


@dataclass(frozen=True, repr=False)
class Like:
    """A tensor to draw: its layout, and the statistics of the tensor that it replaces.

    Floating numbers are normal ones within `low` and `high`; a `hidden` share of them, as in masks, is the dtype's
    lowest number, or minus infinity. Integers lie between `low` and `high`, both included. They count up by `step`, or
    are `distinct` or `ascending` as the others were: they may be the slots of a cache. A `mean` of flags are True."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: str = "cpu"
    mean: float = 0.0
    std: float = 0.0
    low: float = 0.0
    high: float = 0.0
    hidden: float = 0.0
    infinite: bool = False
    step: int | None = None
    distinct: bool = False
    ascending: bool = False

    def __repr__(self) -> str:
        given = [getattr(self, part.name) for part in fields(self)[:3]]
        named = {part.name: getattr(self, part.name) for part in fields(self)[3:]}
        defaults = {part.name: part.default for part in fields(self)[3:]}
        more = [f"{name}={value!r}" for name, value in named.items() if value != defaults[name]]
        return f"Like({', '.join([*map(repr, given), *more])})"

    def draw(self, generator: torch.Generator) -> Tensor:
        sizes = [1 if stride == 0 else size for size, stride in zip(self.shape, self.stride, strict=True)]
        drawn = self._numbers(tuple(sizes), generator)
        memory = torch.empty_strided(sizes, self.stride, dtype=self.dtype)
        return memory.copy_(drawn).expand(self.shape).to(self.device)

    def _numbers(self, sizes: tuple[int, ...], generator: torch.Generator) -> Tensor:
        if self.dtype == torch.bool:
            return torch.rand(sizes, generator=generator) < self.mean
        if self.dtype.is_complex:
            parts = [self._normal(sizes, generator) for _ in range(2)]
            return torch.complex(*parts)
        if self.dtype.is_floating_point:
            return self._masked(self._normal(sizes, generator), generator)
        return self._integers(sizes, generator)

    def _normal(self, sizes: tuple[int, ...], generator: torch.Generator) -> Tensor:
        numbers = torch.randn(sizes, generator=generator, dtype=torch.float64)
        return (numbers * self.std + self.mean).clamp(self.low, self.high)

    def _masked(self, numbers: Tensor, generator: torch.Generator) -> Tensor:
        lowest = -torch.inf if self.infinite else torch.finfo(self.dtype).min
        is_hidden = torch.rand(numbers.shape, generator=generator) < self.hidden
        return numbers.masked_fill(is_hidden, lowest)

    def _integers(self, sizes: tuple[int, ...], generator: torch.Generator) -> Tensor:
        low, high, count = int(self.low), int(self.high), torch.Size(sizes).numel()
        if self.step is not None:
            return (low + self.step * torch.arange(count)).reshape(sizes)
        if self.distinct:
            numbers = low + torch.randperm(high - low + 1, generator=generator)[:count]
        else:
            numbers = torch.randint(low, high + 1, (count,), generator=generator)
        return (numbers.sort().values if self.ascending else numbers).reshape(sizes)


def any_like(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, device: str) -> Like:
    """What to draw for a tensor without known values: matrices of scale 1/sqrt(columns), vectors around one, whole
    numbers of 0 and 1, and any codes of a byte."""
    if dtype.is_floating_point or dtype.is_complex:
        mean, std = (0.0, shape[-1] ** -0.5) if len(shape) > 1 and shape[-1] else (1.0, 0.3)
        return Like(shape, stride, dtype, device, mean=mean, std=std, low=-torch.inf, high=torch.inf)
    if dtype == torch.bool or dtype.itemsize > 1:
        return Like(shape, stride, dtype, device, mean=0.5, high=1)
    return Like(shape, stride, dtype, device, low=torch.iinfo(dtype).min, high=torch.iinfo(dtype).max)


def like(value: Any) -> Any:
    """What to draw in place of a tensor; any other value is itself."""
    if not isinstance(value, Tensor):
        return value
    known = _like_numbers(value.detach()) if value.numel() else {}
    device = str(value.device) if value.device.type != "cpu" else "cpu"
    return Like(tuple(value.shape), tuple(value.stride()), value.dtype, device, **known)


def _like_numbers(value: Tensor) -> Mapping[str, Any]:
    """The statistics of a tensor, by their names in `Like`."""
    if value.dtype == torch.bool:
        return {"mean": float(f"{value.double().mean():.3g}")}
    if value.is_complex():
        return _like_floats(torch.view_as_real(value).double())
    if not value.is_floating_point():
        return _like_integers(value.flatten().long())
    lowest = torch.finfo(value.dtype).min
    return _like_floats(value.double(), float(lowest))


def _like_floats(value: Tensor, lowest: float = -torch.inf) -> Mapping[str, Any]:
    is_hidden = value <= lowest
    ordinary = value[~is_hidden & value.isfinite()]
    found = {
        "hidden": float(f"{is_hidden.double().mean():.3g}"),
        "infinite": bool((value == -torch.inf).any()),
    }
    if ordinary.numel() == 0:
        return found
    low, high = float(ordinary.min()), float(ordinary.max())
    if low == high:
        return {**found, "mean": low, "low": low, "high": high}
    numbers = {"mean": float(ordinary.mean()), "std": float(ordinary.std()), "low": low, "high": high}
    return {**found, **{name: float(f"{number:.3g}") for name, number in numbers.items()}}


def _like_integers(value: Tensor) -> Mapping[str, Any]:
    steps = value.diff()
    found: dict[str, Any] = {"low": int(value.min()), "high": int(value.max())}
    if value.numel() > 1 and bool((steps == steps[0]).all()) and int(steps[0]) > 0:
        return {**found, "step": int(steps[0])}
    is_distinct = 1 < value.numel() == torch.unique(value).numel() and found["high"] - found["low"] < MOST_DISTINCT
    return {**found, "distinct": is_distinct, "ascending": value.numel() > 1 and bool((steps >= 0).all())}
