"""The numbers that values provably hold at compile time."""

from __future__ import annotations

import functools
import math
import operator
import re
from typing import Any

import torch
from torch.fx import Node

from mla_fx.graph.schemas import writers
from mla_fx.graph.torch_compilers import is_frozen, is_lifted
from mla_fx.graph.torch_private import share_storage, unset_fake_temporarily

from .calls import CASTS, args_of, argument

aten = torch.ops.aten


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
KEEPING = CASTS | {
    aten.expand.default, aten.clone.default, aten.lift_fresh_copy.default, aten.view.default, aten._unsafe_view.default,
    aten.reshape.default, aten.unsqueeze.default,
}  # fmt: skip


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
