"""Numbers for the host: which become inputs of a graph, and that they are those of each call."""

import pytest
import torch
from mla_fx.lowering.ascend.fused_infer_attention_score import READ, on_host
from mla_fx.lowering.ascend.limits import Surface

from mla_fx.graph.torch_private import make_fx
from mla_fx.passes import hoist
from mla_fx.rewriting.emitter import Emitter

aten, own = torch.ops.aten, torch.ops.mla_fx_ascend
HOST = Surface("Ascend910B3", "aclgraph", hoists=True, cann="8.5.0", reads_ahead=True)


def traced(function, *given):
    return make_fx(function, tracing_mode="symbolic")(*(value.clone() for value in given))


def read_ahead(graph, operators):
    return hoist.read_ahead(graph, operators, lambda emit, _, plan: Emitter.apply(emit, plan))


def run(module, numbers, *given):
    """The graph's results, run with the numbers of this call."""
    module.recompile()
    return numbers.around(module)(*given)


def weighted(x, *lengths):
    """A result that depends on which length comes where."""
    return x * sum(own.host_number(length, place) * 10**place for length in lengths for place in range(2))


def test_numbers_are_those_of_each_call():
    module = traced(lambda x, positions: weighted(x, positions + 1), torch.ones(2), torch.tensor([3, 4]))
    numbers = read_ahead(module.graph, READ)
    assert not module.graph.find_nodes(op="call_function", target=own.host_number.default)
    for positions in ([3, 4], [7, 1]):
        expected = positions[0] + 1 + 10 * (positions[1] + 1)
        assert run(module, numbers, torch.ones(2), torch.tensor(positions)).tolist() == [expected] * 2
    assert numbers.summary() == "2 lengths read by the host before each call"


def test_equal_tensors_are_read_once():
    def function(x, positions, others):
        return weighted(x, positions + 1) + weighted(x, positions + 1) - weighted(x, others + 1)

    given = torch.ones(2), torch.tensor([3, 4]), torch.tensor([5, 6])
    module = traced(function, *given)
    numbers = read_ahead(module.graph, READ)
    assert numbers.count == 4
    assert run(module, numbers, *given).tolist() == [2 * (4 + 50) - (6 + 70)] * 2


def test_each_input_has_a_symbol_of_its_own():
    """Equal calls of one function are traced once, and then have one symbol."""

    def function(x, one, other):
        return weighted(x, one) + weighted(x, other)

    module = traced(function, torch.ones(2), *torch.ones(2, 2).long())
    first, *others = module.graph.find_nodes(op="call_function", target=own.host_number.default)
    for call in others:
        call.meta["val"] = first.meta["val"]
    read_ahead(module.graph, READ)
    values = [str(node.meta["val"]) for node in module.graph.find_nodes(op="placeholder")][3:]
    assert len(set(values)) == len(values) == 4


def test_names_of_inputs_are_their_targets():
    """torchair's own source of a graph has both."""
    given = torch.ones(2), torch.tensor([3, 4]), torch.tensor([5, 6])
    module = traced(lambda x, length, length_1: weighted(x, length, length_1), *given)
    read_ahead(module.graph, READ)
    inputs = module.graph.find_nodes(op="placeholder")[3:]
    assert [node.target for node in inputs] == [node.name for node in inputs]
    assert len({node.name for node in module.graph.nodes}) == len(module.graph.nodes)


def test_a_size_is_read_from_the_inputs():
    """It would need what the graph computes otherwise, here a product."""

    def function(x, weight, positions):
        size = aten.sym_size.int(x @ weight, 0)
        return weighted(x, positions.clamp(max=size))

    given = torch.ones(5, 3), torch.ones(3, 3), torch.tensor([9, 2])
    module = make_fx(function, tracing_mode="symbolic")(*given)
    numbers = read_ahead(module.graph, READ)
    ((make, _),) = numbers.tensors
    assert aten.mm.default not in [node.target for node in make.graph.nodes]
    assert run(module, numbers, *given)[0, 0] == 5 + 20


@torch.library.custom_op("mla_fx_tests::of_graphs", mutates_args=())
def of_graphs(values: torch.Tensor) -> torch.Tensor:
    return values + 1


of_graphs.register_fake(torch.empty_like)

STAYING = {
    "a vendor's operator": lambda x, values: weighted(x, torch.ops.mla_fx_tests.of_graphs(values)),
    "a random value": lambda x, values: weighted(x, torch.bernoulli(values * 0.5).long()),
    "a value that the graph writes": lambda x, values: weighted(x, aten.copy_.default(values, values * 2).long()),
}


@pytest.mark.parametrize("name", STAYING)
def test_what_stays(name):
    module = traced(STAYING[name], torch.ones(2), torch.ones(2))
    before = str(module.graph)
    assert read_ahead(module.graph, READ).summary() == ""
    assert str(module.graph) == before


def test_lengths_of_the_host():
    values = torch.tensor([5, 300], dtype=torch.int32)
    assert on_host(HOST, values) == [5, 300]
    assert on_host(HOST, [5, 300]) == [5, 300]
    assert on_host(Surface("Ascend910B3", "ge", hoists=True, cann="8.5.0"), values) is values
