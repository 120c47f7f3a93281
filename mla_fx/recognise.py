"""Applying the rules: every rule of a stage at every anchor, and the nearest miss where it does not fire."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .canonical.contraction import name_of
from .debug.report import Miss, fused_name, module_of, source_of
from .errors import NoMatch
from .match import Match, Trail
from .rule import Rule

if TYPE_CHECKING:
    from .pipeline import Run


def recognise(stage: str) -> Callable[[Run], None]:
    """Applies the rules of one stage at all their anchors."""

    def apply(run: Run) -> None:
        for rule in run.rules:
            if rule.stage == stage and rule.name not in run.options.disable:
                _apply_rule(run, rule)

    return apply


def _apply_rule(run: Run, rule: Rule[Any]) -> None:
    for anchor in list(rule.anchors(run.graph)):
        trail = Trail()
        if _try_at(run, rule, anchor, trail):
            run.record.fired[rule.name] += 1
        elif trail.miss is not None:
            node = trail.miss.node if trail.miss.node is not None else anchor
            suspicious = rule.suspicious(anchor)
            run.report.misses.append(
                Miss(rule.name, trail.miss.reason, node.name, source_of(node), module_of(node), trail.depth, suspicious)
            )


def _try_at(run: Run, rule: Rule[Any], anchor: Any, trail: Trail) -> bool:
    try:
        bindings = rule.bindings(anchor, trail)
        while (match := next(bindings, None)) is not None:
            if _rewrite(run, rule, anchor, match, trail):
                return True
    except NoMatch as miss:
        trail.fail(Match(), miss)
    return False


def _rewrite(run: Run, rule: Rule[Any], anchor: Any, match: Match, trail: Trail) -> bool:
    try:
        facts = rule.check(match)
    except NoMatch as miss:
        trail.fail(match, miss)
        return False
    mark = len(run.emit.added)
    try:
        with run.emit.at(anchor, rule.name):
            rule.rewrite(run.emit, facts)
    except NoMatch as miss:
        run.emit.roll_back(mark)
        trail.fail(match, miss)
        return False
    for node in run.emit.added[mark:]:
        if fused_name(node) is not None:
            node.meta["mla_fx_replaced"] = [(source.name, name_of(source), source_of(source)) for source in match.nodes]
    return True
