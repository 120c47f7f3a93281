"""Targets: which one "auto" chooses, what they are asked, and what the report says when a call stays a call."""

import ast
import importlib.util
import itertools
from collections import Counter
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from mla_fx.lowering import loops
from mla_fx.lowering.ascend.stub.environment import torch_npu
from mla_fx.lowering.cpu import costs
from mla_fx.lowering.loops import attention
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import mla_fx
from mla_fx import cases
from mla_fx.driver import discovery
from mla_fx.driver.compilation import automatic_target
from mla_fx.errors import NoMatch
from mla_fx.ops import catalogue
from mla_fx.target import Target, to_body

pytestmark = pytest.mark.usefixtures("no_gradients")
ROOT = Path(__file__).parent.parent


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
    targets = {**discovery.targets(), "absent": Absent(), "narrow": Narrow()}
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
    release = torch_npu(torch.__version__)
    with pytest.raises(mla_fx.OptionError) as error:
        make(target)
    assert str(error.value).startswith(  # Dynamo adds a hint of its own
        f"target {target!r} cannot be used here: torch_npu is not installed; pip install torch-npu=={release}, "
        "on a machine with Ascend's CANN"
    )


CORE = ("driver/compilation", "options", "target", "passes/pipeline", "backend", "passes/lower")


@pytest.mark.parametrize("file", CORE)
def test_the_core_names_no_target(file):
    tree = ast.parse((ROOT / "mla_fx" / f"{file}.py").read_text(encoding="utf-8"))
    strings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    assert strings.isdisjoint(discovery.targets())


@pytest.mark.slow
def test_the_form_is_chosen_by_every_call_of_one_graph(monkeypatch):
    """Absorbed up to four tokens, expanded beyond: nothing is compiled for the other form, and no call remains."""
    monkeypatch.setattr(costs, "MOST_ABSORBED", 4)
    layer, fused, graphs = cases.Layer().eval(), cases.Layer().eval(), torch._dynamo.utils.counters["stats"]
    before = graphs["unique_graphs"]
    compiled = torch.compile(fused, backend=mla_fx.get_backend(target="inductor"), dynamic=True)
    for count in (3, 4, 5, 13):
        torch.testing.assert_close(compiled(*cases.inputs(count)), layer(*cases.inputs(count)), rtol=1e-4, atol=1e-5)
        for name, cache in layer.named_buffers():
            torch.testing.assert_close(fused.get_buffer(name), cache, rtol=1e-4, atol=1e-5)
    assert graphs["unique_graphs"] - before == 1
    report = mla_fx.last_report()
    assert report.fused == {"kv_rmsnorm_rope_cache": 1, "mla_attention": 1}, report
    assert report.notes == []


def test_a_choice_over_parts_of_caches_is_left_to_the_operator():
    lower = loops.lowerings(alone=False)[torch.ops.mla_fx.attention.default]
    shape_env = ShapeEnv()
    with FakeTensorMode(shape_env=shape_env):
        count = shape_env.create_unbacked_symint()
        query, rope = (torch.empty(2, count, 4, width) for width in (8, 6))
        both, up = torch.empty(2, 32, 26), torch.empty(4, 8, 20)
        whole, parts = (both[..., :20].clone(), both[..., 20:].clone()), (both[..., :20], both[..., 20:])
        options = {"weight_uk": up, "weight_uv": up, "scale": 1.0, "max_absorbed_tokens": 4}
        function = lower(query, rope, *whole, **options)
        assert function.__wrapped__ is attention.compiled
        with pytest.raises(NoMatch, match="and its caches are not contiguous"):
            lower(query, rope, *parts, **options)


def test_what_compilers_do_not_compute_alike_becomes_no_body():
    entries, int8 = catalogue(), torch.zeros(2, dtype=torch.int8)
    assert to_body(entries["rms_norm"], int8.float(), int8.float()) is entries["rms_norm"].body
    with pytest.raises(NoMatch, match="it is quantised"):
        to_body(entries["mla_prolog"], int8)
    with pytest.raises(NoMatch, match="it reads lengths"):
        to_body(entries["paged_attention"])


def test_calls_that_no_kernel_of_an_npu_takes_become_bodies_unless_they_read_pages_or_lengths_or_round():
    bodies, kept = discovery.targets()["ge"].bodies(), ("paged_attention.batched",)
    tried = Counter()
    for name, entry in catalogue().items():
        for sample in entry.samples(torch.float32):
            # of chosen rows alone, or of rows that are read once
            is_few = sample.mode.startswith("expanded") or "indices" in sample.mode or name == "lightning_index"
            reads_pages = "block_table" in sample.mode and not is_few
            has_codes = any(getattr(value, "dtype", None) == torch.int8 for value in sample.args)
            has_codes = has_codes and "kv_scales" not in sample.kwargs  # which become numbers
            stays = name in kept or entry.host is not None or reads_pages or has_codes
            with pytest.raises(NoMatch) if stays else nullcontext():
                assert bodies[entry.overload](*sample.args, **sample.kwargs) is entry.body
            tried[stays] += 1
    assert min(tried.values()) > 50


def test_loops_keep_calls_of_the_prolog_whose_roundings_a_compiler_would_not_keep():
    quant, tried = catalogue()["mla_prolog_quant"], Counter()
    for alone, sample in itertools.product((False, True), quant.samples(torch.float32)):
        stays = sample.mode != "unquantised"
        with pytest.raises(NoMatch, match="do not keep its intermediate roundings") if stays else nullcontext():
            assert loops.lowerings(alone=alone)[quant.overload](*sample.args, **sample.kwargs) is quant.body
        tried[stays] += 1
    assert min(tried.values()) > 3
