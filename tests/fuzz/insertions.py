"""Mutations that insert something between a value and its readers.

Each is two functions: `draw(random, value)` returns literal parameters, or None if it does not apply, and
`emit(bench, node, *parameters)` the node to read instead. IDENTITIES keep every value, CHANGES do not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import getitem
from random import Random
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from .bench import Bench, shape

aten = torch.ops.aten

Draw = Callable[[Random, Tensor], "tuple[Any, ...] | None"]
FACTORS = (-1.0, 0.0, 0.5, 2.0, 1.5, -0.25, 3.0)
NARROW = ("bfloat16", "float16", "float32")


@dataclass(frozen=True)
class Insertion:
    draw: Draw
    emit: Callable[..., Node]


CHANGES: dict[str, Insertion] = {}
IDENTITIES: dict[str, Insertion] = {}


def insertion(kinds: dict[str, Insertion], draw: Draw) -> Callable[[Callable[..., Node]], Callable[..., Node]]:
    def register(emit: Callable[..., Node]) -> Callable[..., Node]:
        kinds[emit.__name__] = Insertion(draw, emit)
        return emit

    return register


def change(draw: Draw) -> Callable[[Callable[..., Node]], Callable[..., Node]]:
    return insertion(CHANGES, draw)


def identity(draw: Draw) -> Callable[[Callable[..., Node]], Callable[..., Node]]:
    return insertion(IDENTITIES, draw)


# --- what is drawn ---------------------------------------------------------------------------------------------------


def nothing(random: Random, value: Tensor) -> tuple[Any, ...]:
    return ()


def numeric(random: Random, value: Tensor) -> tuple[Any, ...] | None:
    return None if value.dtype is torch.bool else ()


def real(random: Random, value: Tensor) -> tuple[Any, ...] | None:
    return () if value.is_floating_point() else None


def of_factor(random: Random, value: Tensor) -> tuple[Any, ...] | None:
    if value.is_complex():
        return (random.choice((1j, -1.0, 2.0, 0.5 + 1j, 0.0)), "mul")
    if not value.is_floating_point():
        return None if value.dtype is torch.bool else (random.choice((-1, 0, 2)), "mul")
    return random.choice(FACTORS), random.choice(("mul", "mul", "div", "tensor", "first"))


def of_number(random: Random, value: Tensor) -> tuple[Any, ...] | None:
    if value.dtype is torch.bool:
        return None
    return (random.choice((1.0, -1.0, 0.5, 1e-3) if value.is_floating_point() else (1, -1, 2)),)


def of_dtype(random: Random, value: Tensor) -> tuple[Any, ...] | None:
    return (random.choice(NARROW),) if value.is_floating_point() else None


def of_dim(random: Random, value: Tensor) -> tuple[Any, ...] | None:
    return (random.randrange(value.dim()),) if value.dim() else None


def of_long_dim(random: Random, value: Tensor) -> tuple[Any, ...] | None:
    dims = [dim for dim, size in enumerate(value.shape) if size > 1]
    return (random.choice(dims),) if dims else None


def of_cut(random: Random, value: Tensor) -> tuple[Any, ...] | None:
    found = of_long_dim(random, value)
    return found and (*found, random.randrange(1, value.shape[found[0]]))


def of_divisor(random: Random, value: Tensor) -> tuple[Any, ...] | None:
    """A dimension, and a number of pieces that divides it."""
    pairs = [(dim, pieces) for dim, size in enumerate(value.shape) for pieces in range(2, size) if size % pieces == 0]
    return random.choice(pairs) if pairs else None


def of_equal_dims(random: Random, value: Tensor) -> tuple[Any, ...] | None:
    pairs = [
        (first, second)
        for second in range(value.dim())
        for first in range(second)
        if value.shape[first] == value.shape[second] > 1
    ]
    return random.choice(pairs) if pairs else None


def of_dims(random: Random, value: Tensor) -> tuple[Any, ...] | None:
    return tuple(random.sample(range(value.dim()), 2)) if value.dim() > 1 else None


# --- arithmetic ------------------------------------------------------------------------------------------------------


@change(of_factor)
def scale(bench: Bench, node: Node, factor: Any, spelling: str) -> Node:
    if spelling == "mul":
        return bench.call(aten.mul.Tensor, node, factor)
    if spelling == "div":
        return bench.call(aten.div.Tensor, node, 1 / factor if factor else float("inf"))
    number = bench.call(aten.full.default, [], factor, dtype=node.meta["val"].dtype)
    return bench.call(aten.mul.Tensor, *((node, number) if spelling == "tensor" else (number, node)))


@change(numeric)
def negate(bench: Bench, node: Node) -> Node:
    return bench.call(aten.neg.default, node)


@change(of_number)
def add_number(bench: Bench, node: Node, number: Any) -> Node:
    return bench.call(aten.add.Tensor, node, number)


@change(lambda random, value: (random.choice((1, 2, 3, 24)),) if value.is_floating_point() else None)
def pile(bench: Bench, node: Node, times: int) -> Node:
    """A value added to itself again and again: two to the power of `times` terms."""
    for _ in range(times):
        node = bench.call(aten.add.Tensor, node, node)
    return node


@change(lambda random, value: (random.choice(("square", "abs", "tanh", "exp")),) if value.is_floating_point() else None)
def unary(bench: Bench, node: Node, name: str) -> Node:
    if name == "square":
        return bench.call(aten.mul.Tensor, node, node)
    return bench.call(getattr(aten, name).default, node)


@change(of_dtype)
def narrow(bench: Bench, node: Node, name: str) -> Node:
    """A cast that rounds, and one back."""
    rounded = bench.call(aten._to_copy.default, node, dtype=getattr(torch, name))
    return bench.call(aten._to_copy.default, rounded, dtype=node.meta["val"].dtype)


@change(lambda random, value: () if value.is_complex() else None)
def conjugate(bench: Bench, node: Node) -> Node:
    return bench.call(aten._conj.default, node)


@change(lambda random, value: () if value.dtype is torch.bool else None)
def invert(bench: Bench, node: Node) -> Node:
    return bench.call(aten.bitwise_not.default, node)


@change(
    lambda random, value: (
        (random.choice(("add", "subtract", "multiply", "copy", "fill")),)
        if value.is_floating_point() and value.dim() > 1
        else None
    )
)
def flags(bench: Bench, node: Node, spelling: str) -> Node:
    """Numbers together with flags, which count as 0 and 1 wherever they are no condition."""
    flags = bench.call(aten.ge.Scalar, node, 0.0)
    if spelling == "copy":
        return bench.call(aten.copy.default, node, flags)
    if spelling == "fill":
        return bench.call(aten.masked_fill.Scalar, node, flags, -1e4)
    targets = {"add": aten.add.Tensor, "subtract": aten.sub.Tensor, "multiply": aten.mul.Tensor}
    return bench.call(targets[spelling], node, flags)


# --- order -----------------------------------------------------------------------------------------------------------


@change(of_equal_dims)
def exchange_dims(bench: Bench, node: Node, first: int, second: int) -> Node:
    return bench.call(aten.transpose.int, node, first, second)


@change(of_long_dim)
def flip(bench: Bench, node: Node, dim: int) -> Node:
    return bench.call(aten.flip.default, node, [dim])


@change(of_cut)
def rotate(bench: Bench, node: Node, dim: int, cut: int) -> Node:
    """The first part of a dimension after the rest."""
    parts = bench.call(aten.slice.Tensor, node, dim, cut), bench.call(aten.slice.Tensor, node, dim, 0, cut)
    return bench.call(aten.cat.default, list(parts), dim)


@change(of_cut)
def roll(bench: Bench, node: Node, dim: int, shift: int) -> Node:
    return bench.call(aten.roll.default, node, [shift], [dim])


@change(of_divisor)
def riffle(bench: Bench, node: Node, dim: int, pieces: int) -> Node:
    """Every first element of each piece, then every second: (pieces, rest) read as (rest, pieces)."""
    sizes = shape(node)
    split = [*sizes[:dim], pieces, sizes[dim] // pieces, *sizes[dim + 1 :]]
    turned = bench.call(aten.transpose.int, bench.view(node, split), dim, dim + 1)
    return bench.view(turned, sizes)


@change(of_dims)
def scramble(bench: Bench, node: Node, first: int, second: int) -> Node:
    """A view with two sizes exchanged, and the dimensions exchanged back."""
    sizes = shape(node)
    sizes[first], sizes[second] = sizes[second], sizes[first]
    return bench.call(aten.transpose.int, bench.view(node, sizes), first, second)


@change(of_cut)
def one_for_all(bench: Bench, node: Node, dim: int, position: int) -> Node:
    one = bench.call(aten.slice.Tensor, node, dim, position, position + 1)
    return bench.call(aten.expand.default, one, shape(node))


@change(of_cut)
def patch(bench: Bench, node: Node, dim: int, end: int) -> Node:
    """The first elements of a dimension replaced by the last ones."""
    size = shape(node)[dim]
    source = bench.call(aten.slice.Tensor, node, dim, size - end, size)
    return bench.call(aten.slice_scatter.default, node, source, dim, 0, end)


@change(lambda random, value: () if value.dim() == 1 else None)
def column(bench: Bench, node: Node) -> Node:
    """What was along the last dimension is along the one before."""
    return bench.call(aten.unsqueeze.default, node, 1)


# --- identities ------------------------------------------------------------------------------------------------------


@identity(nothing)
def clone(bench: Bench, node: Node) -> Node:
    return bench.call(aten.clone.default, node)


@identity(nothing)
def contiguous(bench: Bench, node: Node) -> Node:
    return bench.call(aten.clone.default, node, memory_format=torch.contiguous_format)


@identity(nothing)
def alias(bench: Bench, node: Node) -> Node:
    return bench.call(aten.alias.default, node)


@identity(nothing)
def expand(bench: Bench, node: Node) -> Node:
    return bench.call(aten.expand.default, node, shape(node))


@identity(of_dim)
def unsqueeze(bench: Bench, node: Node, dim: int) -> Node:
    return bench.call(aten.squeeze.dim, bench.call(aten.unsqueeze.default, node, dim), dim)


@identity(of_dims)
def transpose_twice(bench: Bench, node: Node, first: int, second: int) -> Node:
    return bench.call(aten.transpose.int, bench.call(aten.transpose.int, node, first, second), first, second)


@identity(of_divisor)
def split_dim(bench: Bench, node: Node, dim: int, pieces: int) -> Node:
    """A dimension viewed as two, and back."""
    sizes = shape(node)
    split = [*sizes[:dim], pieces, sizes[dim] // pieces, *sizes[dim + 1 :]]
    return bench.view(bench.view(node, split), sizes)


@identity(lambda random, value: (random.randrange(value.dim() - 1),) if value.dim() > 1 else None)
def merge_dims(bench: Bench, node: Node, dim: int) -> Node:
    sizes = shape(node)
    merged = [*sizes[:dim], sizes[dim] * sizes[dim + 1], *sizes[dim + 2 :]]
    return bench.view(bench.view(node, merged), sizes)


@identity(of_divisor)
def riffle_and_back(bench: Bench, node: Node, dim: int, pieces: int) -> Node:
    return riffle(bench, riffle(bench, node, dim, pieces), dim, shape(node)[dim] // pieces)


@identity(of_cut)
def split_and_join(bench: Bench, node: Node, dim: int, cut: int) -> Node:
    parts = bench.call(aten.slice.Tensor, node, dim, 0, cut), bench.call(aten.slice.Tensor, node, dim, cut)
    return bench.call(aten.cat.default, list(parts), dim)


@identity(of_divisor)
def chunk_and_stack(bench: Bench, node: Node, dim: int, pieces: int) -> Node:
    sizes = shape(node)
    whole = bench.call(aten.split.Tensor, node, sizes[dim] // pieces, dim)
    parts = [bench.call(getitem, whole, number) for number in range(pieces)]
    return bench.view(bench.call(aten.stack.default, parts, dim), sizes)


@identity(of_dim)
def slice_whole(bench: Bench, node: Node, dim: int) -> Node:
    return bench.call(aten.slice.Tensor, node, dim, 0, 2**63 - 1)


@identity(of_long_dim)
def flip_twice(bench: Bench, node: Node, dim: int) -> Node:
    return bench.call(aten.flip.default, bench.call(aten.flip.default, node, [dim]), [dim])


@identity(lambda random, value: (random.randrange(1, 4),) if value.is_floating_point() and value.dim() else None)
def pad_and_cut(bench: Bench, node: Node, padding: int) -> Node:
    padded = bench.call(aten.constant_pad_nd.default, node, [0, padding], 0.0)
    return bench.call(aten.slice.Tensor, padded, node.meta["val"].dim() - 1, 0, shape(node)[-1])


@identity(lambda random, value: (random.randrange(value.dim()),) if value.is_floating_point() and value.dim() else None)
def write_into_empty(bench: Bench, node: Node, dim: int) -> Node:
    value = node.meta["val"]
    empty = bench.call(aten.empty.memory_format, shape(node), dtype=value.dtype)
    return bench.call(aten.slice_scatter.default, empty, node, dim, 0, shape(node)[dim])


@identity(numeric)
def times_one(bench: Bench, node: Node) -> Node:
    return bench.call(aten.mul.Tensor, node, 1)


@identity(numeric)
def plus_zero(bench: Bench, node: Node) -> Node:
    return bench.call(aten.add.Tensor, node, 0)


@identity(numeric)
def negate_twice(bench: Bench, node: Node) -> Node:
    return bench.call(aten.neg.default, bench.call(aten.neg.default, node))


@identity(real)
def double_and_halve(bench: Bench, node: Node) -> Node:
    return bench.call(aten.div.Tensor, bench.call(aten.mul.Tensor, node, 2.0), 2.0)
