"""The source distribution holds what a clone holds, has the package's version, and its tests run in it."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch
from mla_fx.lowering.ascend.stub import environment

import mla_fx

ROOT = Path(__file__).parents[2]
FOLDERS = (".ci", "benchmarks", "docs", "examples", "lowering", "mla_fx", "patterns", "tests")
PAGES = ("CHANGELOG.md", "CONTRIBUTING.md", "README.md")
FILES = (*PAGES, "LICENSE", "MANIFEST.in", "mkdocs.yml", "pyproject.toml", "setup.py")
BUILD = "import setuptools.build_meta as build; build.build_sdist('made')"


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory):
    """A source distribution, made from a copy and unpacked elsewhere."""
    copied, unpacked = tmp_path_factory.mktemp("copied"), tmp_path_factory.mktemp("unpacked")
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, copied / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in FILES:
        shutil.copy(ROOT / file, copied)
    subprocess.run([sys.executable, "-c", BUILD], cwd=copied, check=True, capture_output=True)
    (made,) = (copied / "made").iterdir()
    with tarfile.open(made) as archive:
        archive.extractall(unpacked, filter="data")
    (root,) = unpacked.iterdir()
    return root


def test_it_holds_what_a_clone_holds(unpacked):
    def files(root):
        found = (path for folder in FOLDERS for path in (root / folder).rglob("*") if path.is_file())
        return {path.relative_to(root) for path in found if "__pycache__" not in path.parts} | {Path(f) for f in FILES}

    assert files(ROOT) == {path for path in files(unpacked) if (unpacked / path).is_file()}


def test_a_wheel_has_the_files_that_are_no_modules(unpacked):
    """And what the extra of NPUs brings is what torchair imports, with pip to fetch torch_npu."""
    command = [sys.executable, "-c", "import setuptools.build_meta as build; build.build_wheel('wheels')"]
    subprocess.run(command, cwd=unpacked, check=True, capture_output=True)
    (made,) = (unpacked / "wheels").iterdir()
    with zipfile.ZipFile(made) as archive:
        names = archive.namelist()
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        text = archive.read(metadata).decode()
    assert {"mla_fx/py.typed", "mla_fx/debug/page.html", "mla_fx/lowering/ascend/stub/cann_stub.c"} <= set(names)
    brought = set(re.findall(r'^Requires-Dist: (\S+); extra == "npu"$', text, re.MULTILINE))
    assert brought == {*environment.IMPORTED_BY_TORCHAIR, "pip"}


def test_it_has_the_version_of_the_package(unpacked):
    assert f"\nVersion: {mla_fx.__version__}\n" in (unpacked / "PKG-INFO").read_text()
    assert f"## [{mla_fx.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.slow
def test_its_tests_run_in_it(unpacked):
    """Without the installed project: `-S` leaves out what an editable install adds to the path."""
    packages = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*packages, str(Path(torch.__file__).parents[1])])}
    command = [sys.executable, "-S", "-m", "pytest", "-p", "no:cacheprovider", "tests/debug/test_report.py"]
    found = subprocess.run(command, cwd=unpacked, env=environment, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout
