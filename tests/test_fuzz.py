"""Mutated layers give the same answers and leave the same caches, fused or not (see fuzz/__init__.py)."""

import pytest
from fuzz.bases import LAYERS, may_stay_unfused
from fuzz.campaign import batches, campaign
from fuzz.found import FOUND

FAST = len(LAYERS)  # mutants of an ordinary test run: one of each layer, in one of its captures


def pytest_generate_tests(metafunc):
    if "numbers" not in metafunc.fixturenames:
        return
    total = metafunc.config.getoption("--fuzz") or FAST
    found = list(batches(total, 200))
    names = [f"{base}-{numbers.start}" for base, numbers in found]
    metafunc.parametrize("base, numbers", found, ids=names)


@pytest.mark.filterwarnings("ignore")
def test_mutants(base, numbers, request):
    seed = request.config.getoption("--fuzz-seed")
    results = list(campaign(base, seed, numbers))
    untouched = results[0].outcome
    assert untouched.is_failure or untouched.fused or may_stay_unfused(base), untouched
    failures = [
        f"{(result.reduced_outcome or result.outcome).verdict}: {(result.reduced_outcome or result.outcome).detail}\n"
        f"    {result.reduced or result.mutant}"
        for result in results
        if result.outcome.is_failure
    ]
    assert not failures, "\n" + "\n".join(failures)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mutant", FOUND, ids=str)
def test_found(mutant):
    outcome = mutant.judge()
    assert outcome.verdict in ("fused", "unfused"), f"{outcome.verdict}: {outcome.detail}"
