"""Attention over paged keys and values per head becomes the vendor's over pages and a table; rows are written in place.

The layers are plain PyTorch, as in lib/paged_heads.py."""

import pytest
import torch
from lib.paged_heads import (
    ByLength,
    Eager,
    Engine,
    Expanded,
    Gqa,
    Grouped,
    LogarithmOfLength,
    PagesOfHeads,
    RowsOfHeads,
    TableOfEachHead,
    Turned,
    arguments,
    heads_first,
    table_of_each_head,
)

import mla_fx
from npu.converted import types
from npu.paged_heads import BF16, KERNEL, WIDTH, compared, compiled, sized

KINDS = (Engine, Eager, Grouped, Gqa, Expanded, ByLength, LogarithmOfLength)
SIZES = [(1, 16), (1, 128), (3, 128), (3, 256), (20, 128)]
QUICK = [*((Gqa, *sizes) for sizes in SIZES), (Grouped, 1, 16), (Grouped, 3, 128)]  # how rows are shared is one thing


def at_each_size():
    every = [(kind, *sizes) for kind in KINDS for sizes in SIZES]
    return [pytest.param(*case, marks=[] if case in QUICK else pytest.mark.campaign) for case in every]


@pytest.mark.parametrize("kind, tokens, block", at_each_size())
def test_a_layer(converted, kind, tokens, block):
    module = kind(sized(tokens, block)).to(BF16)
    compared(compiled(module), module, arguments(module.sizes, BF16))
    graph = types(converted.graphs[0])
    counts = [graph.count(name) for name in (KERNEL, "ScatterNdUpdate", "TensorMove", "Assign", "IndexByTensor")]
    assert counts == [1, 2, 0, 0, 0], str(mla_fx.last_report())
    assert not any("copied" in note for note in mla_fx.last_report().notes)


@pytest.mark.parametrize("kind", [PagesOfHeads, pytest.param(RowsOfHeads, marks=pytest.mark.campaign)])
@pytest.mark.parametrize("tokens, block", [(1, 16), (1, 384), (3, 128), (20, 256)])
@pytest.mark.parametrize("target", ["ge", "aclgraph"])
def test_heads_first_in_a_page(converted, captured, kind, tokens, block, target):
    """The vendor's layout BNSD: the pages are passed as they are."""
    module = kind(sized(tokens, block)).to(BF16)
    compared(compiled(module, target=target), module, heads_first(arguments(module.sizes, BF16)))
    if target == "aclgraph":
        assert captured.graphs[0].calls("npu.npu_fused_infer_attention_score_v2.out") == [1]
        return
    graph = types(converted.graphs[0])
    counts = [graph.count(name) for name in (KERNEL, "ScatterNdUpdate", "TensorMove", "Assign", "IndexByTensor")]
    assert counts == [1, 2, 0, 0, 0], str(mla_fx.last_report())
    (kernel,) = [op for op in converted.graphs[0].op if op.type == KERNEL]
    assert all(name.startswith("ScatterNdUpdate") for name in kernel.input[1:3]) == (kind is PagesOfHeads)


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("target", ["ge", "aclgraph"])
def test_a_table_of_each_head(converted, captured, tokens, target):
    """Each is a sequence of the kernel."""
    module = TableOfEachHead(sized(tokens, 128, batch=2)).to(BF16)
    compared(compiled(module, target=target), module, table_of_each_head(module.sizes, BF16))
    if target == "ge":
        assert types(converted.graphs[0]).count(KERNEL) == 1
    else:
        assert captured.graphs[0].calls("npu.npu_fused_infer_attention_score_v2.out") == [1]


@pytest.mark.parametrize("kv_heads, dtype", [(1, BF16), (4, BF16), (2, torch.float16)])
def test_heads_and_dtypes(converted, kv_heads, dtype):
    module = Gqa(sized(1, 16, kv_heads=kv_heads)).to(dtype)
    compared(compiled(module), module, arguments(module.sizes, dtype))
    assert types(converted.graphs[0]).count(KERNEL) == 1


def test_several_steps_and_contexts_on_one_graph(converted):
    """Blocks may count from the end."""
    module = Gqa(sized(2, 128)).to(BF16)
    run = compiled(module)
    x, table, starts, *caches = arguments(module.sizes, BF16)
    table[1] -= len(caches[0])
    for step in (0, 2, 300):
        compared(run, module, [torch.roll(x, step, -1), table, starts + step, *caches])
    assert [types(graph).count(KERNEL) for graph in converted.graphs] == [1]


def test_batches_of_any_size(converted):
    """From the second size on, the batch is a symbol; the caches keep their sizes."""
    module = Gqa(sized(2, 128, batch=4)).to(BF16)
    run, (x, table, starts, *caches) = compiled(module, dynamic=None), arguments(module.sizes, BF16)
    for batch in (4, 3, 2):
        compared(run, module, [x[:batch], table[:batch], starts[:batch], *caches])
    assert [[types(graph).count(name) for name in (KERNEL, "TensorMove")] for graph in converted.graphs] == [[1, 0]] * 2


def test_caches_whose_size_is_a_symbol_are_copied(converted):
    """The report says so."""
    module = Gqa(sized(1, 128)).to(BF16)
    given = arguments(module.sizes, BF16)
    for cache in given[3:]:
        torch._dynamo.mark_dynamic(cache, 0)
    compared(compiled(module, dynamic=None), module, given)
    copies = types(converted.graphs[0]).count("TensorMove")
    said = [note for note in mla_fx.last_report().notes if "copied at each step" in note]
    assert copies == len(said) == 2 and "key_cache is copied at each step, because a size of it is a symbol" in said[0]


def test_a_sequence_without_a_context_gives_zeros(converted):
    """The operator itself does so: rows of a batch that is padded."""
    draw = torch.Generator().manual_seed(0)
    query = torch.randn(2, 3, 4, WIDTH, generator=draw).to(BF16)
    caches = [torch.randn(4, 128, 2, WIDTH, generator=draw).to(BF16) for _ in range(2)]
    call = query, *caches, torch.tensor([[3, 1], [0, 2]]), torch.tensor([0, 130])

    def attend(*call):
        return torch.ops.mla_fx.paged_attention.batched(*call, scale=0.1)

    found = compiled(attend)(*call)
    assert (found[0] == 0).all() and types(converted.graphs[0]).count(KERNEL) == 1
    torch.testing.assert_close(found, attend(*call), rtol=2e-2, atol=2e-2)


def test_masks(converted):
    """One that is declared causal gives lengths; where it is not, the result is NaN."""
    draw = torch.Generator().manual_seed(0)
    query = torch.randn(2, 3, 4, WIDTH, generator=draw).to(BF16)
    caches = [torch.randn(4, 128, 2, WIDTH, generator=draw).to(BF16) for _ in range(2)]
    lens = torch.tensor([[7], [130]])
    seen = torch.arange(256) < (lens - 2 + torch.arange(3)).unsqueeze(-1)
    seen = seen.unsqueeze(1)
    table = torch.tensor([[3, 1], [0, 2]])

    def attend(*call):
        return torch.ops.mla_fx.paged_attention.batched(*call[:4], None, call[4], scale=0.1)

    run = compiled(attend, causal_masks=True)
    torch.testing.assert_close(
        run(query, *caches, table, seen), attend(query, *caches, table, seen), rtol=2e-2, atol=2e-2
    )
    assert types(converted.graphs[0]).count(KERNEL) == 1
    seen[1, 0, 0, 5] = False
    found = run(query, *caches, table, seen)
    assert found[1].isnan().all() and not found[0].isnan().any()


REFUSED = {
    "pages of drafts": (
        sized(3, 16),
        "with S = 3, key_cache has BlockSize = 16; FusedInferAttentionScore takes multiples of 128",
    ),
    "pages": (sized(1, 8), "with S = 1, key_cache has BlockSize = 8; FusedInferAttentionScore takes multiples of 16"),
    "columns": (sized(1, 16, width=24, columns=24), "query has D = 24; FusedInferAttentionScore takes 16, 32, 48"),
    "values": (sized(1, 16, columns=32), "value_cache has Dv = 32; FusedInferAttentionScore takes 64"),
}


def test_blocks_of_heads_that_are_larger_than_a_page(converted):
    """Unlike rows of heads, they are not several pages."""
    module = PagesOfHeads(sized(1, 1024)).to(BF16)
    compared(compiled(module), module, heads_first(arguments(module.sizes, BF16)))
    (miss,) = [miss for miss in mla_fx.last_report().misses if miss.pattern == "paged_attention"]
    assert "key_cache has BlockSize = 1024; FusedInferAttentionScore takes up to 512 if heads come first" in miss.reason


@pytest.mark.parametrize("name", REFUSED)
def test_what_stays_in_plain_operators(converted, name):
    sizes, sentence = REFUSED[name]
    module = Engine(sizes).to(BF16)
    compared(compiled(module), module, arguments(sizes, BF16))
    (miss,) = [miss for miss in mla_fx.last_report().misses if miss.pattern == "paged_attention"]
    assert miss.reason.startswith(f"target 'ge': {sentence}")
    assert KERNEL not in types(converted.graphs[0])


def test_heads_in_another_order(converted):
    """Head n of the query reads head n % Hkv: the query is turned, not the cache."""
    module = Turned(sized(1, 128)).to(BF16)
    compared(compiled(module), module, arguments(module.sizes, BF16))
    graph = types(converted.graphs[0])
    assert [graph.count(name) for name in (KERNEL, "TensorMove")] == [1, 0]


def test_captured(captured):
    """The host reads the length of each sequence before the step."""
    module = Gqa(sized(1, 128)).to(BF16)
    compared(compiled(module, target="aclgraph"), module, arguments(module.sizes, BF16))
    (graph,) = captured.graphs
    assert graph.calls("npu.npu_fused_infer_attention_score_v2.out") == [1]
