"""Attention over latents beside the logarithm of the sum that its softmax divides by: one operator returns both.

    out = softmax(score) . latent,  lse = log(sum(exp(score)))

Code that attends to parts of a context, and merges the results, has this value: context parallelism, chunks of a long
prompt, flash decoding. Spellings: `logsumexp`, or the largest score plus the logarithm of a sum. It must be of the
very scores that the softmax is of, with their factor and masks: any other stays as it is, and the attention fuses
alone. What the program does with it later, as to scale it to base 2, stays as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

import torch
from torch import Tensor
from torch.fx import Graph, Node

from mla_fx.cases import DR, HCKV, Case, D, Layer, N
from mla_fx.rule import Match, NearestMiss, NoMatch, Plan
from mla_fx.rule.readings import LOGARITHMS, Attention, LogSumExp, attention, beside, log_sum_exp, logarithms

from .mla_attention import MlaAttention, cases


class _Chunk(cases.Absorbed):
    """A part of a context, merged with what others gave: here with a row of zeros and a logarithm of zero."""

    def attend(self, q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, mask: Tensor) -> Tensor:
        weight = self.kv_b.view(N, -1, HCKV)
        query = torch.einsum("bnsd,ndc->bnsc", q_nope, weight[:, :D])
        scores = torch.einsum("bnsc,btc->bnst", query, latent[:, 0])
        scores = (scores + torch.einsum("bnsr,btr->bnst", q_rope, k_rope[:, 0])) * (D + DR) ** -0.5 + mask
        out = torch.einsum("bnst,btc->bnsc", scores.softmax(-1), latent[:, 0])
        out = out * self.lse(scores).sigmoid().unsqueeze(-1)
        return torch.einsum("bnsc,nvc->bnsv", out, weight[:, D:])

    def lse(self, scores: Tensor) -> Tensor:
        return scores.logsumexp(-1)


class _ByHand(_Chunk):
    def lse(self, scores: Tensor) -> Tensor:
        largest = scores.amax(-1, keepdim=True)
        return ((scores - largest).exp().sum(-1, keepdim=True).log() + largest).squeeze(-1)


class _OfHalf(_Chunk):
    def lse(self, scores: Tensor) -> Tensor:
        return (scores * 0.5).logsumexp(-1)


class _ExpandedKeys(Layer):
    def attend(self, q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, mask: Tensor) -> Tensor:
        key, value = self.keys(latent, k_rope)
        scores = torch.cat((q_nope, q_rope), dim=-1) @ key.transpose(-1, -2) * (D + DR) ** -0.5 + mask
        out: Tensor = scores.softmax(-1) @ value * scores.logsumexp(-1).sigmoid().unsqueeze(-1)
        return out


ONE_EACH = {"mla_prolog": 1, "latent_attention": 1}


class MlaAttentionLse(MlaAttention):
    after: ClassVar[Sequence[str]] = ()
    yields_to_target = True
    accepts = (Case("logsumexp", _Chunk, ONE_EACH), Case("largest score and a logarithm", _ByHand, ONE_EACH))
    rejects = (
        Case("of other scores", _OfHalf, because="is of the sum for 0.5 times the scores"),
        Case("expanded keys", _ExpandedKeys, because="only attention over latents has logarithms of sums"),
    )

    def anchors(self, graph: Graph) -> Iterator[Node]:
        if not any(graph.find_nodes(op="call_function", target=target) for target in LOGARITHMS):
            return iter(())
        return (anchor for anchor in super().anchors(graph) if beside(anchor))

    def bindings(self, anchor: Node, nearest: NearestMiss) -> Iterator[Match]:
        _lses(attention(anchor))
        yield from super().bindings(anchor, nearest)

    def rewrite(self, match: Match) -> Plan:
        return self.plan(match, _lses(match.reading(Attention, "attention")))

    def looks_like_mla(self, anchor: Node) -> bool:
        return False


def _lses(found: Attention) -> list[LogSumExp]:
    """All that are of the attention's sum. Raises NoMatch with the reason if none is."""
    if found.sink is not None:
        raise NoMatch("the sum that the softmax divides by has an attention sink", found.node)
    read, misses = list[LogSumExp](), list[NoMatch]()
    for node in logarithms(part.node for part in found.scores):
        try:
            read.append(log_sum_exp(node, found))
        except NoMatch as miss:
            misses.append(miss)
    if not read:
        raise misses[0]
    return read
