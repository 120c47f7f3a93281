"""Reports, dumps and verification, and what is said where an optional dependency is missing."""

import importlib.util


def require(*modules: str) -> None:
    """Raise ModuleNotFoundError that says what to install if an optional dependency is missing."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        them = "it" if len(missing) == 1 else "them"
        raise ModuleNotFoundError(f"this needs {' and '.join(missing)}; pip install 'mla_fx[demo]' brings {them}.")
