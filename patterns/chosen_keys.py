"""Attention under a mask of the keys that each query chose, as attention that reads no others.

    attention(..., mask) -> the same call with the rest of the mask and indices

DeepSeek Sparse Attention chooses keys by the top-k of an indexer's scores, and hides all others. What else is in the
mask stays an operand, read at the chosen keys alone, because it may hide some of them: a key that comes after its query
is chosen where a query sees fewer keys than it may choose. Where all keys are chosen, nothing chooses any more.

Hidden scores may have the lowest number. A row that sees no key then averages over all of them, chosen or not, unless
it has a sink, next to which they have no weight. So without a sink, nothing else may hide keys.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from mla_fx.cases import B, Case, Layer, N, S, T
from mla_fx.ops.emitted.attention.tiles import LOWEST
from mla_fx.rule import CallPattern, Match, NoMatch, Operand, Plan, Rule, var
from mla_fx.rule.operands import ATTENTION, Replacement, call_with, mask_and_lengths, tensor
from mla_fx.rule.readings import (
    Reading,
    Selection,
    axes,
    composite,
    extent,
    fresh,
    named_argument,
    options_of,
    seems_chosen,
    selection,
    shape_of,
)

CHOSEN = 4


class _Chosen(Layer):
    """DeepSeek V3.2: the indices of a top-k are scattered into a mask."""

    def attend(self, q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, mask: Tensor) -> Tensor:
        hidden = self.hidden(self.chosen(self.wishes(latent) + mask)).unsqueeze(1)
        return super().attend(q_nope, q_rope, latent, k_rope, mask.masked_fill(hidden, -torch.inf))

    def wishes(self, latent: Tensor) -> Tensor:
        """Index scores, [B, S, T]."""
        return torch.sin(latent.sum(-1) * torch.arange(1, S + 1).unsqueeze(-1))

    def chosen(self, wishes: Tensor) -> Tensor:
        return wishes.topk(CHOSEN, dim=-1).indices

    def hidden(self, indices: Tensor) -> Tensor:
        return indices.new_ones(B, S, T, dtype=torch.bool).scatter(-1, indices, False)


class _Shown(_Chosen):
    """What is seen, and not what is hidden."""

    def hidden(self, indices: Tensor) -> Tensor:
        return ~torch.zeros(B, S, T, dtype=torch.bool).scatter_(-1, indices.int().long(), True)


class _Added(_Chosen):
    """DeepSeek's own code: zeros are scattered into minus infinity."""

    def attend(self, q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, mask: Tensor) -> Tensor:
        indices = self.chosen(self.wishes(latent) + mask)
        added = torch.full((B, S, T), -torch.inf).scatter_(-1, indices, 0)
        return Layer.attend(self, q_nope, q_rope, latent, k_rope, added.unsqueeze(1))


class _ChosenAreHidden(_Chosen):
    def hidden(self, indices: Tensor) -> Tensor:
        return ~super().hidden(indices)


class _NamedTwice(_Chosen):
    def chosen(self, wishes: Tensor) -> Tensor:
        return super().chosen(wishes) // 2


class _FromOutside(_Chosen):
    """Another graph has chosen."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("indices", torch.arange(B * S * CHOSEN).view(B, S, CHOSEN) % 8)
        self.indices: Tensor

    def chosen(self, wishes: Tensor) -> Tensor:
        return self.indices


class _Many(_Chosen):
    def chosen(self, wishes: Tensor) -> Tensor:
        return wishes.topk(CHOSEN + 1, dim=-1).indices


class _Lowest(_Chosen):
    """Hidden scores are one finite number, and nothing but the choice hides keys."""

    lowest = torch.finfo(torch.float32).min

    def attend(self, q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, mask: Tensor) -> Tensor:
        hidden = self.hidden(self.chosen(self.wishes(latent) + mask)).unsqueeze(1)
        key, value = self.keys(latent, k_rope)
        scores = torch.cat((q_nope, q_rope), dim=-1) @ key.transpose(-1, -2) * 0.3
        return self.probabilities(scores.masked_fill(self.unseen(hidden, mask), self.lowest)) @ value

    def unseen(self, hidden: Tensor, mask: Tensor) -> Tensor:
        return hidden

    def probabilities(self, scores: Tensor) -> Tensor:
        return scores.softmax(-1)


class _LowestLater(_Lowest):
    """A row that sees no key averages over all of them."""

    def unseen(self, hidden: Tensor, mask: Tensor) -> Tensor:
        return hidden | (mask < 0)


class _BesideSinks(_LowestLater):
    """Hunyuan 4. The positions of the first row are hidden from all keys that it may choose."""

    def unseen(self, hidden: Tensor, mask: Tensor) -> Tensor:
        return super().unseen(hidden, mask) | (torch.arange(S).unsqueeze(-1) < 1)

    def probabilities(self, scores: Tensor) -> Tensor:
        sinks = torch.linspace(-1, 1, N).view(-1, 1, 1).expand(B, N, S, 1)
        return torch.cat((scores, sinks), dim=-1).softmax(-1)[..., :-1]


class _NotTheLowest(_BesideSinks):
    lowest = -1e4


class _OfEachHead(_Chosen):
    def attend(self, q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, mask: Tensor) -> Tensor:
        wishes = self.wishes(latent).unsqueeze(1) * torch.arange(1, N + 1).view(-1, 1, 1) + mask
        hidden = torch.ones(B, N, S, T, dtype=torch.bool).scatter(-1, self.chosen(wishes), False)
        return Layer.attend(self, q_nope, q_rope, latent, k_rope, mask.masked_fill(hidden, -torch.inf))


class ChosenKeys(Rule):
    stage = "context"
    after = ("paged_context",)
    targets = (ATTENTION,)
    pattern = CallPattern({"query": Operand("bsnc", var("query"))})
    accepts = tuple(
        Case(name, build, {"mla_prolog": 1, "sparse_latent_attention": 1})
        for name, build in (
            ("hidden", _Chosen),
            ("shown", _Shown),
            ("added", _Added),
            ("the lowest number", _Lowest),
            ("beside sinks", _BesideSinks),
        )
    )
    rejects = (
        Case("the chosen are hidden", _ChosenAreHidden, because="does not hide the keys that were not chosen"),
        Case("a key named twice", _NamedTwice, because="is not the indices of a top-k, so it may name a key twice"),
        Case("from outside", _FromOutside, because="indices is not the indices of a top-k, so it may name a key twice"),
        Case("most keys", _Many, because="attention to all 16 keys costs less than to 5 chosen ones"),
        Case("a row that sees no key", _LowestLater, because="a row that sees no key averages over all keys"),
        Case("a higher number", _NotTheLowest, because="hidden scores are -10000, expected minus infinity or at most"),
        Case("of each head", _OfEachHead, because="each head chooses keys of its own"),
    )

    def anchors(self, graph: Graph) -> Iterator[Node]:
        masked = ((node, named_argument(node, "mask")) for node in super().anchors(graph))
        chosen = (node for node, mask in masked if isinstance(mask, Node) and seems_chosen(mask))
        free = (node for node in chosen if named_argument(node, "indices") is None)
        return (node for node in free if not options_of(node).get("return_lse"))

    def rewrite(self, match: Match) -> Plan:
        call = match.reading(Reading, "call").node
        mask, query = named_argument(call, "mask"), named_argument(call, "query").meta["val"]
        b, s, n = match.dims("b s n")
        found = selection(mask, (composite(b), composite(n), composite(s), fresh(shape_of(mask)[-1])))
        if found.numbers.axes & set(n):
            raise NoMatch("each head chooses keys of its own", found.node)
        _check_hides(found, options_of(call).get("fill"), named_argument(call, "sinks"), call)
        rest, lens = mask_and_lengths(found, (b, n, s, axes(found.keys, "keys", mask)), query.dtype)
        masks = {"mask": rest, "context_lens": lens, "fill": None}
        if found.count == extent(found.keys):
            return Plan(Replacement(call, call_with(call, **masks)), without=(found.numbers.origin,))
        indices = tensor(found.numbers, (b, s, (), axes(found.chosen, "chosen keys", found.node)), expand=True)
        return Plan(Replacement(call, call_with(call, **masks, indices=indices)))


def _check_hides(found: Selection, fill: float | None, sinks: Any, call: Node) -> None:
    """Next to a score that is seen, the lowest number leaves no probability. Without one, all keys share it."""
    lowest = found.fill if fill is None else max(found.fill, fill)
    if lowest > LOWEST:
        raise NoMatch(f"hidden scores are {lowest:.6g}, expected minus infinity or at most {LOWEST:.6g}", call)
    if lowest != -math.inf and sinks is None and not found.is_seen:
        raise NoMatch("a row that sees no key averages over all keys, and not over chosen ones", call)
