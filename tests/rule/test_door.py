"""All that a rule needs comes from `mla_fx.rule`, and nothing that no rule uses."""

import importlib

import pytest
from lib.sources import ROOT, imports, is_within, name_of

# What a rule is described with, and what its own words are made of.
OFFERED = {"mla_fx.rule.Reads", "mla_fx.rule.Root", "mla_fx.rule.Stage"}


@pytest.mark.parametrize("path", sorted((ROOT / "patterns").rglob("*.py")), ids=name_of)
def test_all_that_a_rule_needs_comes_through_one_door(path):
    doors = ("mla_fx.rule", "mla_fx.cases", "mla_fx.ops")
    ours = [module for module in imports(path) if is_within(module, "mla_fx")]
    assert [module for module in ours if not is_within(module, *doors)] == []


@pytest.mark.parametrize("path", sorted((ROOT / "mla_fx" / "rule").glob("*.py")), ids=name_of)
def test_the_door_exports_what_it_says_and_nothing_that_no_rule_uses(path):
    module = importlib.import_module(f"mla_fx.rule.{path.stem}".removesuffix(".__init__"))
    assert [name for name in module.__all__ if not hasattr(module, name)] == []
    rules = [*(ROOT / "patterns").rglob("*.py"), ROOT / "examples" / "add_a_pattern.py"]
    used = {name for rule in rules for name in imports(rule)}
    offered = {f"{module.__name__}.{name}" for name in module.__all__}
    assert sorted(offered - used - OFFERED) == []
