"""Values that a rewrite widened, and that the program rounds back."""

import pytest
import torch

from mla_fx.graph.torch_private import make_fx
from mla_fx.rewriting.cleanup import round_trips
from mla_fx.rewriting.emitter import Emitter

prims = torch.ops.prims
CAST = prims.convert_element_type.default


def widened(x):
    return CAST(x, torch.float32)


def moved_and_rounded(x):
    return widened(x).view(3, 4, 2).transpose(0, 1).to(torch.bfloat16) * 2


def cloned_and_rounded(x):
    return widened(x).view(3, 4, 2).permute(1, 0, 2).clone(memory_format=torch.contiguous_format).to(torch.bfloat16)


def read_wide_too(x):
    wide = widened(x)
    return wide.to(torch.bfloat16), wide + 1e-3


def computed_with(x):
    return (widened(x) * 1.001).to(torch.bfloat16)


def rounded_elsewhere(x):
    return widened(x).to(torch.float16)


def with_gaps(x):
    """Widening closes the gaps, and later calls were traced for the gaps."""
    return widened(x[:, :4]).view(24).to(torch.bfloat16)


def laid_out_anew(x):
    """The program asks for other strides than the value has."""
    return widened(x.t()).to(torch.bfloat16, memory_format=torch.contiguous_format)


def casts(graph):
    return [node for node in graph.nodes if node.target in (CAST, torch.ops.aten._to_copy.default)]


def edited(function, *, is_ours=True):
    given = torch.randn(6, 4 if function is not with_gaps else 8).bfloat16()
    traced = make_fx(function)(given)
    for node in traced.graph.find_nodes(op="call_function", target=CAST):
        if is_ours:
            node.meta["mla_fx_rule"] = "rule"
    emit = Emitter(traced.graph)
    for plan in round_trips(emit):
        emit.apply(plan)
    traced.graph.eliminate_dead_code()
    traced.recompile()
    torch.testing.assert_close(traced(given), function(given), rtol=0, atol=0)
    return len(casts(traced.graph))


@pytest.mark.parametrize("function", [moved_and_rounded, cloned_and_rounded])
def test_a_round_trip_is_dropped(function):
    assert edited(function) == 0
    assert edited(function, is_ours=False) == 2


def test_what_reads_the_wide_value_keeps_it():
    assert edited(read_wide_too) == 1


@pytest.mark.parametrize("function", [computed_with, rounded_elsewhere, with_gaps, laid_out_anew])
def test_everything_else_stays(function):
    assert edited(function) == 2
