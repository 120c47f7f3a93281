"""Rotations as products of complex numbers, and by tables whose columns are written in turn."""

from __future__ import annotations

from typing import Any

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


class Axes(Layer):
    """Positions of three axes: columns of the first row of angles are overwritten by those of the others."""

    def tables(self) -> tuple[Tensor, ...]:
        return self.random(3, self.sizes.tokens), self.random(self.sizes.rope // 2)

    def forward(self, x: Tensor, tables: tuple[Tensor, ...], *rest: Any) -> Any:
        return super().forward(x, self.made(*tables), *rest)

    def made(self, positions: Tensor, frequencies: Tensor) -> tuple[Tensor, ...]:
        angles = self.mixed(positions.unsqueeze(-1) * frequencies)
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos(), angles.sin()

    def mixed(self, table: Tensor) -> Tensor:
        row = table[0]
        for axis in (1, 2):
            row[..., axis::3] = table[axis, ..., axis::3]
        return row


class AxesOfTables(Axes):
    """Cosines and sines are made for each rotation, and then written."""

    def forward(self, x: Tensor, *rest: Any) -> Any:
        return Layer.forward(self, x, *rest)

    def made(self, positions: Tensor, frequencies: Tensor) -> tuple[Tensor, ...]:
        angles = positions.unsqueeze(-1) * frequencies
        angles = torch.cat((angles, angles), dim=-1)
        return self.mixed(angles.cos()), self.mixed(angles.sin())

    def rotate(self, x: Tensor, *tables: Tensor) -> Tensor:
        return super().rotate(x, *self.made(*tables))
