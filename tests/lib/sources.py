"""The files of the repository, and what they import."""

import ast
import importlib.util
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]


def name_of(path):
    return str(path.relative_to(ROOT))


def check_each(paths, offences, rule):
    """Fails with the rule and the files in which `offences` finds something. There must be files to look at."""
    assert paths, f"no files for the rule: {rule}"
    found = [f"{name_of(path)} ({', '.join(some)})" for path in paths if (some := [*map(str, offences(path))])]
    assert not found, f"{rule}. Files that break this: {'; '.join(found)}."


@cache
def imports(path):
    """The modules that a file imports anywhere; relative ones by their full names."""
    return tuple(_imports(path))


def _imports(path):
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" for alias in node.names)


def is_within(module, *packages):
    return any(module == package or module.startswith(f"{package}.") for package in packages)


EXAMPLES = ROOT / "examples"


def example(name):
    """The module of an example, on a CPU."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.DEVICE = "cpu"
    return module
