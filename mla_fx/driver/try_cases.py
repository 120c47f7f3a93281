"""Tries a rule on its cases; the tests of every pattern are generated from this."""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

from mla_fx.cases import Case, inputs
from mla_fx.debug.report import Report
from mla_fx.rule import Rule
from mla_fx.target import Compiled

from .compilation import Compilation


def run_case(case: Case, *more: Rule) -> Report:
    """Run a case unfused and fused, with the rules in `patterns/` and `more`, and report what happened.

    Raises AssertionError if an output or a buffer differs."""
    eager = case.build().eval()
    fused = copy.deepcopy(eager)
    reports: list[Report] = []
    options = {"target": "reference", "pieces": case.pieces}

    def backend(gm: GraphModule, example_inputs: Sequence[Any]) -> Compiled:
        compilation = Compilation.prepare(example_inputs, options, keep_text=True)
        compilation.rules += more
        reports.append(compilation.report)
        return compilation.compile(gm, example_inputs)

    with torch.no_grad():
        expected = eager(*inputs())
        found = torch.compile(fused, backend=backend)(*inputs())
    rtol, atol = (3e-2, 3e-2) if found.dtype.itemsize == 2 else (1e-4, 1e-5)
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)
    torch.testing.assert_close(dict(fused.named_buffers()), dict(eager.named_buffers()), rtol=1e-4, atol=1e-5)
    return Report.merged(reports)


def check_accepted(case: Case, *more: Rule) -> None:
    """Check that the case fuses exactly as it says, with the same results. Raises AssertionError."""
    report = run_case(case, *more)
    assert {**report.fused, **report.pieces} == case.fused, f"{case.name}: expected {dict(case.fused)}, {report}"


def check_refused(rule: Rule, case: Case, *more: Rule) -> None:
    """Check that the rule refuses the case for its reason, and does not fire. Raises AssertionError."""
    report = run_case(case, *more)
    reasons = [miss.reason for miss in report.misses if miss.pattern == rule.name]
    assert any(case.because in reason for reason in reasons), f"{case.name}: expected {case.because!r} in {reasons}"
    assert not any(record.fired[rule.name] for record in report.passes), f"{case.name}: the rule fired"


def main(path: Path) -> None:
    """Try the rules of a file on their cases."""
    spec = spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None, f"{path} is not a Python file"
    module = sys.modules[path.stem] = module_from_spec(spec)
    spec.loader.exec_module(module)
    kinds = [kind for kind in vars(module).values() if isinstance(kind, type) and kind.__module__ == path.stem]
    for rule in (kind() for kind in kinds if issubclass(kind, Rule)):
        for case in rule.accepts:
            check_accepted(case, rule)
            print(f"{case.name}: fused {dict(case.fused)}, and answers as before")
        for case in rule.rejects:
            check_refused(rule, case, rule)
            print(f"{case.name}: refused, because {case.because!r}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
