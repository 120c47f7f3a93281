"""Merged attention over neighbouring pieces of one context, as attention over all of them.

    merge_attention of attention(query, kv_cache[:, :t]) and attention(query, kv_cache[:, t:])
        -> attention(query, kv_cache)

Loops over chunks of a context bound the memory of scores, which the operators do anyway. Pieces are slices of one
cache, or of one block table. They have the same query and weights; what they hide becomes one mask. A merge with other
contexts stays one, of fewer parts.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from mla_fx.ops.emitted.attention.pages import context_of
from mla_fx.ops.emitted.attention.softmax import aligned, as_mask
from mla_fx.rule import NoMatch, Plan
from mla_fx.rule.operands import ATTENTION, Call, Cast, Expression, Inlined, Replacement, call_with, result, tensor
from mla_fx.rule.readings import (
    Element,
    are_neighbours,
    args_of,
    axes,
    computed_from,
    computed_with,
    element_of,
    fresh_index,
    is_same,
    joined,
    keywords,
    named_argument,
    options_of,
    positional,
    resolve,
)

PIECES = ("kv_cache", "kr_cache", "block_table")
MASKS = ("mask", "context_lens")


@dataclass(frozen=True)
class _Part:
    """What a merge gets, and the call of attention that returns both, if one does."""

    out: Node
    lse: Node
    call: Node | None


def joined_pieces(merge: Node) -> Plan:
    """The plan that attends to neighbouring pieces at once. Raises NoMatch if no two are."""
    pairs = zip(*args_of(merge), strict=True)
    parts = [_Part(out, lse, call_of(element_of(out), element_of(lse))) for out, lse in pairs]
    chains = _chains(parts)
    if len(chains) == len(parts):
        raise NoMatch("no two parts are neighbouring pieces of one context", merge)
    new = _joined(chains[0])
    if len(chains) > 1:
        outs, lses = zip(*map(_attention, chains), strict=True)
        call = Call(merge.target, list(outs), list(lses))
        new = Call(operator.getitem, call, 0), Call(operator.getitem, call, 1)
    return Plan(*(Replacement(old, new[args_of(old)[1]]) for old in results(merge)))


def results(merge: Node) -> list[Node]:
    return [user for user in merge.users if user.target is operator.getitem]


def feeds_alone(merge: Node) -> bool:
    """Whether nothing else reads the attention that is merged. It would be computed twice."""
    before = {merge, *computed_from(merge, returns_lse)}
    calls = list(filter(returns_lse, before))
    return before.issuperset(computed_with(calls, lambda node: node is merge or node not in before))


def returns_lse(node: Node) -> bool:
    """Whether this is attention with its logarithms."""
    return node.target is ATTENTION and bool(options_of(node).get("return_lse"))


def call_of(out: Element, lse: Element) -> Node | None:
    """The call of attention that returns both, if one does."""
    if any(one.origin.target is not operator.getitem or one.factor != 1.0 for one in (out, lse)):
        return None
    (call, first), (other, second) = (args_of(one.origin) for one in (out, lse))
    return call if call is other and returns_lse(call) and (first, second) == (0, 1) else None


def _chains(parts: Sequence[_Part]) -> list[list[_Part]]:
    """The parts, in chains of neighbours."""
    after = {one: other for one in parts for other in parts if _is_next(one, other)}
    chains = [[part] for part in parts if part not in after.values()]
    for chain in chains:
        while chain[-1] in after:
            chain.append(after[chain[-1]])
    return chains


def _is_next(part: _Part, other: _Part) -> bool:
    """Whether the other part's context follows this one's, and all but what they hide is equal."""
    if part.call is None or other.call is None:
        return False
    if not _lie_alike(part.out, other.out) or not _lie_alike(part.lse, other.lse):
        return False
    one, two = positional(part.call), positional(other.call)
    rest = one.keys() - {*PIECES, *MASKS}
    is_whole = all(one.get(name) is None for name in ("sinks", "indices", "lens"))  # which are of one piece
    if not is_whole or not all(is_same(one[name], two[name]) for name in rest):
        return False
    if _options(part.call) != _options(other.call) or _is_added(part.call) != _is_added(other.call):
        return False
    moves = _pieces(one)
    same = [name for name in PIECES if name not in moves]
    return all(is_same(one[name], two[name]) for name in same) and all(
        two[name] is not None and are_neighbours(one[name], two[name], 1) for name in moves
    )


def _lie_alike(one: Node, other: Node) -> bool:
    """Whether two results of calls are read in one order of dimensions, which have equal sizes."""
    index = fresh_index(one)
    return resolve(one, index).index == resolve(other, index).index


def _options(call: Node) -> dict[str, Any]:
    """All but what may be given by position, and what hides keys."""
    return {name: value for name, value in keywords(call).items() if name != "is_causal"}


def _pieces(given: dict[str, Node | None]) -> list[str]:
    """The operands that differ from piece to piece."""
    if given["block_table"] is not None:
        return ["block_table"]
    return [name for name in ("kv_cache", "kr_cache") if given[name] is not None]


def _is_added(call: Node) -> bool:
    mask = named_argument(call, "mask")
    return mask is not None and mask.meta["val"].dtype != torch.bool


def _attention(chain: Sequence[_Part]) -> tuple[Node | Expression, Node | Expression]:
    """Attention and logarithms of a chain."""
    return (chain[0].out, chain[0].lse) if len(chain) == 1 else _joined(chain)


def _joined(chain: Sequence[_Part]) -> tuple[Expression, Expression]:
    calls = [part.call for part in chain if part.call is not None]
    moved = _pieces(positional(calls[0]))
    given = {name: _operand([named_argument(call, name) for call in calls]) for name in moved}
    call = call_with(calls[0], **given, mask=_mask(calls), context_lens=None, is_causal=False)
    out, lse = (Call(operator.getitem, call, place) for place in (0, 1))
    return _as_read(chain[0].out, out), _as_read(chain[0].lse, lse)


def _operand(pieces: list[Node]) -> Expression:
    """One operand, of its pieces along the context."""
    element, index = joined(pieces, 1)
    return tensor(element, [axes(part, "a dimension", pieces[0]) for part in index])


def _as_read(old: Node, new: Expression) -> Expression:
    """A result of the new call, with the dimensions and the dtype that the merge reads of an old one."""
    index = fresh_index(old)
    roles, dims = ([axes(part, "a dimension", old) for part in read] for read in (resolve(old, index).index, index))
    return Cast(tensor(result(new, roles), dims), old.meta["val"].dtype)


# --- masks -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Hidden:
    """How a call hides keys, and whether it reads pages: which tensors a mask is made of."""

    by: str
    in_pages: bool


def _mask(calls: Sequence[Node]) -> Expression | None:
    hidden = [_Hidden(_hidden_by(call), named_argument(call, "block_table") is not None) for call in calls]
    if not any(one.by for one in hidden):
        return None
    given = [named_argument(calls[0], "query")]
    for call, one in zip(calls, hidden, strict=True):
        names = ("kv_cache", *(["block_table"] if one.in_pages else []), *([one.by] if one.by in MASKS else []))
        given += [named_argument(call, name) for name in names]
    return Inlined(functools.partial(_joined_masks, tuple(hidden)), tuple(given))


def _hidden_by(call: Node) -> str:
    if options_of(call).get("is_causal"):
        return "is_causal"
    return next((name for name in MASKS if named_argument(call, name) is not None), "")


def _joined_masks(hidden: Sequence[_Hidden], query: Tensor, *given: Tensor) -> Tensor:
    """[B or 1, N or 1, S or 1, T] of all pieces; `given` are cache, table and mask of each, if it has them."""
    tensors, masks = iter(given), []
    for one in hidden:
        context = context_of(next(tensors), next(tensors) if one.in_pages else None)
        said = next(tensors) if one.by in MASKS else None
        mask, lengths = (said, None) if one.by == "mask" else (None, said)
        mask = as_mask(mask, lengths, one.by == "is_causal", query, context)
        mask = query.new_ones(1, dtype=torch.bool) if mask is None else mask
        mask = aligned(mask, rows_first=False)
        masks.append(mask.expand(*mask.shape[:-1], context))
    lead = [max(sizes) for sizes in zip(*(mask.shape[:-1] for mask in masks), strict=True)]
    return torch.cat([mask.expand(*lead, mask.shape[-1]) for mask in masks], -1)
