"""A decode step compiles to half as many kernels and calls as the model under stock Inductor."""

import re

import pytest
import torch
from lib.families import empty_cache, tiny_model, tokens
from torch._inductor.utils import get_code

import mla_fx

pytestmark = pytest.mark.usefixtures("no_gradients")


def compiled_to(backend):
    """The number of Inductor's kernels and of library calls."""
    model = tiny_model("deepseek_v3", torch.bfloat16, num_hidden_layers=1)
    cache = empty_cache(model, "static")
    model(tokens(1, 12), past_key_values=cache)
    torch._dynamo.reset()
    with torch._inductor.config.patch(force_disable_caches=True):
        step = torch.compile(model, backend=backend, fullgraph=True)
        code, *_ = get_code(step, tokens(1, 1), past_key_values=cache)  # which no C++ compiler reads
    calls = code.partition("def call(")[2]
    return len(re.findall(r"^\s+cpp_fused\w*\(", calls, re.MULTILINE)), len(re.findall(r"extern_kernels\.", calls))


@pytest.mark.slow
def test_a_decode_step_takes_few_kernels_and_library_calls():
    kernels, calls = compiled_to(mla_fx.mla_backend)
    stock_kernels, stock_calls = compiled_to("inductor")
    assert kernels <= 4 < stock_kernels
    assert calls <= 3 < stock_calls
