"""The target "aclgraph": what torchair would capture computes what eager does, and writes caches in place."""

import contextlib

import pytest
import torch

import mla_fx
from mla_fx.ops.common.sample import Sampler
from mla_fx.passes import hoist
from npu import models
from npu.calls import BF16, BLOCKS, DR, HCKV, PAGE, D, in_nz, kv_call, pages
from npu.copies import KEY_SIDE, PROLOG, check_nothing_is_copied

FRESH_PROLOG = "npu.npu_mla_prolog_v3_functional.default"
ATTENTION = "npu.npu_fused_infer_attention_score_v2.out"


def compiled(function, *, dynamic=False):
    return torch.compile(function, backend=mla_fx.get_backend(target="aclgraph", soc="Ascend910B3"), dynamic=dynamic)


@pytest.mark.parametrize("dynamic", [False, True])
def test_decode_step(captured, dynamic):
    model = models.model(layers=2)
    prompts = [models.prompt(1, seed=seed) for seed in range(3)]
    models.check_as_exact_as_eager(model, compiled(model, dynamic=dynamic), models.static_cache, prompts)
    (graph,) = captured.graphs
    assert graph.calls(PROLOG, ATTENTION) == [2, 2]
    assert len(graph.recordings) == 1, "later steps replay the first"
    check_nothing_is_copied(graph)


def test_lengths_that_stay_as_captured_are_noticed(captured, monkeypatch):
    """What the graph's first run read would be wrong in the next."""
    first = []
    read = hoist.HostNumbers.inputs

    def stale(numbers, given):
        count = len(given)
        first[:] = first or read(numbers, given)[count:]
        return [*given, *first]

    monkeypatch.setattr(hoist.HostNumbers, "inputs", stale)
    model, prompts = models.model(), [models.prompt(1, seed=seed) for seed in range(3)]
    with pytest.raises(AssertionError, match=r"^\(\["):
        models.check_as_exact_as_eager(model, compiled(model), models.static_cache, prompts)


def test_prompt(captured):
    model = models.model(layers=2)
    models.check_as_exact_as_eager(model, compiled(model), models.static_cache, [models.prompt(20)])
    (graph,) = captured.graphs
    assert graph.calls(KEY_SIDE) == [2]
    check_nothing_is_copied(graph)


def test_prompt_of_a_growing_cache(captured):
    """Attention over expanded keys would have the layout TND, which CANN does not capture."""
    model = models.model()
    models.check_as_exact_as_eager(model, compiled(model), models.dynamic_cache, [models.prompt(20)])
    (graph,) = captured.graphs
    assert graph.calls(ATTENTION) == [0]
    assert any("TND, which cannot be captured" in note for note in mla_fx.last_report().notes)


def test_growing_cache(captured):
    """Its rows are fresh memory, and its length is computed, which the kernel for attention does not take."""
    model, prompts = models.model(), [models.prompt(1, seed=seed) for seed in range(2)]
    models.check_as_exact_as_eager(model, compiled(model, dynamic=True), models.grown, prompts)
    assert [graph.calls(FRESH_PROLOG, ATTENTION) for graph in captured.graphs] == [[1, 0]]


class Attention(torch.nn.Module):
    """Hugging Face's attention of one token to all positions of a cache, without a mask."""

    def __init__(self):
        super().__init__()
        self.attention = models.model().layers[0].self_attn

    def forward(self, x, cos, sin, cache):
        return self.attention(x, (cos, sin), None, past_key_values=cache)[0]


def test_attention_without_a_mask(captured):
    """Every sequence has its whole cache, whose length is a number of the host."""
    layer, draw = Attention(), Sampler(BF16, seed=9)
    run = compiled(layer)
    eager, found = (filled(models.static_cache(models.model())) for _ in range(2))
    with torch.no_grad():
        for _ in range(3):
            given = [draw.normal(1, 1, models.SMALL["hidden_size"]), *draw.tables(1, 1, DR)]
            torch.testing.assert_close(run(*given, found), layer(*given, eager), rtol=2e-2, atol=2e-2)
            torch.testing.assert_close(models.rows_of(found), models.rows_of(eager), rtol=2e-2, atol=2e-2)
    (graph,) = captured.graphs
    assert graph.calls(PROLOG, ATTENTION) == [1, 1]
    check_nothing_is_copied(graph)


def filled(cache):
    draw = Sampler(BF16, seed=10)
    for layer in cache.layers:
        for rows in (layer.keys, layer.values):
            rows.copy_(draw.normal(*rows.shape))
    return cache


def latent_call(cache_mode, rows):
    draw, lengths = Sampler(BF16, seed=6), [3, 300, 128]
    caches = [draw.normal(len(lengths) * BLOCKS, PAGE, 1, width) for width in (HCKV, DR)]
    caches = [in_nz(cache) if cache_mode == "nzcache" else cache for cache in caches]
    return [*(draw.normal(rows, 128, width) for width in (HCKV, DR)), *caches, pages(draw, lengths)], lengths


@pytest.mark.parametrize(
    "cache_mode, steps, as_tensors",
    [
        ("krope_ctkv", None, False),
        ("krope_ctkv", [3, 1, 2], True),
        ("nzcache", None, True),
        ("nzcache", [3, 1, 2], False),
    ],
    ids=str,
)
def test_multi_latent_attention(captured, cache_mode, steps, as_tensors):
    """One capture for all lengths, those of the host and those that it reads ahead."""
    tensors, lengths = latent_call(cache_mode, 3 if steps is None else sum(steps))
    options = {"cache_mode": cache_mode, "calc_type": "calc_type_undefined" if steps is None else "calc_type_spec"}
    counts = torch.tensor(steps) if steps and as_tensors else steps

    def call(lengths, counts, *tensors):
        attention = torch.ops.mla_fx.multi_latent_attention
        return attention(*tensors, lengths, None, counts, qk_scale=0.07, **options)[0]

    run = compiled(call, dynamic=None)
    for more in range(3):
        now = [length + more for length in lengths]
        given = [torch.tensor(now) if as_tensors else now, counts, *tensors]
        torch.testing.assert_close(run(*given), call(*given), rtol=1e-2, atol=4e-3)
    graph = captured.graphs[-1]
    assert graph.calls(ATTENTION, "atb.npu_multi_head_latent_attention.default") == [1, 0]
    assert len(graph.recordings) == 1


def test_atb_is_captured_for_each_length(captured):
    """torchair updates none of its lengths."""
    tensors, lengths = latent_call("krope_ctkv", 6)
    tensors[:2] = (tensor[:, :8].contiguous() for tensor in tensors[:2])

    def call(lengths, *tensors):
        attention, options = torch.ops.mla_fx.multi_latent_attention, {"calc_type": "calc_type_spec"}
        return attention(*tensors, lengths, None, [3, 1, 2], qk_scale=0.07, **options)[0]

    run = compiled(call, dynamic=None)
    for more in range(3):
        now = [length + more for length in lengths]
        # one ulp of bfloat16: sums in another order may round otherwise
        torch.testing.assert_close(run(now, *tensors), call(now, *tensors), rtol=2**-7, atol=2**-12)
    assert [graph.calls("atb.npu_multi_head_latent_attention.default") for graph in captured.graphs] == [[1], [1]]
    assert len(captured.graphs[-1].recordings) == 2


def test_paged_attention(captured):
    draw, lengths = Sampler(BF16, seed=7), [1, 300, 128]
    caches = [draw.normal(len(lengths) * BLOCKS, PAGE, 4, D) for _ in range(2)]
    tensors = [draw.normal(len(lengths), 32, D), *caches, pages(draw, lengths)]

    def call(*tensors):
        return torch.ops.mla_fx.paged_attention(*tensors, lengths, qk_scale=0.09, kv_head_num=4)

    torch.testing.assert_close(compiled(call)(*tensors), call(*tensors), rtol=1e-2, atol=4e-3)
    assert captured.graphs[0].calls(ATTENTION) == [1]


def test_lengths_of_the_host_change_between_replays(captured):
    """One capture serves all lengths: of a captured graph torchair updates these alone."""
    draw = Sampler(BF16, seed=7)
    caches = [draw.normal(2 * BLOCKS, PAGE, 4, D) for _ in range(2)]
    tensors = [draw.normal(2, 32, D), *caches, pages(draw, [1, 1])]

    def call(lengths, *tensors):
        assert all(length > 0 for length in lengths)
        return torch.ops.mla_fx.paged_attention(*tensors, lengths, qk_scale=0.09, kv_head_num=4)

    run = compiled(call, dynamic=None)
    for lengths in ([5, 300], [6, 301], [7, 302]):
        torch.testing.assert_close(run(lengths, *tensors), call(lengths, *tensors), rtol=1e-2, atol=4e-3)
    _, graph = captured.graphs
    assert graph.calls(ATTENTION) == [1]
    assert ["actual_seq_kvlen"] in graph.info.updated_ops_param.values()
    assert graph.info.unupdated_sym_input_index == []


@pytest.mark.parametrize("is_written", [True, False])
def test_key_side(captured, is_written):
    """torch_npu's operator that returns new caches is wrong outside of GE graphs, so that none may be left."""

    def call(*tensors):
        k_cache, ckv_cache, *_ = torch.ops.mla_fx.kv_rmsnorm_rope_cache(*tensors, cache_mode="PA")
        if not is_written:
            return k_cache, ckv_cache
        tensors[5].copy_(k_cache)
        tensors[6].copy_(ckv_cache)
        return tensors[5] + 1, tensors[6] + 1

    ours, theirs = ([tensor for tensor in kv_call("PA") if tensor is not None] for _ in range(2))
    run = compiled(call)
    with contextlib.nullcontext() if is_written else pytest.warns(mla_fx.MlaWarning, match="not written in place"):
        found = run(*ours)
    torch.testing.assert_close((found, ours), (call(*theirs), theirs), rtol=0, atol=0)
    assert captured.graphs[-1].calls(KEY_SIDE) == [int(is_written)]
