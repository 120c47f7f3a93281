"""`python -m mla_fx doctor`: what works here, and what does not and why."""

import json

import pytest
import torch
from mla_fx.lowering.ascend import toolchain

from mla_fx.__main__ import main
from mla_fx.commands import doctor


def found():
    return {one.name: one for one in doctor.findings()}


def test_what_works_here(capsys):
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert f"torch: works: {torch.__version__}" in text
    assert "target reference: works\n" in text
    assert {line.partition(":")[2].split(":")[0].strip() for line in text.splitlines()} <= {"works", "does not"}


def test_for_programs(capsys):
    assert main(["doctor", "--json"]) == 0
    findings = json.loads(capsys.readouterr().out)
    assert all(set(one) == {"name", "works", "why", "is_needed"} for one in findings)
    assert {one["name"] for one in findings if one["is_needed"]} == {
        "torch",
        "C++ compiler",
        "compile caches",
        "rules and targets",
    }


@pytest.mark.parametrize(
    ("release", "works"), [("2.13.0+cpu", True), ("2.10.1", True), ("2.9.9", False), ("2.16.0", False), ("3.0", False)]
)
def test_the_release_of_torch(monkeypatch, release, works):
    monkeypatch.setattr(torch, "__version__", release)
    finding = found()["torch"]
    assert finding.works == works and release in finding.why
    assert works or finding.why.endswith("mla_fx needs 2.10 or newer, and older than 2.16")


def test_a_compiler_that_compiles_nothing(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "cpp_compiler", lambda: "false")
    assert main(["doctor"]) == 1
    assert "C++ compiler: does not: false compiles no program" in capsys.readouterr().out


def test_a_cache_folder_that_cannot_be_made(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(doctor, "cache_folder", lambda: tmp_path / "file" / "below")
    finding = found()["compile caches"]
    assert not finding.works and "file" in finding.why


def test_cann_by_its_variable(monkeypatch, tmp_path):
    monkeypatch.delenv("ASCEND_TOOLKIT_HOME", raising=False)
    for home, works in ((str(tmp_path), True), ("/no/such/folder", False), ("", False)):
        monkeypatch.setenv("ASCEND_HOME_PATH", home)
        assert found()["CANN"].works == works


def test_an_optional_package(monkeypatch):
    monkeypatch.setitem(doctor.OPTIONAL, "no_such_module", "dreams")
    assert str(found()["no_such_module"]) == "no_such_module: does not: it is not installed; dreams need it"


def test_a_package_that_cannot_be_imported_does_not_work(monkeypatch, tmp_path):
    """torch_npu without CANN is such a package: what it says is the same for the targets that need it."""
    (tmp_path / "torch_npu.py").write_text("raise ImportError('libhccl.so: cannot open shared object file')")
    monkeypatch.syspath_prepend(tmp_path)
    toolchain.missing.cache_clear()
    findings = found()
    toolchain.missing.cache_clear()
    why = "libhccl.so: cannot open shared object file"
    assert str(findings["torch_npu"]) == f"torch_npu: does not: {why}"
    for target in ("ge", "aclgraph"):
        assert str(findings[f"target {target}"]) == f"target {target}: does not: torch_npu cannot be imported: {why}"
    assert "torchair" not in findings, "it is a part of torch_npu"
