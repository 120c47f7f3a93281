"""The backend as users meet it: options and their errors, what happens when something fails, what is left alone."""

from __future__ import annotations

import ast
import copy
import re
import threading
import warnings
from pathlib import Path

import pytest
import torch
from families import Recorder, cache_tensors, empty_cache, tiny_model, tokens
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from zoo.entries import DEFAULT, Entry
from zoo.negatives import expanded_cache
from zoo.sizes import DECODE, PREFILL

import mla_fx
from mla_fx import compilation, discover
from mla_fx.options import Options
from mla_fx.pipeline import PIPELINE, Pass, Run, run_pipeline
from mla_fx.verify import verified

EXACT = {"rtol": 1e-4, "atol": 1e-5}
ALL = {"mla_prolog": 1, "latent_attention": 1}


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


@pytest.fixture
def decode():
    """A layer of latent attention and the arguments of a decode step."""
    return Entry(DEFAULT).build(), Entry(DEFAULT).arguments(DECODE)


def compiled(module, **options):
    return torch.compile(module, backend=mla_fx.mla_backend, options={"target": "reference", **options})


def check_same(module, arguments, run):
    """What `run` returns, and what it leaves in the caches, is what the module does."""
    theirs, ours = copy.deepcopy(arguments), copy.deepcopy(arguments)
    expected = module(*theirs)
    torch.testing.assert_close((run(*ours), ours), (expected, theirs), **EXACT)


def check_runs_as_it_came(module, arguments, run):
    """Not only the same answer: bit for bit, with no fused operator."""
    theirs, ours = copy.deepcopy(arguments), copy.deepcopy(arguments)
    expected = torch.compile(module, backend="aot_eager")(*theirs)
    torch._dynamo.reset()
    torch.testing.assert_close((run(*ours), ours), (expected, theirs), rtol=0, atol=0)
    assert mla_fx.last_report().fused == {}


def mla_warnings(caught):
    return [str(warning.message) for warning in caught if issubclass(warning.category, mla_fx.MlaWarning)]


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


def test_explain_merges_the_graphs_between_breaks():
    class Broken(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Entry(DEFAULT).build() for _ in range(2))

        def forward(self, arguments):
            first = self.layers[0](*arguments)
            torch._dynamo.graph_break()
            return first, self.layers[1](*arguments)

    report = mla_fx.explain(Broken(), target="reference")(Entry(DEFAULT).arguments(DECODE))
    assert report.fused == {"mla_prolog": 2, "latent_attention": 2}
    assert {name.split(":")[0] for name in report.graphs} == {"graph 0", "graph 1"}
    assert "mla_prolog x2" in str(report)


def test_explain_looks_at_a_model_that_wants_gradients(decode):
    module, arguments = decode
    with torch.enable_grad():
        assert mla_fx.explain(module, target="reference")(*arguments).fused == ALL


# --- options ---------------------------------------------------------------------------------------------------------

BAD_OPTIONS = {
    "target": ({"target": "abacus"}, "unknown target 'abacus'; known targets are 'auto', 'inductor'.*'reference'"),
    "option": ({"colour": "red"}, "unknown option 'colour' for target 'reference'; known options are 'absorb', 'dis"),
    "inductor's": ({"target": "inductor", "colour": "red"}, "unknown option 'colour'.* of its own, such as "),
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
    """The configuration with which Inductor is called; it compiles nothing."""
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
    assert patches == [{"max_autotune": False, "epilogue_fusion": True}]


def test_inductor_gets_the_options_of_a_mode(decode, patches):
    module, arguments = decode
    torch.compile(module, backend="mla", mode="reduce-overhead")(*arguments)
    assert patches == [torch._inductor.list_mode_options("reduce-overhead")]


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
    assert "looks like MLA stays unfused: mla_attention: expected a matrix product, found cat" in message


def test_strict_refuses_a_near_miss():
    module, arguments = expanded_cache(DECODE)
    with pytest.raises(mla_fx.FusionError, match="looks like MLA stays unfused: mla_attention: expected a matrix"):
        compiled(module, strict=True)(*arguments)


def test_strict_takes_what_fuses(decode):
    module, arguments = decode
    check_same(module, arguments, compiled(module, strict=True, expect=ALL))


@pytest.mark.parametrize("expect", [{"mla_prolog": 61, "latent_attention": 61}, {"mla_prolog": 1}, {}], ids=str)
def test_unmet_expectation(decode, expect):
    module, arguments = decode
    with pytest.raises(mla_fx.FusionError, match=r"expected .*, fused {'mla_prolog': 1, 'latent_attention': 1}"):
        compiled(module, expect=expect)(*arguments)


# --- verify ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verify", ["first", "always"])
@pytest.mark.parametrize("step", [PREFILL, DECODE], ids=lambda step: step.name)
def test_verify_takes_a_good_graph(verify, step):
    entry = Entry(DEFAULT)
    module = entry.build()
    run = compiled(module, verify=verify)
    for _ in range(2):
        check_same(module, entry.arguments(step), run)
    assert mla_fx.last_report().fused


def wrong_query(q_nope, weight_uk):
    return torch.einsum("bsnd,ndc->bsnc", q_nope, weight_uk) * 1.1


def wrong_norm(_):
    return {"rmsnorm_epsilon_ckv": 1.0, "rmsnorm_epsilon_cq": 1e-5, "rope_layout": "interleave_half"}


@pytest.mark.parametrize(
    "sabotaged, wrong",
    [("mla_fx.absorb.absorb_query", wrong_query), ("mla_fx.patterns.mla_prolog._options", wrong_norm)],
    ids=["query", "norm"],
)
def test_verify_finds_a_wrong_rewrite(decode, monkeypatch, sabotaged, wrong):
    module, arguments = decode
    monkeypatch.setattr(sabotaged, wrong)
    with pytest.raises(mla_fx.VerificationError, match=r"put \d+ of the fused graph is .* away from the unfused one"):
        compiled(module, verify="first")(*arguments)


def scaled(factor):
    def function(value):
        value.mul_(factor)
        return (value + 1,)

    return function


def test_verify_finds_a_wrong_cache():
    def wrong(value):
        value.mul_(2).view(-1)[3] += 1
        return (torch.ones(5) * 2 + 1,)

    with pytest.raises(mla_fx.VerificationError, match="input 0 of the fused graph"):
        verified(wrong, scaled(2), once=False)(torch.ones(5))


def test_verify_finds_nan():
    with pytest.raises(mla_fx.VerificationError, match="output 0"):
        verified(lambda value: (value * float("nan"),), lambda value: (value,), once=False)(torch.ones(5))


@pytest.mark.parametrize("once, runs", [(True, 1), (False, 3)])
def test_how_often_verify_runs_the_unfused_graph(once, runs):
    calls = []

    def original(value):
        calls.append(value)
        return (value,)

    run = verified(lambda value: (value,), original, once=once)
    for _ in range(3):
        run(torch.ones(5))
    assert len(calls) == runs


# --- when a pass fails -----------------------------------------------------------------------------------------------


@pytest.fixture(params=range(len(PIPELINE) + 1))
def planted(request, monkeypatch):
    """A pass that fails, at each place in the pipeline."""

    def fail(run):
        raise ZeroDivisionError("a bug")

    passes = (*PIPELINE[: request.param], Pass("planted", fail), *PIPELINE[request.param :])
    monkeypatch.setattr(compilation, "run_pipeline", lambda run, _: run_pipeline(run, passes))


@pytest.mark.usefixtures("planted")
def test_failing_pass_breaks_no_model(decode):
    module, arguments = decode
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_runs_as_it_came(module, arguments, compiled(module))
    (message,) = mla_warnings(caught)
    assert "pass 'planted' failed with ZeroDivisionError: a bug; the model runs unfused" in message
    assert "planted" in str(mla_fx.last_report())


@pytest.mark.usefixtures("planted")
def test_failing_pass_is_an_error_when_strict(decode):
    module, arguments = decode
    with pytest.raises(mla_fx.FusionError, match="pass 'planted' failed: ZeroDivisionError: a bug"):
        compiled(module, strict=True)(*arguments)


@pytest.mark.parametrize("step", ["replace_cache", "_cache_operands"])
def test_failure_in_the_midst_of_a_rewrite_breaks_no_model(decode, monkeypatch, step):
    def fail(*_):
        raise ZeroDivisionError("a bug")

    module, arguments = decode
    monkeypatch.setattr(f"mla_fx.patterns.mla_prolog.{step}", fail)
    with pytest.warns(mla_fx.MlaWarning, match="pass 'recognise prolog' failed with ZeroDivisionError: a bug"):
        check_runs_as_it_came(module, arguments, compiled(module))


def test_refusal_in_the_midst_of_a_rewrite_takes_back_what_was_added(decode, monkeypatch):
    def refuse(*_):
        raise mla_fx.NoMatch("not like this")

    module, arguments = decode
    monkeypatch.setattr("mla_fx.patterns.mla_prolog._cache_operands", refuse)
    check_same(module, arguments, compiled(module))
    report = mla_fx.last_report()
    assert report.fused == {"kv_rmsnorm_rope_cache": 1, "latent_attention": 1}
    assert [miss.reason for miss in report.misses] == ["not like this"]


# --- what is left alone ----------------------------------------------------------------------------------------------


def gradients(module, run):
    out, *_ = run(*Entry(DEFAULT).arguments(PREFILL))
    out.square().sum().backward()
    return [weight.grad for weight in module.parameters()]


def test_training_graph_is_left_alone():
    module, other = Entry(DEFAULT).build(), Entry(DEFAULT).build()
    with torch.enable_grad(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.testing.assert_close(gradients(other, compiled(other)), gradients(module, module), **EXACT)
    assert mla_warnings(caught) == ["mla_fx fuses inference only; a graph that needs gradients is left alone"]
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


@pytest.mark.parametrize("name", OTHERS)
def test_other_models_come_out_node_for_node(name):
    torch.manual_seed(0)
    gm = captured(OTHERS[name]().eval(), (torch.randint(64, (2, 9)),))
    before = as_it_is(gm.graph)
    run = Run(gm.graph, Options(target="reference"), discover.rules(), mla_fx.Report())
    run_pipeline(run)
    assert as_it_is(gm.graph) == before
    assert not run.is_changed
    assert not any(miss.suspicious for miss in run.report.misses), str(run.report)


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
    """Also one that looks like MLA, at which rules were tried and took back what they had added."""
    module, arguments = expanded_cache(DECODE)
    gm = captured(module, arguments)
    before = as_it_is(gm.graph)
    run = Run(gm.graph, Options(target="reference"), discover.rules(), mla_fx.Report())
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


# --- as a pass in a pipeline that is there already -------------------------------------------------------------------


def test_pass_in_inductor():
    """A plain `torch.compile(model)`; nothing of this project stands before the pass."""
    model = tiny_model("deepseek_v3", num_hidden_layers=1)
    theirs = empty_cache(model, "static")
    model(tokens(2, 6), past_key_values=theirs)
    ours, step, graph_pass = copy.deepcopy(theirs), tokens(2, 1), mla_fx.MlaPass()
    with torch._inductor.config.patch(post_grad_custom_pre_pass=graph_pass):
        found = torch.compile(model)(step, past_key_values=ours).logits
    torch.testing.assert_close(found, model(step, past_key_values=theirs).logits, **EXACT)
    torch.testing.assert_close(cache_tensors(ours), cache_tensors(theirs), **EXACT)
    assert graph_pass.report.fused == ALL


def test_uuid_tells_passes_apart():
    assert mla_fx.MlaPass(strict=True).uuid() == mla_fx.MlaPass(strict=True).uuid()
    kinds = [{}, {"strict": True}, {"disable": "mla_prolog"}, {"absorb": "never"}, {"target": "reference"}]
    assert len({mla_fx.MlaPass(**options).uuid() for options in kinds}) == len(kinds)


def test_uuid_changes_with_the_sources(monkeypatch):
    from mla_fx import graph_pass

    before = mla_fx.MlaPass().uuid()
    monkeypatch.setattr(graph_pass, "source_hash", lambda: "other sources")
    assert mla_fx.MlaPass().uuid() != before


def test_uuid_knows_the_sources_of_every_package():
    from mla_fx import graph_pass

    project = (Path(mla_fx.__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    (packages,) = re.findall(r"^packages = (\[.*\])$", project, re.MULTILINE)
    assert list(graph_pass.PACKAGES) == ast.literal_eval(packages)
