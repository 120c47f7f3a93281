"""Finds patterns and targets by walking their folders; a file dropped there is used, and nothing else names it."""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
from collections.abc import Iterator, Mapping
from types import MappingProxyType, ModuleType
from typing import Any

from .rule import Rule
from .target import Target


@functools.cache
def rules() -> tuple[Rule[Any], ...]:
    """One instance of every rule in `patterns/`, sorted by name."""
    return tuple(found() for found in _subclasses("mla_fx.patterns", Rule))


@functools.cache
def targets() -> Mapping[str, Target]:
    """One instance of every target in `lowering/`, by name."""
    found = [target() for target in _subclasses("mla_fx.lowering", Target)]
    return MappingProxyType({target.name: target for target in found})


def _subclasses(package: str, base: type) -> Iterator[type]:
    for module in _modules(package):
        for _, value in sorted(vars(module).items()):
            is_own = inspect.isclass(value) and value.__module__ == module.__name__
            if is_own and issubclass(value, base) and not value.__name__.startswith("_"):
                yield value


def _modules(package: str) -> Iterator[ModuleType]:
    root = importlib.import_module(package)
    for found in sorted(pkgutil.iter_modules(root.__path__), key=lambda module: module.name):
        yield importlib.import_module(f"{package}.{found.name}")


def folders(package: str) -> list[str]:
    """Where a package's files lie, also in an editable install, and where else its user has it look for some."""
    return list(importlib.import_module(package).__path__)
