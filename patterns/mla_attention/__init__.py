"""Attention over latents: keys and values are expanded from one low-rank latent, or the query was absorbed into it.

    score[b,n,s,t] = scale * (q_nope . (weight_uk latent) + q_rope . k_rope) + mask
    out[b,n,s,v]   = sum_t softmax(score)[t] (weight_uv latent[t])

Models are written expanded (Hugging Face, torchtitan, Megatron); DeepSeek's inference code is absorbed, with weight_uk
multiplied into the query. Either becomes one operator over the latents:

    expanded -> mla_attention, which still has weight_uk and weight_uv (the absorb pass chooses between the two)
    absorbed -> latent_attention

An absorbed query may come from anywhere, for example from weights multiplied ahead of time, if the values are columns
of the keys: no other attention has that. Without a rotary part (GLM-5 Next, every fourth layer of Mistral Large 4),
only their rank distinguishes latents from the hidden states of multi-head attention, for which fusing gains nothing: so
they must have been projected down. Attention sinks (Hunyuan 4) are one more score per head, without a value.

Weights and latents may be quantised. Scales of a weight's outputs multiply the query and the result, so that its codes
stay as they are stored; scales of tokens multiply the latents. A target that hoists keeps a copy of each weight: there
the scales of weight_uk are in its copy, which the prolog takes, too.

Masks that provably hide exactly the keys after a position become `context_lens`; all others stay masks.

Axes: b batch, s query tokens, n heads, t context tokens, e nope dims, r rope dims, c latent rank, v value dims.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch.fx import Graph, Node

from mla_fx.ops.common.absorption import absorb_query, expand_output
from mla_fx.rule import (
    LATENT_ATTENTION,
    Attention,
    AttentionPattern,
    Axes,
    ByHoisting,
    Call,
    Case,
    Cast,
    Contraction,
    Element,
    Expression,
    Inlined,
    Layer,
    Match,
    NearestMiss,
    NoMatch,
    NoRotaryPart,
    Plan,
    Rule,
    args_of,
    axes,
    bound,
    contract,
    either,
    element_of,
    is_coarser,
    ordered,
    quantised,
    refused,
    replaced,
    result,
    rms_norm,
    tensor,
    times,
    var,
)
from mla_fx.rule.codes import quantised_product, quantised_up_projection, scaled_by
from mla_fx.rule.indices import Axis, at_most, product
from mla_fx.rule.operands import check_is_causal, counts_from_first, known_causal, mask_operands
from mla_fx.rule.readings import (
    LogSumExp,
    anchors,
    attention,
    computed_between,
    down_projection,
    is_cached_per_head,
    is_projected_from,
    parted_at,
    rank,
    seems_low_rank,
    segments,
    weighted_sum,
)

from . import cases
from .factors import attention_factors

aten = torch.ops.aten
LATENT, WEIGHT_UK, WEIGHT_UV = var("kv_cache"), var("weight_uk"), var("weight_uv")
NOPE = either(
    "keys",
    expanded=contract(var("q_nope"), quantised(LATENT, WEIGHT_UK, name="up"), name="nope"),
    normed=contract(
        var("q_nope"),
        refused(
            rms_norm(quantised(LATENT, WEIGHT_UK, name="up"), var("gamma"), name="norm"),
            because="keys are normalised per head after the up-projection, which therefore cannot be absorbed",
        ),
        name="nope",
    ),
    absorbed=contract(bound("query", contract(var("q_nope"), WEIGHT_UK, name="up")), LATENT, name="nope"),
)
ROPE = contract(var("q_rope"), var("kr_cache"), name="rope")
VALUE = either("values", expanded=quantised(LATENT, WEIGHT_UV, name="down"), absorbed=LATENT)

ROTATED = AttentionPattern(scores=(NOPE, ROPE), value=VALUE)
UNROTATED = AttentionPattern(scores=(NOPE,), value=VALUE)
OVER_LATENTS = AttentionPattern(scores=(contract(var("query"), LATENT, name="nope"), ROPE), value=LATENT)


@dataclass(frozen=True)
class _Roles:
    """The axes of each dimension of the operands."""

    b: Axes
    s: Axes
    n: Axes
    t: Axes
    d: Axes
    dr: Axes
    hckv: Axes
    dv: Axes


SCALED_LATER = ("weight_uk", "weight_uv")
"""The scales of quantised weights multiply the query and the result instead: the codes stay as they are stored."""
CACHED_EXPANDED = "keys and values are cached expanded, per head: latent attention needs the latents cached"
ONE_EACH = {"mla_prolog": 1, "latent_attention": 1}


class MlaAttention(Rule):
    stage: ClassVar[str] = "attention"
    after: ClassVar[Sequence[str]] = ("mla_attention_lse",)
    accepts: ClassVar[Sequence[Case]] = (
        Case("keys joined by cat", Layer, ONE_EACH),
        Case("keys written into an empty tensor", cases.WrittenKeys, ONE_EACH),
        Case("scaled_dot_product_attention", cases.Fused, ONE_EACH),
        Case("absorbed by einsum", cases.Absorbed, ONE_EACH),
        Case("query projected in two", cases.QueryInTwo, ONE_EACH),
        Case("attention sink", cases.Sink, ONE_EACH),
        Case("no rotary part", NoRotaryPart, ONE_EACH),
        Case("one tensor for latents and rotary keys", cases.OneKey, {"latent_attention": 1}),
    )
    rejects: ClassVar[Sequence[Case]] = (
        Case("rotary key per head", cases.KeysPerHead, because="k_rope is not shared across heads"),
        Case("expanded keys and values cached", cases.ExpandedCache, because=CACHED_EXPANDED),
        Case("quantised probabilities", cases.CodedProbabilities, because="probabilities are rounded to whole numbers"),
        Case("multi-head attention without a rotary part", cases.HiddenStates, because="from a down-projected latent"),
    )

    def anchors(self, graph: Graph) -> Iterator[Node]:
        return anchors(graph)

    def bindings(self, anchor: Node, nearest: NearestMiss) -> Iterator[Match]:
        found = attention(anchor)
        if is_cached_per_head(found.value):
            raise NoMatch(CACHED_EXPANDED, found.value.origin)
        # two products are already the nope and the rope part; a cat inside them belongs to a rotation
        products = segments(found.scores[0]) if len(found.scores) == 1 else found.scores
        products = parted_at(products[0], found.value) if len(products) == 1 else products
        yield from (UNROTATED if len(products) == 1 else ROTATED).bindings(found, products, nearest)
        if any(found.value.origin in (part.left.origin, part.right.origin) for part in products):
            yield from OVER_LATENTS.bindings(found, products, nearest)
        if quantised_up_projection(found.value.origin) is not None:
            try:
                quantised_product(found.value)
            except NoMatch as miss:  # everything else that was missed follows from that
                nearest.fail(Match(), miss, is_certain=True)

    def rewrite(self, match: Match) -> Plan:
        return self.plan(match)

    def plan(self, match: Match, lses: Sequence[LogSumExp] = ()) -> Plan:
        """`lses` are logarithms of the sums that the softmax divides by, which the operator then returns, too."""
        found, a = match.reading(Attention, "attention"), _roles(match)
        _check_operands(match, found, a)
        if "rope" not in match.readings:
            _check_rank(match, a.n, (*a.d, *a.dv))
        keys, values = _forms(match)
        if lses and keys == values == "expanded":
            because = "keys and values are expanded; only attention over latents has logarithms of sums"
            raise NoMatch(because, found.node)
        scale, factors = attention_factors(match, keys, dtype := _dtype(match))

        def operand(name: str, *dims: Axes) -> Expression | None:
            return made(name, *dims) if name in match.elements else None

        def made(name: str, *dims: Axes, dtype: torch.dtype = dtype) -> Expression:
            element = replace(match[name], scales=None) if name in SCALED_LATER else match[name]
            return times(tensor(element, dims, dtype=dtype, expand=True), factors.get(name, 1.0))

        def scaled(value: Expression, weight: str, columns: Axes) -> Expression:
            scales = match[weight].scales if weight in match.elements else None
            return value if scales is None else Cast(scaled_by(scales, value, ((), (), a.n, columns)), dtype)

        def query_and_weight() -> tuple[Expression, Expression]:
            """q_nope and weight_uk: the scales multiply either."""
            dims = a.n, a.d, a.hckv
            q_nope, codes = made("q_nope", a.b, a.s, a.n, a.d), made("weight_uk", *dims)
            scales = match["weight_uk"].scales
            if scales is None:
                return q_nope, codes
            wide = made("weight_uk", *dims, dtype=torch.promote_types(dtype, torch.float32))
            weight = Cast(scaled_by(scales, wide, (a.n, a.d, ())), dtype)
            return ByHoisting(q_nope, scaled(q_nope, "weight_uk", a.d)), ByHoisting(weight, codes)

        kv_cache, kr_cache = made("kv_cache", a.b, a.t, a.hckv), operand("kr_cache", a.b, a.t, a.dr)
        context = operand("q_rope", a.b, a.s, a.n, a.dr), kv_cache, kr_cache
        masks, options = _masks(found, a, dtype)
        if keys == values == "expanded":
            q_nope, weight_uk = query_and_weight()
            operands = q_nope, *context, weight_uk, made("weight_uv", a.n, a.dv, a.hckv), *masks
            out: Expression = Call(torch.ops.mla_fx.mla_attention.default, *operands, scale=scale, **options)
        else:
            if keys == "absorbed":
                query = made("query", a.b, a.s, a.n, a.hckv)
            else:
                query = Inlined(absorb_query, query_and_weight())
            without, with_lse = LATENT_ATTENTION
            call = Call(with_lse if lses else without, query, *context, *masks, scale=scale, **options)
            out = Call(operator.getitem, call, 0) if lses else call
            if values == "expanded":
                out = Inlined(expand_output, (out, made("weight_uv", a.n, a.dv, a.hckv)))
        out = scaled(out, "weight_uv", a.dv)
        # the program may multiply in a wider dtype: 1024 times a value may not fit in float16
        widest = torch.promote_types(dtype, found.node.meta["val"].dtype)
        out = out if factors["out"] == 1.0 else times(Cast(out, widest), factors["out"])
        part = result(out, (a.b, a.s, a.n, a.dv))
        new = replaced(found.node, found.index, part, padding=found.padding)
        exact = _rounded_once(match, dtype)
        if not lses:
            return Plan(new, exact=exact)
        sums = result(Call(operator.getitem, call, 1), (a.b, a.s, a.n))
        return Plan(new, *(replaced(lse.node, lse.index, sums) for lse in lses), exact=exact)

    def looks_like_mla(self, anchor: Node) -> bool:
        """Whether something that is multiplied by the probabilities comes from a bottleneck, whatever else differs."""
        output = weighted_sum(anchor)
        values = args_of(anchor)[2:3] if output is None else args_of(output)[:2]
        nodes = [value for value in values if isinstance(value, Node)]
        return any(seems_low_rank(element_of(node)) or quantised_up_projection(node) is not None for node in nodes)


def _forms(match: Match) -> tuple[str, str]:
    """"expanded" if keys and values are expanded from the latents, "absorbed" if they are the latents."""
    return match.choices.get("keys", "absorbed"), match.choices.get("values", "absorbed")


def _roles(match: Match) -> _Roles:
    found = match.reading(Attention, "attention")
    nope, up, rotary = (match.get(Contraction, name) for name in ("nope", "up", "rope"))
    assert nope is not None, "every pattern has it"
    keys, values = _forms(match)
    inner = nope.axes, () if up is None else up.axes
    d, hckv = inner if keys == "expanded" else inner[::-1]
    t, dr = axes(found.keys, "the context", found.node), () if rotary is None else rotary.axes
    outer = tuple(axis for part in found.index for axis in axes(part, "the attention's output", found.node))
    b = ordered(match["kv_cache"].axes - {*t, *hckv}, outer)
    n, s = (ordered(rows, outer) for rows in _heads_and_tokens(match, {*b, *d, *hckv}))
    dv = tuple(axis for axis in outer if axis not in {*b, *s, *n})
    if values == "absorbed":
        if set(dv) != set(hckv):  # a column that is repeated
            raise NoMatch("the attention's result and the latents have different columns", found.node)
        dv = hckv  # in the order of the latents
    return _Roles(b=b, s=s, n=n, t=t, d=d, dr=dr, hckv=hckv, dv=dv)


def _check_operands(match: Match, found: Attention, a: _Roles) -> None:
    """Each operand has its own dimensions and no others."""
    for name, columns in (("weight_uk", a.d), ("weight_uv", a.dv)):
        if name in match.elements:
            _check_axes(match[name], name, {*a.n, *columns, *a.hckv})
    _check_shared(match["kv_cache"], "the latent", {*a.b, *a.t, *a.hckv}, a.n, a.t)
    if "kr_cache" in match.elements:
        _check_shared(match["kr_cache"], "k_rope", {*a.b, *a.t, *a.dr}, a.n, a.t)
    for name, columns in (("q_nope", a.d), ("q_rope", a.dr), ("query", a.hckv)):
        if name in match.elements:
            _check_axes(match[name], name, {*a.b, *a.s, *a.n, *columns})
    for mask in found.masks:
        _check_axes(mask.element, "the mask", {*a.b, *a.n, *a.s, *a.t})
    if isinstance(found.sink, Element) and not found.sink.axes <= set(a.n):
        raise NoMatch("the attention sink is not one number per head", found.sink.origin)
    check_is_causal(found, a.s)


def _masks(found: Attention, a: _Roles, dtype: torch.dtype) -> tuple[tuple[Expression | None, ...], dict[str, object]]:
    """A mask, or None and equivalent lengths, or neither; and the options, which may say the same."""
    causal = known_causal(found, a.b, a.s, dtype)
    is_causal = found.causal is not None or (causal is not None and counts_from_first(causal, a.s))
    options: dict[str, object] = {"is_causal": is_causal}
    mask = context_lens = fill = None
    if not is_causal:
        mask, context_lens, fill = mask_operands(found, causal, (a.b, a.n, a.s, a.t))
    if fill is not None:
        options["fill"] = fill
    sinks = () if found.sink is None else (_sinks(found.sink, a.n, found.node.meta["val"].device),)
    return ((mask,) if context_lens is None and not sinks else (mask, context_lens, *sinks)), options


def _sinks(sink: Element | float, n: Axes, device: torch.device) -> Expression:
    """The score next to those of the keys, per head."""
    if isinstance(sink, Element):
        return tensor(sink, (n,), expand=True)
    heads = product(axis.size for axis in n)
    return Call(aten.full.default, [heads], sink, dtype=torch.float32, device=device)


def _heads_and_tokens(match: Match, others: set[Axis]) -> tuple[frozenset[Axis], frozenset[Axis]]:
    """The axes of heads and of tokens among those of the query: heads have their own weights, or at least no masks."""
    found = match.reading(Attention, "attention")
    if "weight_uk" in match.elements:
        heads = match["weight_uk"].axes - others
        return heads, match["q_nope"].axes - others - heads
    rows = match["query"].axes - others
    masked = {axis for mask in found.masks for axis in mask.element.axes}
    masked |= found.causal.rows.axes if found.causal is not None else set()
    return rows - masked, rows & masked


def _check_rank(match: Match, n: Axes, columns: Axes) -> None:
    """Heads share latents that were projected down for keys and values. In multi-head attention keys, values and
    queries are all computed from the hidden states."""
    latent, weight = match["kv_cache"], match["weight_uk"]
    if not n:
        raise NoMatch("there is no rotary part, and no heads share a latent", latent.origin)
    if {match.choices["keys"], match.choices["values"]} == {"absorbed"}:
        return
    down = down_projection(latent)
    width = product(axis.size for axis in latent.axes & weight.axes)
    wider = () if down is None else (rank(down), product(axis.size for axis in (*n, *columns)))
    is_latent = wider and all(at_most(width + 1, size) for size in wider)
    if not is_latent or is_projected_from(match["q_nope"], latent):
        reason = "there is no rotary part, and keys and values are not expanded from a down-projected latent"
        raise NoMatch(reason, latent.origin)


def _dtype(match: Match) -> torch.dtype:
    """The dtype of the latents, if it holds the query without loss; else the wider of the two."""
    dtype = match["kv_cache"].dtype
    queries = [match[name] for name in ("query", "q_nope", "q_rope") if name in match.elements]
    if all(query.is_exact_in(dtype) for query in queries):
        return dtype
    return functools.reduce(torch.promote_types, (query.dtype for query in queries), dtype)


def _rounded_once(match: Match, dtype: torch.dtype) -> list[Node]:
    """The calls whose results have the dtype of the attention's result, where that is coarser than `dtype`: weights or
    latents are dequantised to float32, and keys and values rounded to 16 bits. The operator rounds its result alone."""
    out = match.reading(Attention, "attention").node
    own, sources = out.meta["val"].dtype, {element.origin for element in match.elements.values()}
    calls = computed_between(out, sources) if is_coarser(own, dtype) else ()
    return [call for call in calls if getattr(call.meta.get("val"), "dtype", None) == own]


def _check_shared(element: Element, name: str, allowed: set[Axis], n: Axes, t: Axes) -> None:
    if not element.axes.isdisjoint(n):
        raise NoMatch(f"{name} is not shared across heads", element.node)
    if element.axes.isdisjoint(t):
        raise NoMatch(f"{name} is not along the context", element.node)
    _check_axes(element, name, allowed)


def _check_axes(element: Element, name: str, allowed: set[Axis]) -> None:
    if not element.axes <= allowed:
        raise NoMatch(f"{name} depends on more than its own dimensions", element.node)
