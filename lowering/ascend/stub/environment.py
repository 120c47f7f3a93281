"""An environment in which torch_npu imports without an NPU: its packages and the stub libraries, for a child process.

Everything is in a cache folder, outside the environment that runs: with torch_npu installed there, a plain
`import torch` fails without CANN's libraries.

The stub libraries are built here. Each symbol that torch_npu's binaries need and nothing defines becomes a function
that returns 0; `cann_stub.c` holds the few that must answer something else.
"""

import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace

from mla_fx.errors import OptionError

PYTHON = f"cp{sys.version_info.major}{sys.version_info.minor}"
IN_CHILD = "MLA_FX_NPU_STUB"

# The newest torch_npu for each release of torch.
TORCH_NPU = {
    "2.10": "2.10.0.post7",
    "2.11": "2.11.0.post3",
    "2.12": "2.12.0.post3",
    "2.13": "2.13.0",
    "2.14": "2.14.0",
}

# What torchair imports, as project and as module; the extra "npu" brings it. Torch is the environment's own.
IMPORTED_BY_TORCHAIR = {
    "attrs": "attr",
    "cloudpickle": "cloudpickle",
    "decorator": "decorator",
    "numpy": "numpy",
    "protobuf": "google.protobuf",
    "psutil": "psutil",
    "pyyaml": "yaml",
    "scipy": "scipy",
}

ANSWERS = Path(__file__).with_name("cann_stub.c")
LIBRARIES = (
    "libacl_op_compiler.so",
    "libacl_tdt_channel.so",
    "libascend_protobuf.so",
    "libascendcl.so",
    "libatb.so",
    "libfmk_parser.so",
    "libge_runner.so",
    "libgraph.so",
    "libhccl.so",
)
SYSTEM = (
    "libc.so.6",
    "libm.so.6",
    "libstdc++.so.6",
    "libgcc_s.so.1",
    "libpthread.so.0",
    "libdl.so.2",
    "librt.so.1",
)
BY_PYTHON = ("Py", "_Py")
BY_LOADER = {"__tls_get_addr"}

FUNCTION = ".globl {0}\n.type {0},@function\n.text\n{0}: xorl %eax,%eax\nxorl %edx,%edx\nret\n"
VIRTUAL_TABLE = ".globl {0}\n.type {0},@object\n.data\n.align 16\n{0}: .zero 512\n.size {0},512\n"


def is_used() -> bool:
    """Whether this process is such a child."""
    return IN_CHILD in os.environ


def cache() -> Path:
    """$MLA_FX_NPU_CACHE, or a folder in the user's cache."""
    user = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = Path(os.environ.get("MLA_FX_NPU_CACHE") or user / "mla_fx" / "npu").absolute()
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def built(name: str, build: Callable[[Path], None]) -> Path:
    """The cached folder with that name. It appears completely or not at all: it is built elsewhere and then renamed, so
    neither an interruption nor a second process leaves half of it behind."""
    folder = cache() / name
    if folder.exists():
        return folder
    with tempfile.TemporaryDirectory(dir=cache(), prefix="building-") as aside:
        build(Path(aside) / name)
        try:
            (Path(aside) / name).rename(folder)
        except OSError:
            if not folder.exists():  # else another process was faster
                raise
    return folder


def package(requirement: str) -> Path:
    """A folder with that requirement alone, without what it depends on. Raises OptionError."""

    def install(folder: Path) -> None:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), requirement]
        done = subprocess.run(pip, capture_output=True, text=True, check=False)
        if done.returncode:
            raise OptionError(f"pip could not install {requirement}: {(done.stderr.strip() or 'no message')[-300:]}")

    return built(f"{requirement}-{PYTHON}", install)


def torch_npu(torch: str) -> str:
    """The version of torch_npu for a version of torch. Raises OptionError."""
    release = ".".join(torch.split(".")[:2])
    if release not in TORCH_NPU:
        raise OptionError(f"torch_npu is known for torch {', '.join(TORCH_NPU)}, this is {torch}")
    return TORCH_NPU[release]


@functools.cache
def variables() -> Mapping[str, str]:
    """The environment variables with which a child process imports torch_npu. Raises OptionError."""
    if is_used():
        raise OptionError("the stub libraries do not take the place of CANN's")
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise OptionError(
            f"torch_npu and its stub libraries need Linux on x86-64, this is {sys.platform} {platform.machine()}"
        )
    for tool in ("gcc", "nm"):
        if shutil.which(tool) is None:
            raise OptionError(f"the stub libraries are built with {tool}, which is not installed")
    torch = importlib.metadata.version("torch").split("+")[0]
    version = torch_npu(torch)
    site = package(f"torch-npu=={version}")
    missing = [project for project, module in IMPORTED_BY_TORCHAIR.items() if not _is_importable(module)]
    found = built(f"stubs-{key()}-{version}-torch-{torch}", lambda folder: build(site, folder))
    paths = [site, site / "torch_npu" / "dynamo", *map(package, missing)]
    return {
        IN_CHILD: "1",
        "LD_LIBRARY_PATH": _joined(found, os.environ.get("LD_LIBRARY_PATH")),
        "PYTHONPATH": _joined(*paths, os.environ.get("PYTHONPATH")),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",  # torch_npu is imported by those who want it, not by torch
    }


def _is_importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of the package around it
        return False


def _joined(*paths: Path | str | None) -> str:
    return os.pathsep.join(str(path) for path in paths if path)


# --- stubs of CANN's libraries ---------------------------------------------------------------------------------------


def key() -> str:
    """Changes with the source of the stubs."""
    return hashlib.sha256(Path(__file__).read_bytes() + ANSWERS.read_bytes()).hexdigest()[:12]


def build(site: Path, folder: Path) -> None:
    """Build the libraries in `folder` for the torch_npu that is installed in `site`. Raises OptionError."""
    folder.mkdir(parents=True)
    source, library = folder / "stubs.s", folder / "libcann_stub.so"
    stubs = [(VIRTUAL_TABLE if name.startswith("_ZT") else FUNCTION).format(name) for name in sorted(_missing(site))]
    source.write_text("".join(stubs) + '.section .note.GNU-stack,"",@progbits\n')
    _run("gcc", "-shared", "-fPIC", "-o", library, ANSWERS, source)
    for name in LIBRARIES:  # one library under all names: the loader sees that it is one file
        (folder / name).symlink_to(library.name)


def _torch() -> Path:
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None, "this package needs torch"
    return Path(spec.origin).parent / "lib"


def _missing(site: Path) -> set[str]:
    """What torch_npu links to or looks up by name, and no library here has."""
    binaries = list((site / "torch_npu").rglob("*.so"))
    system = [_run("gcc", f"-print-file-name={name}").strip() for name in SYSTEM]
    present: list[Path | str] = [*binaries, *_torch().glob("*.so*"), *system]
    defined = set[str]().union(*(_symbols("--defined-only", file) for file in present))
    linked = set[str]().union(*(_symbols("--undefined-only", file) for file in binaries))
    looked_up = re.findall(rb"(?<=\0)acl(?:rt|op|mdl|prof|tdt|)[A-Z]\w+(?=\0)", _bytes(site))
    answered = set(re.findall(r"\b(acl\w+)(?=[(,)])", ANSWERS.read_text()))
    missing = (linked | {name.decode() for name in looked_up}) - defined - answered - BY_LOADER
    return {name for name in missing if not name.startswith(BY_PYTHON)}


def _bytes(site: Path) -> bytes:
    return (site / "torch_npu" / "lib" / "libtorch_npu.so").read_bytes()


def _symbols(which: str, file: Path | str) -> set[str]:
    """The dynamic symbols of a library, without versions; weak ones may stay undefined."""
    rows = (line.split() for line in _run("nm", "-D", which, file).splitlines())
    return {row[-1].split("@")[0] for row in rows if row[-2] != "w"}


def _run(*command: Path | str) -> str:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise OptionError(f"{command[0]} could not build the stub libraries: {done.stderr.strip()[-300:]}")
    return done.stdout


def leave_out_engine() -> None:
    """Make torchair neither start the engine nor ask which operators it has: the stub libraries have none."""
    from torchair._ge_concrete_graph import compat_ir, fx2ge_converter  # type: ignore[import-not-found]
    from torchair.core import _backend  # type: ignore[import-not-found]
    from torchair.ge import ge_custom as ge  # type: ignore[import-not-found]

    fx2ge_converter.initialize_graph_engine = _backend.initialize_graph_engine = lambda *_: None
    compat_ir.is_cann_compat = lambda *_, **__: ""  # no complaint about any operator
    # A converter names inputs and outputs itself, and asks only whether there is such an operator.
    ge._torchair = SimpleNamespace(get_registered_ir_def=lambda kind: ("SUCCESS", (), (), ()))
