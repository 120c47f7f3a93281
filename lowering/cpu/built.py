"""Builds the C++ file beside a Python file, when it is first wanted."""

import ctypes
import functools
import warnings
from pathlib import Path
from typing import Any

from mla_fx.errors import MlaWarning
from mla_fx.graph.torch_compilers import cpp_library


@functools.cache
def built(python_file: str, what: str, *kernels: str) -> Any:
    """The library of the C++ file, in which some functions are kernels; None, with a warning that names `what`, if it
    cannot be built."""
    try:
        files = Path(__file__).with_name("common.h"), Path(python_file).with_suffix(".cpp")
        library = cpp_library("".join(file.read_text(encoding="utf-8") for file in files))
    except (RuntimeError, OSError) as error:  # Inductor's, of a compiler; the system's, of a library
        cause = str(error).strip().partition("\n")[0]
        warnings.warn(f"mla_fx: {what} runs without its C++ kernel: {cause}", MlaWarning, stacklevel=2)
        return None
    for kernel in (getattr(library, name) for name in kernels):
        kernel.restype, kernel.errcheck = ctypes.c_int64, functools.partial(_checked, what)
    return library


def _checked(what: str, code: int, *_: Any) -> int:
    """What a kernel returns. Raises MemoryError for bytes that the system does not give it: a negative number."""
    if code < 0:
        raise MemoryError(f"{what} takes {-code} bytes of memory at once, which the system does not give.")
    return code
