"""A norm that no larger operator took: the query's, and those between layers.

    out = rms_norm(x) gamma

The rule starts at the reciprocal root and tries the products that follow.
"""

from __future__ import annotations

import string
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor
from torch.fx import Node

from mla_fx.cases import HCQ, Case, WeightedQuery
from mla_fx.rule import Match, NearestMiss, NoMatch, Plan, Rule, ValuePattern, rms_norm, var
from mla_fx.rule.operands import Call, tensor
from mla_fx.rule.readings import CASTS, Element, OperandAxes, RmsNorm, is_coarser

aten = torch.ops.aten

PATTERN = rms_norm(var("x"), var("gamma"), name="norm")


class _WeightFirst(WeightedQuery):
    def norm(self, x: Tensor, gamma: Tensor) -> Tensor:
        return x * gamma * (x.square().sum(-1, keepdim=True) / x.shape[-1] + 1e-5).rsqrt()


class _OneOfTwo(WeightedQuery):
    """The query's normalised latent is also added to its norm."""

    def norm(self, x: Tensor, gamma: Tensor) -> Tensor:
        normed = super().norm(x, gamma)
        return normed + x if x.shape[-1] == HCQ else normed


FUSED = {"rms_norm": 1, "rope": 1, "kv_rmsnorm_rope_cache": 1, "latent_attention": 1}


class RmsNormAlone(Rule):
    stage = "piece"
    targets = (aten.rsqrt.default,)
    tells_misses = False
    accepts = (
        Case("query that is also read elsewhere", WeightedQuery, FUSED, pieces=True),
        Case("weight first", _WeightFirst, FUSED, pieces=True),
        Case("norm of a value that is read elsewhere", _OneOfTwo, FUSED, pieces=True),
    )

    def bindings(self, anchor: Node, nearest: NearestMiss) -> Iterator[Match]:
        for node in reversed(list(products(anchor))):
            yield from ValuePattern(PATTERN, string.ascii_letters[: node.meta["val"].ndim]).at(node, nearest)

    def rewrite(self, match: Match) -> Plan:
        """The norm is over all of the last dimension."""
        norm, value = match.reading(RmsNorm, "norm"), match.reading(OperandAxes, "value.axes")
        dims = match.dims(letters := " ".join(value.letters))
        if norm.factor != 1.0:
            raise NoMatch(f"the norm is multiplied by a number, {norm.factor:.6g}", norm.node)
        norm.check_rows(dims[-1])
        dtype = value.node.meta["val"].dtype
        x = tensor(_before_casts(match["x"]), dims, dtype=dtype)
        gamma = tensor(match["gamma"], dims[-1:], dtype=dtype)
        options = {"epsilon": norm.epsilon, "gamma_after_cast": norm.gamma_after_cast}
        out = Call(torch.ops.mla_fx.rms_norm.default, x, gamma, **options)
        return Plan(match.replacing(out, letters))


def _before_casts(value: Element) -> Element:
    """The value as it was computed, if the casts that follow do not change it: norms cast to float32 first."""
    return value if value.roundings or value.factor != 1.0 else replace(value, top=None)


def products(root: Node) -> Iterator[Node]:
    """The products that a reciprocal root enters, the inner one first; each after its rounding to 16 bits, if nothing
    reads it in the dtype in which it was multiplied."""
    factor = root
    for _ in range(2):
        multiplied = [user for user in factor.users if user.target is aten.mul.Tensor]
        if len(multiplied) != 1:
            return
        factor = _rounded(multiplied[0])
        yield factor


def _rounded(node: Node) -> Node:
    (first, *others) = node.users
    is_rounded = not others and first.target in CASTS
    return first if is_rounded and is_coarser(first.meta["val"].dtype, node.meta["val"].dtype) else node
