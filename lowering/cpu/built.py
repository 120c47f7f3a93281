"""Builds the C++ file beside a Python file, when it is first wanted."""

import functools
import warnings
from pathlib import Path
from typing import Any

from mla_fx.errors import MlaWarning
from mla_fx.graph.torch_compilers import cpp_library


@functools.cache
def built(python_file: str, what: str) -> Any:
    """The library of the C++ file; None, with a warning that names `what`, if it cannot be built."""
    try:
        files = Path(__file__).with_name("common.h"), Path(python_file).with_suffix(".cpp")
        return cpp_library("".join(file.read_text(encoding="utf-8") for file in files))
    except (RuntimeError, OSError) as error:  # Inductor's, of a compiler; the system's, of a library
        cause = str(error).strip().partition("\n")[0]
        warnings.warn(f"mla_fx: {what} runs without its C++ kernel: {cause}", MlaWarning, stacklevel=2)
        return None
