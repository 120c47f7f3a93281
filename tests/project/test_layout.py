"""The imports between the folders, the size of files, and what `import mla_fx` imports."""

import ast
import re
import subprocess
import sys

import pytest
from lib.sources import ROOT, check_each, imports, is_within

from mla_fx.driver import discovery

CORE = sorted((ROOT / "mla_fx").rglob("*.py"))
PLUGINS = sorted([*(ROOT / "patterns").rglob("*.py"), *(ROOT / "lowering").rglob("*.py")])
NPU = ROOT / "tests" / "npu"
KERNELS = sorted([*(NPU / "ge_ops").glob("*.py"), *NPU.glob("ge_*.py"), NPU / "cpu_kernels.py", NPU / "formats.py"])
TESTS = sorted((ROOT / "tests").rglob("*.py"))
OPERATORS = sorted((ROOT / "mla_fx" / "ops").rglob("*.py"))
LINES = 400


def test_relative_imports_are_read_as_full_names():
    assert "mla_fx.errors.NoMatch" in set(imports(ROOT / "mla_fx" / "readings" / "rope.py"))


def outside(path, *allowed):
    return [module for module in imports(path) if not is_within(module, *allowed)]


def test_operators_import_torch_and_nothing_else_of_ours_but_errors():
    allowed = ("torch", "mla_fx.ops", "mla_fx.errors", *sys.stdlib_module_names)
    check_each(OPERATORS, lambda path: outside(path, *allowed), "Operators import torch, and errors of the package")


def test_what_takes_less_time_is_asked_of_the_target():
    """What PyTorch can do on a device is in one file."""
    rules = (ROOT / "patterns").rglob("*.py")

    def offences(path):
        text = path.read_text(encoding="utf-8")
        return [words for words in ("measured", "device.type") if words in text]

    plain = [path for path in (*OPERATORS, *rules) if path.name != "machine.py"]
    check_each(plain, offences, "Operators and rules have no measured numbers, and know no devices")


def test_nothing_imports_a_pattern_or_a_target_by_name():
    """A large pattern has its own folder. Targets may share one, and a folder may build on another's."""
    targets = [f"lowering.{found.name}" for found in (ROOT / "lowering").iterdir() if found.is_dir()]

    def offences(path):
        folder = ".".join(path.relative_to(ROOT).parts[:2])
        shared = targets if path.is_relative_to(ROOT / "lowering") else [folder]
        plugged = ("mla_fx.patterns", "mla_fx.lowering", "patterns", "lowering")
        return [module for module in outside(path, *shared) if is_within(module, *plugged)]

    check_each([*CORE, *PLUGINS], offences, "Patterns and targets are found, not imported by name")


# From the bottom to the top: each folder imports those before it.
ROOMS = (
    "mla_fx.errors", "mla_fx.ops", "mla_fx.graph", "mla_fx.readings", "mla_fx.rewriting", "mla_fx.matching",
    "mla_fx.comparing",
    "mla_fx.cases", "mla_fx.rule", "mla_fx.target", "mla_fx.options", "mla_fx.debug", "mla_fx.passes", "mla_fx.driver",
    "mla_fx.backend", "mla_fx.graph_pass", "mla_fx", "mla_fx.commands", "mla_fx.__main__",
)  # fmt: skip


def test_the_check_of_rewrites_shares_no_code_with_what_it_checks():
    """It sees drafts, which are calls, and nothing of how they were found or are computed."""
    shared = ("mla_fx.comparing", "mla_fx.graph", "mla_fx.errors", "mla_fx.rewriting.draft")
    check_each(
        sorted((ROOT / "mla_fx" / "comparing").glob("*.py")),
        lambda path: [module for module in outside(path, *shared) if is_within(module, "mla_fx")],
        f"What compares imports {', '.join(shared)} and nothing else of the package",
    )


def room_of(module):
    return max((room for room in ROOMS if is_within(module, room)), key=len)


def test_no_arrow_points_up():
    """Also if a name is imported only for its type."""

    def offences(path):
        own = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        above = ROOMS[ROOMS.index(room_of(own)) + 1 :]
        return [module for module in imports(path) if is_within(module, "mla_fx") and room_of(module) in above]

    check_each(CORE, offences, "A folder imports those before it")


def test_plugins_import_no_pass_and_nothing_of_the_driver():
    closed = ("mla_fx.passes", "mla_fx.driver", "mla_fx.debug")
    check_each(
        PLUGINS,
        lambda path: [module for module in imports(path) if is_within(module, *closed)],
        f"Patterns and targets import nothing of {', '.join(closed)}",
    )


def test_plugins_import_the_core_and_torch():
    allowed = ("mla_fx", "torch", "functorch", *sys.stdlib_module_names)

    def offences(path):
        eager = [node for node in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(node, ast.ImportFrom)]
        return [node.module for node in eager if node.level == 0 and not is_within(node.module, *allowed)]

    check_each(PLUGINS, offences, "Patterns and targets import the package and torch")


def test_the_kernels_of_the_npu_tests_share_nothing_with_the_package():
    """What is right for them is the vendor's documents, so that a fault in the package's own operators shows."""
    allowed = ("torch", "torch_npu", "torchair", "npu", *sys.stdlib_module_names)

    def offences(path):
        return [*outside(path, *allowed), *re.findall("mla_fx", path.read_text(encoding="utf-8"))]

    check_each(KERNELS, offences, "Kernels of the NPU tests share nothing with the package")


def test_a_file_can_be_read_in_one_sitting():
    def too_long(path):
        lines = len(path.read_text(encoding="utf-8").splitlines())
        return [f"{lines} lines"] if lines > LINES else []

    check_each([*CORE, *PLUGINS, *TESTS], too_long, f"A file has {LINES} lines at most")


def test_no_file_imports_a_test():
    def offences(path):
        return [module for module in imports(path) if any(part.startswith("test_") for part in module.split("."))]

    check_each(TESTS, offences, "What several tests share is in tests/lib or in a helper of its folder")


@pytest.mark.parametrize("folder", ["mla_fx", "."], ids=["rooms", "plugins"])
def test_every_room_has_its_tests(folder):
    names = {path.parent.name for path in (ROOT / folder).glob("*/__init__.py")} - {"mla_fx"}
    assert [name for name in sorted(names) if not [*(ROOT / "tests" / name).rglob("test_*.py")]] == []


@pytest.mark.parametrize("rule", discovery.rules(), ids=lambda rule: rule.name)
def test_a_rule_brings_its_cases(rule):
    assert rule.accepts, "a rule says what it must fuse"
    # a rule without misses has no reasons to show; its own tests check what it leaves unchanged
    assert rule.rejects or not rule.tells_misses, "a rule says what it must leave alone"
    assert all(case.fused for case in rule.accepts)
    assert all(case.because for case in rule.rejects)


def test_every_file_in_patterns_holds_one_rule():
    """Or a folder, where a pattern is large; other rules in it have names of their own that begin with the folder's."""
    files = {path.stem for path in (ROOT / "patterns").glob("*.py")} - {"__init__"}
    folders = {path.parent.name for path in (ROOT / "patterns").glob("*/__init__.py")}
    homes = {rule.name: type(rule).__module__.rpartition(".")[2] for rule in discovery.rules()}
    assert set(homes.values()) == files | folders
    assert all(name == home if home in files else name.startswith(home) for name, home in homes.items())
    assert folders <= homes.keys()


def test_every_file_in_lowering_holds_one_target():
    files = {path.stem for path in (ROOT / "lowering").glob("*.py")} - {"__init__"}
    assert set(discovery.targets()) == files


HEAVY = ("transformers", "rich", "torch._inductor", "torchair", "triton")


def test_importing_the_package_stays_light():
    """Compared with what `import torch` alone brings."""
    code = "import sys, torch; before = set(sys.modules); import mla_fx; print(*sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert [module for module in done.stdout.split() if is_within(module, *HEAVY)] == []


def test_the_backend_is_registered_by_name():
    import torch._dynamo

    assert "mla" in torch._dynamo.list_backends()
