"""All that a rule needs comes from `mla_fx.rule`, and nothing that no rule uses."""

import ast

import pytest
from lib.sources import ROOT, imports, is_within, name_of

# What a rule is described with, and what its own words are made of.
OFFERED = {"mla_fx.rule.Reads", "mla_fx.rule.Root", "mla_fx.rule.Stage"}


@pytest.mark.parametrize("path", sorted((ROOT / "patterns").rglob("*.py")), ids=name_of)
def test_all_that_a_rule_needs_comes_through_one_door(path):
    doors = ("mla_fx.rule", "mla_fx.cases", "mla_fx.ops")
    ours = [module for module in imports(path) if is_within(module, "mla_fx")]
    assert [module for module in ours if not is_within(module, *doors)] == []


def exported(path):
    """The classes of a module, and what it imports under its own name, as in `import Match as Match`."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.ImportFrom):
            yield from (alias.name for alias in node.names if alias.asname == alias.name)


@pytest.mark.parametrize("path", sorted((ROOT / "mla_fx" / "rule").glob("*.py")), ids=name_of)
def test_the_door_exports_nothing_that_no_rule_uses(path):
    module = f"mla_fx.rule.{path.stem}".removesuffix(".__init__")
    rules = [*(ROOT / "patterns").rglob("*.py"), ROOT / "examples" / "add_a_pattern.py"]
    used = {name for rule in rules for name in imports(rule)}
    offered = {f"{module}.{name}" for name in exported(path)}
    assert offered and sorted(offered - used - OFFERED) == []
