"""One element of a value, followed through views to the operation that computes it."""

from __future__ import annotations

import functools
import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import Node

from mla_fx.errors import NoMatch
from mla_fx.graph.aliasing import writers
from mla_fx.graph.provenance import name_of
from mla_fx.graph.torch_compilers import is_frozen, is_lifted
from mla_fx.graph.torch_private import share_storage, unset_fake_temporarily
from mla_fx.readings.concatenation import rejoined

from .axes import Axis, Index, speaks_of, substitute
from .calls import args_of, argument, operands_of, options_of
from .views import Place, broadcast, fresh_index, move

aten = torch.ops.aten

Step = tuple[Place, float]
CASTS = frozenset(
    {torch.ops.prims.convert_element_type.default, aten._to_copy.default, aten.to.dtype, aten.to.dtype_layout}
)


@dataclass(frozen=True)
class Element:
    """`factor * origin[index]`, where `origin` is the operation that computes it.

    There are only two ways to the operation, so that no factor is lost: `node`, which refuses an element with a factor,
    and `apart()`, which returns the factor, too. (`origin` is for messages, and for asking which operation it is.)

    `top` is the same value before casts and constant factors: `top_factor * top[0][top[1]]`. A rewrite reads it, so
    that no
    rounding of the user's is lost. `roundings` are the dtypes that the value was rounded to in between, the last one
    first.
    `coarsest` is the least precise dtype that it had since it was last multiplied. `peak` is the largest factor that it
    had
    on the way; factors may cancel later. Two elements are equal if the same operation computes them and they were
    rounded
    alike."""

    origin: Node
    index: tuple[Index, ...]
    factor: float = 1.0
    roundings: tuple[torch.dtype, ...] = ()
    top: Place | None = field(default=None, compare=False, repr=False)
    top_factor: float = field(default=1.0, compare=False, repr=False)
    coarsest: torch.dtype | None = field(default=None, compare=False, repr=False)
    peak: float = field(default=1.0, compare=False, repr=False)

    @property
    def node(self) -> Node:
        """The operation that computes the element. Raises NoMatch if its result is multiplied by a number."""
        if self.factor != 1.0:
            raise NoMatch(f"{name_of(self.origin)} is multiplied by a number, {self.factor:.6g}", self.origin)
        return self.origin

    def apart(self) -> tuple[float, Element]:
        """The constant factor, and the element without it."""
        if self.factor == 1.0:
            return 1.0, self
        return self.factor, replace(self, factor=1.0, top=(self.origin, self.index), top_factor=1.0)

    def times(self, number: float) -> Element:
        if number == 1.0:
            return self
        return replace(self, factor=self.factor * number, top_factor=self.top_factor * number)

    @property
    def axes(self) -> frozenset[Axis]:
        return frozenset(axis for part in self.index for axis in part.axes)

    @property
    def seen(self) -> Place:
        """Where the program reads the value, with only views followed."""
        return (self.origin, self.index) if self.top is None else self.top

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which the program reads this value."""
        return _dtype(*self.seen)

    @property
    def as_operand(self) -> tuple[Node, tuple[Index, ...], float]:
        """Where a rewrite reads the value: before casts, unless the operand of a cast had been repeated first."""
        node, index = self.seen
        if index != self.index and {axis for part in index for axis in part.axes} != self.axes:
            return self.origin, self.index, self.factor
        return node, index, self.factor if self.top is None else self.top_factor

    def is_exact_in(self, dtype: torch.dtype) -> bool:
        """Whether storing the value in `dtype` rounds it no further than the program does."""
        node, index, _ = self.as_operand
        return not is_coarser(dtype, _dtype(node, index)) or not is_coarser(dtype, self.coarsest or self.dtype)

    def at(self, replacements: Mapping[Axis, Index]) -> Element:
        """The element at another index, which may lead through further views. Raises NoMatch if that is not
        possible."""
        node, index = self.seen
        moved = _substituted(node, index, replacements)
        return resolve(node, moved, self.factor if self.top is None else self.top_factor)

    def renamed(self, replacements: Mapping[Axis, Index]) -> Element:
        """The same element with other names for its axes; it is not followed any further."""
        if not any(speaks_of(part, replacements) for part in (*self.index, *self.seen[1])):
            return self
        index, top = _substituted(self.origin, self.index, replacements), self.top
        if top is not None:
            top = (top[0], index if top[1] == self.index else _substituted(*top, replacements))
        return replace(self, index=index, top=top)


def _substituted(node: Node, index: tuple[Index, ...], replacements: Mapping[Axis, Index]) -> tuple[Index, ...]:
    moved = [substitute(part, replacements) for part in index]
    if None in moved:
        raise NoMatch("a dimension is read across a boundary at which a view splits it", node)
    return tuple(part for part in moved if part is not None)


def _dtype(node: Node, index: tuple[Index, ...]) -> torch.dtype:
    value = node.meta["val"]
    is_part = len(index) > value.ndim  # the real or imaginary part of a complex value
    dtype = value.dtype.to_real() if is_part else value.dtype
    assert isinstance(dtype, torch.dtype)
    return dtype


def is_coarser(one: torch.dtype, other: torch.dtype) -> bool:
    """Whether rounding to `one` may change a value of dtype `other`."""
    if one == other or not (one.is_floating_point and other.is_floating_point):
        return False
    mine, others = torch.finfo(one), torch.finfo(other)
    return mine.eps > others.eps or mine.max < others.max or mine.smallest_normal > others.smallest_normal


def resolve(node: Node, index: tuple[Index, ...], factor: float = 1.0) -> Element:
    """The element `factor * node[index]`, followed to the operation that computes it."""
    top: Place | None = None
    top_factor = factor
    peak = 1.0
    dtypes: list[torch.dtype] = []
    since_factor: int | None = None
    while True:
        place = move(node, index) or rejoined(node, index)
        if place is not None:
            node, index = place
            continue
        if top is None:
            top = (node, index)
        dtypes.append(_dtype(node, index))
        look_through = TRANSPARENT.get(node.target)
        step = None if look_through is None else look_through(node, index)
        if step is None:
            if len(dtypes) == 1:
                return Element(node, index, factor, (), top, top_factor, dtypes[0])
            coarsest = functools.reduce(_coarser, dtypes[:since_factor])
            return Element(node, index, factor, _roundings(dtypes), top, top_factor, coarsest, peak)
        (node, index), number = step
        factor *= number
        peak = max(1.0, peak * abs(number))
        since_factor = len(dtypes) if since_factor is None and abs(number) != 1.0 else since_factor


def _coarser(one: torch.dtype, other: torch.dtype) -> torch.dtype:
    return one if is_coarser(one, other) else other


def _roundings(dtypes: list[torch.dtype]) -> tuple[torch.dtype, ...]:
    """Those of a value's dtypes that may have changed it; it was computed in the first."""
    rounded: list[torch.dtype] = []
    finest = dtypes[-1]
    for dtype in reversed(dtypes):
        if is_coarser(dtype, finest):
            rounded.insert(0, dtype)
            finest = dtype
    return tuple(rounded)


def element_of(node: Node) -> Element:
    """A general element of `node`: one new axis for each dimension."""
    return resolve(node, fresh_index(node))


def operand(value: Any, index: tuple[Index, ...], factor: float = 1.0) -> Element:
    """The element of a pointwise operand that enters the result at `index`. Raises NoMatch for a number."""
    if not isinstance(value, Node):
        raise NoMatch(f"expected a tensor, found the number {value}")
    return resolve(value, broadcast(value, index), factor)


def _cast(node: Node, index: tuple[Index, ...]) -> Step | None:
    source = args_of(node)[0]
    return ((source, index), 1.0) if _both_real(node, source) else None


def _copied(node: Node, index: tuple[Index, ...]) -> Step | None:
    """Follow `copy` to another dtype."""
    source = args_of(node)[1]
    return ((source, broadcast(source, index)), 1.0) if _both_real(node, source) else None


def _both_real(node: Node, source: Node) -> bool:
    kinds = node.meta["val"].dtype, source.meta["val"].dtype
    return kinds[0] == kinds[1] or all(kind.is_floating_point for kind in kinds)


def _negated(node: Node, index: tuple[Index, ...]) -> Step | None:
    return _scaled(node, args_of(node)[0], index, -1.0)


def _multiplied(node: Node, index: tuple[Index, ...]) -> Step | None:
    left, right = args_of(node)[:2]
    if (factor := constant(right)) is not None:
        return _scaled(node, left, index, factor)
    return _scaled(node, right, index, constant(left))


def _divided(node: Node, index: tuple[Index, ...]) -> Step | None:
    divisor = constant(args_of(node)[1])
    return _scaled(node, args_of(node)[0], index, 1.0 / divisor if divisor else None)


def _added(node: Node, index: tuple[Index, ...]) -> Step | None:
    is_nothing = len(args_of(node)) == 2 and not options_of(node) and constant(args_of(node)[1]) == 0
    return _scaled(node, args_of(node)[0], index, 1.0 if is_nothing else None)


def _scaled(node: Node, value: Any, index: tuple[Index, ...], factor: float | None) -> Step | None:
    """Follow a constant factor, if it can be divided out again and the dtype stays real or complex: integers round, and
    zero loses everything."""
    if not isinstance(value, Node) or factor is None or factor == 0 or not math.isfinite(factor):
        return None
    kinds = node.meta["val"].dtype, value.meta["val"].dtype
    is_kept = all(kind.is_floating_point for kind in kinds) or all(kind.is_complex for kind in kinds)
    return ((value, broadcast(value, index)), factor) if is_kept else None


# Casts between floating dtypes, and constant factors: each is followed to the operand and its factor.
TRANSPARENT: dict[Any, Callable[[Node, tuple[Index, ...]], Step | None]] = {
    **dict.fromkeys(CASTS, _cast),
    aten.copy.default: _copied,
    aten.neg.default: _negated,
    aten.mul.Tensor: _multiplied,
    aten.mul.Scalar: _multiplied,
    aten.div.Tensor: _divided,
    aten.div.Scalar: _divided,
    aten.add.Tensor: _added,
    aten.add.Scalar: _added,
}


def constant(value: Any) -> float | None:
    """The number that `value` provably holds at compile time, as its dtype stores it, or None."""
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, (int, float)):
        return float(value) if isinstance(value, float) or abs(value) <= EXACT else None
    fake = value.meta.get("val") if isinstance(value, Node) else None
    number = _filled(value) if isinstance(fake, torch.Tensor) else None
    return None if fake is None or number is None else _as_stored(number, fake.dtype)


def _as_stored(number: float, dtype: torch.dtype) -> float | None:
    """A number as a tensor of the dtype stores it. None for integers out of its range: some operators wrap them, some
    raise, and some leave it to the machine."""
    if dtype.is_floating_point:
        return rounded(number, dtype)
    if dtype not in WHOLE or not math.isfinite(number):
        return None
    whole, limits = math.trunc(number), torch.iinfo(dtype)
    return float(whole) if limits.min <= whole <= limits.max and abs(whole) <= EXACT else None


WHOLE = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})
EXACT = 2**53  # up to here a float holds every integer


def _filled(node: Node) -> float | None:
    """The number that fills every element of a tensor."""
    if node.target in FILLED:
        return FILLED[node.target]
    if node.target in FILLS:
        return constant(argument(node, FILLS[node.target]))
    if node.target in KEEPING:
        return constant(args_of(node)[0])
    return _attribute(node)


FILLED = {
    **dict.fromkeys((aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default), 0.0),
    **dict.fromkeys((aten.ones.default, aten.ones_like.default, aten.new_ones.default), 1.0),
}
# The position of the number among the arguments of an operator that fills a tensor.
FILLS = {aten.full.default: 1, aten.full_like.default: 1, aten.scalar_tensor.default: 0}
# Operators whose result is filled with the same number as their operand.
KEEPING = CASTS | {aten.expand.default, aten.clone.default, aten.lift_fresh_copy.default}


@functools.lru_cache(maxsize=256)
def rounded(number: float, dtype: torch.dtype) -> float:
    with unset_fake_temporarily():
        return float(torch.tensor(number, dtype=torch.float64).to(dtype))


# torch's names for a literal such as `torch.tensor(0.1)`, when it traces or exports the program.
TRACED, LIFTED = re.compile(r"_tensor_constant\d+"), re.compile(r"lifted_tensor_\d+")


def _attribute(node: Node) -> float | None:
    """The value of a 0-d tensor attribute of the graph that is a literal of the program."""
    if node.op != "get_attr" or node.graph.owning_module is None:
        return None
    tensor = _attribute_of(node)
    if not isinstance(tensor, torch.Tensor) or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return None
    if tensor.ndim or tensor.device.type == "meta" or not _is_literal(node, tensor):
        return None
    with unset_fake_temporarily():
        return constant(tensor.item())


def _is_literal(node: Node, tensor: torch.Tensor) -> bool:
    """Whether nothing can change the attribute. It is not a parameter or buffer, which users load, fill and update
    unless they freeze it, and shares no memory with one, and no operation of the graph writes it."""
    if not _is_named_as_literal(node) and not is_frozen(tensor):
        return False
    return not any(_is_state_of(other, node, tensor) for other in node.graph.find_nodes(op="get_attr"))


def _is_named_as_literal(node: Node) -> bool:
    """Whether the name is one of these. Users may use them, too; an export lists what they register among its inputs,
    or leaves it registered."""
    assert node.graph.owning_module is not None, "an attribute is read from a module"
    path, _, name = str(node.target).rpartition(".")
    owner = node.graph.owning_module.get_submodule(path)
    is_registered = name in owner._buffers or name in owner._parameters
    if TRACED.fullmatch(name):  # tracing registers its own as buffers
        return not (is_registered and is_lifted(node))
    return LIFTED.fullmatch(name) is not None and not is_registered


def _is_state_of(other: Node, node: Node, tensor: torch.Tensor) -> bool:
    """Whether a write of the attribute, or a parameter or buffer that shares its memory, shows that it may change."""
    if other.target == node.target:
        return next(writers(other), None) is not None
    own = _attribute_of(other) if is_lifted(other) else None
    return isinstance(own, torch.Tensor) and own.layout is torch.strided and share_storage(own, tensor)


def _attribute_of(node: Node) -> object:
    return operator.attrgetter(str(node.target))(node.graph.owning_module)


def is_parameter(node: Node) -> bool:
    """Whether this is a graph input or attribute, which no operation of this graph computes."""
    return node.op in ("placeholder", "get_attr")


def computed_from(node: Node, since: Node | None = None) -> Iterator[Node]:
    """All nodes that a value is computed from, no earlier than `since` if that is given."""
    pending, seen = [node], {node}
    while pending:
        for source in operands_of(pending.pop()):
            if source in seen or (since is not None and source < since):
                continue
            seen.add(source)
            pending.append(source)
            yield source
