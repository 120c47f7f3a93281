"""The options of a compilation."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from .errors import OptionError
from .graph.torch_compilers import debug_folder

if TYPE_CHECKING:
    from .target import Target

AUTO = "auto"
DISABLE = "MLA_FX_DISABLE"
EXPECTED = "it takes operators, or a mapping of operators to a number of calls or a tuple of numbers"


@dataclass(frozen=True)
class Expectation:
    """Allowed numbers of calls per operator; None allows any number except zero.

    With `is_complete`, no other operator may have been fused."""

    counts: Mapping[str, tuple[int, ...] | None]
    is_complete: bool

    def is_met(self, fused: Mapping[str, int]) -> bool:
        if self.is_complete and set(fused) - set(self.counts):
            return False
        return all(_will_do(fused.get(name, 0), wanted) for name, wanted in self.counts.items())

    def __str__(self) -> str:
        if not self.is_complete:
            return " and ".join(map(repr, self.counts))
        return repr(
            {name: wanted[0] if wanted and len(wanted) == 1 else wanted for name, wanted in self.counts.items()}
        )


def _usual_dump() -> str | None:
    """The folder that variables ask for."""
    asked = os.environ.get("TORCH_COMPILE_DEBUG") == "1"
    return os.environ.get("MLA_FX_DUMP") or (str(debug_folder() / "mla_fx") if asked else None)


@dataclass(frozen=True)
class Options:
    """The options of a compilation.

    - target: what compiles the graph: "auto", or the name of a file in `lowering/`.
    - strict: raise FusionError if a layer that looks like MLA does not fuse, or if a pass fails.
    - expect: operators that each graph with attention must fuse, or their numbers of calls; anything else raises
      FusionError.
    - dump: a folder for the graph after each pass; the variable MLA_FX_DUMP does the same, and TORCH_COMPILE_DEBUG=1
      does it in torch's own folder.
    - verify: run the unfused graph next to the fused one and compare, "off", at the "first" call, or "always".
      `mla_fx.comparing.verify` documents what is compared; VerificationError names the result, rule, layer and call,
      and a program that shows the difference, written to the dump folder or to a temporary one.
    - prove: check each rewrite, once for each kind of layer, by running both sides on small random numbers: "on",
      "off", or "required", which refuses what cannot be checked.
    - disable: names of patterns not to apply; the variable MLA_FX_DISABLE adds more, separated by commas.
    - quant: fuse quantised layers only if the operator has the program's codes and scales ("exact"), or also if it has
      the "vendor"'s; the report names each difference.
    - absorb: attend over latents for few query tokens ("auto"), "always", or "never".
    - lay_out: keep copies of weights in the layout that an operator needs.
    - extra: the target's own options, including those that `mode` sets.
    """

    target: str = AUTO
    strict: bool = False
    expect: Expectation | None = None
    dump: str | None = field(default_factory=_usual_dump)
    verify: str = "off"
    prove: str = "on"
    disable: tuple[str, ...] = ()
    quant: str = "exact"
    absorb: str = "auto"
    lay_out: bool = True
    extra: Mapping[str, Any] = field(default_factory=dict)


MODE = "mode"
OWN = frozenset(option.name for option in fields(Options)) - {"extra"} | {MODE}


def by_name(given: Any) -> Mapping[str, Any]:
    """A user's options by name. Raises OptionError for anything but a mapping of strings."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise OptionError(f"options is {given!r}; it takes a dict of options, such as {{'target': 'reference'}}")
    for name in given:
        if not isinstance(name, str):
            raise OptionError(f"options holds the name {name!r}; the names of options are strings")
    return given


def parse(given: Mapping[str, Any], targets: Mapping[str, Target], patterns: frozenset[str]) -> Options:
    """Parse options from a user's dict. Raises OptionError that names what does not exist or fit, and what does.

    While the target is "auto", the mode and options of any target are accepted."""
    target = given.get("target", AUTO)
    if target not in (AUTO, *targets):
        raise OptionError(f"unknown target {target!r}; known targets are {_listed([AUTO, *targets])}")
    asked = targets if target == AUTO else {target: targets[target]}
    theirs = {option: given[option] for option in sorted(set(given) - OWN)}
    for option in theirs:
        _check_known(option, target, asked, targets)
    own = {option: _CHECKS[option](given[option]) for option in given if option in _CHECKS}
    outside = tuple(filter(None, map(str.strip, os.environ.get(DISABLE, "").split(","))))
    for where, names in (("option disable", own.get("disable", ())), (DISABLE, outside)):
        _check_patterns(where, names, patterns)
    own["disable"] = tuple(dict.fromkeys([*own.get("disable", ()), *outside]))
    return Options(target=target, **own, extra=_of_target(theirs, given.get(MODE), asked))


def _check_patterns(where: str, names: Iterable[str], patterns: frozenset[str]) -> None:
    unknown = sorted(set(names) - patterns)
    if unknown:
        raise OptionError(f"{where} names {_listed(unknown)}; known patterns are {_listed(sorted(patterns))}")


def _of_target(theirs: Mapping[str, Any], mode: Any, asked: Mapping[str, Target]) -> Mapping[str, Any]:
    """A target's own options, including those that the mode sets, of the first target that accepts both."""
    able = [target for target in asked.values() if target.accepts() >= set(theirs)]
    if not able:
        raise OptionError(f"no target has all of the options {_listed(theirs)}")
    refusals = []
    for target in able:
        try:
            meant = {} if mode in (None, "default") else target.mode_options(mode)
            target.check(theirs)
        except OptionError as refusal:
            refusals.append(str(refusal))
        else:
            return {**meant, **theirs}
    raise OptionError("; ".join(dict.fromkeys(refusals)))


def _check_known(option: str, target: str, asked: Mapping[str, Target], targets: Mapping[str, Target]) -> None:
    known = frozenset[str]().union(*(target.accepts() for target in asked.values()))
    if option in known:
        return
    unknown = f"unknown option {option!r} for target {target!r}"
    if option == "options":
        raise OptionError(f"{unknown}; options are keywords, as in target='reference'")
    others = [name for name, other in targets.items() if option in other.accepts()]
    if others:
        raise OptionError(f"{unknown}; it is one of target {_listed(others)}")
    for names in (OWN, known):  # ours first: a target may have hundreds
        near = difflib.get_close_matches(option, names, n=1, cutoff=0.7)
        if near:
            raise OptionError(f"{unknown}; do you mean {near[0]!r}?")
    of_target = _listed(sorted(known)) if len(known) <= 12 else f"{len(known)} of its own"
    raise OptionError(f"{unknown}; known options are {_listed(sorted(OWN))} and those of the target: {of_target}")


def _will_do(count: int, wanted: tuple[int, ...] | None) -> bool:
    return count > 0 if wanted is None else count in wanted


def expectation(given: Any) -> Expectation:
    """Parse the value of `expect`. Raises OptionError for anything but operators and numbers."""
    if isinstance(given, Mapping):
        counts: dict[str, tuple[int, ...] | None] = {_operator(name): _numbers(given[name]) for name in given}
        return Expectation(counts, is_complete=True)
    if isinstance(given, str):
        return Expectation({_operator(given): None}, is_complete=False)
    if isinstance(given, Collection) and not isinstance(given, bytes):
        return Expectation({_operator(name): None for name in given}, is_complete=False)
    raise OptionError(f"option expect is {given!r}; {EXPECTED}")


def _operator(name: Any) -> str:
    from mla_fx.ops import names

    known = names()
    if name not in known:
        raise OptionError(f"option expect names {name!r}; known operators are {', '.join(map(repr, known))}")
    return str(name)


def _numbers(given: Any) -> tuple[int, ...]:
    numbers = given if isinstance(given, tuple) else (given,)
    if numbers and all(type(number) is int and number >= 0 for number in numbers):
        return numbers
    raise OptionError(f"option expect holds the number {given!r}; {EXPECTED}")


def _one_of(option: str, *choices: Any) -> Callable[[Any], Any]:
    def checked(value: Any) -> Any:
        if not any(type(value) is type(choice) and value == choice for choice in choices):
            raise OptionError(f"option {option} is {value!r}; it takes {_listed(choices)}")
        return value

    return checked


def _folder(value: Any) -> str | None:
    if value is None:
        return None
    if isinstance(value, (str, os.PathLike)) and os.fspath(value):
        return str(os.fspath(value))
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
    "prove": _one_of("prove", "on", "off", "required"),
    "disable": _names,
    "quant": _one_of("quant", "exact", "vendor"),
    "absorb": _one_of("absorb", "auto", "always", "never"),
    "lay_out": _one_of("lay_out", True, False),
}


def _listed(names: Iterable[Any]) -> str:
    return ", ".join(repr(name) for name in names) or "none"
