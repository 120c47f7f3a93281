"""Operators of users' own rules on targets that cannot run them: bodies are inlined, or the rules are refused."""

import pytest
import torch
from lib.own_rules import EXAMPLE, forget

import mla_fx
from mla_fx.driver import discovery
from mla_fx.errors import NoMatch
from mla_fx.ops import catalogue
from npu import models
from npu.converted import types

PROMPTS = [models.prompt(1, seed=seed) for seed in range(2)]
LAST = "return values.flatten(1) @ a.weight_o.flatten(0, 1)"
NUMBER = "values = values * (int(a.latents.shape[0] > 0) if float(values.abs().max()) >= 0 else 2)"
MEDIAN = "values = values + 0 * values.median()"
OWN = "values = values + 0 * torch.ops.mla_fx.rms_norm(values, torch.ones_like(values[0, 0]), epsilon=1e-6)"
BODY = "it has no lowering, and its body"

pytestmark = pytest.mark.parametrize("target", ["ge", "aclgraph"])


@pytest.fixture(autouse=True)
def forget_what_a_test_registers(monkeypatch):
    monkeypatch.setattr(discovery, "_registered", [])
    yield
    forget()


def register(tmp_path, name, *changes):
    """The rule of the example and its operator under a name of their own, with changes to the text."""
    text = EXAMPLE.read_text().replace('"latent_output"', f'"{name}"')
    for old, new in changes:
        assert text.count(old) == 1
        text = text.replace(old, new)
    (tmp_path / f"{name}.py").write_text(text)
    mla_fx.register_patterns(tmp_path)


def kernels(target, converted, captured):
    """The prolog and attention of the last graph."""
    if target == "ge":
        found = types(converted.graphs[-1])
        return [found.count(kernel) for kernel in ("MlaPrologV3", "FusedInferAttentionScore")]
    names = "npu.npu_mla_prolog_v3.default", "npu.npu_fused_infer_attention_score_v2.out"
    return captured.graphs[-1].calls(*names)


def report_of(target, converted, captured, model=None):
    """The report of some steps, whose states and caches are as exact as eager's. The vendor's kernels compute them."""
    torch.compiler.reset()
    model = model or models.model()
    run = torch.compile(model, backend=mla_fx.get_backend(target=target, soc="Ascend910B3"), dynamic=False)
    models.check_as_exact_as_eager(model, run, models.static_cache, PROMPTS)
    assert kernels(target, converted, captured) == [1, 1]
    return mla_fx.last_report()


@pytest.mark.parametrize(
    "changes",
    [(), (('    stage = "cache"\n', '    stage = "cache"\n    yields_to_target = True\n'),)],
    ids=["plain", "yields to the target"],
)
def test_a_plain_body_is_inlined(converted, captured, tmp_path, target, changes):
    name = f"own_{len(changes)}_{target}"
    register(tmp_path, name, *changes)
    report = report_of(target, converted, captured)
    assert report.fused == {"mla_prolog": 1, "latent_attention": 1, name: 1}
    assert f"{name} becomes its body: it has no lowering" in report.notes
    if target == "aclgraph":
        assert captured.graphs[-1].calls(f"mla_fx.{name}.default") == [0]


REFUSED = {
    "reads": (NUMBER, "cannot be inlined: DataDependentOutputException: aten._local_scalar_dense.default"),
    "median": (MEDIAN, "calls aten.median.default, which its graphs do not take"),
    "calls": (OWN, "calls mla_fx.rms_norm.default, which its graphs do not take"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_rule_is_refused_by_name_where_its_body_cannot_be_inlined(converted, captured, tmp_path, target, kind):
    line, sentence = REFUSED[kind]
    name = f"own_{kind}_{target}"
    register(tmp_path, name, (LAST, f"{line}\n    {LAST}"))
    report = report_of(target, converted, captured)
    if (kind, target) == ("median", "aclgraph"):  # which PyTorch runs
        assert report.fused[name] == 1
        return
    assert report.fused == {"mla_prolog": 1, "latent_attention": 1}
    reasons = [miss.reason for miss in report.misses if miss.pattern == name]
    assert f"target {target!r} cannot run {name}: {BODY} {sentence}" in reasons, reasons


class Called(torch.nn.Module):
    """A model whose states go through a call of the user's."""

    def __init__(self, operator):
        super().__init__()
        self.model, self.operator, self.config = models.model(), operator, models.model().config

    def forward(self, ids, past_key_values):
        output = self.model(ids, past_key_values=past_key_values)
        states = output.last_hidden_state
        halves = states.unflatten(-1, (2, -1)).flatten(0, 1)
        weight = torch.linspace(-0.5, 0.5, 2 * 3 * halves.shape[-1], dtype=states.dtype).view(2, 3, -1)
        output.last_hidden_state = self.operator(halves, weight, weight)
        return output


def test_a_users_own_call_becomes_its_body(converted, captured, tmp_path, target):
    name = f"own_call_{target}"
    register(tmp_path, name)
    discovery.rules()
    report = report_of(target, converted, captured, Called(getattr(torch.ops.mla_fx, name)))
    assert f"{name} becomes its body: it has no lowering (2 times)" in report.notes, "the rule calls it, too"


# Operators of the project that no kernel computes.
NO_KERNEL = {
    "mla_prolog_quant": "torch_npu has no such operator, only pypto has a kernel; mla_prolog_v3 has similar int8 modes",
}


@pytest.mark.parametrize("name", NO_KERNEL)
def test_an_operator_without_a_kernel_is_refused_by_its_sentence(target, name):
    lowerings = discovery.targets()[target].lowerings({"soc": "Ascend910B3"}, prepares=True)
    entry = catalogue()[name]
    for sample in entry.samples(torch.bfloat16):
        with pytest.raises(NoMatch) as refused:
            lowerings[entry.overload](*sample.args, **sample.kwargs)
        assert refused.value.reason == NO_KERNEL[name]


def test_each_operator_of_the_project_has_a_lowering_or_a_sentence(target):
    lowerings = discovery.targets()[target].lowerings({"soc": "Ascend910B3"}, prepares=True)
    assert {entry.overload for entry in catalogue().values()} <= lowerings.keys()
