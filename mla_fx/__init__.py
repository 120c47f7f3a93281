"""A graph-mode compiler plugin that finds Multi-head Latent Attention in plain PyTorch code and fuses it.

torch.compile(model, backend=mla_fx.mla_backend)      or backend="mla"
mla_fx.explain(model)(*args, **kwargs)                 what fused, what almost did, and why not
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from mla_fx.driver.report_log import expecting

from . import ops
from .backend import explain, get_backend, mla_backend
from .driver.report_log import last_report, report
from .errors import FusionError, MlaWarning, NoMatch, OptionError, VerificationError

if TYPE_CHECKING:
    from .cases import Case
    from .debug.report import Miss, Report
    from .driver.discovery import register_patterns
    from .graph_pass import MlaPass
    from .passes.laid_out import refresh
    from .rule import Rule
    from .target import Target

__version__ = "0.1.0"

__all__ = [
    "Case", "FusionError", "Miss", "MlaPass", "MlaWarning", "NoMatch", "OptionError", "Report", "Rule", "Target",
    "VerificationError", "__version__", "expecting", "explain", "get_backend", "last_report", "mla_backend", "ops",
    "refresh", "register_patterns", "report",
]  # fmt: skip

_LAZY = {
    "Case": "cases",
    "Miss": "debug.report",
    "MlaPass": "graph_pass",
    "Report": "debug.report",
    "Rule": "rule",
    "Target": "target",
    "refresh": "passes.laid_out",
    "register_patterns": "driver.discovery",
}


def __getattr__(name: str) -> Any:
    """Import a name that needs the compiler when it is first used, so that `import mla_fx` stays fast."""
    if name not in _LAZY:
        raise AttributeError(f"module 'mla_fx' has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_LAZY[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
