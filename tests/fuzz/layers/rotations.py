"""Rotations as products of complex numbers."""

from __future__ import annotations

import torch
from torch import Tensor

from .plain import Layer


class ComplexRope(Layer):
    def tables(self) -> tuple[Tensor, ...]:
        return (torch.complex(*(self.random(self.sizes.tokens, self.sizes.rope // 2) for _ in range(2))),)

    def rotate(self, x: Tensor, turn: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.contiguous().unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * self.turned(turn)).flatten(-2)

    def turned(self, turn: Tensor) -> Tensor:
        return turn


class ComplexFactor(ComplexRope):
    """YaRN's attention factor, multiplied into the table."""

    def turned(self, turn: Tensor) -> Tensor:
        return turn * 1.5


class ConjugatedTable(ComplexRope):
    def turned(self, turn: Tensor) -> Tensor:
        return turn.conj()
