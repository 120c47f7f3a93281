"""Attention in flat memory: PyTorch's own and tiles of query rows give the results of the operators' bodies, and a
trace for a long prompt contains no scores of all queries and keys."""

import dataclasses
import math

import pytest
import torch
from mla_fx.lowering import loops
from mla_fx.lowering.loops import attention as loops_of_attention
from mla_fx.lowering.loops.attention import IN_TILES
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from mla_fx.debug.memory import peak_of_temporaries
from mla_fx.driver import discovery
from mla_fx.errors import NoMatch
from mla_fx.ops.emitted.attention import operator as attention
from mla_fx.ops.emitted.attention import tiles

FORMS = ("latents", "heads")
STEPS, CONTEXT, HEADS = 18, 20, 3
ROWS = torch.arange(STEPS).unsqueeze(-1)
SEEN = torch.arange(CONTEXT) <= ROWS
BLIND = SEEN & (ROWS != 7)
OWN = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
LOWEST = torch.finfo(torch.float32).min


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64)


def arguments(form, steps=STEPS, context=CONTEXT, batch=2, **given):
    """Dense operands of a form; some may be passed."""
    up = normal(HEADS, 14, 16) / 4
    own = {"weight_uk": up[:, :8], "weight_uv": up[:, 8:]} if form == "heads" else {}
    queries = {"query": normal(batch, steps, HEADS, 8 if own else 16), "query_rope": normal(batch, steps, HEADS, 4)}
    caches = {"kv_cache": normal(batch, context, 16), "kr_cache": normal(batch, context, 4)}
    return attention.Arguments(**{**queries, **caches, **own, "scale": 0.3, **given})


BIAS = normal(1, HEADS, STEPS, CONTEXT)
HIDING = {
    "no mask": {},
    "causal": {"is_causal": True},
    "causal, negative scale": {"is_causal": True, "scale": -0.3},
    "causal, no scale": {"is_causal": True, "scale": 0.0},
    "bool mask": {"mask": BLIND},
    "bool mask of one row": {"mask": SEEN[4:5]},
    "bool mask of heads": {"mask": (BIAS > 0) & SEEN},
    "additive mask": {"mask": BIAS},
    "additive mask of another type": {"mask": BIAS.float()},
    "blind rows of an additive mask": {"mask": torch.zeros(STEPS, CONTEXT).masked_fill(~BLIND, -math.inf)},
    "context_lens": {"context_lens": torch.tensor([20, 7])},
    "context_lens beyond": {"context_lens": torch.tensor([-3])},
}
FILLED = {
    "lowest fill": {"mask": BLIND, "fill": LOWEST},
    "lowest fill, context_lens": {"context_lens": torch.tensor([20, 7]), "fill": LOWEST},
}
TILED = {
    "fill": {"mask": BLIND, "fill": -1.5},
    "sinks": {"context_lens": torch.tensor([20, 7]), "sinks": normal(HEADS)},
    "sinks, fill": {"mask": BLIND, "sinks": normal(HEADS), "fill": -1e9},
    "sinks, causal": {"is_causal": True, "sinks": normal(HEADS)},
}


def ways(form):
    """What a call runs, and what a compiler of loops gets; attention alone of both."""
    compiled = loops_of_attention.compiled if form == "heads" else loops_of_attention.in_parts
    return map(alone, (attention.kernel, compiled))


def alone(way):
    return lambda a: way(a)[0]


def graph_of(function, a, decompositions=None):
    names = [name for name, value in vars(a).items() if isinstance(value, torch.Tensor)]

    def traced(*tensors):
        return function(dataclasses.replace(a, **dict(zip(names, tensors, strict=True))))

    with torch.no_grad():
        return make_fx(traced, decompositions, tracing_mode="fake")(*(getattr(a, name) for name in names)).graph


def calls_own(a):
    """Wherever a call may use it: with a mask that is one of two branches."""
    whole = graph_of(loops_of_attention.compiled, a).owning_module
    graphs = [module.graph for module in whole.modules() if isinstance(module, GraphModule)]
    return any(node.target is OWN for graph in graphs for node in graph.nodes)


@pytest.fixture(params=["few scores", "many scores"])
def has_few_scores(request, monkeypatch):
    if request.param == "many scores":
        monkeypatch.setattr(loops_of_attention, "FEW_SCORES", 0)
        monkeypatch.setattr(attention, "fit_a_tile", lambda *_: False)
    return request.param == "few scores"


@pytest.mark.slow
@pytest.mark.parametrize("name", [*HIDING, *FILLED, *TILED])
def test_prompts_answer_as_the_body(name, has_few_scores):
    """Which is plain: scores of all queries and keys, and their softmax."""
    a = arguments("heads", **(HIDING | FILLED | TILED)[name])
    for way in ways("heads"):
        torch.testing.assert_close(way(a), attention.body(a)[0], rtol=1e-9, atol=1e-9)
    assert calls_own(a) is (name not in TILED and not has_few_scores)


@pytest.mark.parametrize("tile", [1, 2 * HEADS * CONTEXT * 5])
@pytest.mark.parametrize("name", [*HIDING, *FILLED, *TILED])
@pytest.mark.parametrize("form", FORMS)
def test_tiles_answer_as_the_body(monkeypatch, form, name, tile):
    monkeypatch.setattr(tiles, "TILE", tile)
    monkeypatch.setattr(tiles, "FEW", 1)
    monkeypatch.setattr(loops_of_attention, "FEW_SCORES", 0)
    lower = loops.lowerings(alone=False)[attention.operator.overload]
    for given in ({}, {"max_absorbed_tokens": STEPS}) if form == "heads" else ({},):
        a = arguments(form, **(HIDING | FILLED | TILED)[name], **given)
        torch.testing.assert_close(attention.kernel(a)[0], attention.body(a)[0], rtol=1e-9, atol=1e-9)
        if form == "heads" and name not in TILED and not given:
            assert lower(**vars(a)).__wrapped__ is loops_of_attention.compiled
        else:
            with pytest.raises(NoMatch, match=IN_TILES):
                lower(**vars(a))


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 2, 3, 5])
@pytest.mark.parametrize("name", [*HIDING, *FILLED, *TILED, "mask of each sequence"])
def test_few_queries_answer_as_the_body(monkeypatch, name, batch):
    """Products are divided at the end, and a batch goes in parts."""
    monkeypatch.setattr(loops_of_attention, "PART", 1)
    masks = {"mask of each sequence": {"mask": normal(batch, 1, STEPS, CONTEXT) > 0}}
    given = (HIDING | FILLED | TILED | masks)[name]
    if "context_lens" in given and len(given["context_lens"]) > 1:
        given = {**given, "context_lens": torch.tensor([20, 7, 13, 1, 4])[:batch]}
    a = arguments("latents", batch=batch, **given)
    assert not tiles.goes_by_tiles(a.query, CONTEXT)
    for way in ways("latents"):
        torch.testing.assert_close(way(a), attention.body(a)[0], rtol=1e-9, atol=1e-9)
    bmm = torch.ops.aten.bmm.default
    products = [node for node in graph_of(loops_of_attention.in_parts, a).nodes if node.target is bmm]
    assert len(products) == 3 * {1: 1, 2: 2, 3: 3, 5: 1}[batch]


def test_pages_go_by_tiles_of_rows_too(monkeypatch):
    monkeypatch.setattr(tiles, "TILE", 2 * HEADS * 20 * 5)
    monkeypatch.setattr(tiles, "FEW", 1)
    monkeypatch.setattr(loops_of_attention, "FEW_SCORES", 0)
    table, pages = torch.tensor([[3, -2, 0, 5, 1], [2, 4, 4, 1, 0]]), {"kv_cache": normal(6, 4, 16)}
    pages["kr_cache"] = normal(6, 4, 4)
    for form in FORMS:
        a = arguments(form, block_table=table, context_lens=torch.tensor([19, 7]), **pages)
        torch.testing.assert_close(attention.kernel(a)[0], attention.body(a)[0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("context", [3, 20, 600])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_nan_in_a_query_stays(form, context, is_causal, has_few_scores):
    a = arguments(form, steps=3, context=context, is_causal=is_causal)
    a.query[0, 1, 2] = math.nan
    expected = attention.body(a)[0]
    assert expected[0, 1, 2].isnan().all()
    for way in ways(form):
        torch.testing.assert_close(way(a), expected, equal_nan=True)


@pytest.mark.parametrize("name", [*HIDING, *FILLED])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", FORMS)
def test_half_precision_is_as_exact_as_the_body(form, name, dtype, has_few_scores):
    wide = arguments(form, **(HIDING | FILLED)[name])
    operands = {key: value for key, value in vars(wide).items() if isinstance(value, torch.Tensor) and key != "mask"}
    rounded = {key: value.to(dtype) for key, value in operands.items() if value.is_floating_point()}
    a = dataclasses.replace(wide, **rounded)
    exact = attention.body(dataclasses.replace(a, **{key: value.double() for key, value in rounded.items()}))[0]
    *worst, plain = ((way(a).double() - exact).abs().max() for way in (*ways(form), alone(attention.body)))
    assert max(worst) <= 2 * plain


@pytest.mark.parametrize(("steps", "context"), [(0, 20), (3, 0), (0, 0)])
@pytest.mark.parametrize("form", FORMS)
def test_without_queries_or_keys(form, steps, context, has_few_scores):
    a = arguments(form, steps=steps, context=context)
    assert [way(a).shape for way in ways(form)] == 2 * [attention.body(a)[0].shape]


# --- a long prompt ---------------------------------------------------------------------------------------------------


def long_prompt(**given):
    """DeepSeek-V3's sizes, as fake tensors: 34 GB of scores in float32."""
    steps = context = 8192
    shapes = {
        "query": (1, steps, 128, 128),
        "query_rope": (1, steps, 128, 64),
        "kv_cache": (1, context, 512),
        "kr_cache": (1, context, 64),
        "weight_uk": (128, 128, 512),
        "weight_uv": (128, 128, 512),
    }
    operands = {name: torch.empty(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    return attention.Arguments(**{**operands, "mask": None, "scale": 0.1, **given})


@pytest.mark.parametrize("given", ["is_causal", "context_lens", "mask"])
@pytest.mark.parametrize("target", ["reference", "inductor"])
def test_a_long_prompt_keeps_no_scores(target, given):
    """Its temporaries are less than three times query, keys, values and result together."""
    table = dict(discovery.targets()[target].decompositions())
    steps, heads = 8192, 128
    with FakeTensorMode():
        values = {
            "is_causal": True,
            "context_lens": torch.empty(1, dtype=torch.int64),
            "mask": torch.empty(1, 1, steps, steps, dtype=torch.bool),
        }
        graph = graph_of(loops_of_attention.compiled, long_prompt(**{given: values[given]}), table)
    activations = 2 * steps * heads * (192 + 192 + 128 + 128)
    assert peak_of_temporaries(graph) <= 3 * activations
    tensors = [value for node in graph.nodes if isinstance(value := node.meta.get("val"), torch.Tensor)]
    assert all(value.numel() < heads * steps * steps for value in tensors)
