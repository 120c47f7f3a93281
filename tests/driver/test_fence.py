"""If a pass fails or refuses, the model runs unfused, with one warning, or an error when strict."""

import warnings

import pytest
from lib.comparing import check_runs_unfused, check_same, compiled, mla_warnings

import mla_fx
from mla_fx.driver import compilation
from mla_fx.passes.pipeline import PIPELINE, run_pipeline
from mla_fx.passes.run import Pass

pytestmark = pytest.mark.usefixtures("no_gradients")


@pytest.fixture(params=range(len(PIPELINE) + 1))
def planted(request, monkeypatch):
    """A pass that fails, at each place in the pipeline."""

    def fail(run):
        raise ZeroDivisionError("a bug")

    passes = (*PIPELINE[: request.param], Pass("planted", fail), *PIPELINE[request.param :])
    monkeypatch.setattr(compilation, "run_pipeline", lambda run, _: run_pipeline(run, passes))


@pytest.mark.slow
@pytest.mark.usefixtures("planted")
def test_failing_pass_breaks_no_model(decode):
    module, arguments = decode
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_runs_unfused(module, arguments, compiled(module))
    (message,) = mla_warnings(caught)
    assert "pass 'planted' failed with ZeroDivisionError: a bug; the model runs unfused" in message
    assert "planted" in str(mla_fx.last_report())


@pytest.mark.slow
@pytest.mark.usefixtures("planted")
def test_failing_pass_is_an_error_when_strict(decode):
    module, arguments = decode
    with pytest.raises(mla_fx.FusionError, match="pass 'planted' failed: ZeroDivisionError: a bug"):
        compiled(module, strict=True)(*arguments)


@pytest.mark.slow
@pytest.mark.parametrize("step", ["prolog.replacing_cache", "plain.positions_and_caches"])
def test_failure_in_the_midst_of_a_rewrite_breaks_no_model(decode, monkeypatch, step):
    def fail(*_):
        raise ZeroDivisionError("a bug")

    module, arguments = decode
    monkeypatch.setattr(f"mla_fx.patterns.mla_prolog.{step}", fail)
    with pytest.warns(mla_fx.MlaWarning, match="pass 'recognise prolog' failed with ZeroDivisionError: a bug"):
        check_runs_unfused(module, arguments, compiled(module))


def test_refusal_in_the_midst_of_a_rewrite_adds_nothing(decode, monkeypatch):
    def refuse(*_):
        raise mla_fx.NoMatch("not like this")

    module, arguments = decode
    monkeypatch.setattr("mla_fx.patterns.mla_prolog.plain.positions_and_caches", refuse)
    check_same(module, arguments, compiled(module))
    report = mla_fx.last_report()
    assert report.fused == {"kv_rmsnorm_rope_cache": 1, "latent_attention": 1}
    assert [miss.reason for miss in report.misses] == ["not like this"]
