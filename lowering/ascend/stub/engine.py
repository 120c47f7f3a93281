"""torchair without CANN's graph engine: it converts graphs, and nothing runs them."""

from __future__ import annotations

from types import SimpleNamespace


def leave_out() -> None:
    """Make torchair neither start the engine nor ask which operators it has: the stub libraries have none."""
    from torchair._ge_concrete_graph import compat_ir, fx2ge_converter  # type: ignore[import-not-found]
    from torchair.core import _backend  # type: ignore[import-not-found]
    from torchair.ge import ge_custom as ge  # type: ignore[import-not-found]

    fx2ge_converter.initialize_graph_engine = _backend.initialize_graph_engine = lambda *_: None
    compat_ir.is_cann_compat = lambda *_, **__: ""  # no complaint about any operator
    # A converter names inputs and outputs itself, and asks only whether there is such an operator.
    ge._torchair = SimpleNamespace(get_registered_ir_def=lambda kind: ("SUCCESS", (), (), ()))
