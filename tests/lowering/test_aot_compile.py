"""`torch.compile(...).aot_compile`: what Inductor compiled is saved, and runs in another process, fused."""

import copy
import subprocess
import sys

import pytest
import torch
import torch._functorch.config as functorch_config
from lib.comparing import ALL

import mla_fx
from mla_fx import cases

pytestmark = pytest.mark.usefixtures("no_gradients", "cached")
LOAD = """
import sys, torch
from mla_fx import cases
path, saved = sys.argv[1:]
with open(path, "rb") as file, torch.no_grad():
    run = torch.compiler.load_compiled_function(file)
    layer, calls = cases.Layer(), torch.load(saved)
    for given, out, left in calls:
        torch.testing.assert_close(run(layer, *given), out, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(layer.state_dict(), left, rtol=1e-4, atol=1e-5)
"""


@pytest.fixture
def cached():
    """The default setting: saving uses what AOTAutograd caches."""
    with functorch_config.patch(enable_autograd_cache=True):
        yield


def ahead(model, **options):
    compiled = torch.compile(model, backend=mla_fx.get_backend(**options), fullgraph=True)
    return compiled.forward.aot_compile((cases.inputs(), {}))


@pytest.mark.slow
def test_what_is_compiled_ahead_is_saved_and_runs_elsewhere(tmp_path):
    layer, eager = cases.Layer(), cases.Layer()
    run = ahead(layer, target="inductor")
    assert mla_fx.last_report().fused == ALL
    torch.testing.assert_close(run(layer, *cases.inputs()), eager(*cases.inputs()), rtol=1e-4, atol=1e-5)
    run.save_compiled_function(str(tmp_path / "layer"))
    eager = cases.Layer()
    calls = [(cases.inputs(), eager(*cases.inputs()), copy.deepcopy(eager.state_dict()))]
    torch.save(calls, tmp_path / "calls.pt")
    subprocess.run([sys.executable, "-c", LOAD, str(tmp_path / "layer"), str(tmp_path / "calls.pt")], check=True)


@pytest.mark.parametrize(
    "options, refusal",
    [
        ({"target": "reference"}, "target 'reference' compiles cannot be saved by aot_compile"),
        ({"target": "inductor", "verify": "first"}, "the graph that it compares with cannot be saved"),
    ],
)
def test_what_cannot_be_saved_is_refused_in_a_sentence(options, refusal):
    with pytest.raises(mla_fx.OptionError, match=refusal):
        ahead(cases.Layer(), **options)
