"""The key side alone: the norm of the latent, the rotation of the key and both cache writes as one operator.

    ckv_cache[index] = rms_norm(kv[:Hckv]) gamma,  k_cache[index] = rope(kv[Hckv:])

Applies where the prolog does not: a prefill that stays expanded, a number of query tokens known only at run time, or a
query that is computed differently. Rows that are appended to a cache are written into a new one that holds just
them. A cache may be int8, with scales that are given:

    ckv_cache[index] = clamp(round(rms_norm(kv[:Hckv]) gamma c_kv_scale), -128, 127)

Rows in int8 fuse if operator and program round at the same places. Norms that differ in the last bit of float32, such
as x * rsqrt(m) and x / sqrt(m), count as equal: about one code in a million is then at a tie, and differs by 1.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.fx import Graph, Node

from mla_fx.cases import HCKV, Case, GrowingCache, NoRotaryPart, WeightedQuery
from mla_fx.rule import (
    ByDesign,
    CallPattern,
    Match,
    NearestMiss,
    NoMatch,
    Operand,
    Pattern,
    Plan,
    Rule,
    behind,
    coded,
    either,
    last_dimension,
    normed,
    rms_norm,
    rope,
    stored,
    var,
)
from mla_fx.rule.caches import (
    CacheRoles,
    CacheUpdate,
    cache_roles,
    check_int8_cache,
    check_same_write,
    has_new_rows,
    is_new,
    new_cache,
    positions_and_caches,
    replacing_cache,
)
from mla_fx.rule.operands import ATTENTION, Call, Expression, joined, tables, tensor
from mla_fx.rule.readings import (
    Axes,
    Element,
    RmsNorm,
    Rope,
    Size,
    StaticCodes,
    axes,
    computed_from,
    computed_otherwise,
    element_of,
    named_argument,
    product,
    rounded,
    shape_of,
)

aten = torch.ops.aten
ONE_EACH = {"kv_rmsnorm_rope_cache": 1, "latent_attention": 1}
ONLY_NEW = "attention reads only the rows computed here; if they are written into a cache, too, that stays as it is"

K_ROPE = either("k_rope", normed=normed("k_rope", "kv_rmsnorm_rope_cache"), plain=var("k_rope"))
LATENT = rms_norm(var("latent"), var("gamma"), name="norm")
KEY = either("rotation", rotated=rope(K_ROPE, name="rope", along=last_dimension("kr_cache")), none=K_ROPE)


def _cached(row: Pattern, cache: str, beside: str = "") -> Pattern:
    """Rows, or their codes, that are written into a cache; it may be read through a computation, such as
    dequantisation."""
    rows = either(f"{cache}.rows", coded=coded(row, name=f"{cache}.codes"), plain=row)
    written = stored(rows, name=f"{cache}.write", beside=beside)
    return either(f"{cache}.read", plain=written, behind=behind(written))


# b and t: batch and context of the caches, c latent and r rotary columns
KV_CACHE = Operand("btc", _cached(LATENT, "kv_cache"))
KR_CACHE = Operand("btr", _cached(KEY, "kr_cache", beside="kv_cache.write"), is_optional=True)
PATTERN = CallPattern({"kv_cache": KV_CACHE, "kr_cache": KR_CACHE})


class _TwoProjections(WeightedQuery):
    def rows(self, x: Tensor) -> tuple[Tensor, Tensor]:
        latent, k_rope = x @ self.kv_a[:HCKV].T, (x + 1) @ self.kv_a[HCKV:].T
        return self.norm(latent, self.kv_gamma).unsqueeze(1), k_rope.unsqueeze(1)


class _TwoPositions(WeightedQuery):
    def store(self, latent: Tensor, k_rope: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        self.kv_cache.index_copy_(2, position, latent)
        self.kr_cache.index_copy_(2, position - 1, k_rope)
        return self.kv_cache, self.kr_cache


class _GrowingCache(WeightedQuery, GrowingCache):
    """A cache that grows by cat."""


class _NoRotaryPart(WeightedQuery, NoRotaryPart):
    """Keys have no rotary part."""


class _NoRotaryPartAppended(_NoRotaryPart, GrowingCache):
    """A cache that grows by cat, without a rotary part."""


class KvRmsnormRopeCache(Rule):
    stage = "cache"
    targets = (ATTENTION,)
    pattern = PATTERN
    accepts = (
        Case("query computed elsewhere", WeightedQuery, ONE_EACH),
        Case("latent and key projected separately", _TwoProjections, ONE_EACH),
        Case("rows appended", _GrowingCache, ONE_EACH),
        Case("no rotary part", _NoRotaryPart, ONE_EACH),
        Case("no rotary part, rows appended", _NoRotaryPartAppended, ONE_EACH),
    )
    rejects = (Case("two positions", _TwoPositions, because="written to different positions"),)

    def anchors(self, graph: Graph) -> Iterator[Node]:
        return (node for node in super().anchors(graph) if has_new_rows(element_of(named_argument(node, "kv_cache"))))

    def bindings(self, anchor: Node, nearest: NearestMiss) -> Iterator[Match]:
        check_int8_cache(element_of(named_argument(anchor, "kv_cache")))
        return super().bindings(anchor, nearest)

    def rewrite(self, match: Match) -> Plan:
        """Latent and rotary key are written to the same positions of two caches."""
        names = [name for name in PATTERN.operands if f"{name}.axes" in match.readings]
        updates = [update for name in names if (update := match.get(CacheUpdate, f"{name}.write")) is not None]
        if not updates and is_new(match["latent"]):
            raise ByDesign(ONLY_NEW, match["latent"].origin)
        if len(updates) < len(names):
            raise NoMatch("latent and rotary key are not both cached as attention reads them", match["latent"].origin)
        latent, *others = (cache_roles(update, may_be_nz=True) for update in updates)
        keys = others[0] if others else None
        match.reading(RmsNorm, "norm").check_rows(latent.width)
        if keys is not None:
            check_same_write(latent, keys)
        quantisation = Quantisation.of(match, latent, keys)
        as_kernel = quantisation.unrounded()
        instead = None if as_kernel is None else _plan(match, latent, keys, as_kernel)
        return _plan(match, latent, keys, quantisation, instead)


def _plan(
    match: Match,
    latent: CacheRoles,
    keys: CacheRoles | None,
    quantisation: Quantisation,
    instead: Plan | None = None,
) -> Plan:
    norm, rotation = match.reading(RmsNorm, "norm"), match.get(Rope, "rope")
    options: dict[str, object] = {"epsilon": norm.epsilon, "gamma_after_cast": quantisation.gamma_after_cast}
    if norm.factor != 1.0:
        options["kc_scale"] = norm.factor
    if rotation is not None:
        options["rope_layout"] = rotation.layout
    if quantisation.rounds_first:
        options["rounds_first"] = True
    if latent.update.is_appended:
        index = None
        ckv_cache, k_cache = _new_cache(latent), _new_cache(latent if keys is None else keys)
        options["cache_mode"] = "BNSD"
    else:
        index, ckv_cache, k_cache = positions_and_caches(latent, keys)
        if latent.mode == "NZ":
            index, options["cache_mode"] = Call(aten.squeeze.dim, index, 0), "NZ"
    if keys is None:
        k_cache = _without_columns(latent, quantisation.dtype)
    kv, gamma = _rows(match, latent, keys, quantisation.dtype), tensor(match["gamma"].stored, (latent.width,))
    # A cache without a batch counts the tokens of all sequences, which may share their tables.
    cos, sin = tables(rotation, ("cos", "sin"), (latent.batch, (), latent.token), expand=not latent.batch)
    target = torch.ops.mla_fx.kv_rmsnorm_rope_cache.default
    out = Call(target, kv, gamma, cos, sin, index, k_cache, ckv_cache, *quantisation.scales, **options)
    written = ((cache, Call(operator.getitem, out, place)) for place, cache in ((0, keys), (1, latent)) if cache)
    replacements = (replacing_cache(cache, new) for cache, new in written)
    return Plan(*replacements, differences=quantisation.differences, exact=quantisation.whole, instead=instead)


def _new_cache(cache: CacheRoles) -> Expression:
    """[B,1,S,width]."""
    rows = cache.update.rows
    return new_cache(rows, rows.meta["val"].dtype, *_lead(cache.row), shape_of(rows)[-1])


def _without_columns(latent: CacheRoles, dtype: torch.dtype) -> Expression:
    """The cache of keys without a rotary part, [B,1,T,0]."""
    role = latent.token if latent.update.is_appended else latent.slot
    return new_cache(latent.update.rows, dtype, *_lead((latent.batch, role)), 0)


def _lead(roles: tuple[Axes, Axes]) -> tuple[Size, int, Size]:
    batch, tokens = (product(axis.size for axis in role) for role in roles)
    return batch, 1, tokens


def _rows(match: Match, latent: CacheRoles, keys: CacheRoles | None, dtype: torch.dtype) -> Expression:
    """Adjacent latents and rotary keys, [B,1,S,Hckv+Dr]: one value, or joined if they were computed separately."""
    tokens = (latent.batch, (), latent.token)
    parts = [("latent", latent.width)]
    if keys is not None:
        rotation = match.get(Rope, "rope")  # its columns are those of the rotary key before rotation
        along = keys.width if rotation is None else axes(rotation.along, "the rotary key", rotation.node)
        kv = joined(match["latent"], latent.width, match["k_rope"], along)
        if kv is not None:
            return tensor(kv.element, (*tokens, (kv.axis,)), dtype=dtype)
        parts.append(("k_rope", along))
    rows = [tensor(match[name], (*tokens, width), dtype=dtype, expand=True) for name, width in parts]
    return rows[0] if len(rows) == 1 else Call(aten.cat.default, rows, -1)


# --- caches in int8 --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Quantisation:
    """The dtype of kv, the scales of rotary key and latent, and how the operator's codes differ from the program's."""

    dtype: torch.dtype
    gamma_after_cast: bool
    scales: tuple[Expression | None, ...] = ()
    rounds_first: bool = False
    differences: tuple[str, ...] = ()
    whole: tuple[Node, ...] = ()

    @classmethod
    def of(cls, match: Match, latent: CacheRoles, keys: CacheRoles | None) -> Quantisation:
        caches = {"kr_cache": keys, "kv_cache": latent}
        codes = {name: match.get(StaticCodes, f"{name}.codes") for name in caches}
        dtype = _dtype(match, [cache.update.rows for name, cache in caches.items() if cache and not codes[name]])
        parts = {name: found for name, found in codes.items() if found is not None}
        gamma_after_cast = match.reading(RmsNorm, "norm").gamma_after_cast
        if not parts:
            return cls(dtype, gamma_after_cast)
        for found in parts.values():
            _check_given(found, match["latent"].origin)
        wide = torch.promote_types(dtype, torch.float32)
        scales = (_scale(codes[name], cache, wide) for name, cache in caches.items())
        roundings, differences = set[bool](), list[str]()
        for name, found in parts.items():
            differences += found.differences(wide)
            try:
                roundings |= _is_rounded(match, name, found.value, dtype, wide)
            except NoMatch as miss:
                differences.append(miss.reason)
        if len(roundings) == 2:
            differences.append(f"only one of latent and rotary key is rounded to {dtype}; the operator rounds both")
        whole = (call for found in parts.values() for call in found.whole)
        rounds_first = True in roundings
        return cls(
            dtype, gamma_after_cast, tuple(scales), rounds_first, tuple(dict.fromkeys(differences)), tuple(whole)
        )

    def unrounded(self) -> Quantisation | None:
        """The same for kernels, which quantise values that are not rounded; None if this is so already."""
        has_codes = any(scale is not None for scale in self.scales[1:])
        is_rounded = self.rounds_first or (self.gamma_after_cast and has_codes)
        if not is_rounded or self.dtype.itemsize > 2:
            return None
        different = f"values are rounded to {self.dtype} before they are quantised, in a kernel they are not"
        return replace(
            self, rounds_first=False, gamma_after_cast=False, differences=(*self.differences, different)
        )


def _dtype(match: Match, plain: list[Node]) -> torch.dtype:
    """The dtype of kv: that of rows that are stored as they are, or that in which latents are projected."""
    latent = match["latent"]
    found: list[torch.dtype] = [rows.meta["val"].dtype for rows in plain]
    if not plain:
        return latent.roundings[0] if latent.roundings else latent.origin.meta["val"].dtype
    if any(dtype.itemsize == 1 for dtype in found):
        raise NoMatch(f"rows are stored in {found[0]}, expected codes or values of 16 bits or more", plain[0])
    return found[-1]


def _check_given(codes: StaticCodes, rows: Node) -> None:
    """Raises NoMatch if a scale follows the rows, as a running maximum does: the operator would compute them again."""
    if codes.scale is not None and rows in computed_from(codes.scale.origin):
        because = "the scale of codes is computed from the rows that it multiplies, expected a scale that is given"
        raise NoMatch(because, codes.node)


def _scale(codes: StaticCodes | None, cache: CacheRoles | None, wide: torch.dtype) -> Expression | None:
    """The numbers that multiply each column, [width] in float32."""
    if codes is None or cache is None:
        return None
    width, number = cache.width, codes.number
    if codes.scale is None:
        number = 1 / number if codes.is_divided else number
        if wide == torch.float64 and rounded(number, torch.float32) != number:
            raise NoMatch(f"a scale of {number:.6g} would be rounded to torch.float32 by the operator", codes.node)
        size, device = product(axis.size for axis in width), codes.node.meta["val"].device
        return Call(aten.full.default, [size], number, dtype=torch.float32, device=device, pin_memory=False)
    if not codes.scale.axes <= {*width}:
        raise NoMatch("codes have scales of tokens, expected one scale or one for each column", codes.node)
    scale = tensor(codes.scale, (width,), dtype=torch.float32, expand=True)
    return Call(aten.reciprocal.default, scale) if codes.is_divided else scale


def _is_rounded(match: Match, name: str, value: Element, dtype: torch.dtype, wide: torch.dtype) -> set[bool]:
    """Whether rows are rounded to the dtype of kv before they are quantised; empty if that changes nothing.

    Raises NoMatch if the program rounds them elsewhere, or computes them in another dtype than the operator."""
    norm, rotation = match.reading(RmsNorm, "norm"), match.get(Rope, "rope")
    if name == "kr_cache" and rotation is None:
        return set()
    reading, what = (norm, "the latent") if name == "kv_cache" else (rotation, "the rotary key")
    assert reading is not None, "an unrotated key was left out"
    stops = {node for element in reading.elements for node in (element.origin, element.seen[0])}
    calls = computed_otherwise(value.seen[0], stops, wide)
    dtypes = [call.meta["val"].dtype for call in calls]
    if name == "kv_cache" and norm.gamma_after_cast and dtypes == [dtype, dtype] and calls[1] is value.origin:
        return set()
    if not calls:
        return set() if dtype == wide else {False}
    if dtypes == [dtype] == [value.coarsest] and value.roundings == (dtype,):
        return {True}
    raise NoMatch(f"{what} is computed in {dtypes[0]}, by the operator in {wide}", calls[0])
