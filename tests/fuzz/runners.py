"""The ways to run a rewritten program: by the pass, by the backend, with weights laid out once. Each takes more
options."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lib.plants import plant_in_runs
from mla_fx.lowering.reference import Reference
from torch import Tensor

import mla_fx
from mla_fx.debug.report import Report
from mla_fx.driver.compilation import Compilation
from mla_fx.options import Options

from .capture import copies, run
from .flaws import flaw
from .program import Call, Program

Runner = Callable[[Program, dict[str, Any]], tuple[Call, Report]]


def _by_pass(target: str) -> Runner:
    """Rewrites the graph in place, then runs it node by node."""

    def rewritten(program: Program, options: dict[str, Any]) -> tuple[Call, Report]:
        compiler = mla_fx.MlaPass(target=target, **options)
        compiler(program.gm)
        return lambda *inputs: run(program.gm, inputs), compiler.report

    return rewritten


def _by_backend(**own: Any) -> Runner:
    def compiled(program: Program, options: dict[str, Any]) -> tuple[Call, Report]:
        torch._dynamo.reset()
        with torch.no_grad():
            call = mla_fx.get_backend(**own, **options)(program.gm, list(copies(program.inputs)))
        return call, mla_fx.last_report()

    return compiled


class _Keeping(Reference):
    """Computes once what depends on weights alone."""

    name = "keeping"
    writes_in_place = False
    prepares = True


def _with_weights_kept(program: Program, options: dict[str, Any]) -> tuple[Call, Report]:
    compilation = Compilation(Options(**options), _Keeping(), Report(target=_Keeping.name))
    given = zip(program.gm.graph.find_nodes(op="placeholder"), program.inputs, strict=True)
    weights = {node for node, value in given if isinstance(value, torch.nn.Parameter)}
    prepared = compilation.rewrite(program.gm, weights=weights).hoisted
    return prepared.around(lambda *inputs: run(program.gm, inputs)), compilation.report


def _with_flaw(program: Program, options: dict[str, Any]) -> tuple[Call, Report]:
    """What runs is wrong. The program gives what is right if `verify` finds that."""
    assert program.way.flaw is not None, "a runner of its own"
    with pytest.MonkeyPatch.context() as patch:
        plant_in_runs(patch, *flaw(*program.way.flaw))
        run_wrong, report = RUNNERS["verified"](program, options)

    def verified(*inputs: Any) -> tuple[Any, ...]:
        before = copies(inputs)
        try:
            return run_wrong(*inputs)
        except mla_fx.VerificationError:
            for given, old in zip(inputs, before, strict=True):
                if isinstance(given, Tensor):
                    given.copy_(old)
            return run(program.gm, inputs)

    return verified, report


RUNNERS: dict[str, Runner] = {
    "reference": _by_pass("reference"),
    "lowered": _by_pass("inductor"),
    "kept": _with_weights_kept,
    "backend": _by_backend(target="reference"),
    "verified": _by_backend(target="reference", verify="always"),
    "flawed": _with_flaw,
}
