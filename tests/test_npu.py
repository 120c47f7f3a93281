"""The files of `tests/npu/`, each in its own process that can import torch_npu: see `tests/npu/__init__.py`."""

import contextlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
from mla_fx.lowering.ascend.stub import environment
from npu.environment import pytests

from mla_fx.errors import OptionError

FILES = sorted(path.name for path in (Path(__file__).parent / "npu").glob("test_*.py"))
ORDERED = ("test_both_targets.py",)  # what it imports first matters
# Each takes a minute or more: tables of the documentation, whole models and steps, and calls that users make.
LONG = (
    "test_host_lengths.py", "test_models.py", "test_prolog_versions.py", "test_published.py", "test_quantised_calls.py",
    "test_server_step.py", "test_table.py", "test_user_calls.py", "test_vendor_calls.py", "test_vendor_table.py",
)  # fmt: skip


@pytest.fixture(scope="session")
def torch_npu():
    try:
        environment.variables()
    except OptionError as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="session")
def forks(torch_npu):
    """Runs pytest after the imports that nearly all files need."""
    with pytests() as run:
        yield run


def tier(file):
    return pytest.mark.campaign if file in LONG else pytest.mark.slow


@pytest.mark.every
@pytest.mark.parametrize("file", [pytest.param(file, marks=tier(file)) for file in FILES])
def test_in_a_process_with_torch_npu(forks, file, request, tmp_path):
    more = ["--campaign"] if request.config.getoption("--campaign") else []
    output = tmp_path / "output"
    with pytests(()) if file in ORDERED else contextlib.nullcontext(forks) as run:
        code = run([f"tests/npu/{file}", *more], output)
    if code:
        pytest.fail(output.read_text(encoding="utf-8"), pytrace=False)


@pytest.mark.slow
def test_explain_finds_what_it_needs_by_itself(torch_npu):
    config = str(Path(__file__).parent / "configs" / "minicpm3.json")
    flags = "--target", "ge", "--cann", "9.0.0", "--layers", "1", "--json"
    command = [sys.executable, "-m", "mla_fx", "explain", config, *flags]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)["targets"]["ge"]
    assert report["fused"] == {"latent_attention": 1}
    assert "MlaPrologV3 of CANN 9.0.0 takes" in report["misses"][0]["reason"]
    assert "\nmodel.layers.0.self_attn.o_proj.weight: bfloat16[2560, 2560]\n" in report["compiled"]["compiled for ge"]


def test_torch_npu_stays_out_of_this_environment():
    with pytest.raises(ModuleNotFoundError):
        __import__("torch_npu")


def test_a_folder_is_cached_whole_or_not_at_all(tmp_path, monkeypatch):
    monkeypatch.setenv("MLA_FX_NPU_CACHE", str(tmp_path))

    def interrupted(folder):
        folder.mkdir()
        raise KeyboardInterrupt

    def build(folder):
        folder.mkdir()
        (folder / "file").touch()

    def overtaken(folder):
        build(folder)
        environment.built("name", build)

    with pytest.raises(KeyboardInterrupt):
        environment.built("name", interrupted)
    assert list(tmp_path.iterdir()) == []
    assert environment.built("name", overtaken) == tmp_path / "name"
    assert environment.built("name", interrupted) == tmp_path / "name", "what is there is not built again"
    assert [path.name for path in tmp_path.rglob("*")] == ["name", "file"]


def test_a_wheel_that_cannot_be_had_is_said(tmp_path, monkeypatch):
    monkeypatch.setenv("MLA_FX_NPU_CACHE", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(OptionError, match=r"pip could not install no-such-project==1: .*no-such-project"):
        environment.package("no-such-project==1")
