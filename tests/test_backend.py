"""The backend as users see it: options and their errors, failures, and what is left unchanged."""

import copy
import re
import threading
import warnings
from datetime import datetime

import pytest
import torch
from functorch.compile import make_boxed_func
from lib.comparing import ALL, EXACT, check_same, compiled, gradients, mla_warnings
from lib.families import Recorder
from lib.zoo.entries import DEFAULT, Entry, TwoGraphs
from lib.zoo.negatives import expanded_cache
from lib.zoo.sizes import DECODE
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import mla_fx
from mla_fx import cases
from mla_fx.driver import discovery, report_log
from mla_fx.options import Options
from mla_fx.passes.pipeline import run_pipeline
from mla_fx.passes.run import Run

pytestmark = pytest.mark.usefixtures("no_gradients")


# --- the entry -------------------------------------------------------------------------------------------------------


def test_registered_name():
    assert "mla" in torch._dynamo.list_backends()
    assert torch._dynamo.lookup_backend("mla") is mla_fx.mla_backend


def test_get_backend_binds_options(decode):
    module, arguments = decode
    check_same(module, arguments, torch.compile(module, backend=mla_fx.get_backend(target="reference")))
    assert mla_fx.last_report().target == "reference"


def test_options_of_the_call_come_before_bound_ones(decode):
    module, arguments = decode
    backend = mla_fx.get_backend(target="inductor", disable="mla_prolog")
    torch.compile(module, backend=backend, options={"target": "reference"})(*arguments)
    report = mla_fx.last_report()
    assert (report.target, report.fused) == ("reference", {"kv_rmsnorm_rope_cache": 1, "latent_attention": 1})


def test_last_report_is_that_of_the_last_compilation(decode):
    module, arguments = decode
    compiled(module, disable="mla_attention")(*arguments)
    assert mla_fx.last_report().fused == {}
    torch._dynamo.reset()
    compiled(module)(*arguments)
    assert mla_fx.last_report().fused == ALL


class InTwo(nn.Module):
    """A layer, a graph break, and a graph without attention."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = cases.Layer(), nn.Linear(cases.HE, 8)

    def forward(self, *inputs):
        hidden = self.layer(*inputs)
        torch._dynamo.graph_break()
        return self.head(hidden).relu()


def test_the_last_report_is_of_all_graphs_since_it_was_asked_for():
    run = compiled(InTwo().eval())
    run(*cases.inputs(1))
    assert mla_fx.last_report().fused == ALL
    assert [part.fused for part in mla_fx.last_report().parts] == [ALL, {}]
    assert str(mla_fx.last_report()).splitlines()[2:4] == [
        "  graph 0: fused mla_prolog x1, latent_attention x1",
        "  graph 1: fused nothing, no attention",
    ]
    compiled(nn.ReLU())(torch.ones(1))
    assert (mla_fx.last_report().fused, mla_fx.last_report().parts) == ({}, [])


def test_the_last_report_is_of_nothing_from_before_a_reset():
    for _ in range(2):
        compiled(InTwo().eval())(*cases.inputs(1))
        torch._dynamo.reset()
    assert mla_fx.last_report() is None  # nothing was compiled since
    for _ in range(2):
        torch._dynamo.reset()
        compiled(nn.ReLU())(torch.ones(1))
    assert mla_fx.last_report().parts == []


def test_a_report_says_when_and_for_which_code_it_was_made():
    before = f"{datetime.now():%Y-%m-%d %H:%M:%S}"
    compiled(cases.Layer())(*cases.inputs(1))
    report = mla_fx.last_report()
    assert before <= report.made <= f"{datetime.now():%Y-%m-%d %H:%M:%S}"
    assert re.fullmatch(r"forward at .*mla_fx/cases\.py:\d+", report.code)
    assert str(report).splitlines()[1] == f"  compiled at {report.made}: {report.code}"


def test_what_was_compiled_without_dynamo_is_alone_in_its_report():
    """However many frames Dynamo compiles afterwards."""
    graph = torch.fx.symbolic_trace(lambda x: (x.relu(),))
    for _ in range(2):
        mla_fx.get_backend(target="reference")(graph, [torch.ones(1)])
    assert mla_fx.last_report().parts == []
    mla_fx.get_backend(target="reference")(graph, [torch.ones(1)])
    compiled(InTwo().eval())(*cases.inputs(1))
    assert [part.fused for part in mla_fx.last_report().parts] == [ALL, {}]


def test_the_last_report_is_of_so_many_graphs(monkeypatch):
    """A process that never reads reports does not keep them all."""
    monkeypatch.setattr(report_log, "_run", report_log._Run(most=3))
    for size in range(1, 6):
        torch.compile(nn.ReLU(), backend=mla_fx.get_backend(target="reference"), dynamic=False)(torch.ones(size))
    assert len(mla_fx.last_report().parts) == 3


def test_explain_leaves_no_texts_behind(decode):
    module, arguments = decode
    with report_log.listening() as reports:
        report = mla_fx.explain(module, target="reference")(*arguments)
    assert "captured" in report.graphs
    assert [(kept.graphs, kept.fused) for kept in reports] == [({}, report.fused)]


def test_explain_merges_the_graphs_between_breaks():
    report = mla_fx.explain(TwoGraphs(), target="reference")(Entry(DEFAULT).arguments(DECODE))
    assert report.fused == {"mla_prolog": 2, "latent_attention": 2}
    assert {name.split(":")[0] for name in report.graphs} == {"graph 0", "graph 1"}
    assert "mla_prolog x2" in str(report)


def test_explain_looks_at_a_model_that_wants_gradients(decode):
    module, arguments = decode
    with torch.enable_grad():
        assert mla_fx.explain(module, target="reference")(*arguments).fused == ALL


# --- options ---------------------------------------------------------------------------------------------------------

BAD_OPTIONS = {
    "target": ({"target": "abacus"}, "unknown target 'abacus'; known targets are 'auto', .*'inductor'.*'reference'"),
    "option": ({"colour": "red"}, "unknown option 'colour' for target 'reference'; known options are 'absorb', 'dis"),
    "inductor's": ({"target": "inductor", "colour": "red"}, "unknown option 'colour'.*target: [0-9]+ of its own"),
    "pattern": ({"disable": ["mla_prologue"]}, "disable names 'mla_prologue'; known patterns are .*'mla_prolog'"),
    "verify": ({"verify": "sometimes"}, "verify is 'sometimes'; it takes 'off', 'first', 'always'"),
    "absorb": ({"absorb": True}, "absorb is True; it takes 'auto', 'always', 'never'"),
}


@pytest.mark.parametrize(("options", "complaint"), BAD_OPTIONS.values(), ids=BAD_OPTIONS)
def test_bad_option(decode, options, complaint):
    module, arguments = decode
    with pytest.raises(mla_fx.OptionError, match=complaint):
        compiled(module, **options)(*arguments)


@pytest.mark.parametrize("door", ["options", "get_backend", "explain", "name", "pass"])
def test_every_door_checks_options(decode, door):
    module, arguments = decode
    doors = {
        "options": lambda: torch.compile(module, backend=mla_fx.mla_backend, options={"target": "abacus"})(*arguments),
        "get_backend": lambda: torch.compile(module, backend=mla_fx.get_backend(target="abacus"))(*arguments),
        "explain": lambda: mla_fx.explain(module, target="abacus")(*arguments),
        "name": lambda: torch.compile(module, backend="mla", options={"target": "abacus"})(*arguments),
        "pass": lambda: mla_fx.MlaPass(target="abacus")(torch.fx.symbolic_trace(nn.Identity())),
    }
    with pytest.raises(mla_fx.OptionError, match="known targets are"):
        doors[door]()


def test_reference_has_no_modes(decode):
    module, arguments = decode
    backend = mla_fx.get_backend(target="reference")
    with pytest.raises(mla_fx.OptionError, match="'reference' has no modes, so mode='max-autotune' does not apply"):
        torch.compile(module, backend=backend, mode="max-autotune")(*arguments)


@pytest.fixture
def patches(monkeypatch):
    """The configuration that Inductor is called with. Nothing is compiled, so nothing is known about the result, and
    Inductor is called once more without its caches."""
    seen = []

    def compile_fx(gm, example_inputs, inner_compile, config_patches=None):
        seen.append(config_patches)
        return gm.forward

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", compile_fx)
    return seen


def test_inductor_gets_its_own_options(decode, patches):
    module, arguments = decode
    options = {"max_autotune": False, "epilogue_fusion": True, "verify": "off"}
    torch.compile(module, backend="mla", options=options)(*arguments)
    assert patches == [{"max_autotune": False, "epilogue_fusion": True}] * 2


def test_inductor_gets_the_options_of_a_mode(decode, patches):
    module, arguments = decode
    torch.compile(module, backend="mla", mode="reduce-overhead")(*arguments)
    assert patches == [torch._inductor.list_mode_options("reduce-overhead")] * 2


@pytest.mark.parametrize(
    "disable, fused",
    [
        ("mla_prolog", {"kv_rmsnorm_rope_cache": 1, "latent_attention": 1}),
        (["mla_prolog", "kv_rmsnorm_rope_cache"], {"latent_attention": 1}),
        (("mla_attention",), {}),
    ],
    ids=str,
)
def test_disable(decode, disable, fused):
    module, arguments = decode
    check_same(module, arguments, compiled(module, disable=disable))
    assert mla_fx.last_report().fused == fused


# --- strict and expect -----------------------------------------------------------------------------------------------


def test_near_miss_costs_one_warning():
    module, arguments = expanded_cache(DECODE)
    run = compiled(module)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            run(*copy.deepcopy(arguments))
    (message,) = mla_warnings(caught)
    assert "looks like MLA was not fused: mla_attention: keys and values are cached expanded, per head" in message


def test_strict_refuses_a_near_miss():
    module, arguments = expanded_cache(DECODE)
    with pytest.raises(mla_fx.FusionError, match="looks like MLA was not fused: mla_attention: keys and values are"):
        compiled(module, strict=True)(*arguments)


def test_strict_takes_what_fuses(decode):
    module, arguments = decode
    check_same(module, arguments, compiled(module, strict=True, expect=ALL))


@pytest.mark.parametrize("expect", [{"mla_prolog": 61, "latent_attention": 61}, {"mla_prolog": 1}, {}], ids=str)
def test_unmet_expectation(decode, expect):
    module, arguments = decode
    with pytest.raises(mla_fx.FusionError, match=r"expected .*, fused {'mla_prolog': 1, 'latent_attention': 1}"):
        compiled(module, expect=expect)(*arguments)


# --- what is left alone ----------------------------------------------------------------------------------------------


def test_training_graph_is_left_alone():
    module, other = Entry(DEFAULT).build(), Entry(DEFAULT).build()
    with torch.enable_grad(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.testing.assert_close(gradients(other, compiled(other)), gradients(module, module), **EXACT)
    assert mla_warnings(caught) == ["mla_fx fuses inference only; a graph that needs gradients is left unchanged"]
    assert mla_fx.last_report().fused == {}


def test_weights_that_want_gradients_do_not_hinder_inference(decode):
    module, arguments = decode
    assert all(weight.requires_grad for weight in module.parameters())
    check_same(module, arguments, compiled(module))
    assert mla_fx.last_report().fused == ALL


SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}
OTHERS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SMALL, num_key_value_heads=2, intermediate_size=48)),
    "llama-eager": lambda: LlamaForCausalLM(
        LlamaConfig(**SMALL, num_key_value_heads=4, intermediate_size=48, attn_implementation="eager")
    ),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=64)),
}


def captured(module, arguments):
    """The operator graph of a module, as the passes get it."""
    graphs = []

    def keep(gm, example_inputs):
        graphs.append(gm)
        return make_boxed_func(gm.forward)

    torch.compile(module, backend=aot_autograd(fw_compiler=keep), fullgraph=True)(*arguments)
    (gm,) = graphs
    return gm


def as_it_is(graph):
    return [(node, node.name, node.op, node.target, node.args, node.kwargs, dict(node.meta)) for node in graph.nodes]


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_other_models_come_out_node_for_node(name):
    torch.manual_seed(0)
    gm = captured(OTHERS[name]().eval(), (torch.randint(64, (2, 9)),))
    before = as_it_is(gm.graph)
    run = Run(gm.graph, Options(target="reference"), discovery.rules(), mla_fx.Report())
    run_pipeline(run)
    assert as_it_is(gm.graph) == before
    assert not run.is_changed
    assert not any(miss.looks_like_mla for miss in run.report.misses), str(run.report)


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_other_models_cost_no_warning(name):
    torch.manual_seed(0)
    module, ids = OTHERS[name]().eval(), torch.randint(64, (2, 9))
    with warnings.catch_warnings():
        warnings.simplefilter("error", mla_fx.MlaWarning)
        found = compiled(module)(ids).logits
    torch.testing.assert_close(found, module(ids).logits, **EXACT)
    assert mla_fx.last_report().fused == {}


def test_graph_in_which_nothing_fuses_comes_out_node_for_node():
    """Also one that looks like MLA, where rules were tried and took back what they had added."""
    module, arguments = expanded_cache(DECODE)
    gm = captured(module, arguments)
    before = as_it_is(gm.graph)
    run = Run(gm.graph, Options(target="reference"), discovery.rules(), mla_fx.Report())
    run_pipeline(run)
    assert as_it_is(gm.graph) == before


# --- no state between compilations -----------------------------------------------------------------------------------


def test_two_models_do_not_see_each_other(decode):
    module, arguments = decode
    other, other_arguments = expanded_cache(DECODE)
    first, second = Recorder(), Recorder()
    runs = torch.compile(module, backend=first), torch.compile(other, backend=second)
    for _ in range(2):
        check_same(module, arguments, runs[0])
        check_same(other, other_arguments, runs[1])
    assert (first.fused, second.fused) == (ALL, {})
    assert (len(first.reports), len(second.reports)) == (1, 1)


def test_threads_do_not_see_each_other():
    expected = {
        "kv_rmsnorm_rope_cache": ALL,
        "mla_prolog": {"kv_rmsnorm_rope_cache": 1, "latent_attention": 1},
        "mla_attention": {},
    }
    fused = {}

    def work(disable):
        entry, backend = Entry(DEFAULT), Recorder(disable=disable)
        module = entry.build()
        with torch.no_grad():
            check_same(module, entry.arguments(DECODE), torch.compile(module, backend=backend))
        fused[disable] = [report.fused for report in backend.reports]

    threads = [threading.Thread(target=work, args=(disable,)) for disable in expected]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert fused == {disable: [counts] for disable, counts in expected.items()}
