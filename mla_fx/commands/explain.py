"""Reports what fuses in a model of transformers, in a published configuration, or in a user's own model."""

import json
import os
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from mla_fx.backend import explain
from mla_fx.commands import CommandError
from mla_fx.debug.graph_text import A_GRAPH
from mla_fx.debug.outcomes import layer_of
from mla_fx.debug.report import Miss, Report
from mla_fx.driver import discovery
from mla_fx.driver.compilation import NOT_COMPILED
from mla_fx.errors import MlaWarning, OptionError
from mla_fx.ops import forms
from mla_fx.options import OWN
from mla_fx.rule import Stage

from . import costs
from .costs import LayerSizes, Machine, Step
from .demo import Announce, progress
from .models import (
    Program,
    attention_layers,
    config_class,
    full_call,
    is_config,
    read_config,
    script_call,
    tiny_call,
    with_layers,
)

ALL = "all"
BY_DEFAULT = "reference"
RELEASE = "cann"  # the option
FEWER = "--layers 1 compiles the first layer alone, which may do without what is not compiled"

Reports = Mapping[tuple[str, str], Report]  # by target and release, which is empty if the target has none


@dataclass(frozen=True)
class Asked:
    """What the command line asks for. `arguments` are its own, for a child process."""

    model: str
    targets: Sequence[str] = (BY_DEFAULT,)
    options: Mapping[str, str] = field(default_factory=dict)
    step: Step = field(default_factory=Step)
    machine: Machine = field(default_factory=Machine)
    layers: int | None = None
    is_full: bool = False
    as_json: bool = False
    arguments: Sequence[str] = ()


def run_explain(asked: Asked) -> int:
    """Print what fuses for each target, what its compiler makes of it, and what the attention of a full model costs.

    Returns 0 if all that looks like MLA fused as far as each target can, and else 1."""
    with progress() as announce:
        variables = _stand_ins(asked, announce)
    if variables:
        command = [sys.executable, "-m", "mla_fx", *asked.arguments]
        return subprocess.run(command, env={**os.environ, **variables}, check=False).returncode
    with progress() as announce, warnings.catch_warnings():
        warnings.simplefilter("ignore", MlaWarning)  # the report says the same
        announce(f"building {asked.model}")
        usable, absent = _usable(asked.targets)
        config, call = _model(asked, usable)
        reports = dict(_reports(asked, call, usable, announce))
    sizes = None if config is None else (LayerSizes.of(config), attention_layers(config), asked.step, asked.machine)
    if asked.as_json:
        told = _as_json(reports)
        print(json.dumps({"targets": told, "absent": absent, "costs": sizes and costs.to_dict(*sizes)}, indent=2))
    else:
        parts = [*absent.values(), *_told(reports), *([costs.told(*sizes)] if sizes else [])]
        print("\n\n".join(parts))
    return int(any(map(leaves_mla, reports.values())))


def leaves_mla(report: Report) -> bool:
    """Whether attention that looks like MLA is left, or a part of its layer, for another reason than by design."""
    of_any = {rule.name for rule in discovery.rules() if rule.stage == Stage.ATTENTION}  # others need a fused one
    fused, of_mla = (_layers(report, names) for names in (report.modules, report.modules.keys() & forms()))

    def is_left(miss: Miss) -> bool:
        layer = layer_of(miss.module)
        is_of_mla = miss.pattern not in of_any or layer in of_mla or (miss.looks_like_mla and layer not in fused)
        return is_of_mla and not miss.by_design

    return bool(report.hindrances) or any(map(is_left, report.misses))


def _layers(report: Report, names: Iterable[str]) -> set[str]:
    """The layers in which operators with these names fused."""
    return {layer_of(path) for name in names for path in report.modules[name]}


def _model(asked: Asked, targets: Sequence[str]) -> tuple[Any, Program]:
    """The configuration of a full model, if it is one, and the call to trace."""
    is_whole = _is_whole(asked)
    if asked.layers is not None and not is_whole:
        raise CommandError("--layers takes the first layers of a configuration, or of a model type with --full.")
    if asked.model.endswith(".py"):
        return None, script_call(Path(asked.model))
    if not is_whole:
        return None, tiny_call(asked.model, "cpu" if all(map(_runs_here, targets)) else "meta")
    config = read_config(asked.model) if is_config(asked.model) else config_class(asked.model)()
    config = config if asked.layers is None else with_layers(config, asked.layers)
    return config, full_call(config, asked.step)


def _is_whole(asked: Asked) -> bool:
    """Whether the model has the sizes and layers of a configuration."""
    return not asked.model.endswith(".py") and (is_config(asked.model) or asked.is_full)


def _runs_here(name: str) -> bool:
    target = discovery.targets().get(name)
    return target is None or target.runs_operators or target.serves([torch.empty(1)])


def _reports(
    asked: Asked, call: Program, targets: Sequence[str], announce: Announce
) -> Iterator[tuple[tuple[str, str], Report]]:
    """Yield a report for each target and each release of its software: the one that the options name, or all known."""
    function, args, kwargs = call
    for name in targets:
        given = _options_of(name, asked.options, targets)
        known = discovery.targets()[name].releases if name in discovery.targets() else ()
        for release in (given[RELEASE],) if RELEASE in given else known or ("",):
            announce(f"tracing {asked.model}, and rewriting it for {name} {release}".rstrip())
            chosen = {**given, RELEASE: release} if release else given
            report = explain(function, target=name, **chosen)(*args, **kwargs)
            has_other_layers = asked.layers is None and _is_whole(asked)
            if has_other_layers and any(NOT_COMPILED in note for note in report.notes):
                report.notes.append(FEWER)
            yield (name, release), report


def _options_of(name: str, options: Mapping[str, str], usable: Sequence[str]) -> dict[str, str]:
    """The options that this target takes, and those that none takes, which `explain` refuses."""
    taken = {target: OWN | discovery.targets()[target].accepts() for target in usable if target in discovery.targets()}
    known = frozenset[str]().union(*taken.values())
    return {key: value for key, value in options.items() if key in taken.get(name, OWN) or key not in known}


def _stand_ins(asked: Asked, announce: Announce) -> Mapping[str, str]:
    """The environment variables of a child process that has what is missing here for the targets with these names."""
    known, variables = discovery.targets(), dict[str, str]()
    for name in [name for name in asked.targets if name in known]:  # explain refuses unknown ones
        reason = known[name].missing()
        if reason is None:
            continue
        known[name].check(asked.options)
        announce(f"finding what target {name!r} needs without its device; the first time, pip fetches it")
        try:
            variables.update(known[name].stand_in())
        except OptionError as error:
            raise CommandError(f"target {name!r} cannot be used here: {reason}. Without a device: {error}.") from error
    return variables


def _usable(names: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The targets to use, and a sentence for each one that is left out of all."""
    if ALL not in names:
        return list(dict.fromkeys(names)), {}
    reasons = {name: target.missing() for name, target in discovery.targets().items()}
    absent = {
        name: f"target {name!r} cannot be used here: {reason}. --target {name} checks its limits without the device."
        for name, reason in reasons.items()
        if reason
    }
    return [name for name in reasons if name not in absent], absent


# --- what is alike for several releases of a target's software, once -------------------------------------------------


def _as_json(reports: Reports) -> dict[str, Any]:
    """The reports as JSON values, each with what the target's compiler made of its graphs."""
    count = Counter(target for target, _ in reports)
    return {
        f"{target} {release}" if count[target] > 1 else target: {**report.to_dict(), "compiled": _compiled(report)}
        for (target, release), report in reports.items()
    }


def _told(reports: Reports) -> Iterator[str]:
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
    for named in alike.values():
        yield texts[named[0]].replace(f"CANN {named[0]}", f"CANN {', '.join(named)}")
