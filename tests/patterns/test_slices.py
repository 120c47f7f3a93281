"""Caches written from a position that is a Python number: it grows with every step and becomes a symbol."""

import copy
from dataclasses import replace

import pytest
import torch
from lib.families import Recorder
from lib.zoo.classics import DeepSeekAbsorb, DeepSeekNaive
from lib.zoo.entries import DEFAULT, Entry
from lib.zoo.mla import Spelling
from lib.zoo.ropes import angles
from lib.zoo.sizes import SMALL, Step, dense, weights
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

pytestmark = pytest.mark.usefixtures("no_gradients", "seeded")
CLOSE = {"rtol": 1e-4, "atol": 1e-5}
ALL = {"mla_prolog": 1, "latent_attention": 1}


class Inference(nn.Module):
    """deepseek-ai/DeepSeek-V3's inference/model.py around its attention: caches for more sequences than there are, and
    frequencies sliced from a table."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer(Spelling(rope="complex"), weights(SMALL))
        self.register_buffer("freqs_cis", torch.polar(torch.ones(()), angles(torch.arange(SMALL.context), SMALL.rope)))
        self.register_buffer("kv_cache", dense(3, SMALL.context, SMALL.kv_rank))
        self.register_buffer("pe_cache", dense(3, SMALL.context, SMALL.rope))

    def forward(self, x, start_pos):
        seqlen = x.size(1)
        freqs_cis = self.freqs_cis[start_pos : start_pos + seqlen]
        mask = None
        if seqlen > 1:
            mask = torch.full((1, 1, seqlen, start_pos + seqlen), float("-inf")).triu_(start_pos + 1)
        return self.layer(x, (freqs_cis,), None, mask, (self.kv_cache, self.pe_cache), start_pos)


def compilations(module, steps):
    """How often `aot_eager` compiles, which recompiles nothing without need."""
    counter = CompileCounterWithBackend("aot_eager")
    run = torch.compile(module, backend=counter)
    for tokens, start in steps:
        run(torch.randn(2, tokens, SMALL.hidden), start)
    torch._dynamo.reset()
    return counter.frame_count


def run_steps(module, steps):
    """The reports of a module that gave eager's results and caches at every step."""
    allowed = compilations(copy.deepcopy(module), steps)
    recorder, fused = Recorder(), copy.deepcopy(module)
    run = torch.compile(fused, backend=recorder)
    for tokens, start in steps:
        x = torch.randn(2, tokens, SMALL.hidden)
        torch.testing.assert_close(run(x, start), module(x, start), **CLOSE)
        torch.testing.assert_close(dict(fused.named_buffers()), dict(module.named_buffers()), **CLOSE)
    assert len(recorder.reports) <= allowed
    return recorder.reports


@pytest.mark.slow
@pytest.mark.parametrize("layer", [DeepSeekNaive, DeepSeekAbsorb])
def test_growing_position(layer):
    """One token at a time: fused from the second graph on, and in place."""
    reports = run_steps(Inference(layer), [(1, start) for start in range(5, 21)])
    assert [(report.fused, report.notes) for report in reports] == [(ALL, [])] * 2


@pytest.mark.slow
@pytest.mark.parametrize("layer", [DeepSeekNaive, pytest.param(DeepSeekAbsorb, marks=pytest.mark.campaign)])
def test_growing_position_and_number_of_tokens(layer):
    """A prompt in chunks: their start and length are two symbols, and the cache is so short that any chunk is
    absorbed."""
    reports = run_steps(Inference(layer), [(5, 0), (3, 5), (4, 8), (2, 12), (6, 14), (1, 20), (1, 21)])
    assert [report.fused for report in reports] == [ALL] * 3
    assert not any(report.notes for report in reports[1:])


SLOW = [pytest.param(cache, marks=pytest.mark.campaign) for cache in ("narrow_copy", "one_row")]


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["slice_scatter", "counted", *SLOW])
def test_other_ways_to_write(cache):
    entry, recorder = Entry(replace(DEFAULT, cache=cache)), Recorder()
    module = entry.build()
    run = torch.compile(module, backend=recorder)
    caches = entry.arguments(Step("growing", 1, 6))[4]
    theirs, ours = copy.deepcopy(caches), copy.deepcopy(caches)
    for start in range(6, 10):
        x, tables, positions, mask, _, place = entry.arguments(Step("growing", 1, start))
        expected = module(x, tables, positions, mask, theirs, place)
        torch.testing.assert_close(run(x, tables, positions, mask, ours, place), expected, **CLOSE)
        torch.testing.assert_close(ours, theirs, **CLOSE)
    assert [(report.fused, report.notes) for report in recorder.reports[1:]] == [(ALL, [])] * len(recorder.reports[1:])
    assert len(recorder.reports) >= 2


class Behind(Inference):
    """Rotary keys are written one row after the latents."""

    def __init__(self):
        super().__init__(BehindLayer)


class BehindLayer(DeepSeekAbsorb):
    def forward(self, x, tables, positions, mask, caches, start_pos):
        end_pos = start_pos + 1
        kv, k_pe = self.kv_a_proj_with_mqa(x).split([self.rank, self.rope], dim=-1)
        caches[0][:2, start_pos:end_pos] = self.kv_a_layernorm(kv)
        caches[1][:2, start_pos - 1 : end_pos - 1] = k_pe
        q_nope, q_pe = self.query(x).view(2, 1, self.n_heads, -1).split([self.nope, self.rope], dim=-1)
        weight = self.kv_b_proj.weight.view(self.n_heads, -1, self.rank)
        latents, keys = (cache[:2, :end_pos] for cache in caches)
        scores = torch.einsum("bshd,hdc,btc->bsht", q_nope, weight[:, : self.nope], latents)
        scores = (scores + torch.einsum("bshr,btr->bsht", q_pe, keys)) * self.scale
        x = torch.einsum("bsht,btc->bshc", scores.softmax(dim=-1), latents)
        return (self.o_proj(torch.einsum("bshc,hdc->bshd", x, weight[:, -self.value :]).flatten(2)),)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::mla_fx.MlaWarning")
def test_two_positions_are_not_taken_for_one():
    *_, report = run_steps(Behind(), [(1, start) for start in range(5, 8)])
    assert report.fused == {"latent_attention": 1}
    assert "latent and rotary key are written to different positions" in str(report)
