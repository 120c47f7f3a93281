"""These tests need torch_npu, which the environment has not; `tests/test_npu.py` runs them in a process that has it."""

import importlib.util

import pytest

HAS_TORCH_NPU = importlib.util.find_spec("torch_npu") is not None
collect_ignore_glob = [] if HAS_TORCH_NPU else ["test_*.py"]


@pytest.fixture(autouse=True)
def converted():
    """`npu.converted`, without the graphs and formats of earlier tests."""
    from npu import converted, formats

    converted.graphs.clear()
    formats.clear()
    return converted


@pytest.fixture
def captured(converted):
    """`npu.captured`, without the graphs of earlier tests."""
    from npu import captured

    captured.graphs.clear()
    return captured


@pytest.fixture(autouse=True)
def refusals(request):
    """Some release takes every operator that a test runs, which `ge_releases.check` checks; other releases that refuse
    it are named in refused.json."""
    from npu import ge_releases, refused

    ge_releases.refused.clear()
    yield ge_releases.refused
    refused.check(request.path.name, ge_releases.refused)


@pytest.fixture
def any_size(monkeypatch):
    """Operators are checked by no release: small ones are computed, which no device takes."""
    from npu import ge_releases

    monkeypatch.setattr(ge_releases, "check", lambda *_: None)
