"""Attention over paged keys and values per head: spellings, sizes and dtypes, and near twins, compared with eager
mode."""

import contextlib
import functools

import pytest
import torch
from lib import layers
from lib import paged_heads as paged
from lib.layers import QUIET
from lib.paged_heads import BLOCK, FLOAT32, HEADS, ByLength, Eager, Engine, Grouped, Sizes, arguments, check
from torch.nn.functional import scaled_dot_product_attention

import mla_fx
from mla_fx.errors import NoMatch

pytestmark = [pytest.mark.filterwarnings(line) for line in QUIET]


def fused(module, **options):
    report = check(module, **options)
    return report.fused.get("paged_attention", 0)


def reasons(report):
    return [miss.reason for miss in report.misses if miss.pattern == "paged_attention"]


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("kind", paged.SPELLINGS, ids=lambda kind: kind.__name__)
def test_spellings(kind, tokens):
    assert fused(kind(Sizes(tokens=tokens))) == 1


@pytest.mark.parametrize("kind", [paged.PagesOfHeads, paged.RowsOfHeads], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("target", ["reference", "inductor"])
def test_heads_first_in_a_page(kind, target):
    module = kind(Sizes(columns=6)).float()
    given = paged.heads_first(arguments(module.sizes, torch.float32))
    assert fused(module, given=given, close=FLOAT32, target=target) == 1


def test_a_table_of_each_head():
    module = paged.TableOfEachHead(Sizes(batch=2, columns=6))
    assert fused(module, given=paged.table_of_each_head(module.sizes)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Engine, Eager, paged.Expanded, paged.Gqa], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("kv_heads, columns", [(4, 8), (1, 8), (2, 5), (2, 11)])
def test_heads_and_widths(kind, kv_heads, columns):
    assert fused(kind(Sizes(kv_heads=kv_heads, columns=columns))) == 1


def test_many_tokens_and_long_contexts():
    assert fused(Engine(Sizes(batch=2, tokens=70, blocks=40))) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [Engine, ByLength, paged.Filled, Grouped, paged.OneFurther, paged.Window, paged.Slopes],
    ids=lambda kind: kind.__name__,
)
def test_causal_masks_become_lengths_and_others_stay(kind):
    lines = check(kind(), keep_text=True).graphs["lower"].splitlines()
    (call,) = [line.split("(")[1] for line in lines if "= mla_fx.paged_attention." in line]
    is_length = call.split(", ")[4] != "None"
    assert is_length == (kind in (Engine, ByLength, paged.Filled, Grouped)), call


# --- targets, sizes and types ----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("target", ["reference", "inductor"])
def test_no_context_is_gathered(target):
    module = Engine().float()
    given = arguments(module.sizes, torch.float32)
    report = check(module, given=given, close=FLOAT32, target=target, keep_text=True)
    assert report.fused == {"paged_attention": 1}
    paged.check_no_context_is_gathered(report)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["reference", pytest.param("inductor", marks=pytest.mark.campaign)])
@pytest.mark.parametrize("kind", [Engine, Eager, Grouped, paged.Slots, ByLength], ids=lambda kind: kind.__name__)
def test_one_graph_for_all_sizes(kind, target):
    paged.check_all_sizes(kind, arguments, target)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Engine, Eager, Grouped, paged.Upcast], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_no_coarser_than_the_program(kind, dtype):
    paged.check_no_coarser(kind().to(dtype), arguments(Sizes(), dtype))


# --- near twins ------------------------------------------------------------------------------------------------------


variant = functools.partial(layers.variant, kind=Engine)

def of_heads(scores):
    return torch.arange(1, HEADS + 1, dtype=scores.dtype).view(-1, 1, 1)


def beside_a_sink(my, scores):
    return torch.cat((scores, torch.ones_like(scores[..., :1])), -1).softmax(-1)[..., :-1]


TableTurned = variant("TableTurned", tables=lambda my, table: (table, table.flip(1)))
TableOfAnotherSequence = variant("TableOfAnotherSequence", tables=lambda my, table: (table, table.roll(1, 0)))
RowsFirst = variant("RowsFirst", context=lambda my, cache, table: cache[table].transpose(1, 2).flatten(1, 2))
Rounded = variant("Rounded", context=lambda my, *given: Engine.context(my, *given).bfloat16().to(given[0].dtype))
Softcap = variant("Softcap", kind=Eager, weights=lambda my, scores: (torch.tanh(scores / 3) * 3).softmax(-1))
ScaledHeads = variant("ScaledHeads", kind=Eager, weights=lambda my, scores: (scores * of_heads(scores)).softmax(-1))
Weighed = variant("Weighed", keys=lambda my, key: key * torch.arange(1, key.shape[1] + 1).view(-1, 1, 1))
Sinks = variant("Sinks", kind=Eager, weights=beside_a_sink)


class OtherHeads(paged.Turned):
    def values(self, value):
        self.turned = True
        return value

    def repeated(self, rows):
        turned, self.turned = self.turned, False
        return super().repeated(rows) if turned else Engine.repeated(self, rows)


class ValuesPerHead(Engine):
    """Each head of the query has values of its own; two heads share their keys."""

    def attend(self, query, key, value, positions):
        value = value.flatten(-2).unflatten(-1, (HEADS, -1))
        parts = (part.transpose(1, 2) for part in (query, self.repeated(key), value))
        return scaled_dot_product_attention(*parts, attn_mask=self.mask(key, positions)).transpose(1, 2)


REFUSED = {
    TableTurned: "block_table is not one tensor",
    TableOfAnotherSequence: "block_table is not one tensor",
    RowsFirst: "the rows of a block are not consecutive in the context",
    Softcap: "the attention scores go through tanh",
    ScaledHeads: "the attention scores go through mul before the softmax, expected a product",
    Weighed: "expected gathered rows, found mul",
    Rounded: "rows are gathered in torch.float64 and cast to torch.",
    Sinks: "paged_attention has no operand for an attention sink",
    OtherHeads: "keys and values do not have the same heads",
    ValuesPerHead: "keys and values do not have the same heads",
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", REFUSED, ids=lambda kind: kind.__name__)
def test_near_twins_are_refused_with_a_reason(kind):
    report = check(kind())
    assert not report.fused and any(REFUSED[kind] in miss.reason for miss in report.misses), str(report)


def test_a_cache_that_would_have_to_be_copied_is_gathered():
    """The columns of a row are not adjacent, [BlockNum, Hkv, columns / 4, BlockSize, 4]."""

    class Columned(Engine):
        def forward(self, query, table, *caches):
            key, value = (cache[table].permute(0, 1, 4, 2, 3, 5).flatten(1, 2).flatten(-2) for cache in caches)
            return self.attend(query, key, value, torch.arange(7, 12).expand(3, -1))

    generator = torch.Generator().manual_seed(0)
    caches = (torch.randn(19, 2, 2, BLOCK, 4, generator=generator, dtype=torch.float64) for _ in range(2))
    query = torch.randn(3, 5, HEADS, 8, generator=generator, dtype=torch.float64)
    table = torch.randperm(19, generator=generator)[:18].view(3, 6)
    report = check(Columned(), given=(query, table, *caches))
    assert not report.fused and "reading the cache as pages of rows of heads would copy it" in reasons(report)[0]


def test_masked_weights_are_no_attention():
    def masked(my, scores):
        return scores.softmax(-1) * (torch.arange(scores.shape[-1]) != 3)

    assert not check(variant("MaskedWeights", kind=Eager, weights=masked)()).fused


def test_dropout_is_left_alone():
    class Dropping(Engine):
        def attend(self, query, key, value, positions):
            parts = (part.transpose(1, 2) for part in (query, self.repeated(key), self.repeated(value)))
            return scaled_dot_product_attention(*parts, dropout_p=0.5)

    torch._dynamo.reset()
    given = arguments(Sizes())
    with torch.no_grad(), contextlib.suppress(RuntimeError):
        torch.compile(Dropping(), backend=mla_fx.get_backend(target="reference"))(*given)
    assert not mla_fx.last_report().fused


def test_a_graph_in_which_nothing_is_gathered_is_left_alone():
    class Contiguous(Engine):
        def context(self, cache, table):
            return cache[: table.shape[0]].repeat(1, 1, 1, 1)

    report = check(Contiguous())
    assert not report.fused and not reasons(report)


def test_a_refusing_target_keeps_the_graph(monkeypatch):
    """Like an NPU, whose kernel does not take everything."""
    from mla_fx.lowering.reference import Reference

    refusal = "no kernel takes this"

    def refuse(*args, **kwargs):
        raise NoMatch(refusal)

    monkeypatch.setattr(Reference, "runs_operators", False)
    monkeypatch.setattr(Reference, "lowerings", lambda *_, **__: {torch.ops.mla_fx.paged_attention.batched: refuse})
    report = check(Engine())
    assert not report.fused and reasons(report) == [f"target 'reference': {refusal}"]
    assert report.graphs["captured"] == report.graphs["clean up"] if report.graphs else True
