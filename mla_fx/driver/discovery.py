"""Finds patterns and targets by walking their folders; a file dropped there is used, and no list names it.

A user's own patterns are elsewhere: in a module or package named by an entry point of the group `mla_fx.patterns`, or
in a folder passed to `register_patterns`."""

import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import pkgutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

from mla_fx.errors import OptionError
from mla_fx.graph.default_device import on_processor
from mla_fx.rule import Rule
from mla_fx.target import Target

PATTERNS, LOWERING = "mla_fx.patterns", "mla_fx.lowering"
ENTRY_POINTS = "mla_fx.patterns"

_registered: list[str] = []  # the packages of registered folders; global like the process's modules


@dataclass(frozen=True)
class Fault:
    """A file that cannot be used, by the name of its rule or target, and the reason."""

    name: str
    place: str
    error: Exception

    def __str__(self) -> str:
        return f"{self.place} cannot be used and is skipped: {type(self.error).__name__}: {self.error}"


@dataclass(frozen=True)
class Found:
    """One instance of each class, and the files that cannot be used."""

    values: tuple[Any, ...]
    faults: tuple[Fault, ...]


def rules() -> tuple[Rule, ...]:
    """One instance of every rule, by name, each after the rules in its `after`."""
    return found_rules().values


@functools.cache
def targets() -> Mapping[str, Target]:
    """One instance of every target in `lowering/`, by name."""
    return MappingProxyType({target.name: target for target in found_targets().values})


@functools.cache
def found_rules() -> Found:
    found = _found(packages(), Rule)
    return replace(found, values=_in_order(found.values))


@functools.cache
def found_targets() -> Found:
    return _found((LOWERING,), Target)


def _in_order(rules: Sequence[Rule]) -> tuple[Rule, ...]:
    met, ordered = set[Rule](), list[Rule]()

    def place(rule: Rule) -> None:
        if rule in met:
            return
        met.add(rule)
        for other in rules:
            if other.name in rule.after:
                place(other)
        ordered.append(rule)

    for rule in rules:
        place(rule)
    return tuple(ordered)


@functools.cache
def packages() -> tuple[str, ...]:
    """The modules and packages with rules: the project's own, those of entry points, and registered folders."""
    named = sorted(entry.module for entry in importlib.metadata.entry_points(group=ENTRY_POINTS))
    return tuple(dict.fromkeys((PATTERNS, *named, *_registered)))


def register_patterns(folder: str | Path) -> None:
    """Apply the rules in a folder's files from now on, in this process, in addition to those in `patterns/`.

    Each file is imported as a module of a package for the folder, so files may import each other with
    `from .other import ...`. A rule has its file's name, also in the option `disable`. Registering a folder again reads
    it again for new files. Raises OptionError for a folder that does not exist."""
    path = Path(folder).resolve()
    if not path.is_dir():
        raise OptionError(f"there is no folder {str(path)!r} to register patterns from")
    name = f"mla_fx_patterns_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    if name not in _registered:
        _make_package(name, path)
        _registered.append(name)
    importlib.invalidate_caches()
    for known in (found_rules, packages):
        known.cache_clear()


def _make_package(name: str, folder: Path) -> None:
    """Make a folder's files importable as modules of a package."""
    spec = ModuleSpec(name, None, is_package=True)
    spec.submodule_search_locations = [str(folder)]
    sys.modules[name] = importlib.util.module_from_spec(spec)


def _find_beside(package: str) -> None:
    """In a clone that is not installed, or that hides an installed one, the folder is next to that of `mla_fx`."""
    folder = Path(__file__).parents[2] / package.rpartition(".")[2]
    if importlib.util.find_spec(package) is None and folder.is_dir():
        _make_package(package, folder)


def _found(packages: Sequence[str], base: type) -> Found:
    """Sorted by name."""
    values: dict[str, list[Any]] = {}
    faults = []
    for name, place, load in (file for package in packages for file in _files(package)):
        try:
            with on_processor():
                made = [kind() for kind in own_classes(load(), base)]
            taken = sorted({value.name for value in made} & values.keys())
            if taken:
                raise NameError(f"another rule is called {taken[0]!r}; names must be unique")
        except Exception as error:
            faults.append(Fault(name, place, error))
        else:
            for value in made:
                values.setdefault(value.name, []).append(value)
    return Found(tuple(value for name in sorted(values) for value in values[name]), tuple(faults))


def own_classes(module: ModuleType, base: type) -> Iterator[type]:
    """The public classes of a kind that a module defines itself."""
    for _, value in sorted(vars(module).items()):
        is_own = inspect.isclass(value) and value.__module__ == module.__name__
        if is_own and issubclass(value, base) and not value.__name__.startswith("_"):
            yield value


def _files(package: str) -> Iterator[tuple[str, str, Callable[[], ModuleType]]]:
    """For a module, and for each module of a package: its last name, its file, and a function that imports it."""
    load = functools.partial(importlib.import_module, package)
    yield package.rpartition(".")[2], f"module {package!r}", load
    try:
        root = load()
    except Exception:
        return  # found when the package is imported
    for found in sorted(pkgutil.iter_modules(getattr(root, "__path__", ())), key=lambda module: module.name):
        name = f"{package}.{found.name}"
        spec = found.module_finder.find_spec(name, None)
        place = str(spec.origin) if spec is not None else name
        yield found.name, place, functools.partial(importlib.import_module, name)


def sources(package: str) -> Iterator[tuple[str, Path]]:
    """The files of a module or package by name, also in an editable install, and in other places on its path."""
    try:
        root = importlib.import_module(package)
    except Exception:
        return
    if not hasattr(root, "__path__"):
        yield package, Path(str(root.__file__))
    for folder in map(Path, getattr(root, "__path__", ())):
        for file in sorted(folder.rglob("*.py")):
            yield f"{package}/{file.relative_to(folder)}", file


for _package in (PATTERNS, LOWERING):
    _find_beside(_package)
