"""Threads and processes: models are compiled and called from several at once, with the same results."""

import copy
import multiprocessing
import threading
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor

import pytest
import torch
from lib.zoo.entries import DEFAULT, Entry
from lib.zoo.mla import Spelling
from lib.zoo.sizes import DECODE, FEW

import mla_fx

LAYERS = (Entry(DEFAULT), Entry(Spelling(query="direct", rope="complex", norm="fused", layout="bshd", cache="slice")))
ALL = {"mla_prolog": 1, "latent_attention": 1}


@pytest.fixture(autouse=True)
def forget_compilations():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@torch.no_grad()
def differs(run, layer, arguments):
    """What is wrong with outputs and caches of a compiled layer, or nothing."""
    theirs, ours = copy.deepcopy((arguments, arguments))
    try:
        torch.testing.assert_close((run(*ours), ours), (layer(*theirs), theirs), rtol=1e-4, atol=1e-5)
    except AssertionError as error:
        return str(error)
    return ""


def compiled_anew(layer, arguments, barrier=None):
    """Differences and fused operators of a layer that is compiled here."""
    reports = []
    backend = mla_fx.get_backend(target="reference")

    def reporting(gm, example_inputs):
        made = backend(gm, example_inputs)
        reports.append(mla_fx.last_report().fused)
        return made

    if barrier is not None:
        barrier.wait()
    return differs(torch.compile(layer, backend=reporting, dynamic=False), layer, arguments), reports


@pytest.mark.slow
def test_two_models_compiled_at_once():
    barrier, calls = threading.Barrier(len(LAYERS)), [(entry.build(), entry.arguments(FEW)) for entry in LAYERS]
    with ThreadPoolExecutor(len(LAYERS)) as pool:
        found = list(pool.map(lambda call: compiled_anew(*call, barrier), calls))
    assert found == [("", [ALL])] * len(LAYERS)


@pytest.mark.slow
def test_one_compiled_model_called_from_several_threads():
    """The first call of each step compiles, whichever thread makes it."""
    layer, arguments = LAYERS[0].build(), [LAYERS[0].arguments(step) for step in (FEW, DECODE)]
    run = torch.compile(layer, backend=mla_fx.get_backend(target="reference"), dynamic=False)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda turn: differs(run, layer, arguments[turn % 2]), range(12)))
    assert found == [""] * 12


def first_layer_compiled_anew():
    return compiled_anew(LAYERS[0].build(), LAYERS[0].arguments(FEW))


@pytest.mark.slow
@pytest.mark.parametrize("way", ["fork", "spawn"])
def test_worker_processes(way):
    """A worker compiles for itself, whether the process that it was forked from has compiled before or not."""
    here = first_layer_compiled_anew()
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context(way)) as pool:
        assert pool.submit(first_layer_compiled_anew).result(timeout=240) == here == ("", [ALL])
