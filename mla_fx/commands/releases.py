"""What `explain` prints of targets whose limits differ between releases of their software: what is alike, once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from mla_fx.debug.graph_text import A_GRAPH
from mla_fx.debug.report import Report

OPTION = "cann"
Reports = Mapping[tuple[str, str], Report]  # by target and release, which is empty if the target has none


def to_dict(reports: Reports) -> dict[str, Any]:
    """The reports as JSON values, each with what the target's compiler made of its graphs."""
    count = Counter(target for target, _ in reports)
    return {
        f"{target} {release}" if count[target] > 1 else target: {**report.to_dict(), "compiled": _compiled(report)}
        for (target, release), report in reports.items()
    }


def told(reports: Reports) -> Iterator[str]:
    """For each target the reports, and then what its compiler made."""
    for name in dict.fromkeys(target for target, _ in reports):
        found = {release: report for (target, release), report in reports.items() if target == name}
        named = {release: replace(one, target=_named(name, release)) for release, one in found.items()}
        untimed = {release: str(replace(one, passes=[])) for release, one in named.items()}
        yield from _once({release: str(one) for release, one in named.items()}, untimed)
        for graph in dict.fromkeys(graph for one in found.values() for graph in _compiled(one)):
            made = {release: _compiled(one)[graph] for release, one in found.items() if graph in _compiled(one)}
            texts = {release: f"# {_named(graph, release)}{text}" for release, text in made.items()}
            yield from _once(texts, texts)


def _compiled(report: Report) -> dict[str, str]:
    """Return the compiled graphs as text, by their names."""
    return {
        name: text.removeprefix(A_GRAPH).rstrip("\n") for name, text in report.graphs.items() if "compiled for " in name
    }


def _named(what: str, release: str) -> str:
    return f"{what}, CANN {release}" if release else what


def _once(texts: Mapping[str, str], compared: Mapping[str, str]) -> Iterator[str]:
    """Each text once, with the names of all releases where what is compared differs by these names alone."""
    alike: dict[str, list[str]] = {}
    for release, text in compared.items():
        alike.setdefault(text.replace(f"CANN {release}", "CANN"), []).append(release)
    for releases in alike.values():
        yield texts[releases[0]].replace(f"CANN {releases[0]}", f"CANN {', '.join(releases)}")
