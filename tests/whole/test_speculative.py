"""Speculative decoding of DeepSeek-V3 of transformers: steps of one to eight tokens, and caches that go back."""

from functools import cache
from random import Random

import pytest
import torch
from lib.families import Recorder, cache_tensors, empty_cache, mark_steps, randomise, tiny_model, tokens
from transformers.modeling_layers import MtpModel

EXACT = {"rtol": 1e-4, "atol": 1e-5}
DECODE = {"mla_prolog": 1, "latent_attention": 1}
NEW = 40  # tokens that are generated

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("seeded", "no_gradients")]


@cache
def tiny():
    return tiny_model("deepseek_v3", num_hidden_layers=1, max_position_embeddings=2048)


def prefilled(kind):
    torch.manual_seed(1)
    held = empty_cache(tiny(), kind, 160)
    tiny()(tokens(2, 12), past_key_values=held)
    return held


def go_back(held, kind, count):
    """Forget the last tokens. A static cache keeps their rows, which get large numbers here."""
    if count == 0:
        return
    if kind == "dynamic":
        held.crop(-count)
        return
    for layer in held.layers:
        layer.cumulative_length.sub_(count)
        for rows in (layer.keys, layer.values):
            rows[:, :, int(layer.cumulative_length) :] = 1e4


@pytest.mark.parametrize("kind, steps", [("static", 200), ("dynamic", 60)])
def test_steps_that_go_back(kind, steps):
    """One graph takes any number of tokens except one. A growing cache that was cut is a view, which has its own."""
    recorder, random = Recorder(), Random(0)
    run, theirs, ours = torch.compile(tiny(), backend=recorder, fullgraph=True), prefilled(kind), prefilled(kind)
    for number in range(steps):
        count = number + 1 if number < 2 else random.randint(1, 8)
        ids = tokens(2, count)
        mark_steps(ids, ours, most=8)
        expected = tiny()(ids, past_key_values=theirs).logits
        torch.testing.assert_close(run(ids, past_key_values=ours).logits, expected, **EXACT)
        torch.testing.assert_close(cache_tensors(ours), cache_tensors(theirs), **EXACT)
        length = theirs.get_seq_length()
        back = count if int(length) > 140 else random.randint(0, count)
        go_back(theirs, kind, back)
        go_back(ours, kind, back)
    assert [report.fused for report in recorder.reports] == [DECODE] * {"static": 2, "dynamic": 4}[kind]


def drafting(main_model, **options):
    """A random layer that predicts several tokens, in place of one from a checkpoint."""
    drafts = MtpModel(main_model, 1).eval()
    randomise(drafts.layers)
    return drafts


@pytest.mark.parametrize("kind", ["assisted", "mtp"])
def test_generation_gives_the_tokens_of_greedy_search(monkeypatch, kind):
    monkeypatch.setattr(MtpModel, "from_pretrained", drafting)
    model, recorder = tiny(), Recorder()
    torch.manual_seed(2)
    assistant = tiny_model("deepseek_v3", num_hidden_layers=1, hidden_size=32)
    ids = tokens(1, 6)
    settings = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
    means = {"assisted": {"assistant_model": assistant}, "mtp": {"use_mtp": True}}[kind]
    plain, eager = model.generate(ids, **settings), model.generate(ids, **settings, **means)
    forward = model.forward
    try:
        model.forward = torch.compile(forward, backend=recorder, dynamic=True)
        found = model.generate(ids, **settings, **means)
    finally:
        del model.forward
    assert torch.equal(found, eager)
    assert torch.equal(found, plain)
    fused = [{"latent_attention", "mla_attention"} & report.fused.keys() for report in recorder.reports]
    assert all(fused) and len(fused) <= 3, str(recorder.report)
