"""The driver of a compilation: its fence, its passes and dumps, floats that are recovered, and the pass in Inductor."""

import copy
import warnings

import pytest
import torch
from lib.comparing import ALL, EXACT, check_same, gradients, mla_warnings, with_backend
from lib.zoo.entries import DEFAULT, Entry
from torch import nn

import mla_fx
from mla_fx import cases
from mla_fx.debug.recorder import Recorder
from mla_fx.driver import compilation, discovery
from mla_fx.options import Options
from mla_fx.passes.pipeline import PIPELINE, run_pipeline
from mla_fx.passes.run import Pass, Run

pytestmark = pytest.mark.usefixtures("no_gradients")


def told(module, arguments, run):
    """The warnings of a run that must give what the module gives."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_same(module, arguments, run)
    return mla_warnings(caught)


def fail(*_, **__):
    raise ZeroDivisionError("a bug")


# --- the fence -------------------------------------------------------------------------------------------------------


def test_floats_that_cannot_be_recovered_break_no_model(decode, monkeypatch):
    module, arguments = decode
    monkeypatch.setattr(compilation, "recover_floats", fail)
    (message,) = told(module, arguments, with_backend(module))
    assert "reading Dynamo's graph failed with ZeroDivisionError: a bug; the model runs unfused" in message
    assert mla_fx.last_report().fused == {}


def test_floats_that_cannot_be_recovered_are_an_error_when_strict(decode, monkeypatch):
    module, arguments = decode
    monkeypatch.setattr(compilation, "recover_floats", fail)
    with pytest.raises(mla_fx.FusionError, match="reading Dynamo's graph failed: ZeroDivisionError: a bug"):
        with_backend(module, strict=True)(*arguments)


@pytest.fixture
def moody_inductor(monkeypatch):
    """An Inductor that spoils its first graph and then fails."""
    import torch._inductor.compile_fx as inductor

    compile_graph, seen = inductor.compile_fx_inner, []

    def moody(gm, inputs, **given):
        seen.append(gm)
        if len(seen) == 1:
            for node in gm.graph.nodes:
                node.meta.clear()
            raise ZeroDivisionError("a bug")
        return compile_graph(gm, inputs, **given)

    monkeypatch.setattr(inductor, "compile_fx_inner", moody)


@pytest.mark.slow
@pytest.mark.usefixtures("moody_inductor")
def test_a_graph_that_inductor_cannot_compile_once_it_is_fused_is_compiled_as_it_came(decode):
    module, arguments = decode
    (message,) = told(module, arguments, with_backend(module, target="inductor"))
    assert "compiling the fused graph for inductor failed with ZeroDivisionError: a bug; the model runs unf" in message
    assert mla_fx.last_report().fused == {}


@pytest.mark.usefixtures("moody_inductor")
@pytest.mark.parametrize(
    ("options", "complaint"),
    [({"strict": True}, "compiling the fused graph .* failed: Zero"), ({"expect": ALL}, r"expected .*, fused {}")],
    ids=str,
)
@pytest.mark.filterwarnings("ignore::mla_fx.MlaWarning")
def test_who_insists_on_fusion_is_told(decode, options, complaint):
    module, arguments = decode
    with pytest.raises(mla_fx.FusionError, match=complaint):
        with_backend(module, target="inductor", **options)(*arguments)


def test_a_training_graph_that_cannot_be_looked_at_trains_on(monkeypatch):
    monkeypatch.setattr(compilation, "triage", fail)
    model, x = nn.Linear(3, 3), torch.ones(2, 3)
    with torch.enable_grad(), pytest.warns(mla_fx.MlaWarning, match="checking a training graph failed") as caught:
        with_backend(model)(x).sum().backward()
    assert model.weight.grad is not None and len(caught) == 1


def test_an_error_of_the_users_own_stays_what_it_is(monkeypatch):
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx_inner", fail)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="a bug"):
        with_backend(nn.Linear(3, 3), target="inductor")(torch.ones(1, 3))


# --- what every pass is held to --------------------------------------------------------------------------------------


def forget_metadata(run):
    next(node for node in run.emit.added if not node._erased).meta.pop("val")


def write_too_early(run):
    """Copies a cache back before it is read."""
    copy_back = run.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)[0]
    first = next(node for node in run.graph.nodes if node.op == "call_function")
    with run.graph.inserting_before(first):
        zeros = run.graph.call_function(torch.ops.aten.zero_.default, (copy_back.args[0],))
    zeros.meta["val"] = copy_back.meta["val"]


def turn_round(run):
    *_, node = (node for node in run.graph.nodes if node.op == "call_function" and node.users)
    next(iter(node.users)).append(node)


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (forget_metadata, "was added without metadata"),
        (write_too_early, "still reads its old value"),
        (turn_round, "comes before its operand"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_pass_that_spoils_the_graph_is_caught(decode, monkeypatch, spoil, complaint):
    module, arguments = decode
    passes = (*PIPELINE[:8], Pass("spoil", spoil), *PIPELINE[8:])
    monkeypatch.setattr(compilation, "run_pipeline", lambda run, _: run_pipeline(run, passes))
    (message,) = told(module, arguments, with_backend(module))
    assert "pass 'spoil' failed with RuntimeError: " in message and complaint in message


@pytest.mark.slow
@pytest.mark.parametrize("target", ["reference", "inductor"])
def test_every_pass_is_recorded_and_dumped(decode, tmp_path, target):
    module, arguments = decode
    with_backend(module, target=target, dump=str(tmp_path))(*arguments)
    report = mla_fx.last_report()
    assert [record.name for record in report.passes] == [step.name for step in PIPELINE]
    assert [step.name for step in PIPELINE[-4:]] == ["reinplace", "lower", "lower the rest", "hoist"]
    assert all(record.milliseconds > 0 for record in report.passes)
    index = (tmp_path / "graph_000" / "index.md").read_text()
    assert all(f"| {step.name} | " in index for step in PIPELINE)
    files = sorted(path.name for path in (tmp_path / "graph_000").glob("*.py"))
    assert files[0] == "00_captured.py" and len(files) < len(PIPELINE)  # not all change the graph
    lowered = (tmp_path / "graph_000" / files[-1]).read_text()
    assert ("mla_fx.mla_prolog_(" in lowered) == (target == "reference")
    assert ("aten.amax" in lowered) == (target == "inductor")


# --- dumps -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strict", [False, True])
def test_a_folder_that_cannot_be_written_costs_a_warning(decode, tmp_path, strict):
    module, arguments = decode
    (tmp_path / "file").write_text("")
    (message,) = told(module, arguments, with_backend(module, dump=str(tmp_path / "file"), strict=strict))
    assert "the dump is incomplete: The dump folder" in message
    assert mla_fx.last_report().fused == ALL


def test_a_dump_that_breaks_off_is_told_once(tmp_path, monkeypatch):
    report = mla_fx.Report()
    recorder = Recorder(report, str(tmp_path), keep_text=True)
    monkeypatch.setattr("mla_fx.debug.recorder.recorded", fail)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            recorder.stage("captured", torch.fx.Graph())
        recorder.finish()
    assert [str(warning.message) for warning in caught] == ["mla_fx: the dump is incomplete: a bug"]


# --- floats that `dynamic=True` lifted -------------------------------------------------------------------------------

PRODUCTS = {
    "at": lambda x, weight: x @ weight.T,
    "matmul": lambda x, weight: torch.matmul(x, weight.T),
    "method": lambda x, weight: x.matmul(weight.T),
    "linear": lambda x, weight: nn.functional.linear(x, weight),
    "einsum": lambda x, weight: torch.einsum("bsi,oi->bso", x, weight),
    "addmm": lambda x, weight: torch.addmm(
        torch.zeros(weight.shape[0]), x.reshape(-1, x.shape[-1]), weight.T
    ).unflatten(0, x.shape[:2]),
}


class Spelled(cases.Layer):
    """Projections in one spelling, and an epsilon that Dynamo turns into an input."""

    def __init__(self, product):
        super().__init__()
        self.product, self.epsilon = product, 1e-6

    def query(self, x):
        torch._check(x.shape[1] <= cases.T)  # few enough tokens to absorb
        return self.product(self.norm(self.product(x, self.q_a), self.q_gamma), self.q_b)

    def rows(self, x):
        latent, k_rope = self.product(x, self.kv_a).split([cases.HCKV, cases.DR], dim=-1)
        return self.norm(latent, self.kv_gamma).unsqueeze(1), k_rope.unsqueeze(1)

    def norm(self, x, gamma):
        return gamma * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.epsilon))


@pytest.mark.slow
@pytest.mark.parametrize("name", PRODUCTS)
def test_lifted_floats_are_recovered_in_any_spelling(name):
    module = Spelled(PRODUCTS[name]).eval()
    fused = copy.deepcopy(module)
    run = torch.compile(fused, backend=mla_fx.get_backend(target="reference"), dynamic=True)
    torch.testing.assert_close(run(*cases.inputs()), module(*cases.inputs()), **EXACT)
    assert "latent_attention" in mla_fx.last_report().fused, mla_fx.last_report()
    torch.testing.assert_close(fused.kv_cache, module.kv_cache, **EXACT)


class Attends(nn.Module):
    """Attention alone: query and latents are inputs, and no projection is cut in parts."""

    def __init__(self, probabilities):
        super().__init__()
        self.probabilities, self.scale = probabilities, 0.27
        self.up, self.down = nn.Parameter(torch.randn(4, 8, 20)), nn.Parameter(torch.randn(4, 10, 20))

    def forward(self, q_nope, q_rope, latents, keys):
        query = torch.einsum("bnsd,ndc->bnsc", q_nope, self.up)
        scores = query @ latents.transpose(-1, -2) + q_rope @ keys.transpose(-1, -2)
        return torch.einsum("bnsc,nvc->bnsv", self.probabilities(scores * self.scale) @ latents, self.down)


class AttendsFused(Attends):
    def forward(self, q_nope, q_rope, latents, keys):
        query = torch.cat((torch.einsum("bnsd,ndc->bnsc", q_nope, self.up), q_rope), -1)
        key = torch.cat((latents, keys), -1)
        key, value = (part.expand(-1, query.shape[1], -1, -1) for part in (key, latents))
        out = nn.functional.scaled_dot_product_attention(query, key, value, scale=self.scale)
        return torch.einsum("bnsc,nvc->bnsv", out, self.down)


def divided(scores):
    raised = (scores - scores.amax(-1, keepdim=True)).exp()
    return raised / raised.sum(-1, keepdim=True)


def softmax(scores):
    return scores.softmax(-1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "module, dynamic", [(Attends(softmax), True), (Attends(divided), True), (AttendsFused(None), None)]
)
def test_scales_of_attention_alone_are_recovered(module, dynamic):
    """With `dynamic=None`, Dynamo lifts a number that has changed."""
    inputs = [torch.randn(*shape) for shape in ((2, 4, 3, 8), (2, 4, 3, 6), (2, 1, 13, 20), (2, 1, 13, 6))]
    run = torch.compile(module, backend=mla_fx.get_backend(target="reference"), dynamic=dynamic)
    for scale in (0.27, 0.31):
        module.scale = scale
        torch.testing.assert_close(run(*inputs), module(*inputs), **EXACT)
        assert mla_fx.last_report().fused == {"latent_attention": 1}


class Tempered(Attends):
    """Its result is divided by a number that another request may change."""

    temperature = 0.5

    def forward(self, *inputs):
        return super().forward(*inputs) / self.temperature


@pytest.mark.slow
def test_a_temperature_stays_an_input():
    """A new one compiles nothing: many requests have many temperatures."""
    inputs = [torch.randn(*shape) for shape in ((2, 4, 3, 8), (2, 4, 3, 6), (2, 1, 13, 20), (2, 1, 13, 6))]
    module = Tempered(softmax)
    module.temperature = 0.5  # as its own attribute from the start
    run = torch.compile(module, backend=mla_fx.get_backend(target="reference"), dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for module.temperature in (0.5, 0.7, 0.9):
            torch.testing.assert_close(run(*inputs), module(*inputs), **EXACT)
    assert mla_fx.last_report().fused == {"latent_attention": 1}


# --- as a pass in Inductor -------------------------------------------------------------------------------------------


def with_pass(module, graph_pass):
    return torch.compile(module, options={"post_grad_custom_pre_pass": graph_pass})


@pytest.mark.slow
def test_the_report_is_that_of_the_users_own_pass(decode):
    """Inductor runs a copy of its configuration."""
    module, arguments = decode
    graph_pass = mla_fx.MlaPass(absorb="always")
    check_same(module, arguments, with_pass(module, graph_pass))
    assert graph_pass.report.fused == ALL
    assert mla_fx.last_report() is graph_pass.report


@pytest.mark.slow
def test_a_pass_leaves_training_graphs_alone():
    module, other, graph_pass = Entry(DEFAULT).build(), Entry(DEFAULT).build(), mla_fx.MlaPass()
    with torch.enable_grad(), pytest.warns(mla_fx.MlaWarning, match="fuses inference only") as caught:
        torch.testing.assert_close(gradients(other, with_pass(other, graph_pass)), gradients(module, module), **EXACT)
    assert len([warning for warning in caught if issubclass(warning.category, mla_fx.MlaWarning)]) == 1
    assert graph_pass.report.fused == {}
    assert graph_pass.report.notes == ["training graph: left unchanged, mla_fx fuses inference only"]


def test_a_pass_called_without_a_word_knows_training_graphs_by_their_inputs():
    graph = torch.fx.Graph()
    graph.output(graph.placeholder("primals_1"))
    graph_pass = mla_fx.MlaPass()
    with pytest.warns(mla_fx.MlaWarning, match="fuses inference only"):
        graph_pass(torch.fx.GraphModule({}, graph))
    assert graph_pass.report.notes[0].startswith("training graph")


def test_a_pass_that_fails_in_inductor_breaks_no_model(decode, monkeypatch):
    module, arguments = decode
    monkeypatch.setattr("mla_fx.passes.pipeline.erase_orphans", fail)
    graph_pass = mla_fx.MlaPass(dump=None, absorb="never")
    (message,) = told(module, arguments, with_pass(module, graph_pass))
    assert "pass 'clean up' failed with ZeroDivisionError" in message
    assert graph_pass.report.fused == {}


def test_nothing_comes_from_a_cache_that_is_to_be_dumped(tmp_path):
    assert mla_fx.MlaPass(dump=str(tmp_path)).uuid() is None
    assert mla_fx.MlaPass().uuid() is not None


# --- what is not looked at -------------------------------------------------------------------------------------------


def test_a_graph_without_softmax_or_calls_of_ours_goes_no_further_than_the_survey():
    graph = torch.fx.symbolic_trace(nn.Linear(3, 3)).graph
    run = Run(graph, Options(), discovery.rules(), mla_fx.Report())
    run_pipeline(run)
    assert [record.name for record in run.report.passes] == ["functionalize", "triage"]
    assert run.report.notes == ["no attention in this graph: there is nothing to fuse"]
