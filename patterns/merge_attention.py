"""Attention in parts of a context, merged by the logarithms of their sums.

    lse = log(sum(exp(lses))),  out = sum(exp(lses - lse) * outs)

The parts are attention that was fused together with its logarithms, or what other processes computed and sent. Shares
may be written in any way, for all parts at once or two at a time: a chain of merges becomes one. Guards differ: what a
program gives to rows that a part, or all parts, do not see stays what it is.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.fx import Graph, Node

from mla_fx.cases import Case, Layer
from mla_fx.rule import Match, NearestMiss, Plan, Rule
from mla_fx.rule.indices import axes
from mla_fx.rule.operands import Call, Expression, Inlined, replacing, result, tensor
from mla_fx.rule.readings import (
    CASTS,
    Element,
    Merge,
    args_of,
    computed_between,
    merge_before,
    merges,
    narrows,
)

aten, fused = torch.ops.aten, torch.ops.mla_fx
CHOICES = (aten.where.self, aten.masked_fill.Scalar, aten.masked_fill.Tensor)
WITH_LSE = (fused.latent_attention.with_lse, fused.mla_attention.with_lse)


class _Parts(Layer):
    """Attention over two halves of the context, merged."""

    def attend(self, q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, mask: Tensor) -> Tensor:
        key, value = self.keys(latent, k_rope)
        scores = torch.cat((q_nope, q_rope), dim=-1) @ key.transpose(-1, -2) * 0.3 + mask
        halves = zip(scores.chunk(2, -1), value.chunk(2, -2), strict=True)
        parts = [(half.softmax(-1) @ values, half.logsumexp(-1)) for half, values in halves]
        return self.merged(*zip(*parts, strict=True))

    def merged(self, outs: tuple[Tensor, ...], lses: tuple[Tensor, ...]) -> Tensor:
        shares = torch.stack(lses).softmax(0).unsqueeze(-1)
        return (torch.stack(outs) * shares).sum(0)


class _Exponentials(_Parts):
    """Rows that no part sees are zero."""

    def merged(self, outs: tuple[Tensor, ...], lses: tuple[Tensor, ...]) -> Tensor:
        largest = torch.maximum(*lses)
        weights = [(lse - torch.where(largest == -torch.inf, 0.0, largest)).exp().unsqueeze(-1) for lse in lses]
        parts = (torch.where(one == 0, 0.0, out * one) for out, one in zip(outs, weights, strict=True))
        return sum(parts, torch.zeros(())) / sum(weights, torch.zeros(())).clamp(min=1e-10)


class _Swapped(_Parts):
    def merged(self, outs: tuple[Tensor, ...], lses: tuple[Tensor, ...]) -> Tensor:
        return super().merged(outs, lses[::-1])


class _BaseTwo(_Parts):
    def merged(self, outs: tuple[Tensor, ...], lses: tuple[Tensor, ...]) -> Tensor:
        first, second = lses
        weight = 1 / (1 + (second - first).exp2())
        return torch.lerp(outs[1], outs[0], weight.unsqueeze(-1))


FUSED = {"mla_prolog": 1, "latent_attention": 2, "merge_attention": 1}
NOT_SHARES = "parts are not weighted by the shares that their logarithms give them"


class MergeAttention(Rule):
    stage = "context"
    yields_to_target = True
    accepts = (Case("softmax", _Parts, FUSED), Case("exponentials", _Exponentials, FUSED))
    rejects = (Case("base two", _BaseTwo, because=NOT_SHARES),)

    def anchors(self, graph: Graph) -> Iterator[Node]:
        calls = [call for target in WITH_LSE for call in graph.find_nodes(op="call_function", target=target)]
        return merges(calls) if len(calls) > 1 else iter(())

    def bindings(self, anchor: Node, nearest: NearestMiss) -> Iterator[Match]:
        yield Match(readings={"merge": merge_before(anchor)})

    def rewrite(self, match: Match) -> Plan:
        found = match.reading(Merge, "merge")
        old = _rounded(found)
        dtype = old.meta["val"].dtype
        wide = torch.promote_types(dtype, torch.float32)
        dims = [axes(part, "a dimension of the merge", found.node) for part in found.index]
        given = [tensor(lse, dims[:-1], dtype=wide, expand=True) for lse in found.lses]
        lses = [Inlined(_cleaned, (lse,)) if part in found.cleans else lse for part, lse in enumerate(given)]
        outs: list[Expression] = []
        for part, out in enumerate(found.outs):
            value = tensor(out, dims, dtype=dtype, expand=True)
            is_number = part not in found.cleans and _is_zero_where_blind(out, found.lses[part])
            outs.append(value if part not in found.skips or is_number else Inlined(_seen, (value, lses[part])))
        call = Call(fused.merge_attention.default, outs, lses)
        merged: Expression = Call(operator.getitem, call, 0)
        for part in found.blanks:
            merged = Inlined(_blank, (merged, given[part]))
        if found.blank_if_empty and not found.blanks:
            merged = Inlined(_blank, (merged, Call(operator.getitem, call, 1)))
        return Plan(replacing(old, found.index, result(merged, dims)), exact=_choices(found))


def _rounded(found: Merge) -> Node:
    """The merge after its rounding to the dtype of the parts, if nothing reads it in the dtype of the sum."""
    (first, *others) = found.node.users
    dtypes = {out.dtype for out in found.outs}
    return first if not others and first.target in CASTS and dtypes == {first.meta["val"].dtype} else found.node


def _choices(found: Merge) -> Iterator[Node]:
    """The calls that choose between numbers and round none."""
    between = computed_between(found.node, {out.origin for out in found.outs})
    return (call for call in between if call.target in CHOICES and not narrows(call))


def _is_zero_where_blind(out: Element, lse: Element) -> bool:
    """Whether one call of attention returns both: a row that sees no key gives zeros there."""
    results = [element.origin for element in (out, lse)]
    if any(node.target is not operator.getitem for node in results):
        return False
    (call, first), (other, second) = (args_of(node) for node in results)
    return call is other and call.target in WITH_LSE and (first, second) == (0, 1)


def _cleaned(lse: Tensor) -> Tensor:
    return torch.where(lse.isnan() | (lse == torch.inf), -torch.inf, lse)


def _seen(out: Tensor, lse: Tensor) -> Tensor:
    return torch.where((lse == -torch.inf).unsqueeze(-1), 0.0, out)


def _blank(out: Tensor, lse: Tensor) -> Tensor:
    return torch.where((lse == -torch.inf).unsqueeze(-1), torch.nan, out)
