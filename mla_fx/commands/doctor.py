"""Says what works here: what the compiler needs, what targets need, and what this machine has."""

import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from mla_fx.driver import discovery
from mla_fx.errors import first_line
from mla_fx.graph.torch_compilers import cache_folder, cpp_compiler

OPTIONAL = {
    "torch_npu": "the targets ge and aclgraph",
    "transformers": "explain and demo",
    "torchao": "quantised models",
    "rich": "tables and explain",
}
CPU_FEATURES = ("avx2", "avx512_f", "avx512_bf16", "amx_bf16", "amx_int8")


@dataclass(frozen=True)
class Finding:
    """Whether something works, and which it is or why not. `is_needed` if compiling on this machine needs it."""

    name: str
    works: bool
    why: str = ""
    is_needed: bool = False

    def __str__(self) -> str:
        return f"{self.name}: {'works' if self.works else 'does not'}" + (f": {self.why}" if self.why else "")


def run_doctor(*, as_json: bool = False) -> int:
    """Print all findings. Returns 1 if something that is needed does not work."""
    found = list(findings())
    print(json.dumps([asdict(one) for one in found], indent=2) if as_json else "\n".join(map(str, found)))
    return int(any(one.is_needed and not one.works for one in found))


def findings() -> Iterator[Finding]:
    yield _tried("torch", _torch, is_needed=True)
    yield _tried("C++ compiler", _compiler, is_needed=True)
    yield _tried("compile caches", _caches, is_needed=True)
    yield _tried("rules and targets", _plugins, is_needed=True)
    for name, target in discovery.targets().items():
        reason = target.missing()
        yield Finding(f"target {name}", reason is None, reason or "")
    yield _tried("CANN", _cann)
    for name in OPTIONAL:
        yield _tried(name, lambda name=name: _imported(name))  # type: ignore[misc]  # a default
    yield _tried("CUDA", _cuda)
    for name in CPU_FEATURES:
        yield _tried(f"CPU feature {name}", lambda name=name: _cpu_feature(name))  # type: ignore[misc]  # a default


def _tried(name: str, check: Callable[[], str], *, is_needed: bool = False) -> Finding:
    """What `check` returns is what works; what it raises is why it does not."""
    try:
        return Finding(name, True, check(), is_needed)
    except Exception as error:
        return Finding(name, False, first_line(error) or type(error).__name__, is_needed)


def _torch() -> str:
    try:
        wanted = next(line for line in importlib.metadata.requires("mla_fx") or () if line.startswith("torch"))
    except importlib.metadata.PackageNotFoundError:
        return f"{torch.__version__}; mla_fx is not installed, so its requirement is unknown"
    (lowest,), (above,) = (re.findall(rf"{bound}([\d.]+)", wanted) for bound in (">=", "<"))
    if not _numbers(lowest) <= _numbers(torch.__version__) < _numbers(above):
        raise RuntimeError(f"it is {torch.__version__}; mla_fx needs {lowest} or newer, and older than {above}")
    return torch.__version__


def _numbers(version: str) -> tuple[int, ...]:
    """Major and minor."""
    return tuple(map(int, version.split(".")[:2]))


def _compiler() -> str:
    """Compiles a line, as Inductor does on CPUs."""
    compiler = cpp_compiler()
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "line.cpp"
        source.write_text("int main() { return 0; }\n", encoding="utf-8")
        command = [compiler, str(source), "-o", str(Path(folder) / "line")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{compiler} compiles no program: {done.stderr.strip()}")
    return compiler


def _caches() -> str:
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        return str(folder)


def _plugins() -> str:
    faults = (*discovery.found_rules().faults, *discovery.found_targets().faults)
    if faults:
        raise RuntimeError("; ".join(map(str, faults)))
    return f"{len(discovery.rules())} rules, {len(discovery.targets())} targets"


def _imported(name: str) -> str:
    """The version of an optional package, once it is imported."""
    if importlib.util.find_spec(name) is None:
        raise RuntimeError(f"it is not installed; {OPTIONAL[name]} need it")
    importlib.import_module(name)
    try:
        return importlib.metadata.version(name.replace("_", "-"))
    except importlib.metadata.PackageNotFoundError:
        return ""


def _cann() -> str:
    home = os.environ.get("ASCEND_HOME_PATH") or os.environ.get("ASCEND_TOOLKIT_HOME")
    if not home:
        raise RuntimeError("ASCEND_HOME_PATH is not set; CANN's set_env.sh sets it")
    if not Path(home).is_dir():
        raise RuntimeError(f"ASCEND_HOME_PATH is {home}, which is no folder")
    return home


def _cuda() -> str:
    if not torch.cuda.is_available():
        raise RuntimeError("torch has no CUDA here" if torch.version.cuda is None else "there is no CUDA device")
    return ", ".join(torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count()))


def _cpu_feature(name: str) -> str:
    if not hasattr(torch.cpu, "get_capabilities"):
        raise RuntimeError(f"torch {torch.__version__} does not tell")
    if not torch.cpu.get_capabilities().get(name):
        raise RuntimeError("this CPU does not have it")
    return ""
