"""Every operator under torch.compile: what it answers, what it writes, and that no copy of a cache is left."""

import math
import operator as python_operator
import re

import pytest
import torch
from lib.operators.harness import (
    CATALOGUE,
    as_tuple,
    by_name,
    result_names,
    same_tensors,
    samples,
    twin_call,
    written_names,
)
from torch._inductor.utils import run_and_get_code

import mla_fx
from mla_fx.driver.compilation import Compilation

pytestmark = pytest.mark.usefixtures("no_gradients")


def one_of_each_mode(operators):
    """One pytest parameter (operator, arguments by name) for each mode."""
    for operator in operators:
        modes = {mode: (args, kwargs) for mode, args, kwargs in reversed(samples(operator.name, torch.bfloat16))}
        for mode, (args, kwargs) in reversed(modes.items()):
            yield pytest.param(operator, by_name(operator, args, kwargs), id=f"{operator.name}: {mode}")


def first_and_last_mode(operators):
    for operator in operators:
        cases = list(one_of_each_mode([operator]))
        yield from cases[:: max(1, len(cases) - 1)]


def modes_between(operators):
    for operator in operators:
        yield from list(one_of_each_mode([operator]))[1:-1]


OPERATORS = tuple(CATALOGUE.values())
TWINS = tuple(operator for operator in OPERATORS if operator.inplace is not None)
UPDATES = tuple(
    operator
    for operator in TWINS
    if set(written_names(operator.inplace)) <= {argument.name for argument in operator.overload._schema.arguments}
)


def split(arguments):
    """Copies of the tensors among `arguments`, and the other arguments."""
    tensors = {name: value.clone() for name, value in arguments.items() if torch.is_tensor(value)}
    return tensors, {name: value for name, value in arguments.items() if name not in tensors}


def called(overload, options):
    """A function of tensors by name that calls `overload`."""

    def layer(**tensors):
        return overload(**tensors, **options)

    return layer


def expect_eager(operator, arguments, backend):
    tensors, options = split(arguments)
    compiled = torch.compile(called(operator.overload, options), backend=backend, fullgraph=True)
    same_tensors(as_tuple(compiled(**tensors)), as_tuple(operator.overload(**arguments)))
    same_tensors(tensors.values(), [arguments[name] for name in tensors])


@pytest.mark.slow
@pytest.mark.parametrize(("operator", "arguments"), list(modes_between(OPERATORS)))
def test_aot_eager_answers_as_eager(operator, arguments):
    """In the modes that Inductor does not compile below, which needs AOTAutograd, too."""
    expect_eager(operator, arguments, "aot_eager")


@pytest.mark.slow
@pytest.mark.parametrize(("operator", "arguments"), first_and_last_mode(OPERATORS))
def test_inductor_answers_as_eager(operator, arguments):
    expect_eager(operator, arguments, "inductor")


def allocated(code):
    """The numbers of elements of the buffers that generated code allocates."""
    shapes = re.findall(r"= empty_strided\w*\(\((.*?)\)", code)
    return [math.prod(int(size) for size in shape.split(",") if size.strip()) for shape in shapes]


@pytest.mark.slow
@pytest.mark.parametrize(("operator", "arguments"), first_and_last_mode(TWINS))
def test_inductor_runs_the_twin_on_the_very_caches(operator, arguments):
    """It is functionalised and put back in place: the code calls it on graph inputs, and copies nothing."""
    returned, after = twin_call(operator, (), arguments)
    written = written_names(operator.inplace)
    outputs = {name: torch.full_like(after[name], 77) for name in written if name not in arguments}
    tensors, options = split(arguments | outputs)
    addresses = {name: tensors[name].data_ptr() for name in written}
    compiled = torch.compile(called(operator.inplace, options), backend="inductor", fullgraph=True)
    results, (code,) = run_and_get_code(compiled, **tensors)
    same_tensors(as_tuple(results), returned.values())
    same_tensors(tensors.values(), [after[name] for name in tensors])
    assert {name: tensors[name].data_ptr() for name in written} == addresses

    (call,) = re.findall(rf"torch\.ops\.{re.escape(str(operator.inplace))}\((.*)\)", code)
    places = list(tensors)
    assert [f"arg{places.index(name)}_1" in re.findall(r"arg\d+_1", call) for name in written] == [True] * len(written)
    assert not re.search(r"copy_|clone|auto_functionalized", code.split("def call(", 1)[1])
    assert not set(allocated(code)) & {tensors[name].numel() for name in written}


def updated(operator, options, meanwhile=lambda tensors: ()):
    """The functional form, whose updated caches are copied back; returns its other results.

    `meanwhile` gives further results from what the tensors hold before that.
    """
    overload, names = operator.overload, result_names(operator.overload)
    targets = {f"{name}_out" if f"{name}_out" in names else name: name for name in written_names(operator.inplace)}

    def layer(**tensors):
        results = dict(zip(names, overload(**tensors, **options), strict=True))
        others = meanwhile(tensors)
        for result, name in targets.items():
            tensors[name].copy_(results.pop(result))
        return *results.values(), *others

    return layer


@pytest.fixture
def final_graphs(monkeypatch):
    """The graphs as the backend hands them on."""
    graphs, rewrite = [], Compilation.rewrite

    def kept(self, gm, **given):
        run = rewrite(self, gm, **given)
        graphs.append(run.graph)
        return run

    monkeypatch.setattr(Compilation, "rewrite", kept)
    return graphs


def computes(graph):
    """What a graph calls, apart from taking results out of tuples."""
    calls = (node.target for node in graph.nodes if node.op == "call_function")
    return [target for target in calls if target is not python_operator.getitem]


@pytest.mark.slow
@pytest.mark.parametrize(("operator", "arguments"), list(one_of_each_mode(UPDATES)))
def test_copying_results_back_becomes_the_twin(operator, arguments, final_graphs):
    returned, after = twin_call(operator, (), arguments)
    tensors, options = split(arguments)
    backend = mla_fx.get_backend(target="reference")
    results = torch.compile(updated(operator, options), backend=backend, fullgraph=True)(**tensors)
    same_tensors(results, returned.values())
    same_tensors(tensors.values(), [after[name] for name in tensors])
    (graph,) = final_graphs
    assert computes(graph) == [operator.inplace]


@pytest.mark.parametrize("operator", UPDATES, ids=lambda operator: operator.name)
def test_where_the_old_cache_is_read_later_the_functional_form_stays(operator, final_graphs):
    arguments = next(one_of_each_mode([operator])).values[1]
    name = written_names(operator.inplace)[-1]
    returned, after = twin_call(operator, (), arguments)
    tensors, options = split(arguments)
    layer = updated(operator, options, meanwhile=lambda tensors: (tensors[name] * 2,))
    *results, doubled = torch.compile(layer, backend=mla_fx.get_backend(target="reference"), fullgraph=True)(**tensors)
    same_tensors(results, returned.values())
    same_tensors([doubled], [arguments[name] * 2])
    same_tensors(tensors.values(), [after[name] for name in tensors])
    (graph,) = final_graphs
    assert operator.overload in computes(graph)
    assert operator.inplace not in computes(graph)


def is_quantised(arguments):
    """Whether a call computes codes, or reads them without scales that are given: those become numbers first."""
    has_codes = any(torch.is_tensor(value) and value.dtype == torch.int8 for value in arguments.values())
    return has_codes and arguments.get("kv_scales") is None


TRACEABLE = tuple(case for operator in OPERATORS if operator.host is None for case in one_of_each_mode([operator]))


@pytest.mark.slow
@pytest.mark.parametrize(("operator", "arguments"), [case for case in TRACEABLE if is_quantised(case.values[1])])
def test_quantised_calls_are_not_traced(operator, arguments, final_graphs):
    """A compiler would not keep the roundings in between, on which an int8 value can depend."""
    expect_eager(operator, arguments, mla_fx.get_backend(target="inductor"))
    (graph,) = final_graphs
    assert computes(graph) == [operator.overload]
