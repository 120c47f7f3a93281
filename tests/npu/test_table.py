"""The table of GE operators in docs/npu.md for each layer, torchair alone against mla_fx, counted anew.

`MLA_FX_ACCEPT=1 python -m tests.npu tests/npu/test_table.py --campaign` writes it into docs/npu.md."""

from __future__ import annotations

import multiprocessing
import os
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torchair

import mla_fx
from npu import converted, ge_releases, models

PAGE = Path(__file__).parents[2] / "docs" / "npu.md"
HEAD = "| model | step | shapes | torchair alone | mla_fx | of them | CANN |\n" + 7 * "| --- " + "|\n"
SHORT = {"MlaPrologV3": "prolog", "KvRmsNormRopeCache": "key side", "FusedInferAttentionScore": "attention"}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "DeepSeek-V3": ("deepseek_v3", {}),
    "DeepSeek-V3, query of full rank": ("deepseek_v3", {"q_lora_rank": None}),
    "DeepSeek-V2": ("deepseek_v2", {}),
    "MiniCPM3": ("minicpm3", {}),
}
WIDTH = {"hidden_size": 7168}  # which every release takes
STEPS = {"decode": (models.static_cache, 1), "prompt": (models.static_cache, 20), "decode, growing": (models.grown, 1)}

CASES = [
    *((name, "decode", "fixed") for name in MODELS),
    *(("DeepSeek-V3", step, "fixed") for step in ("decode, growing", "prompt")),
    ("DeepSeek-V3", "decode", "dynamic"),
]


def test_table_of_the_page(request: pytest.FixtureRequest) -> None:
    """Its first row, and with --campaign all of it."""
    rows = rows_of(CASES if request.config.getoption("--campaign") else CASES[:1])
    text = PAGE.read_text(encoding="utf-8")
    if len(rows) < len(CASES):
        assert HEAD + rows[0] in text
        return
    table = HEAD + "".join(rows)
    before, _, rest = text.partition(HEAD)
    after = re.sub(r"\A(\|.*\n)*", "", rest)
    if os.environ.get("MLA_FX_ACCEPT"):
        text = before + table + after
        PAGE.write_text(text, encoding="utf-8")
    assert text == before + table + after


def rows_of(cases: Sequence[tuple[str, str, str]]) -> list[str]:
    # torchair alone in a process of its own: the converters that mla_fx brings stay in this one
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as fresh:
        alone = list(fresh.map(alone_per_layer, cases))
    return list(map(row, cases, alone))


def alone_per_layer(case: tuple[str, str, str]) -> dict[str, int] | None:
    return per_layer(*case, torchair.get_npu_backend())


def row(case: tuple[str, str, str], alone: dict[str, int] | None) -> str:
    with mock.patch.object(ge_releases, "refused", set()) as refused:  # which the table names
        fused = per_layer(*case, mla_fx.get_backend(target="ge"))
    assert fused is not None, "every model here converts"
    kinds = ", ".join(f"{fused[kind]} {short}" for kind, short in SHORT.items() if fused.get(kind))
    count = "does not convert" if alone is None else str(sum(alone.values()))
    return f"| {' | '.join(case)} | {count} | {sum(fused.values())} | {kinds} | {releases(refused)} |\n"


def releases(refused: set[str]) -> str:
    """Those that take every operator that ran, and why others do not."""
    taking = [release for release in ge_releases.RELEASES if not any(one.startswith(f"{release}:") for one in refused)]
    assert taking == list(ge_releases.RELEASES[-len(taking) :]), "a release takes what an older one does"
    reasons = sorted({reason.partition(": ")[2] for reason in refused})
    return f"from {taking[0]} ({', '.join(reasons)})" if reasons else "all"


def per_layer(name: str, step: str, shapes: str, backend: Callable[..., Any]) -> dict[str, int] | None:
    """What a second layer adds, by type; None where the model does not convert."""
    one, two = (types_of(name, step, shapes, backend, layers) for layers in (1, 2))
    if one is None or two is None:
        return None
    return {kind: two.count(kind) - one.count(kind) for kind in sorted(set(two)) if two.count(kind) > one.count(kind)}


def types_of(name: str, step: str, shapes: str, backend: Callable[..., Any], layers: int) -> list[str] | None:
    family, sizes = MODELS[name]
    make_cache, tokens = STEPS[step]
    model = models.model(family, layers, **WIDTH, **sizes)
    cache = make_cache(model)
    converted.graphs.clear()
    torch._dynamo.reset()
    try:
        models.steps(torch.compile(model, backend=backend, dynamic=shapes == "dynamic"), cache, [models.prompt(tokens)])
    except torch._dynamo.exc.BackendCompilerFailed as failure:
        assert isinstance(failure.inner_exception, (NotImplementedError, RuntimeError)), failure
        return None
    (graph,) = converted.graphs
    return converted.types(graph)
