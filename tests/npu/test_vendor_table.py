"""The table of the vendor's documents in docs/npu.md: what each of its cells says is compiled."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from lib import packed_prologs, tiled_prologs

import mla_fx
from npu import converted, ge_releases, vendor_programs
from npu.sizes import PACKED
from npu.vendor_programs import Program

HEAD = "| document | mode | plain PyTorch | call on `ge` | call on `aclgraph` |\n"
TEXT = (Path(__file__).parents[2] / "docs" / "npu.md").read_text(encoding="utf-8").partition(HEAD)[2]
TILED = {"HE": 1024, "HCQ": 1536, "D": 128, "DR": 64, "DV": 128}
# A kernel of GE graphs: what captured graphs call.
CAPTURED = {
    "MlaPrologV3": "npu_mla_prolog_v3",
    "MlaProlog": "npu_mla_prolog",
    "KvRmsNormRopeCache": "npu_kv_rmsnorm_rope_cache_v2",
    "FusedInferAttentionScore": "npu_fused_infer_attention_score_v2",
    "MultiLatentAttention": "npu_multi_head_latent_attention",
}
OWN = {
    "`npu_mla_prolog`": "MlaPrologV3",
    "`npu_kv_rmsnorm_rope_cache`": "KvRmsNormRopeCache",
    "ATB `MultiLatentAttention`": "MultiLatentAttention",
}

pytestmark = pytest.mark.filterwarnings("ignore::mla_fx.MlaWarning")


class Cell(NamedTuple):
    """What the page says of programs on some targets."""

    programs: list[Callable[[], Program]]
    targets: tuple[str, ...]
    document: str
    mode: str
    word: str

    @property
    def kernel(self) -> str:
        if not self.word.startswith("yes"):
            return self.word.strip("`")
        return "MlaProlog" if "v1" in self.mode else OWN[self.document]

    @property
    def sentence(self) -> str | None:
        """Why there is none, if a number says so."""
        number = re.fullmatch(r"no \((\d+)\)", self.word)
        return number and re.search(rf"^{number[1]}\. (.+)$", TEXT, re.MULTILINE)[1]


def cells() -> Iterator[Cell]:
    lines, document = TEXT.partition("\n\n")[0].splitlines()[1:], ""
    for line, (plain, calls) in zip(lines, vendor_programs.ROWS, strict=True):
        first, mode, *words = (cell.strip() for cell in line.strip("|").split("|"))
        document = first or document
        both = ("ge",) if "v1" in mode else ("ge", "aclgraph")
        for programs, targets, word in zip((plain, calls, calls), (both, ("ge",), ("aclgraph",)), words, strict=True):
            yield Cell(programs, targets, document, mode, word)


def marked(place: int, cell: Cell):
    """Plain code has tests of its own."""
    kind = "plain" if place % 3 == 0 else f"call, {cell.targets[0]}"
    name = f"{cell.document}, {cell.mode}: {kind}".replace("`", "")
    return pytest.param(cell, id=name, marks=pytest.mark.campaign if kind == "plain" else ())


CELLS = [marked(place, cell) for place, cell in enumerate(cells()) if cell.programs]


@pytest.fixture(autouse=True)
def sizes(monkeypatch):
    """Sizes that kernels take, for layers that have their module's."""
    for module, numbers in ((packed_prologs, PACKED), (tiled_prologs, TILED)):
        for name, number in numbers.items():
            monkeypatch.setattr(module, name, number)
    with torch.no_grad():
        yield


@pytest.mark.parametrize("cell", CELLS)
def test_cell(captured, monkeypatch, cell):
    for make in cell.programs:
        for target in cell.targets:
            program = make()
            monkeypatch.setattr(ge_releases, "RELEASE", program.options.get("cann", ge_releases.RELEASE))
            found, report = compiled(captured, program, target)
            if cell.sentence is None:
                assert cell.kernel in found, str(report)
                continue
            said = [*report.notes, *(miss.reason for miss in report.misses)]
            assert any(cell.sentence in reason for reason in said), said
            assert OWN.get(cell.document) not in found


def compiled(captured, program: Program, target: str):
    """The kernels of the last graph, and the report. A call that stays one is not converted, and what torchair makes of
    plain operators has no simulation."""
    converted.graphs.clear()
    captured.graphs.clear()
    mla_fx.last_report()
    with contextlib.suppress(torch._dynamo.exc.BackendCompilerFailed, NotImplementedError):
        program.compile(target)
    if target == "ge":
        return [kind for graph in converted.graphs[-1:] for kind in converted.types(graph)], mla_fx.last_report()
    nodes = [node for graph in captured.graphs[-1:] for node in graph.module.graph.nodes]
    called = {getattr(node.target, "_opname", "").removesuffix("_functional") for node in nodes}
    return [kernel for kernel, name in CAPTURED.items() if name in called], mla_fx.last_report()
