"""What a report says about memory: temporaries, caches read, and copies of weights."""

from dataclasses import replace

import pytest
import torch
from mla_fx.lowering.cpu import few_rows
from mla_fx.lowering.inductor import Inductor
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from transformers import DeepseekV3Config, StaticCache
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

from mla_fx.commands import demo
from mla_fx.debug.memory import MemoryUse, peak_of_temporaries
from mla_fx.debug.report import Report
from mla_fx.driver.compilation import Compilation
from mla_fx.graph.torch_compilers import aot_autograd
from mla_fx.graph.torch_private import make_fx
from mla_fx.options import Options

MIB = 2**20


class StoppedError(Exception):
    """Only the report is needed; nothing runs."""


class Traced(Inductor):
    """The graph that Inductor would be given, and no more."""

    def compile(self, gm, example_inputs, fusing, options):
        def stop(*inputs):
            raise StoppedError

        compiler = fusing(lambda gm, inputs, **_: stop)
        return aot_autograd(compiler, compiler, self.decompositions())(gm, example_inputs)


@torch.no_grad()
def report_of_a_step(context):
    """One layer of DeepSeek-V3's sizes in bfloat16, whose memory is never touched."""
    config = DeepseekV3Config(**demo.ATTENTION, num_hidden_layers=1)
    config._attn_implementation = "sdpa"
    with torch.device("meta"):
        layer = DeepseekV3Attention(config, 0).to(torch.bfloat16).eval()
    layer, cache = layer.to_empty(device="cpu"), StaticCache(config=config, max_cache_len=context)
    first = (torch.empty(1, 1, 1, width, dtype=torch.bfloat16) for width in (512, 64))
    cache.layers[0].lazy_initialization(*first)
    x, tables = torch.empty(1, 1, config.hidden_size, dtype=torch.bfloat16), torch.empty(2, 1, 1, 64)
    report = Report(target="inductor")

    def backend(gm, inputs):
        return Compilation(Options(), Traced(), report).compile(gm, inputs)

    with pytest.raises(StoppedError):
        torch.compile(layer, backend=backend)(x, tuple(tables.bfloat16()), None, cache)
    return report


@pytest.mark.slow
def test_a_decode_step_in_a_long_context():
    (memory,) = report_of_a_step(16384).memory
    assert (memory.caches, memory.weights) == (16384 * (512 + 64) * 2, 0)
    # Of kernels: the attention, four projections, and two products per head; one of these takes AMX.
    assert memory.calls == (7 if few_rows.library().has_tiles() else 6)
    keys_and_values = 16384 * 128 * (128 + 128) * 2
    assert memory.temporaries <= 64 * MIB < keys_and_values < memory.unfused


def graph_of(function, *shapes):
    return make_fx(function)(*map(torch.ones, shapes)).graph


def test_values_live_until_their_last_use():
    """A product of 16 bytes, then one of 80 and one of 16; the view keeps the first alive."""

    def function(x, wide, narrow):
        y = x @ x
        viewed = y.view(-1)
        return y @ wide, viewed.view(2, 2) @ narrow

    assert peak_of_temporaries(graph_of(function, (2, 2), (2, 10), (2, 2))) == 16 + 80 + 16


def test_what_loops_compute_where_it_is_read_is_not_stored():
    """A sum reads it in a loop; a product needs it in memory."""

    def summed(x):
        return (x * 2 + 1).sum(0)

    def multiplied(x):
        return (x * 2 + 1) @ x

    assert [peak_of_temporaries(graph_of(summed, (4, 4)), is_fused=kind) for kind in (False, True)] == [2 * 64, 16]
    assert [peak_of_temporaries(graph_of(multiplied, (4, 4)), is_fused=kind) for kind in (False, True)] == [128, 128]


def test_a_product_of_one_row_is_a_sum_on_a_cpu():
    def function(x, y):
        return (x * 2) @ y.exp()

    for rows, stored in ((1, 0), (2, 3 * (16 + 80))):
        peak = peak_of_temporaries(graph_of(function, (3, rows, 2), (3, 2, 10)), is_fused=True)
        assert peak == stored + 3 * rows * 40


def test_what_is_computed_where_it_is_read_keeps_what_it_is_computed_from():
    """The first product, 64 bytes, lives until the sum reads twice of it, together with the second and its sum."""

    def function(x):
        product = x @ x
        twice, other = product * 2, (x @ x) @ x
        return twice.sum(), other

    assert peak_of_temporaries(graph_of(function, (4, 4)), is_fused=True) == 3 * 64


@pytest.mark.parametrize(("is_read_later", "peak"), [(False, 0), (True, 64)])
def test_a_cache_that_nobody_reads_any_more_is_written_in_place(is_read_later, peak):
    def function(cache, row):
        new = cache.index_put((torch.tensor([1]),), row)
        total = (cache * 2).sum() if is_read_later else new.sum()
        cache.copy_(new)
        return total

    graph = graph_of(function, (4, 4), (4,))
    assert peak <= peak_of_temporaries(graph, is_fused=True) < peak + 64


def test_unknown_sizes_are_not_told():
    x = torch._subclasses.FakeTensorMode(shape_env=ShapeEnv()).from_tensor(torch.ones(5, 3))
    assert peak_of_temporaries(make_fx(lambda x: x @ x.T, tracing_mode="symbolic")(x).graph) is None


def test_what_is_told():
    told = "memory, per layer of 2: 1.5 KiB of copies of weights"
    assert str(MemoryUse(2, None, 3072, None, None, 0)) == told
    whole = MemoryUse(2, 4 * MIB, 3072, 3 * MIB, 40 * MIB, 0)
    assert str(whole) == f"{told}, 2.0 MiB of caches read; temporaries about 3.0 MiB, unfused 40.0 MiB"
    assert "3.0 MiB and what operators allocate inside, unfused" in str(replace(whole, calls=4))
