"""Tries a rule on its cases; the tests of every pattern are generated from this."""

import argparse
import copy
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.fx import GraphModule

from mla_fx.cases import Case, inputs
from mla_fx.debug.report import Report
from mla_fx.ops.common.define import Operator
from mla_fx.rule import Rule
from mla_fx.target import Compiled

from .compilation import Compilation
from .discovery import own_classes


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

    torch.compiler.reset()  # Dynamo compiles one function only so many times, and cases share `Layer.forward`
    with torch.no_grad():
        expected = eager(*inputs())
        found = torch.compile(fused, backend=backend)(*inputs())
    rtol, atol = (3e-2, 3e-2) if found.dtype.itemsize == 2 else (1e-4, 1e-5)
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)
    torch.testing.assert_close(dict(fused.named_buffers()), dict(eager.named_buffers()), rtol=1e-4, atol=1e-5)
    return Report.merged(reports)


def check_accepted(case: Case, *more: Rule) -> Report:
    """Check that the case fuses exactly as it says, with the same results, and return the report. Raises
    AssertionError."""
    report = run_case(case, *more)
    assert {**report.fused, **report.pieces} == case.fused, f"expected {dict(case.fused)}, {report}"
    return report


def check_refused(rule: Rule, case: Case, *more: Rule) -> None:
    """Check that the rule refuses the case for its reason, and does not fire. Raises AssertionError."""
    report = run_case(case, *more)
    reasons = [miss.reason for miss in report.misses if miss.pattern == rule.name]
    assert any(case.because in reason for reason in reasons), f"expected {case.because!r} in {reasons}"
    assert not any(record.fired[rule.name] for record in report.passes), "the rule fired"


def trials(module: ModuleType) -> Iterator[tuple[str, Callable[[], object], str]]:
    """What there is to try in a file: a name, a function that raises if it fails, and what is said if it does not."""
    for operator in (value for value in vars(module).values() if isinstance(value, Operator)):
        for sample in operator.samples(torch.float32):
            passed = "schema and fake kernel are right"
            check = partial(torch.library.opcheck, operator.overload, sample.args, sample.kwargs)
            yield f"{operator.name}, sample {sample.mode!r}", check, passed
    for rule in (kind() for kind in own_classes(module, Rule)):
        for case in rule.accepts:
            passed = f"fused {dict(case.fused)}, and answers as before"
            yield case.name, partial(check_accepted, case, rule), passed
        for case in rule.rejects:
            yield case.name, partial(check_refused, rule, case, rule), f"refused, because {case.because!r}"


def main(path: Path) -> int:
    """Try the operators of a file on their samples, and its rules on their cases; return how many fail."""
    spec = spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None, f"{path} is not a Python file"
    module = sys.modules[path.stem] = module_from_spec(spec)
    spec.loader.exec_module(module)
    failed = 0
    for name, run, passed in trials(module):
        try:
            run()
        except Exception as error:
            failed += 1
            passed = f"FAILED. {type(error).__name__}: {error}"
        print(f"{name}: {passed}")
    return failed


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m mla_fx.driver.try_cases", description=main.__doc__)
    parser.add_argument("file", type=Path, help="a Python file with a rule, as for patterns/")
    sys.exit(min(main(parser.parse_args().file), 1))
