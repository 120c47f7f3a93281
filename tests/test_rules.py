"""Generated from the patterns: every accept fires as often as it says and agrees; every reject refuses as it says."""

from __future__ import annotations

import copy

import pytest
import torch

from mla_fx import backend, cases, discover
from mla_fx.debug.report import Report

ACCEPTS = [pytest.param(case, id=f"{rule.name}: {case.name}") for rule in discover.rules() for case in rule.accepts]
REJECTS = [
    pytest.param(rule.name, case, id=f"{rule.name}: {case.name}") for rule in discover.rules() for case in rule.rejects
]


def run_both(case: cases.Case) -> Report:
    """Runs a case eagerly and fused; outputs and caches must agree."""
    eager = case.build().eval()
    fused = copy.deepcopy(eager)
    reports: list[Report] = []

    def compiler(gm, example_inputs):
        return backend._compile(gm, example_inputs, None, {"target": "reference"}, reports.append)

    with torch.no_grad():
        expected = eager(*cases.inputs())
        got = torch.compile(fused, backend=compiler)(*cases.inputs())
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    for name, buffer in eager.named_buffers():
        torch.testing.assert_close(fused.get_buffer(name), buffer, rtol=1e-4, atol=1e-5)
    return Report.merged(reports)


@pytest.mark.parametrize("case", ACCEPTS)
def test_accept(case: cases.Case) -> None:
    assert run_both(case).fused == case.fused


@pytest.mark.filterwarnings("ignore::mla_fx.MlaWarning")
@pytest.mark.parametrize(("rule", "case"), REJECTS)
def test_reject(rule: str, case: cases.Case) -> None:
    report = run_both(case)
    reasons = [miss.reason for miss in report.misses if miss.pattern == rule]
    assert any(case.because in reason for reason in reasons), reasons
    operators = {"mla_attention": ("mla_attention", "latent_attention")}.get(rule, (rule,))
    assert not any(name in report.fused for name in operators)


@pytest.mark.filterwarnings("ignore::mla_fx.MlaWarning")
def test_reject_leaves_the_graph_alone() -> None:
    """Where attention is not recognised nothing is, and the graph that leaves is the one that came."""
    attention = next(rule for rule in discover.rules() if rule.name == "mla_attention")
    for case in attention.rejects:
        graphs = run_both(case).graphs
        assert graphs["captured"] == graphs["clean up"], case.name
