"""The options of a compilation."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from .errors import OptionError

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


def parse(given: Mapping[str, Any] | None, accepted: Mapping[str, frozenset[str] | None], patterns: frozenset[str]) -> Options:
    """Options from a user's dict. `accepted` maps each target to the names of its own options (None: any name).

    Raises OptionError naming what is unknown and what is known."""
    given = dict(given or {})
    own = {option.name for option in fields(Options)} - {"extra"}
    target = given.get("target", "auto")
    if target not in accepted:
        raise OptionError(f"unknown target {target!r}; known targets are {_listed(accepted)}")
    for name, choices in CHOICES.items():
        if name in given and given[name] not in choices:
            raise OptionError(f"option {name} is {given[name]!r}; it takes {_listed(choices)}")
    disable = given.get("disable", ())
    disable = (disable,) if isinstance(disable, str) else tuple(disable)
    unknown = sorted(set(disable) - patterns)
    if unknown:
        raise OptionError(f"option disable names {_listed(unknown)}; known patterns are {_listed(sorted(patterns))}")
    extra = {name: given.pop(name) for name in sorted(set(given) - own)}
    takes = accepted[target]
    wrong = [] if takes is None else sorted(set(extra) - takes)
    if wrong:
        known = _listed(sorted(own | (takes or frozenset())))
        raise OptionError(f"unknown option {_listed(wrong)} for target {target!r}; known options are {known}")
    given.pop("disable", None)
    if "dump" in given and given["dump"] is not None:
        given["dump"] = os.fspath(given["dump"])
    return Options(**given, disable=disable, extra=extra)


def _listed(names: Any) -> str:
    return ", ".join(repr(name) for name in names)
