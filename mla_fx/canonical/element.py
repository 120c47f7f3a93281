"""One element of a value, followed through views to the operation that computes it."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import Node

from .axes import Axis, Index, settle, substitute
from .views import Place, args_of, argument, broadcast, fresh_index, move

aten = torch.ops.aten

Step = tuple[Place, float]
FLOATS = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16})
CASTS = frozenset(
    {torch.ops.prims.convert_element_type.default, aten._to_copy.default, aten.to.dtype, aten.to.dtype_layout}
)


@dataclass(frozen=True)
class Element:
    """`scale * node[index]`, with `node` the operation that computes it.

    `top` is the same value before casts and constant factors were looked through: `top_scale * top[0][top[1]]`. It is
    what a rewrite reads, so that no rounding of the user's is lost; two elements are equal if what computes them is."""

    node: Node
    index: tuple[Index, ...]
    scale: float = 1.0
    top: Place | None = field(default=None, compare=False, repr=False)
    top_scale: float = field(default=1.0, compare=False, repr=False)

    @property
    def axes(self) -> frozenset[Axis]:
        return frozenset(axis for part in self.index for axis in settle(part).axes)

    @property
    def dtype(self) -> torch.dtype:
        """The type in which the program holds this value."""
        node, index = (self.node, self.index) if self.top is None else self.top
        value = node.meta["val"]
        is_part = len(index) > value.ndim  # the real or imaginary part of a complex value
        dtype = value.dtype.to_real() if is_part else value.dtype
        assert isinstance(dtype, torch.dtype)
        return dtype

    @property
    def held(self) -> tuple[Node, tuple[Index, ...], float]:
        """Where a rewrite reads the value: before casts, unless what they were applied to had been repeated first."""
        if self.top is None or {axis for part in self.top[1] for axis in part.axes} != self.axes:
            return self.node, self.index, self.scale
        return *self.top, self.top_scale

    def settled(self) -> Element:
        """The same element after axes were split: every comparison starts here."""
        parts = self.index if self.top is None else (*self.index, *self.top[1])
        if not any(axis.parts for part in parts for axis, _ in part.terms):
            return self
        top = self.top and (self.top[0], tuple(map(settle, self.top[1])))
        return replace(self, index=tuple(map(settle, self.index)), top=top)

    def unscaled(self) -> Element:
        """The element without its constant factor."""
        if self.scale == 1.0:
            return self
        return replace(self, scale=1.0, top=(self.node, self.index), top_scale=1.0)

    def at(self, replacements: dict[Axis, Index]) -> Element:
        """The element read elsewhere, which may lead through further views."""
        node, index = (self.node, self.index) if self.top is None else self.top
        moved = tuple(substitute(settle(part), replacements) for part in index)
        return resolve(node, moved, self.top_scale)

    def same_as(self, other: Element) -> bool:
        return self.settled() == other.settled()


def resolve(node: Node, index: tuple[Index, ...], scale: float = 1.0) -> Element:
    """The element `scale * node[index]`, followed to where it is computed."""
    top: Place | None = None
    top_scale = scale
    index = tuple(map(settle, index))
    while True:
        place = move(node, index)
        if place is not None:
            node, index = place
            continue
        if top is None:
            top = (node, index)
        look_through = TRANSPARENT.get(node.target)
        step = None if look_through is None else look_through(node, index)
        if step is None:
            return Element(node, index, scale, top, top_scale)
        (node, index), factor = step
        scale *= factor


def element_of(node: Node) -> Element:
    """A general element of `node`: one new axis for each dimension."""
    return resolve(node, fresh_index(node))


def operand(value: Node, index: tuple[Index, ...], scale: float = 1.0) -> Element:
    """The element of a pointwise operand that goes into the result at `index`."""
    return resolve(value, broadcast(value, index), scale)


def _cast(node: Node, index: tuple[Index, ...]) -> Step | None:
    source = args_of(node)[0]
    both = {node.meta["val"].dtype, source.meta["val"].dtype}
    return ((source, index), 1.0) if both <= FLOATS or len(both) == 1 else None


def _negated(node: Node, index: tuple[Index, ...]) -> Step:
    return (args_of(node)[0], index), -1.0


def _multiplied(node: Node, index: tuple[Index, ...]) -> Step | None:
    left, right = args_of(node)[:2]
    if (factor := constant(right)) is not None and isinstance(left, Node):
        return (left, broadcast(left, index)), factor
    if (factor := constant(left)) is not None:
        return (right, broadcast(right, index)), factor
    return None


def _divided(node: Node, index: tuple[Index, ...]) -> Step | None:
    value, divisor = args_of(node)[0], constant(args_of(node)[1])
    return ((value, broadcast(value, index)), 1.0 / divisor) if divisor else None


def _added(node: Node, index: tuple[Index, ...]) -> Step | None:
    value = args_of(node)[0]
    is_nothing = len(args_of(node)) == 2 and constant(args_of(node)[1]) == 0
    return ((value, broadcast(value, index)), 1.0) if is_nothing else None


# Casts between floating types and constant factors: what is looked through, to the operand and its factor.
TRANSPARENT: dict[Any, Callable[[Node, tuple[Index, ...]], Step | None]] = {
    **dict.fromkeys(CASTS, _cast),
    aten.neg.default: _negated,
    aten.mul.Tensor: _multiplied,
    aten.mul.Scalar: _multiplied,
    aten.div.Tensor: _divided,
    aten.div.Scalar: _divided,
    aten.add.Tensor: _added,
    aten.add.Scalar: _added,
}


def constant(value: Any) -> float | None:
    """The number that `value` is known to hold at compile time, or None."""
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, (int, float)):
        return float(value)
    if not isinstance(value, Node):
        return None
    if value.target in (aten.full.default, aten.scalar_tensor.default):
        filled = argument(value, 1 if value.target is aten.full.default else 0, "fill_value")
        return constant(filled) if not isinstance(filled, Node) else None
    if value.target in (aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default):
        return 0.0
    if value.target in (aten.full_like.default,):
        return constant(value.args[1])
    if value.target in CASTS or value.target in (aten.expand.default, aten.clone.default, aten.lift_fresh_copy.default):
        return constant(value.args[0])
    return _attribute(value)


def _attribute(node: Node) -> float | None:
    """The value of a 0-d tensor that the graph holds as an attribute."""
    module = node.graph.owning_module
    if node.op != "get_attr" or module is None:
        return None
    held = operator.attrgetter(str(node.target))(module)
    plain = isinstance(held, torch.Tensor) and type(held) in (torch.Tensor, torch.nn.Parameter)
    if not plain or held.ndim or held.is_complex() or held.device.type == "meta":
        return None
    with unset_fake_temporarily():
        return float(held)


def is_parameter(node: Node) -> bool:
    """A graph input or attribute: something that no operation of this graph computes."""
    return node.op in ("placeholder", "get_attr")
