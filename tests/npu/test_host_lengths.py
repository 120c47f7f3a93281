"""Lengths of sequences that a step computes: numbers that the host reads before it, or tensors where tiling sinks."""

import functools

import pytest
import torch
import torchair

import mla_fx
from npu import models
from npu.converted import types

READ = "1 length read by the host before each call"


def compiled(model, *, target="ge", dynamic=False, **options):
    backend = mla_fx.get_backend(target=target, soc="Ascend910B3", **options)
    return torch.compile(model, backend=backend, dynamic=dynamic)


def lengths_of(graph):
    """The types of the operators that compute the lengths of each attention."""
    makers = {op.name: op.type for op in graph.op}
    places = [list(op.input_desc).index(place) for op in attentions(graph) for place in op.input_desc if is_kv(place)]
    return [makers[op.input[place].partition(":")[0]] for op, place in zip(attentions(graph), places, strict=True)]


def attentions(graph):
    return [op for op in graph.op if op.type == "FusedInferAttentionScore"]


def is_kv(place):
    return place.name == "actual_seq_lengths_kv"


def sinking():
    config = torchair.CompilerConfig()
    config.experimental_config.tiling_schedule_optimize = True
    return config


@pytest.mark.parametrize("tokens, batch", [(1, 1), (3, 2), (20, 2)])
def test_the_host_reads_them(converted, tokens, batch):
    model = models.model(layers=2)
    prompts = [models.prompt(tokens, batch, seed) for seed in range(3)]
    make_cache = functools.partial(models.static_cache, batch=batch)
    models.check_as_exact_as_eager(model, compiled(model), make_cache, prompts)
    (graph,) = converted.graphs
    assert lengths_of(graph) == ["Data", "Data"]
    assert any("read by the host before each call" in note for note in mla_fx.last_report().notes)


def test_the_graph_computes_them_where_tiling_sinks(converted):
    model = models.model()
    prompts = [models.prompt(1, seed=seed) for seed in range(3)]
    models.check_as_exact_as_eager(model, compiled(model, compiler_config=sinking()), models.static_cache, prompts)
    (graph,) = converted.graphs
    assert lengths_of(graph) == ["ClipByValueV2"]


def test_a_prompt_where_tiling_sinks(converted):
    """The kernel takes expanded keys in a layout for which tiling does not sink."""
    model = models.model()
    run = compiled(model, compiler_config=sinking())
    models.check_as_exact_as_eager(model, run, models.static_cache, [models.prompt(20)])
    assert "FusedInferAttentionScore" not in types(converted.graphs[0])
    assert any("which excludes tiling_schedule_optimize" in note for note in mla_fx.last_report().notes)


def test_a_batch_whose_size_is_a_symbol(converted):
    """How many lengths there are is not known, so the graph computes them."""
    model = models.model()
    run = compiled(model, dynamic=True)
    for batch in (2, 3):
        make_cache = functools.partial(models.static_cache, batch=batch)
        models.check_as_exact_as_eager(model, run, make_cache, [models.prompt(1, batch, seed) for seed in range(2)])
    assert "Data" not in lengths_of(converted.graphs[-1])


@pytest.mark.parametrize("target", ["ge", "aclgraph"])
def test_layers_share_a_length(captured, converted, target):
    """Two caches of the same length are two tensors; each is read, all of them at once."""
    model = models.model(layers=2)
    with torch.no_grad():
        compiled(model, target=target)(models.prompt(1), past_key_values=models.static_cache(model))
    assert READ in mla_fx.last_report().notes
