"""Random values for what a region reads."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from mla_fx.graph.torch_private import OpOverload

from .small_sizes import Numbers

SPREAD = 0.25  # numbers are so small that an epsilon beside their squares is noticed
VISIBLE, MORE_VISIBLE = 0.7, 0.95  # of flags, in the first attempts and later
INTEGER_CODES = (torch.int8, torch.uint8)  # numbers; wider whole numbers are places or names, as those of experts
LEAST = (-1, 1, 3, 0)  # the smallest whole numbers of the first attempts; a program may subtract from them
TRIES = 16


class Inputs:
    """Draws values one after another. Each of `TRIES` attempts draws other whole numbers: what they count is not known,
    and a program raises an error for those that it cannot use. With `are_factors_positive`, tensors of one floating
    number are above zero."""

    def __init__(
        self, numbers: Numbers, small: Mapping[int, int], attempt: int, are_factors_positive: bool = False
    ) -> None:
        self.numbers, self.small, self.attempt = numbers, small, attempt
        self.are_factors_positive = are_factors_positive
        self.given: Any = {"generator": torch.Generator("cpu").manual_seed(attempt), "device": "cpu"}

    @property
    def differ(self) -> bool:
        """Whether all places that are drawn are different ones."""
        return self.attempt < len(LEAST) or self.attempt % 2 == 0

    def _least(self) -> int:
        """The smallest place: after the first attempts behind one of the sizes, because a chunk may begin there."""
        if self.attempt < len(LEAST):
            return LEAST[self.attempt]
        sizes = sorted({*self.small.values()})
        return sizes[len(sizes) * (self.attempt - len(LEAST)) // (TRIES - len(LEAST))] + 1

    def drawn(self, leaf: Node) -> Any:
        own = constant_of(leaf)
        return self.like(leaf.meta["val"]) if own is None else own

    def like(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._tensor(value.dtype, [self.small[size] for size in self.numbers.of(value)])
        number = self.numbers.of(value)
        return self.small.get(number, number)

    def _tensor(self, dtype: torch.dtype, sizes: list[int]) -> Tensor:
        if dtype.is_complex:
            return torch.randn(sizes, dtype=torch.complex128, **self.given)
        if dtype.is_floating_point:
            values = torch.randn(sizes, dtype=torch.float64, **self.given) * SPREAD
            return values.abs() if self.are_factors_positive and values.numel() == 1 else values
        if dtype == torch.bool:
            return self._flags(sizes)
        if dtype in INTEGER_CODES:
            return self._codes(dtype, sizes)
        return self._places(sizes).to(dtype)

    def _codes(self, dtype: torch.dtype, sizes: list[int]) -> Tensor:
        """Both ends of the range are among them."""
        least, most = torch.iinfo(dtype).min, torch.iinfo(dtype).max
        codes = torch.randint(least, most + 1, sizes, dtype=dtype, **self.given)
        codes.view(-1)[:1], codes.view(-1)[1:][-1:] = least, most
        return codes

    def _flags(self, sizes: list[int]) -> Tensor:
        """Draw flags like those of a mask: some rows see nothing, as long as the program's results are finite then."""
        visible = VISIBLE if self.attempt < len(LEAST) else MORE_VISIBLE
        flags, first = torch.rand(sizes, **self.given) < visible, torch.tensor(0, device="cpu")
        if not sizes or 0 in sizes:
            return flags
        if len(sizes) > 1 and self.attempt == 0:
            return flags.index_fill(-2, first, False)
        return flags.index_fill(-1, first, True)

    def _places(self, sizes: list[int]) -> Tensor:
        """Draw positions, slots, blocks or lengths: all different as long as the program takes that, then in turns all
        different and larger, or at random all different, different in each row, or a few."""
        count = math.prod(sizes)
        if self.differ:
            return (torch.randperm(count + 2, **self.given)[:count] + self._least()).reshape(sizes)
        kind = int(torch.randint(3, (), **self.given))
        if kind == 0 or not sizes:
            return torch.randperm(count, **self.given).reshape(sizes)
        if kind == 1:
            return torch.rand(sizes, **self.given).argsort(-1)
        return torch.randint(0, 3, sizes, **self.given)


def _writes(user: Node) -> bool:
    return isinstance(user.target, OpOverload) and user.target._schema.is_mutable


def constant_of(leaf: Node) -> Any:
    """What a graph holds and does not write; None for tensors of more than one number. A rule may have read one number,
    but of more only the shape."""
    if leaf.op != "get_attr" or any(map(_writes, leaf.users)):
        return None
    owner: Any = leaf.graph.owning_module
    for name in str(leaf.target).split("."):
        owner = getattr(owner, name, None)
    if not isinstance(owner, Tensor):
        return owner
    if owner.numel() != 1:
        return None
    return owner.double() if owner.is_floating_point() else owner
