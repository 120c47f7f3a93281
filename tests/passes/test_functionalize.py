"""A user's own calls of in-place operators: in graphs they become the functional ones, with the same effect."""

import copy
import functools
import re
from types import SimpleNamespace

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch.testing import assert_close

from mla_fx.debug.report import Report
from mla_fx.ops import catalogue
from mla_fx.options import Options
from mla_fx.passes import prove
from mla_fx.passes.functionalize import WRAPPER, Written, functionalize

pytestmark = pytest.mark.usefixtures("no_gradients")
TWINS = [entry for entry in catalogue().values() if entry.inplace is not None]
CACHED = [entry for entry in TWINS if entry.inplace._schema.returns]  # others return nothing


def by_aot(compiler):
    return aot_autograd(fw_compiler=compiler, inference_compiler=compiler)


def compiled(function, graphs):
    """`function` as it runs once twins are taken back; its graphs are collected."""

    def compiler(gm, inputs):
        before = len(gm.graph.find_nodes(op="call_function", target=WRAPPER))
        run = SimpleNamespace(options=Options(), report=Report(), proved={})
        assert functionalize(gm.graph, functools.partial(prove.apply, run)) == {}
        assert run.report.checked + len(run.report.unchecked) == before > 0
        gm.graph.lint()
        gm.recompile()
        graphs.append(gm.graph)
        return gm.forward

    return torch.compile(function, backend=by_aot(compiler))


def check(function, arguments, functional, count=1):
    """Check for eager's results and writes, with so many calls of the functional operator alone."""
    torch._dynamo.reset()
    graphs, eager, given = [], copy.deepcopy(arguments), copy.deepcopy(arguments)
    wanted = function(*eager)
    assert_close(compiled(function, graphs)(*given), wanted, rtol=0, atol=0)
    assert_close(given, eager, rtol=0, atol=0)
    (graph,) = graphs
    assert len(graph.find_nodes(op="call_function", target=functional)) == count
    assert not graph.find_nodes(op="call_function", target=WRAPPER)


def first_of_each_mode(entry):
    modes = {}
    for sample in entry.samples(torch.bfloat16):
        modes.setdefault(sample.mode, sample)
    return modes.values()


CALLS = [
    pytest.param(entry, sample, id=f"{entry.name}-{sample.mode}")
    for entry in CACHED
    for sample in first_of_each_mode(entry)
]


@pytest.mark.slow
@pytest.mark.parametrize("entry, sample", CALLS)
def test_every_mode_writes_and_returns_what_it_did(entry, sample):
    def call(*args):
        return entry.inplace(*args, **sample.kwargs)

    check(call, list(sample.args), entry.overload)


def prolog_call():
    entry = catalogue()["mla_prolog"]
    sample = next(sample for sample in entry.samples(torch.bfloat16) if sample.mode == "PA_BSND")
    return entry, list(sample.args), sample.kwargs


def noise(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).bfloat16()


def test_what_reads_the_cache_afterwards_reads_what_was_written():
    entry, args, kwargs = prolog_call()

    def call(*args):
        query, query_rope = entry.inplace(*args, **kwargs)
        return query, query_rope, args[10].float().sum(), args[11] * 2

    check(call, args, entry.overload)


def test_a_slice_of_a_tensor_is_written_and_nothing_beside_it():
    entry, args, kwargs = prolog_call()
    blocks, *page = args[10].shape

    def call(base, *args):
        return entry.inplace(*args[:10], base[1 : 1 + blocks], *args[11:], **kwargs)

    check(call, [noise(blocks + 2, *page), *args], entry.overload)


def test_one_layer_of_a_stack_of_caches_is_written_and_nothing_beside_it():
    entry, args, kwargs = prolog_call()

    def call(base, *args):
        return entry.inplace(*args[:10], base[1], *args[11:], **kwargs)

    check(call, [noise(3, *args[10].shape), *args], entry.overload)


def test_both_caches_may_lie_in_one_tensor():
    entry, args, kwargs = prolog_call()
    blocks, size, _, rank = args[10].shape
    width = args[11].shape[-1]

    def call(base, *args):
        return entry.inplace(*args[:10], base[..., :rank], base[..., rank:], *args[12:], **kwargs)

    check(call, [noise(blocks, size, 1, rank + width), *args], entry.overload)


def test_two_calls_in_a_row_write_one_after_the_other():
    entry, args, kwargs = prolog_call()

    def call(*args):
        first = entry.inplace(*args, **kwargs)
        return *first, *entry.inplace(args[0] * 2, *args[1:9], args[9].flip(0), *args[10:], **kwargs)

    check(call, args, entry.overload, 2)


@pytest.mark.refutes
def test_a_call_whose_write_would_be_lost_stays(monkeypatch):
    """The graph is as it was, and the report says which value would have changed."""
    entry, args, kwargs = prolog_call()
    monkeypatch.setattr(Written, "write", lambda self, emit, base, value: base)
    run, graphs = SimpleNamespace(options=Options(), report=Report(), proved={}), []

    def compiler(gm, inputs):
        before = str(gm.graph)
        refusals = functionalize(gm.graph, functools.partial(prove.apply, run))
        [reason] = run.report.refuted
        assert re.match(r"functionalizing would change getitem\w*: at \[", reason)
        assert refusals == {f"mla_prolog stays a call that writes in place: {reason}": 1}
        graphs.append((before, str(gm.graph)))
        return gm.forward

    torch.compile(lambda *args: entry.inplace(*args, **kwargs), backend=by_aot(compiler))(*args)
    [(before, after)] = graphs
    assert before == after


# --- attention, which writes an output -------------------------------------------------------------------------

ATTENTIONS = {"multi_latent_attention": "atten_out", "paged_attention": "attn_out"}


def attention_call(name, lengths):
    """The in-place form as a function of its output and its tensors, and these; lengths are a list or a tensor."""
    entry = catalogue()[name]
    sample = next(entry.samples(torch.bfloat16))
    names = [argument.name for argument in entry.host._schema.arguments]
    given = dict(zip(names, sample.args, strict=False))
    rows = len(lengths)
    queries = {name: given[name][:1].repeat(rows, 1, 1) for name in ("query", "q_nope", "q_rope") if name in given}
    tables = torch.arange(rows).unsqueeze(1) % len(given["block_tables"])
    given |= queries | {"block_tables": tables, "context_lens": lengths}
    tensors = list(given.values())[: names.index("context_lens")]
    twin, plain = (entry.inplace_host, entry.host) if isinstance(lengths, list) else (entry.inplace, entry.overload)
    result = plain(*tensors, lengths, **sample.kwargs)
    out = torch.full_like(result[0] if isinstance(result, tuple) else result, 77)

    def call(out, *tensors):
        twin(*tensors, lengths, **{ATTENTIONS[name]: out}, **sample.kwargs)
        return (out * 2,)

    return call, [out, *tensors]


@pytest.mark.parametrize("name", sorted(ATTENTIONS))
def test_an_output_that_is_written_whole_is_the_functional_result(name):
    call, arguments = attention_call(name, [5, 7, 3])
    check(call, arguments, catalogue()[name].host)


def test_a_slice_of_an_output_is_written_and_nothing_beside_it():
    call, (out, *tensors) = attention_call("multi_latent_attention", [5, 7, 3])
    whole, plain = torch.full((5, *out.shape[1:]), 77.0).bfloat16(), catalogue()["multi_latent_attention"].host
    check(lambda whole, *tensors: (*call(whole[1:4], *tensors), whole + 1), [whole, *tensors], plain)


@pytest.mark.parametrize("lengths", [[5, 0, 3], torch.tensor([5, 7, 3])], ids=["no context", "tensor"])
@pytest.mark.parametrize("name", sorted(ATTENTIONS))
def test_rows_that_may_be_left_as_they_are_keep_the_twin(name, lengths):
    call, arguments = attention_call(name, lengths)
    stayed = []

    def compiler(gm, inputs):
        assert functionalize(gm.graph, None) == {}
        stayed.extend(gm.graph.find_nodes(op="call_function", target=WRAPPER))
        return gm.forward

    eager, given = copy.deepcopy(arguments), copy.deepcopy(arguments)
    torch._dynamo.reset()
    assert_close(torch.compile(call, backend=by_aot(compiler))(*given), call(*eager), rtol=0, atol=0)
    assert_close(given, eager, rtol=0, atol=0)
    assert len(stayed) == 1
