"""Rows without a place in a cache are skipped. Kernels do not check the end, and would write into another sequence."""

import pytest
import torch

import mla_fx
from npu import models
from npu.converted import types
from npu.models import Layer

KERNELS = {1: "MlaPrologV3", 20: "KvRmsNormRopeCache"}


@pytest.mark.parametrize("tokens", KERNELS)
def test_rows_beyond_the_end_of_a_cache(converted, tokens):
    """The last rows of a cache with room for six. Hugging Face counts positions on."""
    torch._dynamo.reset()
    batch, room = 2, 6
    layer, cache = Layer(), models.static_cache(models.model(), batch=batch)
    held = cache.layers[0]
    cos, sin = torch.randn(2, batch, tokens, 64).bfloat16()
    x = torch.randn(batch, tokens, models.SMALL["hidden_size"]).bfloat16()
    run = torch.compile(layer, backend=mla_fx.get_backend(target="ge"), dynamic=False)

    def written(start):
        """Both caches after a step that begins at `start`."""
        for values in (held.keys, held.values):
            values.fill_(0.5)
        held.cumulative_length.fill_(start)
        with torch.no_grad():
            run(x, cos, sin, torch.tensor(start), cache)
        return held.keys.clone(), held.values.clone()

    inside, beyond, full = (written(start) for start in (100, models.CONTEXT - room, models.CONTEXT))
    assert KERNELS[tokens] in types(converted.graphs[0]) and len(converted.graphs) == 1
    kept = min(room, tokens)
    for rows, tail, untouched in zip(inside, beyond, full, strict=True):
        assert (untouched == 0.5).all()
        first = models.CONTEXT - room
        torch.testing.assert_close(tail[:, :, first : first + kept], rows[:, :, 100 : 100 + kept], rtol=0, atol=0)
        assert (tail[:, :, :first] == 0.5).all() and (tail[:, :, first + kept :] == 0.5).all()
