"""What torch's own tools see of this project: structured traces, TORCH_LOGS, debug folders, provenance."""

import json
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path
from unittest import TestCase

import pytest
import torch
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config

import mla_fx
from mla_fx.debug import recorder
from mla_fx.driver import compile_caches

pytestmark = pytest.mark.usefixtures("no_gradients")
ROOT = Path(__file__).parents[2]
TLPARSE = shutil.which("tlparse", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
STAGES = [
    "mla_fx_00_captured",
    "mla_fx_03_recognise_attention",
    "mla_fx_04_choose_absorbed_or_expanded",
    "mla_fx_06_recognise_prolog",
    "mla_fx_10_reinplace",
]


class Artifacts(logging.Handler):
    """What torch's structured trace gets while this listens: the payloads of artefacts by name, in order."""

    def __init__(self):
        super().__init__()
        self.found = []

    def emit(self, record):
        if "artifact" in record.metadata:
            self.found.append((record.metadata["artifact"]["name"], record.payload))

    def ours(self):
        return [(name, text) for name, text in self.found if name.startswith("mla_fx")]


@pytest.fixture
def trace():
    log, artifacts = logging.getLogger("torch.__trace"), Artifacts()
    log.addHandler(artifacts)
    yield artifacts
    log.removeHandler(artifacts)


def run(module, arguments, backend="mla", **options):
    torch._dynamo.reset()
    return torch.compile(module, backend=backend, options=options or None)(*arguments)


# --- the structured trace --------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_trace_has_each_stage_that_changed_the_graph_and_the_report(decode, trace):
    run(*decode, target="reference")
    *stages, (name, told) = trace.ours()
    assert [stage for stage, _ in stages] == STAGES
    assert name == "mla_fx_report" and json.loads(told) == mla_fx.last_report().to_dict()
    graphs = mla_fx.explain(decode[0], target="reference")(*decode[1]).graphs
    changed = dict.fromkeys(text.partition("\n")[2] for text in graphs.values())
    assert [text.partition("\n")[2] for _, text in stages] == list(changed)


def test_an_unchanged_graph_has_a_report_alone(trace):
    run(torch.nn.Linear(2, 2), [torch.ones(1, 2)], target="reference")
    assert [name for name, _ in trace.ours()] == ["mla_fx_report"]


def test_stages_are_not_written_unless_there_is_a_trace(decode, monkeypatch, capfd):
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "handlers", [])  # pytest listens to it
    monkeypatch.setattr(recorder, "recorded", None)
    run(*decode, target="reference", strict=True)
    assert mla_fx.last_report().notes == [] and capfd.readouterr().err == ""


@pytest.mark.slow
def test_a_graph_from_a_warm_cache_has_its_report(decode, trace):
    for _ in range(2):
        with functorch_config.patch(enable_autograd_cache=True):
            run(*decode)
    *_, (_, first), (name, second) = trace.ours()
    first, second = json.loads(first), json.loads(second)
    assert name == "mla_fx_report" and second.pop("notes") == [compile_caches.FROM_CACHE, *first.pop("notes")]
    assert first.pop("made") <= second.pop("made")
    assert first == second and first["fused"] == {"mla_prolog": 1, "latent_attention": 1}


SCRIPT = """
import torch
from lib.zoo.entries import DEFAULT, Entry
from lib.zoo.sizes import DECODE

layer = torch.compile(Entry(DEFAULT).build(), backend="mla", options={"target": "reference"})
with torch.no_grad():
    layer(*Entry(DEFAULT).arguments(DECODE))
"""


def told(**variables):
    """What a process that compiles a layer writes to its standard error."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]), **variables}
    command = [sys.executable, "-c", SCRIPT]
    return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stderr


@pytest.mark.slow
@pytest.mark.skipif(TLPARSE is None, reason="tlparse is not installed")
def test_tlparse_shows_our_artefacts(tmp_path):
    assert told(TORCH_TRACE=str(tmp_path / "trace")) == ""
    (log,) = (tmp_path / "trace").iterdir()
    command = [TLPARSE, str(log), "-o", str(tmp_path / "shown"), "--no-browser"]
    subprocess.run(command, capture_output=True, check=True)
    files = {file.stem.rpartition("_")[0]: file for file in (tmp_path / "shown").glob("*_0_0_0/mla_fx_*")}
    assert set(files) == {*STAGES, "mla_fx_report"}
    assert "aten.mla" not in (captured := files["mla_fx_00_captured"].read_text()) and "aten.mm" in captured
    assert "mla_fx.attention" in files["mla_fx_10_reinplace"].read_text()
    assert json.loads(files["mla_fx_report"].read_text())["fused"] == {"mla_prolog": 1, "latent_attention": 1}
    page = (tmp_path / "shown" / "index.html").read_text()
    assert all(file.name in page for file in files.values())


# --- TORCH_LOGS ------------------------------------------------------------------------------------------------------


def logged(level, decode):
    with TestCase().assertLogs("mla_fx", level) as logs:
        run(*decode, target="reference", disable="mla_prolog")
    return [record.getMessage() for record in logs.records]


@pytest.mark.slow
def test_the_log_has_a_line_for_each_graph_and_the_passes_for_those_who_debug(decode):
    (line,) = logged(logging.INFO, decode)
    first, *rest = str(mla_fx.last_report()).splitlines()
    assert line == first
    first, *passes, last = logged(logging.DEBUG, decode)
    assert first.startswith("mla_fx on reference: fused kv_rmsnorm_rope_cache x1, latent_attention x1 in ")
    names = [record.name for record in mla_fx.last_report().passes]
    assert [line.strip().partition(":")[0] for line in passes] == names
    assert passes[2].endswith("nodes, mla_attention x1")
    assert last.splitlines()[1:] == rest[1:]  # all but when it was compiled


@pytest.mark.slow
@pytest.mark.parametrize(("level", "lines"), [("mla_fx", 1), ("+mla_fx", 16)])
def test_torch_logs_takes_our_name(level, lines):
    found = told(TORCH_LOGS=level).splitlines()
    assert len(found) == lines and "[0/0] mla_fx on reference: fused mla_prolog x1, latent_attention x1 in" in found[0]


# --- TORCH_COMPILE_DEBUG ---------------------------------------------------------------------------------------------


def test_a_debug_folder_has_a_dump(decode, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_COMPILE_DEBUG", "1")
    with torch._dynamo.config.patch(debug_dir_root=str(tmp_path)):
        run(*decode, target="reference")
    (index,) = tmp_path.glob("run_*/mla_fx/graph_000/index.md")
    assert "- latent_attention x1" in index.read_text()


def test_a_folder_of_the_users_comes_first(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_COMPILE_DEBUG", "1")
    monkeypatch.setenv("MLA_FX_DUMP", str(tmp_path))
    assert mla_fx.options.Options().dump == str(tmp_path)
    assert mla_fx.options.Options(dump=None).dump is None


# --- provenance ------------------------------------------------------------------------------------------------------


def joined(trace, decode, backend, **patches):
    """Which nodes of the model Inductor joins to its kernels."""
    trace.found.clear()
    with inductor_config.patch({"trace.provenance_tracking_level": 1, "fx_graph_cache": False, **patches}):
        run(*decode, backend=backend)
    mapping = json.loads(dict(trace.found)["inductor_provenance_tracking_node_mappings"])
    kernels = mapping["postToCppCode"]
    return {node for node, made in mapping["preToPost"].items() if any(post in kernels for post in made)}


@pytest.mark.slow
def test_kernels_of_fused_operators_are_joined_to_the_model(decode, trace):
    """To every node to which Inductor's own kernels are, which are the model's lines."""
    wanted = joined(trace, decode, "inductor")
    assert joined(trace, decode, "mla") >= wanted >= {"attended", "rsqrt", "index_copy_"}
    graph_pass = mla_fx.MlaPass()
    assert joined(trace, decode, "inductor", post_grad_custom_pre_pass=graph_pass) >= wanted
    assert graph_pass.report.fused == {"mla_prolog": 1, "latent_attention": 1}
