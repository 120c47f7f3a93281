"""Stubs of the CANN libraries, with which the real torch_npu imports and torchair converts without an NPU.

Each symbol that torch_npu's binaries need and nothing defines becomes a function that returns 0; `cann_stub.c` holds
the few that must answer something else.
"""

from __future__ import annotations

import hashlib
import importlib.util
import re
import subprocess
from pathlib import Path

from mla_fx.errors import OptionError

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
