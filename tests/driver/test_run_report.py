"""`mla_fx.report()`: one report of everything that is compiled in a block."""

import threading

import pytest
import torch
from lib.families import empty_cache, tiny_model, tokens
from lib.zoo.entries import DEFAULT, Entry, TwoGraphs
from lib.zoo.sizes import DECODE, FEW

import mla_fx

ALL = {"mla_prolog": 1, "latent_attention": 1}
BACKEND = mla_fx.get_backend(target="reference")

pytestmark = pytest.mark.usefixtures("no_gradients")


def step(model):
    cache = empty_cache(model, "static")
    model(tokens(1, 4), past_key_values=cache)
    return (tokens(1, 1),), {"past_key_values": cache}


def test_a_whole_model_and_a_recompilation(decode):
    layer, arguments = decode
    run = torch.compile(layer, backend=BACKEND, dynamic=False)
    with mla_fx.report() as report:
        run(*arguments)
        run(*Entry(DEFAULT).arguments(FEW))
    assert report.fused == {"mla_prolog": 2, "latent_attention": 2}
    assert [part.fused for part in report.parts] == [ALL] * 2


@pytest.mark.slow
def test_layers_have_their_paths():
    model = tiny_model("deepseek_v3")
    args, kwargs = step(model)
    with mla_fx.report() as report:
        torch.compile(model, backend=BACKEND)(*args, **kwargs)
    fused = [{"graphs": [0], "fused": ALL, "missed": None}]
    assert report.to_dict()["layers"] == {"model.layers.0": fused, "model.layers.1": fused}
    assert "\n  model.layers.0, 1 (2): mla_prolog, latent_attention\n" in str(report)


@pytest.mark.slow
def test_layers_compiled_one_by_one():
    """One graph serves both layers: Dynamo compiles equal modules once."""
    model = tiny_model("deepseek_v3")
    args, kwargs = step(model)
    for layer in model.model.layers:
        layer.self_attn.compile(backend=BACKEND)
    with mla_fx.report() as report:
        model(*args, **kwargs)
    assert set(report.fused) == set(ALL)
    assert all(set(part.fused) == set(ALL) for part in report.parts)


@pytest.mark.slow
def test_graph_breaks():
    with mla_fx.report() as report:
        torch.compile(TwoGraphs(), backend=BACKEND)(Entry(DEFAULT).arguments(DECODE))
    assert [part.fused for part in report.parts] == [ALL] * 2
    assert {path: [one.graphs for one in outcomes] for path, outcomes in report.layers.items()} == {
        "layers.0": [(0,)],
        "layers.1": [(1,)],
    }


def test_other_threads_count(decode):
    layer, arguments = decode

    @torch.no_grad()
    def compile_and_run():
        torch.compile(layer, backend=BACKEND)(*arguments)

    with mla_fx.report() as report:
        thread = threading.Thread(target=compile_and_run)
        thread.start()
        thread.join()
    assert report.fused == ALL


def test_what_only_runs_does_not_count(decode):
    layer, arguments = decode
    run = torch.compile(layer, backend=BACKEND)
    with mla_fx.report() as first, mla_fx.report() as inner:
        run(*arguments)
    with mla_fx.report() as second:
        run(*arguments)
    assert first.fused == inner.fused == mla_fx.last_report().fused == ALL
    assert (second.fused, str(second)) == ({}, "mla_fx: nothing was compiled")


@pytest.mark.slow
def test_an_error_ends_the_report_and_passes(decode):
    layer, arguments = decode
    with pytest.raises(ZeroDivisionError), mla_fx.report() as report:
        torch.compile(layer, backend=BACKEND)(*arguments)
        raise ZeroDivisionError
    torch._dynamo.reset()
    torch.compile(layer, backend=BACKEND)(*arguments)
    assert report.fused == ALL
    assert report.parts == []


def test_two_blocks_that_overlap_are_apart(decode):
    """Also while neither has anything yet."""
    first, second = mla_fx.report(), mla_fx.report()
    one = first.__enter__()
    second.__enter__()
    second.__exit__(None, None, None)
    layer, arguments = decode
    torch.compile(layer, backend=BACKEND)(*arguments)
    first.__exit__(None, None, None)
    assert one.fused == ALL
