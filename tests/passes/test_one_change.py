"""One way to change a graph: a plan is proved, then applied as a whole; a refusal costs that plan alone."""

import pytest
import torch
from lib.comparing import Stack, check_same, with_backend
from lib.watched import Watch
from torch._dynamo.backends.common import aot_autograd

import mla_fx
from mla_fx import cases
from mla_fx.driver.compilation import Compilation
from mla_fx.passes import prove
from mla_fx.passes.pipeline import PIPELINE

pytestmark = pytest.mark.usefixtures("no_gradients")
OPS, F16 = torch.ops.mla_fx, torch.float16


class Layer(cases.Layer):
    """A layer in any dtype."""

    def attend(self, q_nope, q_rope, latent, k_rope, mask):
        return super().attend(q_nope, q_rope, latent, k_rope, mask.to(latent.dtype))


def three():
    """Layers whose plans are of one kind."""
    return Stack(*(Layer() for _ in range(3))).eval()


def of_dtype(dtype):
    return [value.to(dtype) if value.is_floating_point() else value for value in cases.inputs()]


def refusing(patch, name, is_refused):
    """Plans of the pass or rule of that name are refuted where `is_refused` says so."""
    known = prove._known

    def refused(run, what, plan):
        if name in what and is_refused(plan):
            run.report.refuted.append(f"{what} would change a test")
            return run.report.refuted[-1]
        return known(run, what, plan)

    patch.setattr(prove, "_known", refused)


def in_the_second_layer(plan):
    return any("layers.1" in prove.placed_name(old) for old in plan.olds)


def fused(**options):
    """The report of three layers whose outputs and caches are eager's."""
    module = three()
    with pytest.warns(mla_fx.MlaWarning, match="a rewrite was wrong and was not made"):
        check_same(module, cases.inputs(), with_backend(module, **options))
    return mla_fx.last_report()


@pytest.mark.refutes
def test_a_refused_absorption_leaves_the_other_layers_absorbed(monkeypatch):
    refusing(monkeypatch, "absorb", in_the_second_layer)
    report = fused()
    assert report.modules["latent_attention"] == ["layers.0", "layers.2"]
    assert report.modules["mla_attention"] == ["layers.1"]
    assert [miss.reason for miss in report.misses] == ["absorb would change a test"]


@pytest.mark.refutes
def test_a_limit_that_is_refused_is_missing_from_that_call_alone(monkeypatch):
    """Absorbed, a query in float16 may overflow: the call itself decides, in float32."""
    refusing(monkeypatch, "absorb", in_the_second_layer)
    graphs = []

    def compiler(gm, inputs):
        Compilation.prepare(inputs, {"target": "reference"}).rewrite(gm)
        graphs.append(gm.graph)
        return gm.forward

    backend = aot_autograd(fw_compiler=compiler, inference_compiler=compiler, keep_inference_input_mutations=True)
    torch.compile(three().half(), backend=backend)(*of_dtype(F16))
    calls = graphs[0].find_nodes(op="call_function", target=OPS.attention.default)
    assert [call.kwargs.get("max_absorbed_tokens") for call in calls] == [2**62, None, 2**62]


@pytest.mark.refutes
def test_a_refuted_write_in_place_stays_a_copy_and_all_else_stays_fused(monkeypatch):
    refusing(monkeypatch, "writing in place", in_the_second_layer)
    report = fused()
    assert report.fused == {"mla_prolog": 3, "latent_attention": 3}
    [note] = report.notes
    assert note.startswith("mla_prolog does not write its caches in place: writing in place by mla_prolog")


# --- no pass changes a graph before a proof ---------------------------------------------------------------------------


WAYS = [
    ("reference", {"recognise prolog", "reinplace"}, torch.float32),
    ("inductor", {"recognise prolog", "lower"}, torch.float32),
    ("reference", {"reinplace"}, F16),  # expanded
]


@pytest.mark.parametrize("target, changing, dtype", WAYS)
def test_every_pass_proves_before_it_changes(monkeypatch, target, changing, dtype):
    watch, module = Watch(monkeypatch), three().to(dtype)
    compilations = []

    def compiler(gm, inputs):
        compilation = Compilation.prepare(inputs, {"target": target}, keep_text=True)
        compilation.passes = tuple(map(watch.step, PIPELINE))
        compilation.rewrite(gm)
        compilations.append(compilation)
        return gm.forward

    backend = aot_autograd(fw_compiler=compiler, inference_compiler=compiler, keep_inference_input_mutations=True)
    torch.compile(module, backend=backend)(*of_dtype(dtype))
    [compilation] = compilations
    assert compilation.report.fused, compilation.report
    assert watch.passes >= {"recognise attention", "choose absorbed or expanded"} | changing
