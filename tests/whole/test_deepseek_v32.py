"""DeepSeek's own code of a sparse layer, prompts and steps, with codes of 8 bits in the indexer's cache."""

import copy

import pytest
import torch
from lib.layers import QUIET, Reporting
from lib.zoo.deepseek_v32 import CHOSEN, ROOM, SMALL, DeepSeekV32, draw

pytestmark = [
    pytest.mark.interpreted,
    pytest.mark.usefixtures("no_gradients"),
    *(pytest.mark.filterwarnings(line) for line in QUIET),
]
STEP = {"mla_prolog": 1, "sparse_latent_attention": 1, "lightning_index": 1}


def compared(calls, target="reference", **options):
    """The report of the last graph; all calls gave eager's results, and every cache is eager's."""
    backend, layer = Reporting(target=target), DeepSeekV32()
    eager = copy.deepcopy(layer)
    run = torch.compile(layer, backend=backend, **options)
    for place, (tokens, start) in enumerate(calls):
        x = draw(2, tokens, SMALL.hidden, seed=place)
        torch.testing.assert_close(run(x, start), eager(x, start), rtol=1e-4, atol=1e-5)
    for (name, found), wanted in zip(layer.named_buffers(), eager.buffers(), strict=True):
        if "cache" in name:
            torch.testing.assert_close(found.float(), wanted.float(), rtol=1e-4, atol=1e-5)
    return backend.reports[-1]


@pytest.mark.parametrize("target", ["reference", pytest.param("inductor", marks=pytest.mark.slow)])
def test_steps(target):
    report = compared([(1, 4 * CHOSEN)], target, dynamic=False)
    assert report.fused == STEP, str(report)


@pytest.mark.slow
def test_steps_at_any_position():
    torch._dynamo.reset()
    report = compared([(1, start) for start in range(4 * CHOSEN, ROOM, 3)], dynamic=True)
    assert report.fused == STEP, str(report)


@pytest.mark.parametrize("tokens", [3, pytest.param(21, marks=pytest.mark.slow)])
def test_prompts(tokens):
    report = compared([(tokens, 0)], dynamic=False)
    assert ("lightning_index" in report.fused) == (tokens > CHOSEN), str(report)
