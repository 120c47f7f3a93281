"""DeepSeek-V3 of transformers, unmodified, at changing sizes: no more graphs than with PyTorch's own backend.

`error_on_recompile` raises what `TORCH_LOGS=recompiles` would log."""

from functools import cache

import pytest
import torch
from lib.families import Recorder, cache_tensors, empty_cache, mark_steps, tiny_model, tokens
from torch._dynamo import lookup_backend

from mla_fx.graph.torch_private import detect_fake_mode, guards

EXACT = {"rtol": 1e-4, "atol": 1e-5}
DECODE = {"mla_prolog": 1, "latent_attention": 1}
COLD = {"mla_attention": 1}

pytestmark = pytest.mark.usefixtures("no_gradients")


@cache
def tiny():
    return tiny_model("deepseek_v3", num_hidden_layers=1, max_position_embeddings=2048)


def prefilled(kind, batch, prompt=12, length=160):
    held = empty_cache(tiny(), kind, length)
    tiny()(tokens(batch, prompt), past_key_values=held)
    return held


class Asking:
    """A backend that records the size guards of each graph up to its compilation; these recompile it."""

    def __init__(self, backend):
        self.backend, self.asked = backend, []

    def __call__(self, gm, example_inputs):
        environment = detect_fake_mode(example_inputs).shape_env
        compiled = self.backend(gm, example_inputs)
        self.asked.append(set(map(str, guards(environment))))
        return compiled


def drawn(calls, run):
    torch.manual_seed(1)
    return calls(run)


def check(calls):
    """`calls(run)` gives the same as with the unmodified model, with no more graphs or guards than with PyTorch."""
    recorder = Recorder()
    ours, stock = Asking(recorder), Asking(lookup_backend("aot_eager"))
    found = drawn(calls, torch.compile(tiny(), backend=ours, fullgraph=True))
    torch.testing.assert_close(found, drawn(calls, tiny()), **EXACT)
    torch._dynamo.reset()
    drawn(calls, torch.compile(tiny(), backend=stock, fullgraph=True))
    assert len(ours.asked) <= len(stock.asked)
    for few, many in zip(ours.asked, stock.asked, strict=False):
        assert few <= many
    return [report.fused for report in recorder.reports]


@torch._dynamo.config.patch(error_on_recompile=True)
def test_a_static_cache_is_decoded_with_one_graph():
    recorder, count = Recorder(), 128
    run = torch.compile(tiny(), backend=recorder, fullgraph=True)
    theirs, ours = (drawn(lambda _: prefilled("static", 2), None) for _ in range(2))
    ids = tokens(2, count)
    expected = tiny()(ids, past_key_values=theirs).logits
    found = torch.cat([run(step, past_key_values=ours).logits for step in ids.split(1, dim=1)], dim=1)
    torch.testing.assert_close((found, cache_tensors(ours)), (expected, cache_tensors(theirs)), **EXACT)
    assert [report.fused for report in recorder.reports] == [DECODE]


@pytest.mark.slow
def test_batches_of_a_static_cache():
    def calls(run):
        helds = [prefilled("static", batch) for batch in (1, 4, 8)]
        return [run(tokens(len(held.layers[0].keys), 1), past_key_values=held).logits for held in helds * 2]

    assert check(calls) == [DECODE, DECODE]


@pytest.mark.slow
def test_a_dynamic_cache_grows_from_prompts_of_any_length():
    """One graph for prompts, because their length is marked, and one for steps."""

    def calls(run):
        found = []
        for length in (64, 5, 17, 1021):
            held, prompt = empty_cache(tiny(), "dynamic"), tokens(2, length)
            torch._dynamo.mark_dynamic(prompt, 1)
            found += [run(ids, past_key_values=held).logits for ids in (prompt, *tokens(3, 2, 1))]
            found += cache_tensors(held)
        return found

    assert check(calls) == [COLD, DECODE]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [pytest.param("static", marks=pytest.mark.campaign), "dynamic"])
def test_chunks_and_drafts_share_a_decode_graph(kind):
    """At most sixteen tokens are surely absorbed, so one graph, with the prolog, takes any number of them except one: a
    single token has its own graph in any backend."""

    def calls(run):
        found, held = [], prefilled(kind, 2)
        for count in (16, 3, 1, 8, 2, 1):
            ids = tokens(2, count)
            mark_steps(ids, held, most=16)
            found += [run(ids, past_key_values=held).logits, *(tensor.clone() for tensor in cache_tensors(held))]
        return found

    assert check(calls) == [DECODE, DECODE]
