"""The options of a compilation."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from .errors import OptionError
from .expect import Expectation, expectation

if TYPE_CHECKING:
    from .target import Target

AUTO = "auto"


@dataclass(frozen=True)
class Options:
    """What a user may ask of a compilation.

    target   where the graph goes: "auto", or the name of a file in `lowering/`
    strict   raise FusionError when a layer that looks like MLA stays unfused, or when a pass fails
    expect   operators that each graph with attention must fuse, or just how often; anything else raises FusionError
    dump     a folder for the graph before and after each pass; the variable MLA_FX_DUMP does the same
    verify   run the unfused graph beside the fused one and compare: "off", on the "first" call, or "always"
    disable  names of patterns not to apply
    absorb   attention over latents with few query tokens ("auto"), "always", or "never"
    lay_out  weights that an operator takes in another layout are laid out once and kept beside the model's own
    extra    the target's own options
    """

    target: str = AUTO
    strict: bool = False
    expect: Expectation | None = None
    dump: str | None = field(default_factory=lambda: os.environ.get("MLA_FX_DUMP"))
    verify: str = "off"
    disable: tuple[str, ...] = ()
    absorb: str = "auto"
    lay_out: bool = True
    extra: Mapping[str, Any] = field(default_factory=dict)


OWN = frozenset(option.name for option in fields(Options)) - {"extra"}


def parse(given: Mapping[str, Any], targets: Mapping[str, Target], patterns: frozenset[str]) -> Options:
    """Options from a user's dict. Raises OptionError naming what does not exist or does not fit, and what does.

    As long as the target is "auto", the own options of any target will do."""
    target = given.get("target", AUTO)
    if target not in (AUTO, *targets):
        raise OptionError(f"unknown target {target!r}; known targets are {_listed([AUTO, *targets])}")
    extra = {option: given[option] for option in sorted(set(given) - OWN)}
    _check_known(extra, target, targets)
    own = {option: _CHECKS[option](given[option]) for option in given if option in _CHECKS}
    unknown = sorted(set(own.get("disable", ())) - patterns)
    if unknown:
        raise OptionError(f"option disable names {_listed(unknown)}; known patterns are {_listed(sorted(patterns))}")
    return Options(target=target, **own, extra=extra)


def _check_known(extra: Mapping[str, Any], target: str, targets: Mapping[str, Target]) -> None:
    if not extra:
        return
    accepted: frozenset[str] = frozenset().union(
        *(known.accepts() for name, known in targets.items() if target in (name, AUTO))
    )
    unknown = sorted(set(extra) - accepted)
    if unknown:
        raise OptionError(
            f"unknown option {_listed(unknown)} for target {target!r}; known options are {_listed(sorted(OWN))}"
            f" and those of the target: {_summary(accepted, like=unknown[0])}"
        )


def _one_of(option: str, *choices: Any) -> Callable[[Any], Any]:
    def checked(value: Any) -> Any:
        if not any(type(value) is type(choice) and value == choice for choice in choices):
            raise OptionError(f"option {option} is {value!r}; it takes {_listed(choices)}")
        return value

    return checked


def _folder(value: Any) -> str | None:
    if value is None or isinstance(value, (str, os.PathLike)):
        return None if value is None else str(os.fspath(value))
    raise OptionError(f"option dump is {value!r}; it takes a folder, as a string or a path, or None")


def _names(value: Any) -> tuple[str, ...]:
    names = (value,) if isinstance(value, str) else value
    if not isinstance(names, Collection) or not all(isinstance(name, str) for name in names):
        raise OptionError(f"option disable is {value!r}; it takes the name of a pattern, or several")
    return tuple(names)


_CHECKS: Mapping[str, Callable[[Any], Any]] = {
    "strict": _one_of("strict", False, True),
    "expect": lambda value: None if value is None else expectation(value),
    "dump": _folder,
    "verify": _one_of("verify", "off", "first", "always"),
    "disable": _names,
    "absorb": _one_of("absorb", "auto", "always", "never"),
    "lay_out": _one_of("lay_out", True, False),
}


def _listed(names: Iterable[Any]) -> str:
    return ", ".join(repr(name) for name in names) or "none"


def _summary(names: frozenset[str], *, like: str) -> str:
    """The names, or of too many those that are most alike."""
    if len(names) <= 12:
        return _listed(sorted(names))
    near = difflib.get_close_matches(like, names, n=3, cutoff=0)
    return f"{len(names)} of its own, most alike {_listed(near)}"
