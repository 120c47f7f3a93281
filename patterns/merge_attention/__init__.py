"""Attention in parts of a context, merged by the logarithms of their sums.

    lse = log(sum(exp(lses))),  out = sum(exp(lses - lse) * outs)

The parts are attention that was fused together with its logarithms. Shares may be written in any way, for all parts at
once or two at a time: a chain of merges becomes one. Guards differ: what a program gives to rows that a part, or all
parts, do not see stays what it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

import torch
from torch import Tensor
from torch.fx import Graph, Node

from mla_fx.cases import Case
from mla_fx.rule import Match, NearestMiss, Plan, Rule
from mla_fx.rule.operands import Expression, Inlined, merged, replacing, result, tensor
from mla_fx.rule.readings import (
    CASTS,
    Merge,
    Reading,
    axes,
    computed_between,
    merge_before,
    merges,
    narrows,
)

from . import cases
from .pieces import call_of, feeds_alone, joined_pieces, returns_lse

aten, fused = torch.ops.aten, torch.ops.mla_fx
CHOICES = (aten.where.self, aten.masked_fill.Scalar, aten.masked_fill.Tensor)
GATHERED = "_c10d_functional.wait_tensor.default"  # what a collective gave; not every build of PyTorch has it
FUSED = {"mla_prolog": 1, "latent_attention": 2, "merge_attention": 1}
WHOLE = {"mla_prolog": 1, "latent_attention": 1}
NOT_SHARES = "parts are not weighted by the shares that their logarithms give them"


class MergeAttention(Rule):
    stage = "attention"
    after = ("mla_attention",)
    accepts: ClassVar[Sequence[Case]] = (
        Case("softmax", cases.Parts, FUSED),
        Case("exponentials", cases.Exponentials, FUSED),
    )
    rejects: ClassVar[Sequence[Case]] = (Case("base two", cases.BaseTwo, because=NOT_SHARES),)

    def anchors(self, graph: Graph) -> Iterator[Node]:
        calls = list(filter(returns_lse, graph.nodes))
        gathered = [node for node in graph.nodes if calls and str(node.target) == GATHERED]
        return merges(calls, gathered) if len(calls) > 1 or gathered else iter(())

    def bindings(self, anchor: Node, nearest: NearestMiss) -> Iterator[Match]:
        yield Match(readings={"merge": merge_before(anchor)})

    def rewrite(self, match: Match) -> Plan:
        found = match.reading(Merge, "merge")
        old = _rounded(found)
        dtype = old.meta["val"].dtype
        wide = torch.promote_types(dtype, torch.float32)
        every = [axes(part, "a dimension of the merge", found.node) for part in found.index]
        *rows, columns = filter(None, every)
        dims = [*rows, columns]
        given = [tensor(lse, rows, dtype=wide, expand=True) for lse in found.lses]
        lses = [Inlined(_cleaned, (lse,)) if part in found.cleans else lse for part, lse in enumerate(given)]
        outs: list[Expression] = []
        for part, out in enumerate(found.outs):
            value = tensor(out, dims, dtype=dtype, expand=True)
            # rows that see no key are zero in a result of attention
            is_zero = part not in found.cleans and call_of(out, found.lses[part]) is not None
            outs.append(value if part not in found.skips or is_zero else Inlined(_seen, (value, lses[part])))
        sink = None if found.sink is None else tensor(found.sink, rows, dtype=wide, expand=True)
        value = merged(outs, lses, (given[part] for part in found.blanks), found.blank_if_empty, sink)
        return Plan(replacing(old, found.index, result(value, dims)), exact=_choices(found))


class JoinedPieces(MergeAttention):
    """Neighbouring pieces of one context: see pieces.py."""

    name = "merge_attention_pieces"
    after = ("merge_attention",)
    tells_misses = False
    accepts = (Case("halves", cases.Halves, WHOLE),)
    rejects = ()

    def anchors(self, graph: Graph) -> Iterator[Node]:
        return filter(feeds_alone, graph.find_nodes(op="call_function", target=fused.merge_attention.default))

    def bindings(self, anchor: Node, nearest: NearestMiss) -> Iterator[Match]:
        yield Match(readings={"merge": Reading(anchor)})

    def rewrite(self, match: Match) -> Plan:
        return joined_pieces(match.reading(Reading, "merge").node)


class JoinedPages(JoinedPieces):
    """The same once contexts are read through block tables."""

    name = "merge_attention_pages"
    stage = "context"
    after = ("paged_context",)
    accepts = (Case("halves of a table", cases.Pages, WHOLE),)


def _rounded(found: Merge) -> Node:
    """The merge after its rounding to the dtype of the parts, if nothing reads it in the dtype of the sum."""
    readers, dtypes = [*found.node.users], {out.dtype for out in found.outs}
    is_rounded = len(readers) == 1 and readers[0].target in CASTS
    return readers[0] if is_rounded and dtypes == {readers[0].meta["val"].dtype} else found.node


def _choices(found: Merge) -> Iterator[Node]:
    """The calls that choose between numbers and round none."""
    between = computed_between(found.node, {out.origin for out in found.outs})
    return (call for call in between if call.target in CHOICES and not narrows(call))


def _cleaned(lse: Tensor) -> Tensor:
    return torch.where(lse.isnan() | (lse == torch.inf), -torch.inf, lse)


def _seen(out: Tensor, lse: Tensor) -> Tensor:
    return torch.where((lse == -torch.inf).unsqueeze(-1), 0.0, out)
