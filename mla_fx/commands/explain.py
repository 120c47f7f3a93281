"""Reports what fuses in a model of transformers, in a published configuration, or in a user's own model."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from mla_fx.backend import explain
from mla_fx.debug.report import Report
from mla_fx.driver import discovery
from mla_fx.errors import MlaWarning
from mla_fx.options import OWN

from . import costs
from .configs import attention_layers, is_config, read_config
from .costs import Machine, Sizes, Step
from .demo import Announce, progress
from .models import Call, config_class, full_call, script_call, tiny_call

ALL = "all"
BY_DEFAULT = "reference"


@dataclass(frozen=True)
class Asked:
    """What the command line asks for."""

    model: str
    targets: Sequence[str] = (BY_DEFAULT,)
    options: Mapping[str, str] = field(default_factory=dict)
    step: Step = field(default_factory=Step)
    machine: Machine = field(default_factory=Machine)
    is_full: bool = False
    as_json: bool = False


def run_explain(asked: Asked) -> int:
    """Print what fuses for each target, and what the attention of a full model costs.

    Returns 1 if attention that looks like MLA was not fused, and else 0."""
    with progress() as announce, warnings.catch_warnings():
        warnings.simplefilter("ignore", MlaWarning)  # the report says the same
        announce(f"building {asked.model}")
        usable, absent = _usable(asked.targets)
        config, call = _model(asked, usable)
        reports = dict(_reports(asked, call, usable, announce))
    sizes = None if config is None else (Sizes.of(config), attention_layers(config), asked.step, asked.machine)
    if asked.as_json:
        told = {name: report.to_dict() for name, report in reports.items()}
        print(json.dumps({"targets": told, "absent": absent, "costs": sizes and costs.to_dict(*sizes)}, indent=2))
    else:
        parts = [*absent.values(), *map(str, reports.values()), *([costs.told(*sizes)] if sizes else [])]
        print("\n\n".join(parts))
    return int(any(map(leaves_mla, reports.values())))


def leaves_mla(report: Report) -> bool:
    """Whether there is attention that looks like MLA and in whose layer nothing fused."""
    unfused = (one.missed for outcomes in report.layers.values() for one in outcomes if not one.fused)
    return bool(report.hindrances) or any(missed is not None and missed.looks_like_mla for missed in unfused)


def _model(asked: Asked, targets: Sequence[str]) -> tuple[Any, Call]:
    """The configuration of a full model, if it is one, and the call to trace."""
    if asked.model.endswith(".py"):
        return None, script_call(Path(asked.model))
    if not is_config(asked.model) and not asked.is_full:
        return None, tiny_call(asked.model, "cpu" if all(map(_runs_here, targets)) else "meta")
    config = read_config(asked.model) if is_config(asked.model) else config_class(asked.model)()
    return config, full_call(config, asked.step)


def _runs_here(name: str) -> bool:
    target = discovery.targets().get(name)
    return target is None or target.runs_operators or target.serves([torch.empty(1)])


def _reports(asked: Asked, call: Call, targets: Sequence[str], announce: Announce) -> Iterator[tuple[str, Report]]:
    function, args, kwargs = call
    for name in targets:
        announce(f"tracing {asked.model}, and rewriting it for {name}")
        yield name, explain(function, target=name, **_options_of(name, asked.options, targets))(*args, **kwargs)


def _options_of(name: str, options: Mapping[str, str], usable: Sequence[str]) -> dict[str, str]:
    """The options that this target takes, and those that none takes, which `explain` refuses."""
    taken = {target: OWN | discovery.targets()[target].accepts() for target in usable if target in discovery.targets()}
    known = frozenset[str]().union(*taken.values())
    return {key: value for key, value in options.items() if key in taken.get(name, OWN) or key not in known}


def _usable(names: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The targets that can be used here, and a sentence for each other one.

    The rules are the same for every target, so where one is missing, the reference shows what they find."""
    known = discovery.targets()
    asked = list(known) if ALL in names else list(dict.fromkeys(names))
    reasons = {name: known[name].missing() if name in known else None for name in asked}  # explain refuses unknown ones
    absent = {
        name: f"target {name!r} cannot be used here: {reason}. Its limits are not checked; "
        f"{BY_DEFAULT!r} shows what the rules find for every target."
        for name, reason in reasons.items()
        if reason
    }
    usable = [name for name in asked if name not in absent]
    return usable if usable and (not absent or BY_DEFAULT in usable) else [*usable, BY_DEFAULT], absent
