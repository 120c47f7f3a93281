"""Generated from the patterns: every accepted case fuses as often as it says and agrees; every rejected one is refused
for its reason."""

import pytest

from mla_fx.driver import discovery
from mla_fx.driver.try_cases import check_accepted, check_refused, run_case

RULES = discovery.rules()
ACCEPTS = [pytest.param(case, id=f"{rule.name}: {case.name}") for rule in RULES for case in rule.accepts]
REJECTS = [pytest.param(rule, case, id=f"{rule.name}: {case.name}") for rule in RULES for case in rule.rejects]


@pytest.mark.parametrize("case", ACCEPTS)
def test_accept(case):
    """Each rewrite is checked, what follows from it, and writes in place."""
    report = check_accepted(case)
    assert report.checked and (report.unchecked, report.refuted) == ([], []), str(report)


@pytest.mark.filterwarnings("ignore::mla_fx.MlaWarning")
@pytest.mark.parametrize(("rule", "case"), REJECTS)
def test_reject(rule, case):
    check_refused(rule, case)


ATTENTION = next(rule for rule in RULES if rule.name == "mla_attention")


@pytest.mark.filterwarnings("ignore::mla_fx.MlaWarning")
@pytest.mark.parametrize("case", ATTENTION.rejects, ids=lambda case: case.name)
def test_reject_leaves_the_graph_alone(case):
    """If attention is not recognised, nothing is, and the graph is unchanged."""
    graphs = run_case(case).graphs
    assert graphs["captured"] == graphs["clean up"]
