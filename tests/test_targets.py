"""Targets: which one "auto" takes, what they are asked, and what lands in the report when a call stays a call."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest
import torch

import mla_fx
from mla_fx import cases, discover
from mla_fx.compilation import automatic_target
from mla_fx.ops import catalogue
from mla_fx.target import Target

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


class Narrow(Target):
    """Serves inputs on the meta device."""

    name = "narrow"

    def serves(self, example_inputs):
        return any(value.device.type == "meta" for value in example_inputs)


class Absent(Narrow):
    name = "absent"

    def missing(self):
        return "its library is not installed"


def test_auto_takes_the_target_that_serves_the_inputs():
    targets = {**discover.targets(), "absent": Absent(), "narrow": Narrow()}
    assert automatic_target(targets, [torch.empty(1, device="meta")]).name == "narrow"
    assert automatic_target(targets, [torch.empty(1)]).name == "inductor"
    assert automatic_target(targets, []).name == "inductor"


def test_auto_without_a_target_says_so():
    with pytest.raises(mla_fx.OptionError, match="no target serves these inputs; known targets are 'narrow'"):
        automatic_target({"narrow": Narrow()}, [])


@pytest.mark.parametrize("target", ["ge", "aclgraph"])
@pytest.mark.parametrize(
    "make",
    [
        lambda target: mla_fx.MlaPass(target=target),
        lambda target: mla_fx.get_backend(target=target),
        lambda target: torch.compile(torch.sin, backend="mla", options={"target": target})(torch.ones(2)),
    ],
    ids=["MlaPass", "get_backend", "torch.compile"],
)
def test_without_torch_npu_its_targets_say_at_once_what_to_install(monkeypatch, make, target):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *of: None if name == "torch_npu" else find(name, *of))
    release = torch.__version__.partition("+")[0]
    with pytest.raises(mla_fx.OptionError) as error:
        make(target)
    assert str(error.value).startswith(  # Dynamo adds a hint of its own
        f"target {target!r} cannot be used here: torch_npu is not installed; pip install torch-npu=={release}, "
        "on a machine with Ascend's CANN"
    )


@pytest.mark.parametrize("file", ["compilation", "options", "target", "pipeline", "backend", "lower"])
def test_the_core_names_no_target(file):
    tree = ast.parse((ROOT / "mla_fx" / f"{file}.py").read_text(encoding="utf-8"))
    strings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    assert strings.isdisjoint(discover.targets())


@pytest.mark.slow
def test_a_fused_operator_that_stays_a_call_says_why():
    """The number of query tokens is not known, so the choice of form is made at run time."""
    layer = cases.Layer().eval()
    inputs = cases.inputs()
    torch._dynamo.mark_dynamic(inputs[0], 1)

    class Any(cases.Layer):
        def forward(self, x, cos, sin, position):
            q = self.query(x).view(cases.B, x.shape[1], cases.N, -1).transpose(1, 2)
            q_nope, q_rope = q.split([cases.D, cases.DR], dim=-1)
            latent, k_rope = self.rows(x)
            q_rope, k_rope = self.rotate(q_rope, cos, sin), self.rotate(k_rope, cos, sin)
            latent, k_rope = self.store(latent, k_rope, position)
            mask = torch.zeros(x.shape[1], cases.T).masked_fill(torch.arange(cases.T) > position[:, None], -torch.inf)
            return self.attend(q_nope, q_rope, latent, k_rope, mask).transpose(1, 2).flatten(2) @ self.o.T

    expected = layer(*inputs)
    found = torch.compile(Any().eval(), backend=mla_fx.get_backend(target="inductor"), dynamic=True)(*inputs)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    report = mla_fx.last_report()
    assert report.fused.get("mla_attention") == 1, report
    assert report.notes == [
        "mla_attention stays a call: it chooses its form by the number of query tokens of each call"
    ]


def test_operators_say_what_they_decompose_to():
    entries = catalogue()
    sample = next(entries["mla_attention"].samples(torch.float32))
    assert entries["mla_attention"].decomposition(*sample.args, **sample.kwargs) is entries["mla_attention"].body
    int8 = torch.zeros(2, dtype=torch.int8)
    assert "quantised" in entries["latent_attention"].decomposition(int8)
    assert "lengths" in entries["paged_attention"].decomposition()
