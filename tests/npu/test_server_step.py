"""The server step of examples/ on NPUs: prompts, drafts and single tokens, of any number, through one GE graph."""

import copy
import random

import pytest
import torch
from lib.sources import example

import mla_fx
from npu import models
from npu.converted import types

SIZES = {"HIDDEN": 1024, "HEADS": 4, "QUERY_RANK": 1536, "RANK": 512, "NOPE": 128, "ROPE": 64, "VALUE": 128}
PAGES = {"BLOCKS": 8, "BLOCK": 128, "SEQUENCES": 3, "MOST": 256}


def steps(count):
    """Prompts first; then each sequence drafts 1 to 4 tokens, and some of the first are accepted. One joins later."""
    draw, first = random.Random(0), [19, 7]
    yield [(0, 0, 19), (1, 0, 7)]
    for number in range(1, count):
        parts = [(sequence, position, draw.randint(1, 4)) for sequence, position in enumerate(first)]
        first = [position + draw.randint(1, tokens) for _, position, tokens in parts]
        if number == 2:
            parts, first = [*parts, (2, 0, 11)], [*first, 11]
        yield parts


@pytest.fixture
def server():
    module = example("server_step")
    for name, value in (SIZES | PAGES).items():
        setattr(module, name, value)
    return module


def check_steps(server, target, every, *, dynamic):
    torch.manual_seed(0)
    torch._dynamo.reset()
    plain = models.dense(server.Attention()).to(torch.bfloat16)
    plain.latents.normal_()
    plain.keys.normal_()
    exact, served = copy.deepcopy(plain).double(), copy.deepcopy(plain)
    run = torch.compile(served, backend=mla_fx.get_backend(target=target, soc="Ascend910B3"), dynamic=dynamic)
    tables = torch.randperm(server.BLOCKS)[: server.SEQUENCES * 2].view(server.SEQUENCES, 2)
    for parts in every:
        positions, table = server.batch(parts, tables)
        x = torch.randn(len(positions), server.HIDDEN).to(torch.bfloat16)
        found, near, wanted = (
            [step(given, positions, table), step_module.latents, step_module.keys]
            for step, step_module, given in ((run, served, x), (plain, plain, x), (exact, exact, x.double()))
        )
        allowed = [2 * error + 1e-6 for error in models.errors(near, wanted)]
        assert all(map(float.__le__, models.errors(found, wanted), allowed)), (parts, allowed)


@pytest.mark.parametrize("count", [5, pytest.param(64, marks=pytest.mark.campaign)])
@torch.no_grad()
def test_steps(converted, server, count):
    check_steps(server, "ge", steps(count), dynamic=True)
    (graph,) = converted.graphs
    kernels = "MlaPrologV3", "FusedInferAttentionScore", "TensorMove", "Assign", "ScatterNdUpdate"
    assert [types(graph).count(kernel) for kernel in kernels] == [1, 1, 0, 0, 0], str(mla_fx.last_report())


@pytest.mark.parametrize("count", [5, pytest.param(64, marks=pytest.mark.campaign)])
@torch.no_grad()
def test_captured_steps(captured, server, count):
    """A captured graph has one number of tokens, here single ones and a draft of two. Each has a length of its own."""
    every = [[(0, 19 + step, 1), (1, 7 + 2 * step, 2), (2, 11 + step, 1)] for step in range(count)]
    check_steps(server, "aclgraph", every, dynamic=False)
    (graph,) = captured.graphs
    assert graph.calls("npu.npu_mla_prolog_v3.default", "npu.npu_fused_infer_attention_score_v2.out") == [1, 1]
    assert graph.calls("aten.copy_.default") == [0]
    assert len(graph.recordings) == 1
    assert "4 lengths read by the host before each call" in mla_fx.last_report().notes
