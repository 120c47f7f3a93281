"""What the compiler emits, the operators without quantisation, against a float64 oracle written from their formulas."""

import pytest
import torch
from lib import attention_forms as forms
from lib.operators.harness import (
    CATALOGUE,
    cases,
    change,
    compiles_once,
    double,
    drop,
    mapped,
    option,
)
from lib.operators.kv_oracle import matches_oracle
from lib.operators.plain_oracle import DTYPES, LAYOUTS, expect, oracle_attention, oracle_prolog

from mla_fx.ops.emitted.attention import heads
from mla_fx.ops.emitted.attention import operator as attention
from mla_fx.ops.emitted.kv_rmsnorm_rope_cache import samples as kv_rmsnorm_rope_cache
from mla_fx.ops.emitted.mla_prolog import samples as mla_prolog

PLAIN_PROLOG = tuple(f"-{mode}" for mode in ("PA_BSND", "Norm", "NZ", "BSND", "TND"))
PLAIN = [
    *cases(DTYPES, ("attention", "lightning_index", "merge_attention")),
    *cases(DTYPES, ("rms_norm", "rope")),
    *(case for case in cases(DTYPES, ("mla_prolog",)) if case.id.endswith(PLAIN_PROLOG)),
]


@pytest.mark.parametrize(("operator", "args", "kwargs"), PLAIN)
def test_sample_against_oracle(operator, args, kwargs):
    expect(operator, args, kwargs)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("after", [False, True])
def test_layouts_and_gamma_in_every_cache_mode(layout, after):
    options = {"rope_layout": layout, "gamma_after_cast": after}
    for mode, tokens in (("PA_BSND", (2, 3)), ("PA_BSND", (4,)), ("Norm", (2, 3)), ("BSND", (2, 3)), ("TND", (4,))):
        args, kwargs = mla_prolog.sample(torch.float64, 7, mode, tokens)
        expect(CATALOGUE["mla_prolog"], args, kwargs | options)
    for mode in ("Norm", "PA", "PA_BNSD"):
        args, kwargs = kv_rmsnorm_rope_cache.sample(torch.float64, 7, mode, 3)
        matches_oracle(args, kwargs | options)


def plain_norm(x, gamma, epsilon):
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return gamma * normed.to(x.dtype)


def plain_rope(x, cos, sin):
    first, second = x[..., 0::2], x[..., 1::2]
    x = torch.cat((first, second), -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def worst(result, wanted):
    return float((result.double() - wanted).abs().max())


def test_bfloat16_is_as_exact_as_plain_code():
    """At most twice as far from float64 as code written like Hugging Face's."""
    args, kwargs = mla_prolog.sample(torch.bfloat16, 3, "BSND", (4, 16))
    x, w_dq, w_uq, w_uk, w_dkv, gamma_cq, gamma_ckv, sin, cos, *_ = args
    up = (plain_norm(x @ w_dq, gamma_cq, 1e-5) @ w_uq).unflatten(-1, (3, -1))
    key = x @ w_dkv
    plain = (
        torch.einsum("bsnd,ndr->bsnr", up[..., :8], w_uk),
        plain_rope(up[..., 8:], cos[:, :, None], sin[:, :, None]),
        plain_norm(key[..., :16], gamma_ckv, 1e-5)[:, :, None],
        plain_rope(key[..., 16:], cos, sin)[:, :, None],
    )
    for after in (False, True):
        results = torch.ops.mla_fx.mla_prolog(*args, **kwargs, gamma_after_cast=after)
        for result, usual, want in zip(results, plain, oracle_prolog(*double(args), **kwargs), strict=True):
            assert worst(result, want) <= 2 * worst(usual, want)


@pytest.mark.parametrize("limit", [0, 16])
def test_bfloat16_attention_is_as_exact_as_plain_code(limit):
    given = forms.heads(torch.bfloat16, 3, steps=16)
    q, q_rope, kv, kr, w_uk, w_uv = given.values()
    key = torch.cat((torch.einsum("btr,ndr->bntd", kv, w_uk), kr[:, None].expand(-1, 3, -1, -1)), -1)
    scores = torch.cat((q, q_rope), -1).transpose(1, 2) @ key.mT * 0.3
    value = torch.einsum("btr,nvr->bntv", kv, w_uv)
    plain = (scores.softmax(-1, torch.float32).to(q.dtype) @ value).transpose(1, 2)
    want, _ = oracle_attention(**dict(zip(given, double(given.values()), strict=True)), scale=0.3)
    result = torch.ops.mla_fx.attention(**given, scale=0.3, max_absorbed_tokens=limit)[0]
    assert worst(result, want) <= 2 * worst(plain, want)


def prolog_with(index, mode="PA_BSND", tokens=(2, 3)):
    args, kwargs = mla_prolog.sample(torch.float64, 5, mode, tokens)
    return [*args[:9], torch.tensor(index), *args[10:]], kwargs


SKIPS = {
    "slot 0 and skipped": [[0, -1, -1], [-1, 5, -7]],
    "skipped before slot 0": [[-1, -1, 0], [-1, -1, -1]],
    "all skipped": [[-1, -1, -1], [-1, -1, -1]],
    "none skipped": [[0, 1, 2], [5, 4, 3]],
    "one skipped": [[3, -1, 2], [5, 4, 0]],
}


@pytest.mark.parametrize("mode", ["PA_BSND", "Norm"])
@pytest.mark.parametrize("skip", SKIPS)
def test_negative_index_stores_nothing(skip, mode):
    expect(CATALOGUE["mla_prolog"], *prolog_with(SKIPS[skip], mode))
    args, kwargs = kv_rmsnorm_rope_cache.sample(torch.float64, 5, "Norm" if mode == "Norm" else "PA", 3)
    index = torch.tensor(SKIPS[skip]).view_as(args[4])
    matches_oracle((*args[:4], index, *args[5:]), kwargs)


@pytest.mark.parametrize("index", [[[0, -1, 4]], [[-1, -1, -1]], [[3, 1, 0]]])
def test_one_row_of_positions_serves_the_batch(index):
    expect(CATALOGUE["mla_prolog"], *prolog_with(index, "Norm"))


@pytest.mark.parametrize("mode", ["PA_BSND", "Norm", "BSND"])
@pytest.mark.parametrize("tokens", [(0, 3), (2, 0), (1, 1)])
def test_empty_batch_no_token_one_token(mode, tokens):
    expect(CATALOGUE["mla_prolog"], *mla_prolog.sample(torch.float32, 5, mode, tokens))


def test_cache_without_slots_and_attention_without_queries():
    args, kwargs = prolog_with([[-1, -1, -1], [-1, -1, -1]])
    expect(CATALOGUE["mla_prolog"], [*args[:10], *(cache[:0] for cache in args[10:])], kwargs)
    for form in forms.FORMS:
        expect(attention.operator, (), {**form(torch.float32, 0, steps=0), "scale": 0.3})


def test_caches_may_be_two_views_of_one_buffer():
    args, kwargs = prolog_with([[9, -1, 2], [5, 0, 3]])
    buffer = torch.cat(args[10:], -1)
    args[10:] = buffer[..., :16], buffer[..., 16:]
    wanted = oracle_prolog(*double(args), **kwargs)
    torch.ops.mla_fx.mla_prolog_(*args, **kwargs)
    torch.testing.assert_close(buffer, torch.cat(wanted[2:], -1))


def test_tables_and_gammas_in_float32():
    args, kwargs = mla_prolog.sample(torch.bfloat16, 5, "Norm", (2, 3))
    wide = [value.float() if i in (5, 6, 7, 8) else value for i, value in enumerate(args)]
    for after in (False, True):
        expect(CATALOGUE["mla_prolog"], wide, kwargs | {"gamma_after_cast": after})


def test_both_algebras_agree_and_the_limit_chooses():
    given = {**forms.heads(torch.float64, 1), "scale": 0.3}
    arguments = attention.Arguments(**given)
    absorbed, expanded = heads.absorbed(arguments)[0], heads.expanded(arguments)[0]
    torch.testing.assert_close(absorbed, expanded)
    tiled = heads.tiled(arguments)[0]
    torch.testing.assert_close(tiled, expanded)
    for limit, form in ((2, expanded), (3, absorbed)):
        result = torch.ops.mla_fx.attention(**given, max_absorbed_tokens=limit)[0]
        torch.testing.assert_close(result, form, rtol=0, atol=0)


@pytest.mark.parametrize("shape", [(3, 5), (1, 5), (3, 3, 5), (2, 1, 3, 5), (1, 3, 1, 1), ()])
def test_mask_broadcasts(shape):
    mask = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for form in forms.FORMS:
        given = {**form(torch.float64, 0), "scale": 0.3}
        expect(attention.operator, (), {**given, "mask": mask})
        expect(attention.operator, (), {**given, "mask": mask > 0})
        expect(attention.operator, (), {**given, "mask": mask > 0, "fill": -0.5})


def random_prolog(mode, batch, steps, room):
    args, _ = mla_prolog.sample(torch.float32, 1, "BSND", (batch, steps))
    generator = torch.Generator().manual_seed(batch)
    lead = {"PA_BSND": (room, 8, 1), "Norm": (batch, 1, room)}[mode]
    caches = [torch.randn(*lead, width, generator=generator) for width in (16, 4)]
    rows = [torch.randperm(room, generator=generator)[:steps] for _ in range(batch)]
    index = torch.stack([row + (8 * i if mode == "PA_BSND" else 0) for i, row in enumerate(rows)])
    return [args[0], args[7], args[8], index, *caches], [*args[1:7]], {"cache_mode": mode}


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["PA_BSND", "Norm"])
@pytest.mark.parametrize("form", [CATALOGUE["mla_prolog"].body, torch.ops.mla_fx.mla_prolog])
def test_prolog_compiles_once_for_all_sizes(mode, form):
    _, weights, kwargs = random_prolog(mode, 2, 7, 19)

    def layer(x, sin, cos, index, kv_cache, kr_cache):
        return form(x, *weights, sin, cos, index, kv_cache, kr_cache, **kwargs)

    compiles_once(layer, [random_prolog(mode, *sizes)[0] for sizes in ((2, 7, 19), (5, 9, 23), (6, 11, 30))])


@pytest.mark.slow
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("form", [heads.absorbed, heads.expanded, None])
def test_attention_compiles_once_for_all_sizes(form, is_causal):
    given = forms.heads(torch.float32, 0)
    weights = {"weight_uk": given["weight_uk"], "weight_uv": given["weight_uv"]}

    def layer(*tensors):
        if form is None:
            attend = torch.ops.mla_fx.attention
            return attend(*tensors, **weights, scale=0.3, is_causal=is_causal, max_absorbed_tokens=7)
        return form(attention.Arguments(*tensors, **weights, scale=0.3, is_causal=is_causal))

    def tensors(batch, steps, context):
        return [torch.randn(batch, *rest) for rest in ((steps, 3, 8), (steps, 3, 4), (context, 16), (context, 4))]

    compiles_once(layer, [tensors(*sizes) for sizes in ((2, 7, 19), (5, 9, 23), (6, 11, 30))])


def test_cache_write_reaches_inductor_as_one_index_put():
    """No copy of the cache, and nothing else of its size: only then can Inductor write it in place."""
    args, kwargs = prolog_with([[9, -1, 2], [5, 0, 3]])
    graph = torch.fx.experimental.proxy_tensor.make_fx(lambda *a: CATALOGUE["mla_prolog"].body(*a, **kwargs))(*args)
    big = [node for node in graph.graph.nodes if node.op == "call_function" and node.meta["val"].shape[:2] == (4, 4)]
    assert [node.target for node in big] == [torch.ops.aten.index_put.default] * 2
    assert all(node.args[0].op == "placeholder" for node in big)


def test_no_gradient():
    given = forms.heads(torch.float32, 0)
    given["query"].requires_grad_()
    with pytest.raises(RuntimeError, match="autograd"):
        torch.ops.mla_fx.attention(**given, scale=0.3)[0].sum().backward()


REFUSALS = {
    "mla_prolog": [
        (change(0, torch.Tensor.long), "token_x has dtype torch.int64; allowed"),
        (change(0, lambda x: x[0]), r"cache_index has shape \[2, 3\]; it must be \[T\]|rope_sin has shape"),
        (change(0, lambda x: x[0, 0]), r"token_x has shape \[32\]; it must be \[B, S, He\] or \[T, He\]"),
        (change(1, lambda w: w[1:]), r"weight_dq has shape \[31, 24\]; it must be \[He, Hcq\] = \[32, \*\]"),
        (change(1, drop), "Only one of weight_dq and rmsnorm_gamma_cq is given"),
        (change(2, lambda w: w[:, 1:]), r"weight_uq_qr has shape \[24, 35\]"),
        (change(2, torch.Tensor.double), "weight_uq_qr has dtype torch.float64; it must be torch.float32"),
        (change(3, lambda w: w[0]), r"weight_uk has shape \[8, 16\]; it must be \[N, D, Hckv\]"),
        (change(4, lambda w: w[:, :16]), "rope part Dr, 0 here"),
        (change(4, lambda w: w[1:]), r"weight_dkv_kr has shape \[31, 20\]"),
        (change(5, lambda g: g[1:]), r"rmsnorm_gamma_cq has shape \[23\]"),
        (change(6, lambda g: g[1:]), r"rmsnorm_gamma_ckv has shape \[15\]"),
        (change(6, torch.Tensor.long), "rmsnorm_gamma_ckv has dtype torch.int64"),
        (change(6, lambda g: g.to("meta")), "rmsnorm_gamma_ckv is on meta; it must be on cpu"),
        (change(7, drop), "Only rope_cos is given; rope_sin and rope_cos must both"),
        (change(7, lambda t: t[..., 1:]), r"rope_sin has shape \[2, 3, 3\]"),
        (change(8, lambda t: t[:, 1:]), r"rope_cos has shape \[2, 2, 4\]"),
        (change(9, drop), "cache_index is None; it must be a tensor with cache_mode 'PA_BSND'"),
        (change(9, torch.Tensor.int), "cache_index has dtype torch.int32"),
        (change(9, lambda i: i[:1]), r"cache_index has shape \[1, 3\]"),
        (change(9, lambda i: i + 16), "cache_index holds .*; it must be below 16"),
        (change(10, lambda c: c[..., 1:]), r"kv_cache has shape \[4, 4, 1, 15\]"),
        (change(10, torch.Tensor.half), "kv_cache has dtype torch.float16"),
        (change(11, lambda c: c[1:]), r"kr_cache has shape \[3, 4, 1, 4\]"),
        (option(cache_mode="PA_BLK_NZ"), "cache_mode is 'PA_BLK_NZ'; allowed: 'PA_BSND', 'PA_NZ', 'Norm'"),
        (option(cache_mode="PA_NZ"), "BlockSize, axis 1 of kv_cache, is 4; it must be a multiple of 16"),
        (option(cache_mode="Norm"), r"kv_cache has shape \[4, 4, 1, 16\]; it must be \[B, 1, T, Hckv\]"),
        (option(cache_mode="BSND"), r"kv_cache has shape \[4, 4, 1, 16\]; it must be \[B, S, 1, Hckv\]"),
        (option(cache_mode="TND"), r"token_x has shape \[2, 3, 32\]; it must be \[T, He\]"),
        (option(rope_layout="half_interleave"), "rope_layout is 'half_interleave'; allowed: 'interleave_half'"),
    ],
    "lightning_index": [
        (change(0, lambda q: q[0]), r"query has shape \[1, 16, 8\]; it must be \[B, S, N, D\]"),
        (change(1, lambda k: k[..., 1:]), r"key has shape \[2, 12, 7\]; it must be \[B, T, D\]"),
        (change(1, torch.Tensor.half), "key has dtype torch.float16; it must be torch.float32, the dtype of query"),
        (change(2, lambda w: w[..., 1:]), r"weights has shape \[2, 1, 15\]; it must be \[B, S, N\]"),
        (change(2, torch.Tensor.long), "weights has dtype torch.int64"),
        (option(mask=torch.zeros(2, 16, 1, 12)), r"mask has shape \[2, 16, 1, 12\]; it must broadcast to"),
        (option(key_scale=torch.zeros(2, 11)), r"key_scale has shape \[2, 11\]; it must be \[B, T\]"),
        (option(sparse_count=0), "sparse_count is 0; it must be 1 or more"),
        (option(fill=-1.0), "fill is -1.0, but mask is no bool mask and context_lens is None"),
    ],
    "merge_attention": [
        (change(0, lambda outs: outs * 9), "outs has 18 tensors; it must have 1 to 16"),
        (change(0, lambda outs: outs[:1]), "lses has 2 tensors; it must have as many as outs, 1"),
        (change(0, lambda outs: [out.long() for out in outs]), r"outs\[0\] has dtype torch.int64; it must be one of"),
        (change(0, lambda outs: [out[0, 0, 0, 0] for out in outs]), r"outs\[0\] has shape \[\]; it must be \[..., C\]"),
        (change(0, lambda outs: [outs[0], outs[1].half()]), r"outs\[1\] has dtype torch.float16; it must be"),
        (change(0, lambda outs: [outs[0], outs[1][1:]]), r"outs\[1\] has shape \[1, 3, 4, 8\]; it must be"),
        (change(1, lambda lses: [lses[0].half(), lses[1]]), r"lses\[0\] has dtype torch.float16; it must be"),
        (change(1, lambda lses: [lses[0], lses[1].mT]), r"lses\[1\] has shape \[2, 4, 3\]; it must be \[2, 3, 4\]"),
    ],
}


def refusals():
    for name, rows in REFUSALS.items():
        for number, (spoil, message) in enumerate(rows):
            yield pytest.param(name, spoil, message, id=f"{name}-{number}")


@pytest.mark.parametrize(("name", "spoil", "message"), list(refusals()))
def test_refusal_writes_nothing(name, spoil, message):
    operator = CATALOGUE[name]
    _, args, kwargs = next(iter(operator.samples(torch.float32)))
    args = list(args)
    spoil(args, kwargs)
    before = mapped(torch.clone, args)
    for overload in filter(None, (operator.overload, operator.inplace)):
        with pytest.raises(ValueError, match=message):
            overload(*args, **kwargs)
    for value, old in zip(args, before, strict=True):
        assert not isinstance(value, torch.Tensor) or value.is_meta or torch.equal(value, old)


def test_index_where_none_belongs():
    args, kwargs = mla_prolog.sample(torch.float32, 0, "BSND", (2, 3))
    args = (*args[:9], torch.zeros(2, 3).long(), *args[10:])
    with pytest.raises(ValueError, match="cache_index is given; it must be None with cache_mode 'BSND'"):
        torch.ops.mla_fx.mla_prolog(*args, **kwargs)
