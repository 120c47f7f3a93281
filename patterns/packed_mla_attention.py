"""Attention of neighbouring sequences of packed tokens, each to itself, as one call.

    attention(query[:t], .., kv_cache[:t], ..), attention(query[t:], .., kv_cache[t:], ..)
        -> attention(query, .., kv_cache, .., lens=[t, T - t]).split([t, T - t])

Servers prefill the tokens of several sequences at once, and attend in a loop over their lengths. One call expands keys
and values for all of them by one product, which reads the weight once.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.nn.functional import scaled_dot_product_attention

from mla_fx.cases import DR, DV, HE, Case, D, Layer, N
from mla_fx.rule import CallPattern, Match, Plan, Rule
from mla_fx.rule.operands import ATTENTION, Call, Expression, Replacement, call_with, tensor
from mla_fx.rule.readings import (
    Reading,
    Size,
    are_neighbours,
    axes,
    is_same,
    joined,
    keywords,
    named_argument,
    positional,
    shape_of,
)

aten = torch.ops.aten
ROWS = ("query", "query_rope", "kv_cache", "kr_cache")
WEIGHTS = ("weight_uk", "weight_uv")


class _Prompts(Layer):
    """Tokens of two sequences, one after the other."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, position: Tensor) -> Tensor:
        x = torch.cat([x.view(1, -1, HE).roll(columns, -1) for columns in range(4)], 1)
        query = self.query(x).view(1, -1, N, D + DR).transpose(1, 2)
        parts = zip(*(torch.split(rows, [10, 14], 2) for rows in (query, *self.rows(x))), strict=True)
        return torch.cat([self.own(*part) for part in parts], 2).transpose(1, 2).flatten(2) @ self.o.T

    def own(self, query: Tensor, latent: Tensor, k_rope: Tensor) -> Tensor:
        k_nope, value = torch.split((latent @ self.kv_b.T).view(1, -1, N, D + DV).transpose(1, 2), [D, DV], -1)
        key = torch.cat((k_nope, k_rope.expand(-1, N, -1, -1)), -1)
        return scaled_dot_product_attention(query, key, value, is_causal=True)


class PackedMlaAttention(Rule):
    stage = "cache"
    after = ("kv_rmsnorm_rope_cache",)
    targets = (ATTENTION,)
    pattern = CallPattern()
    tells_misses = False
    accepts = (Case("two prompts", _Prompts, {"packed_mla_attention": 1}),)

    def anchors(self, graph: Graph) -> Iterator[Node]:
        return (call for call in super().anchors(graph) if len(_chain(call)) > 1)

    def rewrite(self, match: Match) -> Plan:
        calls = _chain(match.reading(Reading, "call").node)
        lens = list(map(_tokens, calls))
        rows = {name: _operand([named_argument(call, name) for call in calls]) for name in ROWS}
        out = Call(operator.getitem, call_with(calls[0], **rows, lens=lens), 0)
        parts = Call(aten.split_with_sizes.default, out, lens, 1)
        old = ((place, user) for place, call in enumerate(calls) for user in call.users)
        return Plan(*(Replacement(user, Call(operator.getitem, parts, place)) for place, user in old))


def _chain(first: Node) -> list[Node]:
    """The call and those after it, as far as each is of the next sequence."""
    chain, calls = [first], list(first.graph.find_nodes(op="call_function", target=ATTENTION))
    for call in calls[calls.index(first) + 1 :]:
        if not _is_next(chain[-1], call):
            break
        chain.append(call)
    return chain


def _is_next(call: Node, other: Node) -> bool:
    one, two = positional(call), positional(other)
    return (
        all(map(_is_prompt, (call, other)))
        and keywords(call) == keywords(other)
        and all(is_same(one[name], two[name]) for name in WEIGHTS)
        and all(_follows(one[name], two[name]) for name in ROWS)
    )


def _is_prompt(call: Node) -> bool:
    """Whether the call is of one sequence, expanded, in which nothing but causality hides keys."""
    given = positional(call)
    others = given.keys() - {*ROWS, *WEIGHTS}
    is_plain = all(given[name] is None for name in others) and keywords(call).keys() <= {"scale", "is_causal"}
    is_one = is_plain and given["weight_uk"] is not None and shape_of(given["query"])[0] == 1
    return is_one and shape_of(given["kv_cache"])[1] == _tokens(call)


def _follows(one: Node | None, other: Node | None) -> bool:
    if one is None or other is None:
        return one is other
    return are_neighbours(one, other, 1)


def _tokens(call: Node) -> Size:
    return shape_of(named_argument(call, "query"))[1]


def _operand(pieces: list[Node | None]) -> Expression | None:
    """One operand of its pieces along dimension 1."""
    nodes = [piece for piece in pieces if piece is not None]
    if not nodes:
        return None
    element, index = joined(nodes, 1)
    return tensor(element, [axes(part, "a dimension", nodes[0]) for part in index])
