"""A user's own calls of the operators, functional and in place, compiled whole for the target "ge": outputs and caches
are those of the operators' bodies."""

import pytest
import torch

from mla_fx.ops.common.sample import Sampler
from npu.calls import BLOCKS, DR, HCKV, PAGE, D, in_nz, pages
from npu.converted import types
from npu.lowered import Call
from npu.user_calls import (
    BF16,
    HCQ,
    HE,
    N,
    Prolog,
    check,
    check_exact,
    check_one_graph_for_pages_of_several_sizes,
    compiled,
    prolog_call,
)

FORMS = ["functional", "twin"]
# Matrix products of reordered weights take their sums in another order, so the last bit may differ: of numbers up to 4.
LAST_BIT = {"rtol": 2**-7, "atol": 2**-7}


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


# --- mla_prolog ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_mla_prolog(converted, form):
    """Called twice: each call writes the caches that it is given."""
    layer = Prolog(form)
    run = compiled(layer)
    for batch in (2, 2):
        check(run, layer, prolog_call("PA_BSND", batch))
    assert types(converted.graphs[0]).count("MlaPrologV3") == 1 and len(converted.graphs) == 1


@pytest.mark.parametrize("rope_layout", ["half_half", "interleave_half"])
@pytest.mark.parametrize("cache_mode", ["PA_BSND", "Norm", "PA_NZ"])
def test_mla_prolog_with_any_number_of_tokens(converted, cache_mode, rope_layout):
    layer = Prolog("twin", cache_mode=cache_mode, rope_layout=rope_layout)
    run = compiled(layer, dynamic=None)
    for batch, steps in ((2, 3), (3, 4), (4, 2)):
        check(run, layer, prolog_call(cache_mode, batch, steps), **LAST_BIT)
    assert all(types(graph).count("MlaPrologV3") == 1 for graph in converted.graphs)
    assert len(converted.graphs) == 2


CONTIGUOUS = {
    "pages of 128": {},
    "positions shared": {"shared": True},
    "one sequence": {"batch": 1, "steps": 4},
    "small pages": {"room": 80},
}


@pytest.mark.parametrize("given", [pytest.param(given, id=name) for name, given in CONTIGUOUS.items()])
def test_mla_prolog_with_contiguous_caches(converted, given):
    layer = Prolog("functional", cache_mode="Norm")
    check(compiled(layer), layer, prolog_call("Norm", **given))
    assert [types(converted.graphs[0]).count(kind) for kind in ("MlaPrologV3", "TensorMove")] == [1, 0]


def test_one_graph_for_pages_of_several_sizes(converted):
    check_one_graph_for_pages_of_several_sizes(converted)


# --- kv_rmsnorm_rope_cache ----------------------------------------------------------------------------------------


def kv_call(cache_mode, batch=2, steps=3, page=PAGE):
    draw, lead = Sampler(BF16, seed=4), (batch, 1, 64) if cache_mode == "Norm" else (BLOCKS, page, 1)
    slots = draw.slots(batch * steps, lead[0] * page, skip=1)
    index = draw.slots(steps, 64, skip=1).expand(batch, -1).contiguous() if cache_mode == "Norm" else slots
    kv, gamma, tables = draw.normal(batch, 1, steps, HCKV + DR), draw.gamma(HCKV), draw.tables(batch, 1, steps, DR)
    return [kv, gamma, *tables, index, draw.normal(*lead, DR), draw.normal(*lead, HCKV)]


def key_side(form, cache_mode):
    def call(*given):
        if form == "twin":
            k_rope, c_kv = torch.ops.mla_fx.kv_rmsnorm_rope_cache_(*given, cache_mode=cache_mode)
        else:
            k_cache, ckv_cache, k_rope, c_kv = torch.ops.mla_fx.kv_rmsnorm_rope_cache(*given, cache_mode=cache_mode)
            given[5].copy_(k_cache)
            given[6].copy_(ckv_cache)
        return k_rope * 2, c_kv * 2

    return call


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("cache_mode", ["Norm", "PA_NZ"])
def test_kv_rmsnorm_rope_cache(converted, cache_mode, form):
    call = key_side(form, cache_mode)
    check(compiled(call), call, kv_call(cache_mode))
    assert types(converted.graphs[0]).count("KvRmsNormRopeCache") == 1


@pytest.mark.parametrize("cache_mode", ["Norm", "PA_BNSD", "PA_NZ"])
def test_kv_rmsnorm_rope_cache_with_any_number_of_tokens(converted, cache_mode):
    call = key_side("twin", cache_mode)
    run = compiled(call, dynamic=True)
    for batch, steps in ((2, 3), (3, 4)):
        check(run, call, kv_call(cache_mode, batch, steps))
    assert types(converted.graphs[0]).count("KvRmsNormRopeCache") == 1 and len(converted.graphs) == 1


# --- attention ----------------------------------------------------------------------------------------------------

LENGTHS, SCALE = [5, 300, 128], 0.2  # scores are so large that a hundredth of them shows


def latent_call(batch=3, cache_mode="krope_ctkv"):
    draw = Sampler(BF16, seed=6)
    caches = [draw.normal(batch * BLOCKS, PAGE, 1, width) for width in (HCKV, DR)]
    caches = [in_nz(cache) if cache_mode == "nzcache" else cache for cache in caches]
    return [*(draw.normal(batch, 128, width) for width in (HCKV, DR)), *caches, pages(draw, LENGTHS[:batch])]


def paged_call(batch=3, page=PAGE):
    draw = Sampler(BF16, seed=7)
    caches = [draw.normal(batch * BLOCKS, page, 4, D) for _ in range(2)]
    return [draw.normal(batch, 32, D), *caches, pages(draw, LENGTHS[:batch])]


def exact(query, key_pages, value_pages, tables, lengths, scale):
    """Attention in float64 of the rows [T,N,D], sequence by sequence, over pages [BlockNum,BlockSize,Nkv,*]."""
    rows = []
    for row, table, length in zip(query.double(), tables.long(), lengths, strict=True):
        keys, values = (
            cache[table].flatten(0, 1)[:length].double().repeat_interleave(len(row) // cache.shape[2], 1)
            for cache in (key_pages, value_pages)
        )
        weights = (torch.einsum("nd,tnd->nt", row, keys) * scale).softmax(-1)
        rows.append(torch.einsum("nt,tnd->nd", weights, values))
    return torch.stack(rows)


def exact_latent(q_nope, q_rope, ctkv, k_rope, tables):
    whole = [torch.cat(parts, -1) for parts in ((q_nope, q_rope), (ctkv, k_rope))]
    return exact(*whole, ctkv, tables, LENGTHS, SCALE)


@pytest.mark.parametrize("form", FORMS)
def test_multi_latent_attention(converted, form):
    """Twice what it gives: a product by two is exact, so that nothing but attention is compared."""
    given, out = latent_call(), torch.zeros(3, 128, HCKV, dtype=BF16)

    def call(out, *given):
        if form == "functional":
            return torch.ops.mla_fx.multi_latent_attention(*given, LENGTHS, qk_scale=SCALE)[0] * 2
        torch.ops.mla_fx.multi_latent_attention_(*given, LENGTHS, out, qk_scale=SCALE)
        return out * 2

    wanted = exact_latent(*given)
    check_exact(compiled(call)(out, *given), 2 * wanted)
    check_exact(out, wanted if form == "twin" else torch.zeros_like(wanted))
    assert types(converted.graphs[0]).count("FusedInferAttentionScore") == 1


def test_caches_that_are_cast_from_codes(converted):
    """The kernel gets the cast ones, also where lengths are a list."""
    q_nope, q_rope, *caches, tables = latent_call()
    codes = [(40 * cache).round().to(torch.int8) for cache in caches]

    def call(q_nope, q_rope, *given):
        ctkv, k_rope = (cache.to(BF16) for cache in given[:2])
        return torch.ops.mla_fx.multi_latent_attention(q_nope, q_rope, ctkv, k_rope, tables, LENGTHS, qk_scale=0.005)[0]

    given = q_nope, q_rope, *codes
    torch.testing.assert_close(compiled(call)(*given), call(*given), rtol=2**-6, atol=0.2)  # of numbers up to 100
    graph = types(converted.graphs[0])
    assert [graph.count(kind) for kind in ("FusedInferAttentionScore", "Cast")] == [1, 2]


@pytest.mark.parametrize("cache_mode", ["krope_ctkv", "nzcache"])
def test_one_graph_for_lengths_and_batches_of_any_size(converted, cache_mode):
    def call(*given):
        return torch.ops.mla_fx.multi_latent_attention(*given, qk_scale=SCALE, cache_mode=cache_mode)[0]

    run = compiled(call, dynamic=True)
    for batch in (3, 2):
        lengths = torch.tensor(LENGTHS[:batch])
        plain = latent_call(batch)
        q_nope, q_rope, ctkv, k_rope, tables = plain
        whole = [torch.cat(parts, -1) for parts in ((q_nope, q_rope), (ctkv, k_rope))]
        wanted = exact(*whole, ctkv, tables, LENGTHS[:batch], SCALE)
        check_exact(run(*latent_call(batch, cache_mode), lengths), wanted)
    assert types(converted.graphs[0]).count("FusedInferAttentionScore") == 1 and len(converted.graphs) == 1


def test_paged_attention_has_a_graph_for_each_page_size(converted):
    """It is a number among the kernel's attributes."""

    def call(*given):
        return torch.ops.mla_fx.paged_attention(*given, LENGTHS, qk_scale=SCALE, kv_head_num=4)

    run = compiled(call, dynamic=True)
    for page in (192, 96):
        given = paged_call(page=page)
        check_exact(run(*given), exact(*given, LENGTHS, SCALE))
    assert [types(graph).count("FusedInferAttentionScore") for graph in converted.graphs] == [1, 1]


def test_weights_that_are_arguments_are_laid_out_as_well(converted):
    """At the first call, and again where another weight is given."""
    layer = Prolog("functional", cache_mode="PA_BSND")

    def prolog(weights, token_x, *rest):
        *tables, kv_cache, kr_cache = rest
        query, query_rope, kv, kr = torch.ops.mla_fx.mla_prolog(
            token_x, *weights, *tables, kv_cache, kr_cache, cache_mode="PA_BSND"
        )
        return query, query_rope, kv, kr

    run, given = compiled(prolog), prolog_call("PA_BSND")
    for factor in (1, 1, 0.5):
        weights = [weight * factor for weight in layer.weights]
        check(lambda *rest, w=weights: run(w, *rest), lambda *rest, w=weights: prolog(w, *rest), given)
    assert types(converted.graphs[0]).count("MlaPrologV3") == 1 and len(converted.graphs) == 1


class PagedLayer(Prolog):
    """A decode step over pages, as servers hold them: the prolog writes a row a sequence, attention reads all."""

    def forward(self, token_x, sin, cos, index, kv_cache, kr_cache, tables, lengths):
        call = token_x, *self.weights, sin, cos, index, kv_cache, kr_cache
        query, query_rope, kv, kr = torch.ops.mla_fx.mla_prolog(*call, cache_mode="PA_BSND")
        kv_cache.copy_(kv)
        kr_cache.copy_(kr)
        queries = (part.flatten(0, 1) for part in (query, query_rope))
        return torch.ops.mla_fx.multi_latent_attention(*queries, kv, kr, tables, lengths, qk_scale=SCALE)[0]


def test_a_layer_over_pages(converted):
    """Several steps on one graph, which writes the pages in place."""
    layer, draw = PagedLayer("functional"), Sampler(BF16, seed=2)
    layer.weights[1].data = draw.weight(HCQ, 8 * (D + DR), fan_in=HCQ)
    layer.weights[2].data = draw.weight(8, D, HCKV, fan_in=D)
    run = compiled(layer)
    tables = torch.tensor([[3, 0], [1, 2]], dtype=torch.int32)
    mine = [draw.normal(4, PAGE, 1, width) for width in (HCKV, DR)]
    theirs = [cache.clone() for cache in mine]
    for length in (130, 131):
        places = tables[:, 1:].long() * PAGE + (length - 1 - PAGE)
        given = [draw.normal(2, 1, HE), *draw.tables(2, 1, DR), places]
        lengths = torch.tensor([length, length], dtype=torch.int32)
        found, wanted = (step(*given, *caches, tables, lengths) for step, caches in ((run, mine), (layer, theirs)))
        torch.testing.assert_close(found, wanted, rtol=1e-2, atol=2**-8)
        torch.testing.assert_close(mine, theirs, **LAST_BIT)
    kinds = types(converted.graphs[0])
    assert [kinds.count(kind) for kind in ("MlaPrologV3", "FusedInferAttentionScore", "TensorMove")] == [1, 1, 0]
    assert len(converted.graphs) == 1


# --- attention of expanded heads ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "width, values, rope, has_sinks",
    [(128, 128, 64, False), (128, 128, 64, True), (128, 128, 0, True), (192, 192, 0, False)],
)
def test_mla_attention(converted, width, values, rope, has_sinks):
    """With and without a rotary part: as many rows as keys, of one sequence."""
    draw, tokens = Sampler(BF16, seed=8), 20
    up = draw.weight(N, width + values, HCKV, fan_in=HCKV)
    ropes = (draw.normal(1, tokens, N, rope), draw.normal(1, tokens, rope)) if rope else (None, None)
    args = [draw.normal(1, tokens, N, width), ropes[0], draw.normal(1, tokens, HCKV), ropes[1]]
    weights = {"weight_uk": up[:, :width], "weight_uv": up[:, width:], "sinks": draw.normal(N) if has_sinks else None}
    call = Call("attention", args, {**weights, "scale": 0.1, "is_causal": True})
    torch.testing.assert_close(call.on_npu(converted), call.wanted(), rtol=2e-2, atol=2e-2)
    assert types(converted.graphs[0]).count("FusedInferAttentionScore") == 1
