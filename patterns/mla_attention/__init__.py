"""Attention over latents: keys and values are expanded from one low-rank latent, or the query was absorbed into it.

    score[b,n,s,t] = scale * (q_nope . (weight_uk latent) + q_rope . k_rope) + mask
    out[b,n,s,v]   = sum_t softmax(score)[t] (weight_uv latent[t])

Models are written expanded (Hugging Face, torchtitan, Megatron); DeepSeek's inference code is absorbed, with weight_uk
multiplied into the query. Either becomes one operator over the latents:

    expanded -> attention with weight_uk and weight_uv (the absorb pass chooses between the two)
    absorbed -> attention without them

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
from dataclasses import replace
from typing import ClassVar

import torch
from torch.fx import Graph, Node

from mla_fx.cases import Case, Layer, NoRotaryPart
from mla_fx.ops.common.math import nan_where_blind
from mla_fx.ops.emitted.attention.heads import absorb_query, expand_output
from mla_fx.rule import (
    AttentionPattern,
    Match,
    NearestMiss,
    NoMatch,
    Plan,
    Rule,
    bound,
    contract,
    either,
    quantised,
    refused,
    rms_norm,
    var,
)
from mla_fx.rule.operands import (
    ATTENTION,
    ByHoisting,
    Call,
    Cast,
    Computed,
    Expression,
    Inlined,
    Replacement,
    counts_from_first,
    known_causal,
    mask_operands,
    merged,
    replacing,
    result,
    scaled_by,
    tensor,
    times,
)
from mla_fx.rule.readings import (
    LOGARITHMS,
    PRODUCTS,
    Attention,
    Axes,
    Element,
    LogSumExp,
    MergedSums,
    Reading,
    anchors,
    args_of,
    attention,
    axes,
    beside,
    computed_between,
    computed_from,
    element_of,
    ends_of_sums,
    is_cached_per_head,
    is_coarser,
    merged_sums,
    parted_at,
    product,
    quantised_product,
    quantised_up_projection,
    seems_low_rank,
    segments,
    weighted_sum,
)

from . import cases
from .checks import check_operands, check_rank, columns_of, forms
from .factors import attention_factors
from .sums import log_sum_exps

aten = torch.ops.aten
LATENT, WEIGHT_UK, WEIGHT_UV = var("kv_cache", "b t c"), var("weight_uk", "n e c"), var("weight_uv", "n v c")
Q_NOPE = var("q_nope", "b s n e")
NOPE = either(
    "keys",
    expanded=contract(Q_NOPE, quantised(LATENT, WEIGHT_UK, name="up", over="c"), name="nope", over="e"),
    normed=contract(
        Q_NOPE,
        refused(
            rms_norm(quantised(LATENT, WEIGHT_UK, name="up", over="c"), var("gamma"), name="norm"),
            because="keys are normalised per head after the up-projection, which therefore cannot be absorbed",
        ),
        name="nope",
    ),
    absorbed=contract(
        bound("query", contract(Q_NOPE, WEIGHT_UK, name="up", over="e"), "b s n c"), LATENT, name="nope", over="c"
    ),
)
ROPE = contract(var("q_rope", "b s n r"), var("kr_cache", "b t r"), name="rope", over="r")
VALUE = either("values", expanded=quantised(LATENT, WEIGHT_UV, name="down"), absorbed=LATENT)

ROTATED = AttentionPattern(scores=(NOPE, ROPE), value=VALUE)
UNROTATED = AttentionPattern(scores=(NOPE,), value=VALUE)
OVER_LATENTS = AttentionPattern(
    scores=(contract(var("query", "b s n c"), LATENT, name="nope", over="c"), ROPE), value=LATENT
)


SCALED_LATER = ("weight_uk", "weight_uv")
"""The scales of quantised weights multiply the query and the result instead: the codes stay as they are stored."""
CACHED_EXPANDED = "keys and values are cached expanded, per head: latent attention needs the latents cached"
ONE_EACH = {"mla_prolog": 1, "latent_attention": 1}


class MlaAttention(Rule):
    stage: ClassVar[str] = "attention"
    after: ClassVar[Sequence[str]] = ("mla_attention_lse",)
    yields_to_target: ClassVar[bool] = False
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
        return self.matches(attention(anchor), nearest)

    def matches(self, found: Attention, nearest: NearestMiss) -> Iterator[Match]:
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
        found = match.reading(Attention, "attention")
        out, sums, hides = self.attend(match, return_lse=bool(lses))
        new = replacing(found.node, found.index, out, padding=found.padding)

        def logarithm(lse: LogSumExp) -> Replacement:
            known = Inlined(nan_where_blind, (sums, sums)) if hides and lse.is_nan else sums
            return replacing(lse.node, lse.index, result(times(known, 1 / lse.unit), match.dims("b s n")))

        return Plan(new, *map(logarithm, lses), exact=_rounded_once(match, _dtype(match)))

    def attend(self, match: Match, *, return_lse: bool) -> tuple[Computed, Expression, bool]:
        """Attention, the logarithms [b, s, n], and whether keys may be hidden from rows."""
        found = match.reading(Attention, "attention")
        columns = columns_of(match, found)
        check_operands(match, found)
        if "rope" not in match.readings:
            check_rank(match, f"ne{columns}")
        keys, values = forms(match)
        scale, factors = attention_factors(match, keys, dtype := _dtype(match))

        def operand(name: str, letters: str) -> Expression | None:
            return made(name, letters) if name in match.elements else None

        def made(name: str, letters: str, dtype: torch.dtype = dtype) -> Expression:
            element = replace(match[name], scales=None) if name in SCALED_LATER else match[name]
            return times(tensor(element, match.dims(letters), dtype=dtype, expand=True), factors.get(name, 1.0))

        def scaled(value: Expression, weight: str, letters: str) -> Expression:
            scales = match[weight].scales if weight in match.elements else None
            return value if scales is None else Cast(scaled_by(scales, value, match.dims(letters)), dtype)

        def query_and_weight() -> tuple[Expression, Expression]:
            """q_nope and weight_uk: the scales multiply either."""
            q_nope, codes = made("q_nope", "b s n e"), made("weight_uk", "n e c")
            scales = match["weight_uk"].scales
            if scales is None:
                return q_nope, codes
            wide = made("weight_uk", "n e c", torch.promote_types(dtype, torch.float32))
            weight = scaled(wide, "weight_uk", "n e 1")
            return ByHoisting(q_nope, scaled(q_nope, "weight_uk", "1 1 n e")), ByHoisting(weight, codes)

        context = operand("q_rope", "b s n r"), made("kv_cache", "b t c"), operand("kr_cache", "b t r")
        masks, options = _masks(match, found, dtype)
        options |= {"return_lse": True} if return_lse else {}
        if keys == values == "expanded":
            query, weight_uk = query_and_weight()
            options |= {"weight_uk": weight_uk, "weight_uv": made("weight_uv", "n v c")}
        else:
            query = made("query", "b s n c") if keys == "absorbed" else Inlined(absorb_query, query_and_weight())
        call = Call(ATTENTION, query, *context, *masks, scale=scale, **options)
        out: Expression = Call(operator.getitem, call, 0)
        sums = Call(operator.getitem, call, 1)
        hides = not all(mask is None for mask in masks[:2])
        if return_lse and hides and not found.zeroes:
            out = Inlined(nan_where_blind, (out, sums))
        if keys == "absorbed" and values == "expanded":
            out = Inlined(expand_output, (out, made("weight_uv", "n v c")))
        out = scaled(out, "weight_uv", "1 1 n v")
        # the program may multiply in a wider dtype: 1024 times a value may not fit in float16
        widest = torch.promote_types(dtype, found.node.meta["val"].dtype)
        out = out if factors["out"] == 1.0 else times(Cast(out, widest), factors["out"])
        return result(out, match.dims(f"b s n {columns}")), sums, hides

    def looks_like_mla(self, anchor: Node) -> bool:
        """Whether something that is multiplied by the probabilities comes from a bottleneck, whatever else differs."""
        output = weighted_sum(anchor)
        values = args_of(anchor)[2:3] if output is None else args_of(output)[:2]
        nodes = [value for value in values if isinstance(value, Node)]
        return any(seems_low_rank(element_of(node)) or quantised_up_projection(node) is not None for node in nodes)


class MlaAttentionLse(MlaAttention):
    """The same beside the logarithm of the sum that the softmax divides by: see sums.py."""

    name = "mla_attention_lse"
    after: ClassVar[Sequence[str]] = ("mla_attention_sums",)
    yields_to_target = True
    accepts: ClassVar[Sequence[Case]] = (
        Case("logsumexp", cases.Chunk, ONE_EACH),
        Case("largest score and a logarithm", cases.ByHand, ONE_EACH),
        Case("expanded keys", cases.ExpandedKeys, ONE_EACH),
        Case("divided late", cases.DividedLate, ONE_EACH),
    )
    rejects = (Case("of other scores", cases.OfHalf, because="is of the sum for 0.5 times the scores"),)

    def anchors(self, graph: Graph) -> Iterator[Node]:
        if not any(graph.find_nodes(op="call_function", target=target) for target in LOGARITHMS):
            return iter(())
        return (anchor for anchor in super().anchors(graph) if beside(anchor))

    def bindings(self, anchor: Node, nearest: NearestMiss) -> Iterator[Match]:
        log_sum_exps(attention(anchor))
        yield from super().bindings(anchor, nearest)

    def rewrite(self, match: Match) -> Plan:
        return self.plan(match, log_sum_exps(match.reading(Attention, "attention")))

    def looks_like_mla(self, anchor: Node) -> bool:
        return False


class MlaAttentionSums(MlaAttentionLse):
    """Parts of a context that are merged by sums of exponentials: see readings/merged_sums.py."""

    name = "mla_attention_sums"
    after = ()
    accepts = (Case("running sums", cases.RunningSums, {"mla_prolog": 1, "latent_attention": 2, "merge_attention": 1}),)
    rejects = (Case("largest score", cases.LargestScore, because="not weighted by the shares that their logarithms"),)

    def anchors(self, graph: Graph) -> Iterator[Node]:
        return ends_of_sums(graph)

    def bindings(self, anchor: Node, nearest: NearestMiss) -> Iterator[Match]:
        yield Match(readings={"end": Reading(anchor)})

    def rewrite(self, match: Match) -> Plan:
        found = merged_sums(match.reading(Reading, "end").node)
        parts = [self.part(part, found) for part in found.parts]
        dtype = functools.reduce(torch.promote_types, map(_dtype, parts))
        outs, lses = list[Expression](), list[Expression]()
        for part in parts:
            out, sums, _ = self.attend(part, return_lse=True)
            merge = part.reading(MergedSums, "merge")
            *rows, columns = _dims(merge)
            outs.append(tensor(out, [*rows, columns], dtype=dtype, expand=True))
            lses.append(tensor(result(sums, part.dims("b s n")), rows, expand=True))
        wide = torch.promote_types(dtype, torch.float32)
        sink = None if merge.sink is None else tensor(merge.sink, rows, dtype=wide, expand=True)
        value = merged(outs, lses, (lses[part] for part in found.blanks), found.blank_if_empty, sink)
        exact = [call for part in parts for call in _rounded_once(part, _dtype(part))]
        return Plan(replacing(found.node, found.index, result(value, _dims(found))), exact=exact)

    def part(self, found: Attention, merge: MergedSums) -> Match:
        """One part, with names for its dimensions and for those of the merge. Raises NoMatch if it is no such
        attention."""
        nearest = NearestMiss()
        for match in self.matches(found, nearest):
            return match.read("merge", replace(merge, parts=())).settled()
        raise nearest.miss or NoMatch("a part is no attention over latents", found.node)

    def looks_like_mla(self, anchor: Node) -> bool:
        products = (node for node in computed_from(anchor, lambda node: node.target in PRODUCTS))
        values = (value for product in products if product.target in PRODUCTS for value in args_of(product)[:2])
        return any(seems_low_rank(element_of(value)) for value in values)


def _dims(found: MergedSums) -> list[Axes]:
    """The dimensions of several elements."""
    return list(filter(None, (axes(part, "a dimension of the merge", found.node) for part in found.index)))


def _masks(
    match: Match, found: Attention, dtype: torch.dtype
) -> tuple[tuple[Expression | None, ...], dict[str, object]]:
    """A mask, or None and equivalent lengths, or neither; and the options, which may say the same."""
    b, n, s, t = match.dims("b n s t")
    causal = known_causal(found, b, s, dtype)
    is_causal = found.causal is not None or (causal is not None and counts_from_first(causal, s))
    options: dict[str, object] = {"is_causal": is_causal}
    mask = context_lens = fill = None
    if not is_causal:
        mask, context_lens, fill = mask_operands(found, causal, (b, n, s, t))
    if fill is not None:
        options["fill"] = fill
    sinks = () if found.sink is None else (_sinks(found.sink, n, found.node.meta["val"].device, dtype),)
    return ((mask,) if context_lens is None and not sinks else (mask, context_lens, *sinks)), options


def _sinks(sink: Element | float, n: Axes, device: torch.device, dtype: torch.dtype) -> Expression:
    """The score next to those of the keys, per head."""
    if isinstance(sink, Element):
        return tensor(sink, (n,), expand=True)
    heads = product(axis.size for axis in n)
    return Call(aten.full.default, [heads], sink, dtype=torch.promote_types(dtype, torch.float32), device=device)


def _dtype(match: Match) -> torch.dtype:
    """The dtype of the latents, if it holds the query without loss; else the wider of the two. That of codes is no
    number's."""
    dtype = match["kv_cache"].dtype
    queries = [match[name] for name in ("query", "q_nope", "q_rope") if name in match.elements]
    is_code = dtype.itemsize == 1
    if not is_code and all(query.is_exact_in(dtype) for query in queries):
        return dtype
    dtypes = [query.dtype for query in queries]
    return functools.reduce(torch.promote_types, dtypes if is_code else [*dtypes, dtype])


def _rounded_once(match: Match, dtype: torch.dtype) -> list[Node]:
    """The calls whose results have the dtype of the attention's result, where that is coarser than `dtype`: weights or
    latents are dequantised to float32, and keys and values rounded to 16 bits. The operator rounds its result alone."""
    out = match.reading(Attention, "attention").node
    own, sources = out.meta["val"].dtype, {element.origin for element in match.elements.values()}
    calls = computed_between(out, sources) if is_coarser(own, dtype) else ()
    return [call for call in calls if getattr(call.meta.get("val"), "dtype", None) == own]
