"""A user's own rules: the example to copy, and caches of what was discovered."""

from pathlib import Path

from mla_fx.driver import discovery

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "add_a_pattern.py"


def forget():
    for known in (discovery.found_rules, discovery.found_targets, discovery.targets, discovery.packages):
        known.cache_clear()
