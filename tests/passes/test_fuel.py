"""Rewrites that are limited or left out from outside, by variables of the environment."""

import pytest
import torch
from lib.comparing import ALL, check_same

import mla_fx
from mla_fx import cases
from mla_fx.backend import limited
from mla_fx.driver.compilation import Compilation, checked
from mla_fx.passes.fuel import Fuel, Rewrite

pytestmark = pytest.mark.usefixtures("no_gradients")


def fused(backend=None):
    """What fuses in a layer that is compiled anew, with results like those of eager mode."""
    torch.compiler.reset()
    module = cases.Layer()
    run = torch.compile(module, backend=backend or mla_fx.get_backend(target="reference"))
    check_same(module, cases.inputs(), run)
    return mla_fx.last_report()


AFTER = {0: {}, 1: {"mla_attention": 1}, 2: {"latent_attention": 1}, 3: ALL, 9: ALL}  # so many rewrites


@pytest.mark.parametrize(("limit", "expected"), AFTER.items())
def test_the_first_rewrites_are_applied(limit, expected):
    fuel = Fuel(limit)
    report = fused(limited(fuel, target="reference"))
    assert report.fused == expected
    passes = ["mla_attention", "choose absorbed or expanded", "mla_prolog", "reinplace"]
    assert [one.pattern for one in fuel.applied] == passes[:limit]
    assert (f"MLA_FX_FUEL={limit}: no more rewrites are applied" in report.notes) == (limit <= 4)


def test_each_rewrite_is_recorded_in_order():
    fuel = Fuel()
    fused(limited(fuel, target="reference"))
    attention, prolog = fuel.applied
    assert (attention.pattern, attention.calls) == ("mla_attention", ("mla_attention",))
    assert (prolog.pattern, prolog.calls) == ("mla_prolog", ("mla_prolog",))
    assert attention.source.startswith(cases.__file__)
    assert str(Rewrite("rope", "layers.3", "model.py:7", ())) == "rope in layers.3 (model.py:7)"


@pytest.mark.slow
def test_the_variable_counts_the_rewrites_of_all_graphs(monkeypatch):
    monkeypatch.setenv("MLA_FX_FUEL", "6")
    assert [fused().fused for _ in range(3)] == [ALL, {"latent_attention": 1}, {}]


@pytest.mark.parametrize("value", ["", "-1", "many", "1.5"])
def test_a_variable_that_is_no_number_is_an_error(monkeypatch, value):
    monkeypatch.setenv("MLA_FX_FUEL", value)
    with pytest.raises(mla_fx.OptionError, match=f"MLA_FX_FUEL is '{value}'; it takes a number of rewrites"):
        fused()


def test_nothing_is_kept_while_rewrites_are_limited(monkeypatch):
    def keys():
        compilation = Compilation.prepare((), {"target": "inductor"})
        return compilation._key(()), mla_fx.MlaPass().uuid()

    assert None not in keys()
    monkeypatch.setenv("MLA_FX_FUEL", "1000")
    assert keys() == (None, None)


def test_patterns_are_disabled_from_outside(monkeypatch):
    monkeypatch.setenv("MLA_FX_DISABLE", "mla_prolog, kv_rmsnorm_rope_cache,")
    assert fused().fused == {"latent_attention": 1}
    both = ("rope", "mla_prolog", "kv_rmsnorm_rope_cache")
    assert checked({"disable": "rope"}).disable == both
    from_outside, graph_pass = checked({"disable": both}), mla_fx.MlaPass(disable="rope").uuid()
    monkeypatch.delenv("MLA_FX_DISABLE")
    assert checked({"disable": both}) == from_outside
    assert graph_pass == mla_fx.MlaPass(disable=both).uuid() != mla_fx.MlaPass(disable="rope").uuid()


def test_a_disabled_pattern_that_does_not_exist_is_an_error(monkeypatch):
    monkeypatch.setenv("MLA_FX_DISABLE", "mla_prologue")
    with pytest.raises(mla_fx.OptionError, match=r"MLA_FX_DISABLE names 'mla_prologue'; known patterns are '"):
        mla_fx.get_backend()
