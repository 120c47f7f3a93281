"""The options of a compilation."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from .errors import OptionError

if TYPE_CHECKING:
    from .target import Target

CHOICES = {"verify": ("off", "first", "always"), "absorb": ("auto", "always", "never")}


@dataclass(frozen=True)
class Options:
    """What a user may ask of a compilation.

    target   where the graph goes: "auto", or the name of a file in `lowering/`
    strict   raise FusionError when a layer that looks like MLA stays unfused, or when a pass fails
    expect   fused operator -> how often it must appear; anything else raises FusionError
    dump     a folder for the graph before and after each pass; the variable MLA_FX_DUMP does the same
    verify   run the unfused graph beside the fused one and compare: "off", on the "first" call, or "always"
    disable  names of patterns not to apply
    absorb   attention over latents with few query tokens ("auto"), "always", or "never"
    extra    the target's own options
    """

    target: str = "auto"
    strict: bool = False
    expect: Mapping[str, int] | None = None
    dump: str | None = field(default_factory=lambda: os.environ.get("MLA_FX_DUMP"))
    verify: str = "off"
    disable: tuple[str, ...] = ()
    absorb: str = "auto"
    extra: Mapping[str, Any] = field(default_factory=dict)


def parse(given: Mapping[str, Any], targets: Mapping[str, Target], patterns: frozenset[str]) -> Options:
    """Options from a user's dict. Raises OptionError naming what is unknown and what is known."""
    given = dict(given)
    own = {option.name for option in fields(Options)} - {"extra"}
    name = str(given.get("target"))
    if name not in targets:
        raise OptionError(f"unknown target {name!r}; known targets are {_listed(['auto', *targets])}")
    for option, choices in CHOICES.items():
        if option in given and given[option] not in choices:
            raise OptionError(f"option {option} is {given[option]!r}; it takes {_listed(choices)}")
    extra = {option: given.pop(option) for option in sorted(set(given) - own)}
    unknown = sorted(set(extra) - targets[name].accepts()) if extra else []
    if unknown:
        raise OptionError(
            f"unknown option {_listed(unknown)} for target {name!r}; known options are {_listed(sorted(own))}"
            f" and those of the target: {_summary(targets[name].accepts())}"
        )
    return Options(**{**given, **_converted(given, patterns)}, extra=extra)


def _converted(given: Mapping[str, Any], patterns: frozenset[str]) -> dict[str, Any]:
    converted: dict[str, Any] = {}
    if "disable" in given:
        disable = given["disable"]
        converted["disable"] = (disable,) if isinstance(disable, str) else tuple(disable)
        unknown = sorted(set(converted["disable"]) - patterns)
        if unknown:
            raise OptionError(
                f"option disable names {_listed(unknown)}; known patterns are {_listed(sorted(patterns))}"
            )
    if given.get("dump") is not None:
        converted["dump"] = os.fspath(given["dump"])
    return converted


def _listed(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names) or "none"


def _summary(names: frozenset[str]) -> str:
    shown = sorted(names)
    return _listed(shown) if len(shown) <= 12 else f"{len(shown)} of its own, such as {_listed(shown[:3])}"
