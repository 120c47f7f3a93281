"""DeepSeek-V3 with quantised projections and the target "ge": what fuses, what is dequantised once, and exactness."""

import functools
import math

import pytest
import torch
from lib.quantised import Stored, by_groups, by_rows, of_groups, scaled_behind
from torch import Tensor, nn
from torch.nn.functional import linear

import mla_fx
from mla_fx.graph.torch_private import version_of
from npu import ge_graph, models
from npu.converted import types
from npu.ge_interpreter import Interpreter

HEADS, RANK, CONTEXT = 8, 512, 208
KV_B = (HEADS * 256, RANK)  # the shape of kv_b_proj's weight, whose halves are for keys and for values
BLOCK, LARGEST = 128, 448  # rows and columns of a block; in float8
PROLOG, KEY_SIDE, ATTENTION = "MlaPrologV3", "KvRmsNormRopeCache", "FusedInferAttentionScore"


# --- quantised projections -------------------------------------------------------------------------------------------


def by_blocks(weight: Tensor) -> Stored:
    """DeepSeek: codes in float8, and a scale for each block of 128 x 128. The last blocks may be smaller."""
    rows, columns = weight.shape
    wide = nn.functional.pad(weight.float(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = wide.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    scales = blocks.abs().amax((1, 3), keepdim=True) / LARGEST
    codes = (blocks / scales).flatten(2).flatten(0, 1)[:rows, :columns]
    return Stored(codes.to(torch.float8_e4m3fn), scales.squeeze((1, 3)))


def of_blocks(x: Tensor, w: Stored) -> Tensor:
    rows, columns = w.codes.shape
    scales = w.scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[:rows, :columns]
    return linear(x, (w.codes.float() * scales).to(x.dtype))


SPELLINGS = {scaled_behind: by_rows, of_blocks: by_blocks, of_groups: by_groups}
EITHER = [scaled_behind, *(pytest.param(multiply, marks=pytest.mark.campaign) for multiply in (of_blocks, of_groups))]


class Quantised(nn.Module):
    """A projection whose weight is stored in 8 bits or less."""

    def __init__(self, plain, multiply):
        super().__init__()
        self.multiply = multiply
        for name, value in vars(SPELLINGS[multiply](plain.weight.data)).items():
            self.register_buffer(name, value)

    def forward(self, x):
        return self.multiply(x, Stored(self.codes, self.scales, self.zeros))


ALL = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")


def quantised(multiply, *names):
    """A layer with the named projections quantised."""
    model = models.model(num_attention_heads=HEADS)
    attention = model.layers[0].self_attn
    for name in names:
        setattr(attention, name, Quantised(getattr(attention, name), multiply))
    return model


# --- what is seen ----------------------------------------------------------------------------------------------------


class Watched(Interpreter):
    """An interpreter that keeps the shapes of all results, and the states of the weights at each step."""

    def __init__(self, graph):
        super().__init__(graph)
        self.shapes, self.states = set(), []
        self.functions = {kind: self.watched(function) for kind, function in self.functions.items()}

    def watched(self, function):
        @functools.wraps(function)
        def run(**arguments):
            results = function(**arguments)
            self.shapes |= {tuple(result.shape) for result in ([results] if isinstance(results, Tensor) else results)}
            return results

        return run

    def run(self, inputs):
        """The weights for keys and for values; one that is computed again is written, or is another tensor."""
        halves = (value for value in inputs if value.numel() == math.prod(KV_B) // 2)
        self.states.append([(value.data_ptr(), version_of(value)) for value in halves])
        return super().run(inputs)

    @property
    def expanded(self):
        """The shapes of keys and values per head."""
        return {shape for shape in self.shapes if CONTEXT in shape and math.prod(shape) >= CONTEXT * HEADS * 128}

    @property
    def is_dequantised_once(self):
        first = self.states[0]
        return len(first) == 2 and len(self.states) > 1 and all(states == first for states in self.states)


@pytest.fixture
def watched(converted, monkeypatch):
    """The interpreters of the test's graphs."""
    made = []
    monkeypatch.setattr(converted, "Interpreter", lambda graph: made.append(Watched(graph)) or made[-1])
    return made


def compiled(model, *, dynamic=False):
    return torch.compile(model, backend=mla_fx.get_backend(target="ge"), dynamic=dynamic)


def cache(model):
    return models.static_cache(model, CONTEXT)


def single_steps():
    return [models.prompt(1, seed=seed) for seed in range(3)]


def counts(graph):
    found = types(graph)
    return {name: found.count(name) for name in (PROLOG, KEY_SIDE, ATTENTION, "TensorMove") if name in found}


def codes(graph):
    """The shapes of the inputs with codes, which are dequantised at each step."""
    described = [op.output_desc[0] for op in graph.op if op.type == "Data"]
    stored = (torch.int8, torch.float8_e4m3fn)
    return [tuple(ge_graph.shape(one)) for one in described if ge_graph.dtype(one) in stored]


# --- the tests -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "multiply, kept",
    [
        (scaled_behind, "6 weights laid out once, 10.6 MiB"),  # the scales of values, too
        (of_blocks, "5 weights laid out once, 10.6 MiB"),
        (of_groups, "5 weights laid out once, 10.6 MiB"),
    ],
)
def test_kv_b_alone(converted, watched, multiply, kept):
    """The prolog takes a weight that is dequantised once, also where the program multiplies codes, and scales later."""
    model = quantised(multiply, "kv_b_proj")
    models.check_as_exact_as_eager(model, compiled(model), cache, single_steps())
    (graph,), (seen,) = converted.graphs, watched
    assert counts(graph) == {PROLOG: 1, ATTENTION: 1}
    assert not seen.expanded and not codes(graph) and seen.is_dequantised_once
    assert any(kept in note for note in mla_fx.last_report().notes)


@pytest.mark.parametrize("multiply", EITHER)
def test_all_projections(converted, watched, multiply):
    """Those that nothing fuses with stay as they are written, and are dequantised at each step."""
    model = quantised(multiply, *ALL)
    models.check_as_exact_as_eager(model, compiled(model), cache, single_steps())
    (graph,), (seen,) = converted.graphs, watched
    assert counts(graph) == {KEY_SIDE: 1, ATTENTION: 1}
    assert not seen.expanded and seen.is_dequantised_once
    others = {tuple(getattr(model.layers[0].self_attn, name).codes.shape) for name in ALL if name != "kv_b_proj"}
    assert others <= set(codes(graph)) and KV_B not in codes(graph)
    kept = f"{3 if multiply is scaled_behind else 2} weights laid out once, 2.0 MiB"
    assert any(kept in note for note in mla_fx.last_report().notes)


@pytest.mark.parametrize("multiply", EITHER)
def test_prompt(converted, watched, multiply):
    """Keys and values are expanded, by a weight that is dequantised once."""
    model = quantised(multiply, "kv_b_proj")
    prompts = [models.prompt(20, seed=seed) for seed in range(3)]
    models.check_as_exact_as_eager(model, compiled(model), cache, prompts)
    (graph,), (seen,) = converted.graphs, watched
    assert counts(graph) == {KEY_SIDE: 1, ATTENTION: 1}
    assert seen.expanded and not codes(graph) and seen.is_dequantised_once


@pytest.mark.parametrize("multiply", EITHER)
def test_growing_cache(converted, watched, multiply):
    """A prompt, then steps on one graph for every length. The cache is another tensor each time, and is copied."""
    model = quantised(multiply, "kv_b_proj")
    prompts = [models.prompt(32), *single_steps()]
    models.check_as_exact_as_eager(model, compiled(model, dynamic=True), models.dynamic_cache, prompts)
    prompt, step = map(counts, converted.graphs)
    assert prompt == {ATTENTION: 1} and step == {PROLOG: 1, ATTENTION: 1, "TensorMove": 2}
    assert watched[1].is_dequantised_once and not any(map(codes, converted.graphs))


@pytest.mark.parametrize("multiply", EITHER)
def test_written_codes_are_followed(converted, multiply):
    """And scales and zero points, at the next call, without another graph."""
    model = quantised(multiply, "kv_b_proj")
    run, projection = compiled(model), model.layers[0].self_attn.kv_b_proj
    models.steps(run, cache(model), single_steps())
    for part in projection.buffers():
        part.copy_(part.flip(0))
        models.check_as_exact_as_eager(model, run, cache, single_steps())
    assert len(converted.graphs) == 1
