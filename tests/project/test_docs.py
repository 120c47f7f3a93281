"""The documentation is true: snippets run, links and paths exist, tables and output agree with the code."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from coverage_table.command import committed
from coverage_table.tables import PLAIN
from lib.families import empty_cache, tiny_model, tokens
from lib.zoo.entries import ENTRIES
from mla_fx.lowering.ascend.stub.environment import TORCH_NPU

import mla_fx
from mla_fx.driver import discovery
from mla_fx.options import OWN

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
FOLDERS = ("mla_fx", "patterns", "lowering", "tests", "examples", "benchmarks", "docs")
NOT_RUN = ("docs/npu.md", "docs/operators.md")  # need torch_npu, or leave arguments out
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(kind):
    """(page, code) of every fenced block of a kind; doctests have a test of their own, includes are files."""
    for page in PAGES:
        for found in BLOCK.finditer(page.read_text(encoding="utf-8")):
            name, code = found.groups()
            if name == kind and not code.startswith((">>>", "--8<--")):
                yield str(page.relative_to(ROOT)), code


def title(value):
    return value if "\n" not in value else value.strip().splitlines()[-1][:50]


# --- snippets --------------------------------------------------------------------------------------------------------


@pytest.fixture
def names(monkeypatch, tmp_path):
    """What snippets take for granted: a model of two layers, its arguments, and names of a server."""
    (tmp_path / "my_patterns").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(discovery, "_registered", [])
    model = tiny_model("deepseek_v3").requires_grad_(False)
    cache, token = empty_cache(model, "static"), tokens(1, 1)
    model(tokens(1, 4), past_key_values=cache)
    given = {
        "torch": torch,
        "mla_fx": mla_fx,
        "model": model,
        "args": (token,),
        "kwargs": {"past_key_values": cache},
        "inputs": {"input_ids": token, "max_new_tokens": 2},
        "ids": tokens(1, 4),
        "fast": torch.compile(model, backend="mla", options={"target": "reference"}),
        "slots": torch.tensor([3, 17]),
        "rows": torch.randn(2, 576),
        "block_table": torch.tensor([[1, 0]]),
        "query": torch.randn(1, 1, 4, 8),
        "key_cache": torch.ones(2, 16, 2, 8, dtype=torch.int8),
        "key_scale": torch.rand(2, 8),
        "is_right": lambda: True,
    }
    with torch._inductor.config.patch(post_grad_custom_pre_pass=None):
        yield given


@pytest.mark.slow
@pytest.mark.parametrize("page, code", [given for given in blocks("python") if given[0] not in NOT_RUN], ids=title)
def test_snippet_runs(page, code, names):
    torch.compiler.reset()
    exec(compile(code.replace("61", "2"), page, "exec"), names)
    discovery.found_rules.cache_clear()
    discovery.packages.cache_clear()


@pytest.mark.parametrize("page, code", blocks("python"), ids=title)
def test_snippet_is_python(page, code):
    ast.parse(code)


@pytest.mark.slow
@pytest.mark.parametrize("page, text", blocks("console"), ids=title)
def test_shown_output_is_what_is_printed(page, text):
    command, _, shown = text.removeprefix("$ python ").partition("\n")
    run = subprocess.run([sys.executable, *command.split()], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode in (0, 1), run.stderr  # 1: a part did not fuse

    def plain(output):
        output = re.sub(r"\S*/(?=modeling_\w+\.py)", "", output)
        return re.sub(r"\d+(\.\d+)? (ms|KiB)", "N", output).strip()

    assert plain(run.stdout) == plain(shown)


# --- links and paths -------------------------------------------------------------------------------------------------


def links():
    for page in PAGES:
        prose = BLOCK.sub("", page.read_text(encoding="utf-8"))
        for target in re.findall(r"\]\(([^)]+)\)", prose):
            if "://" not in target:
                yield str(page.relative_to(ROOT)), target


@pytest.mark.parametrize("page, target", links())
def test_link_leads_somewhere(page, target):
    path, _, anchor = target.partition("#")
    linked = (ROOT / page).parent / path if path else ROOT / page
    assert linked.exists()
    heads = re.findall(r"^#+ (.+)$", linked.read_text(encoding="utf-8"), re.MULTILINE) if anchor else []
    assert not anchor or anchor in {re.sub(r"[^\w -]", "", head).lower().replace(" ", "-") for head in heads}


def paths():
    named = re.compile(rf"`((?:{'|'.join(FOLDERS)})/[\w./*-]*)`")
    return sorted({path for page in PAGES for path in named.findall(page.read_text(encoding="utf-8"))})


@pytest.mark.parametrize("path", paths())
def test_path_exists(path):
    assert list(ROOT.glob(path.rstrip("/")))


def test_every_page_is_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert [page.name for page in (ROOT / "docs").glob("*.md") if f" {page.name}\n" not in navigation] == []


# --- tables ----------------------------------------------------------------------------------------------------------


def test_families_of_the_readme_are_those_of_the_coverage_page():
    lines, _ = committed(PLAIN)
    steps = {name: line for name, line in lines.items() if line.count("|") == 10 and name != "family"}
    rows = re.findall(r"^\| (whole layers|all but the query's projection) \| (.+) \|$", read("README.md"), re.MULTILINE)
    shown = {row: set(listed.split(", ")) for row, listed in rows}
    whole = {name for name, line in steps.items() if "whole" in line}
    assert shown == {"whole layers": whole, "all but the query's projection": set(steps) - whole}
    assert f"All {len(steps)} MLA families" in read("README.md")


def test_number_of_spellings():
    assert f"and {len(ENTRIES)} published spellings" in read("README.md")


def test_every_option_is_on_its_page():
    table = read("docs/options.md").partition("## strict")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == OWN


def test_releases_of_the_table():
    """torch_npu as the NPU tests take it, the bounds of torch, and the pinned torch, with which all tests run."""
    lines = re.findall(r"^\| (2\.\d+)\.(\d+) \| (.+) \|$", read("docs/npu.md"), re.MULTILINE)
    rows = [(torch, patch, *cells.split(" | ")) for torch, patch, cells in lines]
    assert {torch: npu for torch, _, _, npu, *_ in rows if npu != "none yet"} == TORCH_NPU
    low, high = re.search(r"torch>=2\.(\d+),<2\.(\d+)", read("pyproject.toml")).groups()
    assert [torch for torch, *_ in rows] == [f"2.{release}" for release in range(int(low), int(high))]
    tested = {f"{torch}.{patch}" for torch, patch, first, _, npu, _ in rows if first == npu == "all"}
    assert {*re.findall(r"torch==(\S+)", read(".ci/run"))} == tested


def read(page):
    return (ROOT / page).read_text(encoding="utf-8")
