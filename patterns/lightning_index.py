"""The scores of an indexer and the top-k that chooses keys by them, as one operator.

    sum over heads of weights relu(query . key) * key_scale + mask, topk
        -> lightning_index(query, key, weights, mask, key_scale)

In plain code the scores of each head are a value [B, S, N, T] in float32, which is larger than all else that a layer
computes. The operator never holds it. Keys, queries and weights stay as the program computes them, so an indexer may
rotate, normalise and transform them as it likes.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor
from torch.fx import Graph, Node

from mla_fx.cases import HE, B, Case, Layer, S, T
from mla_fx.rule import Match, NearestMiss, NoMatch, Plan, Rule
from mla_fx.rule.operands import ATTENTION, Call, known_causal, mask_operands, replacing, result, tensor
from mla_fx.rule.readings import (
    TOPK,
    Axes,
    Index,
    IndexScores,
    args_of,
    axes,
    check_read_alone,
    choices,
    computed_from,
    fresh,
    has_index_scores,
    index_scores,
    named_argument,
    shape_of,
)

LIGHTNING = torch.ops.mla_fx.lightning_index.default
HEADS, WIDTH, CHOSEN = 8, 6, 4
RELU = "expected a sum over heads of weights times relu(query . key)"


class _Indexed(Layer):
    """DeepSeek V3.2, in its own spelling and in others. The indexer's keys are not cached."""

    def __init__(self) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(3)
        widths = HEADS * WIDTH, WIDTH, HEADS
        weights = (torch.randn(HE, width, generator=draw) * HE**-0.5 for width in widths)
        self.index_q, self.index_k, self.index_w = map(torch.nn.Parameter, weights)
        self.register_buffer("index_keys", torch.randn(B, T, WIDTH, generator=draw))
        self.index_keys: Tensor

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, position: Tensor) -> Tensor:
        self.indexed = self.operands(x, position)
        return super().forward(x, cos, sin, position)

    def operands(self, x: Tensor, position: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query [B, S, N, D], keys [B, T, D] and weights [B, S, N]."""
        self.index_keys.index_copy_(1, position, x @ self.index_k)
        return (x @ self.index_q).view(B, S, HEADS, WIDTH), self.index_keys, x @ self.index_w

    def attend(self, q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, mask: Tensor) -> Tensor:
        chosen = (self.scores(*self.indexed) + mask).topk(CHOSEN, dim=-1).indices
        hidden = mask.new_ones(B, S, T, dtype=torch.bool).scatter(-1, chosen, False).unsqueeze(1)
        return super().attend(q_nope, q_rope, latent, k_rope, mask.masked_fill(hidden, -torch.inf))

    def scores(self, query: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
        """[B, S, T]."""
        products = torch.relu(torch.matmul(query, keys.mT.unsqueeze(1)) * WIDTH**-0.5)
        return torch.matmul((weights * HEADS**-0.5).unsqueeze(-2), products).squeeze(-2)


class _Einsum(_Indexed):
    """vLLM and SGLang: heads first, sums of products."""

    def scores(self, query: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
        products = torch.einsum("bshd,btd->bhst", query, keys).clamp(min=0)
        return (products * weights.mT.unsqueeze(-1)).sum(1)


class _ScaledLast(_Indexed):
    """Hunyuan 4: the factor follows relu, and it is negative here."""

    def scores(self, query: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
        return torch.einsum("bsht,bsh->bst", torch.einsum("bshd,btd->bsht", query, keys).relu(), weights) * -0.2


class _ScaledKeys(_Indexed):
    """DeepSeek's own code: keys are codes, whose scales multiply the scores."""

    def operands(self, x: Tensor, position: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, keys, weights = super().operands(x, position)
        self.key_scale = keys.abs().amax(-1) / 448.0
        return query, (keys / self.key_scale.unsqueeze(-1)).to(torch.float8_e4m3fn).to(keys.dtype), weights

    def scores(self, query: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
        products = torch.einsum("bshd,btd->bsht", query, keys).relu()
        return (products * weights.unsqueeze(-1)).sum(2) * self.key_scale.unsqueeze(1)


class _ScaledByToken(_Indexed):
    def scores(self, query: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
        products = torch.einsum("bshd,btd->bsht", query, keys).relu()
        scales = query.sum((2, 3)).unsqueeze(-1) * keys.sum(-1).unsqueeze(1)
        return (products * weights.unsqueeze(-1)).sum(2) * scales.sin()


class _NoRelu(_Indexed):
    def scores(self, query: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
        return torch.einsum("bsht,bsh->bst", torch.einsum("bshd,btd->bsht", query, keys).tanh(), weights)


class _WeightsInside(_Indexed):
    def scores(self, query: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
        return (torch.einsum("bshd,btd->bsht", query, keys) * weights.unsqueeze(-1)).relu().sum(2)


class _NegativeInside(_Indexed):
    def scores(self, query: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
        return super().scores(query * -1.0, keys, weights)


class _KeysOfHeads(_Indexed):
    def scores(self, query: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
        shifts = torch.arange(HEADS).view(-1, 1, 1)
        products = torch.einsum("bshd,bhtd->bsht", query, (keys.unsqueeze(1) + shifts).sin())
        return torch.einsum("bsht,bsh->bst", products.relu(), weights)


class _Smallest(_Indexed):
    def attend(self, q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, mask: Tensor) -> Tensor:
        chosen = (self.scores(*self.indexed) - mask).topk(CHOSEN, dim=-1, largest=False).indices
        hidden = mask.new_ones(B, S, T, dtype=torch.bool).scatter(-1, chosen, False).unsqueeze(1)
        return Layer.attend(self, q_nope, q_rope, latent, k_rope, mask.masked_fill(hidden, -torch.inf))


FUSED = {"mla_prolog": 1, "sparse_latent_attention": 1, "lightning_index": 1}


class LightningIndex(Rule):
    stage = "context"
    after = ("chosen_keys",)
    targets = (TOPK,)
    accepts = (
        Case("products", _Indexed, FUSED),
        Case("einsum", _Einsum, FUSED),
        Case("scaled last", _ScaledLast, FUSED),
        Case("keys that are codes", _ScaledKeys, FUSED),
    )
    rejects = (
        Case("no relu", _NoRelu, because=RELU),
        Case("weights inside", _WeightsInside, because=RELU),
        Case("negative inside", _NegativeInside, because="relu is of products times -0.408248"),
        Case("keys of each head", _KeysOfHeads, because="the indexer has keys of each head"),
        Case("scaled by token", _ScaledByToken, because="multiplied by numbers that are no scales of keys"),
        Case("the smallest", _Smallest, because="the keys with the smallest scores are chosen"),
    )

    def anchors(self, graph: Graph) -> Iterator[Node]:
        calls = graph.find_nodes(op="call_function", target=ATTENTION)
        asked = {node for call in calls for node in _asked_by(call)}
        found = (node for node in super().anchors(graph) if node in asked or has_index_scores(node))
        # those that are refused come first: a rewrite is repeated without a look at readers
        return iter(sorted(found, key=_is_read))

    def bindings(self, anchor: Node, nearest: NearestMiss) -> Iterator[Match]:
        found = index_scores(anchor)
        check_read_alone(found)
        yield Match().read("scores", found)

    def rewrite(self, match: Match) -> Plan:
        found = match.reading(IndexScores, "scores")
        parts = found.rows, (found.keys,), found.heads, found.columns
        rows, t, n, d = (_axes(part, found.node) for part in parts)
        b = tuple(axis for axis in rows if axis in found.key.axes)
        s = tuple(axis for axis in rows if axis not in b)
        query, key = found.query.stored, found.key.stored
        dtype = torch.promote_types(_multiplied_in(query.dtype), _multiplied_in(key.dtype))
        results = _users(found.topk)
        dims = b, (), s, t
        hides = all(mask.fill is not None for mask in found.masks)  # any number: where it is added, NaN stays
        *masks, fill = mask_operands(found, known_causal(found, b, s, torch.float32) if hides else None, dims)
        count = shape_of(next(iter(results.values())))[found.dim]
        call = Call(
            LIGHTNING,
            tensor(query, (b, s, n, d), dtype=dtype, expand=True),
            tensor(key, (b, t, d), dtype=dtype),
            tensor(found.weights, (b, s, n), dtype=_dtype_of_weights(found, results), expand=True),
            *masks,
            key_scale=None if found.key_scale is None else tensor(found.key_scale, (b, t), expand=True),
            sparse_count=count,
            scale=found.factor,
            fill=fill,
        )
        chosen = fresh(count)
        index = (*found.rows[: found.dim], chosen, *found.rows[found.dim :])
        roles = b, s, (), axes(chosen, "chosen keys", found.node)
        news = ((node, Call(operator.getitem, call, 1 - place)) for place, node in results.items())
        return Plan(*(replacing(node, index, result(new, roles)) for node, new in news))


def _is_read(topk: Node) -> bool:
    try:
        check_read_alone(index_scores(topk))
    except NoMatch:
        return False
    return True


def _dtype_of_weights(found: IndexScores, results: Mapping[int, Node]) -> torch.dtype | None:
    """The values have the dtype of the weights: one that holds the program's values, if it reads them."""
    return torch.promote_types(found.weights.dtype, results[0].meta["val"].dtype) if 0 in results else None


def _multiplied_in(dtype: torch.dtype) -> torch.dtype:
    """Codes of 8 bits are whole in bfloat16."""
    return torch.bfloat16 if dtype.itemsize == 1 else dtype


def _asked_by(attention: Node) -> Iterator[Node]:
    """What the mask and the indices of a fused attention are computed from, as far as a topk."""
    mask, indices = (named_argument(attention, name) for name in ("mask", "indices"))
    yield from choices(mask) if isinstance(mask, Node) else ()
    yield from computed_from(indices, lambda node: node.target is TOPK) if isinstance(indices, Node) else ()


def _users(topk: Node) -> dict[int, Node]:
    """The values, 0, and the indices, 1, that a topk returns; what nothing reads is not among them."""
    return {args_of(user)[1]: user for user in topk.users}


def _axes(places: tuple[Index, ...], node: Node) -> Axes:
    return tuple(axis for place in places for axis in axes(place, "a dimension of the index scores", node))
