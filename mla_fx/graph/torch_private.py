"""Every private name of torch that the compiler needs, each with the reason why no public one works. Names of torch's
own compilers are in `torch_compilers`.

A release of torch may move any of them; `tests/graph` then says which. Functions import what is heavy, so
`import mla_fx` stays fast.

A few private attributes are read where they are needed: `_opname` and `_schema` of an OpOverload, `_erased` of a node,
`_parameters` and `_buffers` of a module. The operators in `ops`, which import only torch, import `OpOverload` and
`is_fake` from torch directly."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import torch

# The class of operators in graphs. torch has no public name for it.
from torch._ops import HigherOrderOperator as HigherOrderOperator
from torch._ops import OpOverload as OpOverload

# A weak reference to memory, which no later memory can be mistaken for.
from torch.multiprocessing.reductions import StorageWeakRef as StorageWeakRef

# Short names of dtypes, as torch prints them in its own graphs.
from torch.utils._dtype_abbrs import dtype_abbrs as dtype_abbrs

# Whether a tensor wraps others, whose memory it then uses.
from torch.utils._python_dispatch import is_traceable_wrapper_subclass as is_traceable_wrapper_subclass

# Nested values, flattened as torch does it.
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_map_only as tree_map_only
from torch.utils._pytree import tree_unflatten as tree_unflatten

# A dictionary that keeps no storage alive. Those of `weakref` lose one whose Python object torch makes anew.
from torch.utils.weak import WeakIdKeyDictionary as WeakIdKeyDictionary

if TYPE_CHECKING:
    from torch.fx import Graph

# --- tensors and graphs ----------------------------------------------------------------------------------------------


def memory_of(tensor: torch.Tensor) -> int:
    """A number for the memory of a tensor, even without an address; it may be reused once the memory is freed."""
    return int(tensor.untyped_storage()._cdata)


def share_storage(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors share memory."""
    return memory_of(one) == memory_of(other)


def version_of(tensor: torch.Tensor) -> int:
    """The number of writes to a tensor that PyTorch has counted."""
    return tensor._version


def codegen_of(graph: Graph) -> Any:
    """The calling convention of a graph, for `Graph.set_codegen`: an exported graph takes arguments like the module."""
    return graph._codegen


def make_fx(
    function: Callable[..., Any],
    decompositions: Any = None,
    *,
    tracing_mode: Literal["real", "fake", "symbolic"] = "real",
) -> Any:
    """Trace a function to operators; torch.export would need a module, and guards."""
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(function, decompositions, tracing_mode=tracing_mode)


def defining_module(operator: OpOverload) -> str | None:
    """The Python module that defines a custom operator, which a program imports to have it; None if unknown."""
    from torch._library.custom_ops import OPDEFS

    defined = OPDEFS.get(str(operator._schema.name))
    return None if defined is None else str(defined._init_fn.__module__)


# --- sizes -----------------------------------------------------------------------------------------------------------


def is_known(shape_env: Any, relation: Any) -> bool:
    """Whether a relation of sizes holds by everything that a shape environment knows; asking adds no guard."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(shape_env.create_symboolnode(relation))


def hint_of(size: torch.SymInt) -> int:
    """The number that a symbol had when the graph was traced; 2 if it had none. It adds no guard."""
    return int(size.node.hint) if size.node.has_hint() else 2


def guards(shape_env: Any) -> list[Any]:
    """The relations of sizes under which a graph was traced, and without which it does not run."""
    return [guard.expr for guard in shape_env.guards]


def floor_division() -> Any:
    """The function of symbols for `//` of sizes; sympy would simplify its own floor away."""
    from torch.utils._sympy.functions import FloorDiv

    return FloorDiv


def remainders() -> tuple[Any, ...]:
    """The functions of symbols for `%` of sizes."""
    from torch.utils._sympy.functions import Mod, PythonMod

    return Mod, PythonMod


# --- fake tensors ----------------------------------------------------------------------------------------------------


def is_fake(value: object) -> bool:
    """Whether a value is a tensor without data. There are several such classes, so the class does not tell."""
    from torch._subclasses.fake_tensor import is_fake

    return is_fake(value)


def has_symbolic_sizes(value: torch.Tensor) -> bool:
    """Whether any size or stride is a symbol; looking at each takes ten times as long."""
    return value._has_symbolic_sizes_strides


def detect_fake_mode(values: Any) -> Any:
    """The mode in which a graph's values were made; new values need the same."""
    from torch._guards import detect_fake_mode

    return detect_fake_mode(values)


def fake_tensor(mode: Any, meta: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A fake tensor around a meta tensor: five times faster than dispatching through the mode."""
    from torch._subclasses.fake_tensor import FakeTensor

    return FakeTensor(mode, meta, device)


def in_kernel_invocation_manager(mode: Any) -> Any:
    """A context in which fake tensors are the meta tensors behind them."""
    from torch._subclasses.fake_tensor import in_kernel_invocation_manager

    return in_kernel_invocation_manager(mode)


def unknown_number(mode: Any) -> Any:
    """A new symbol for a whole number that is known when the graph runs; the public way to one, `new_dynamic_size`, is
    for sizes, and is forbidden where the user does not capture them. Nothing waits for an operator that returns it."""
    with mode.shape_env.ignore_fresh_unbacked_symbols():
        return mode.shape_env.create_unbacked_symint()


def unset_fake_temporarily() -> Any:
    """A context in which real tensors can be computed, even inside a compiler."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    return unset_fake_temporarily()


def python_dispatcher() -> Any:
    """A context in which operators infer shapes in Python, as torch does when it traces symbols: C++ turns some symbols
    into numbers, for example in a pad."""
    from torch._dispatch.python import enable_python_dispatcher

    return enable_python_dispatcher()


def python_dispatcher_off() -> Any:
    """A context in which operators run in C++ alone, also inside `python_dispatcher`. Real tensors need no more."""
    return torch._C._DisablePythonDispatcher()


# --- logs ------------------------------------------------------------------------------------------------------------


def is_traced() -> bool:
    """Whether torch writes its structured trace, as TORCH_TRACE asks. Before the first event of a process, it may seem
    so although it does not."""
    from torch._logging._internal import trace_log

    return bool(trace_log.handlers)


def trace_artifact(name: str, encoding: Literal["string", "json"], payload: Callable[[], Any]) -> None:
    """Add an artefact to torch's structured trace. If there is no trace, `payload` is not called."""
    from torch._logging._internal import trace_structured_artifact

    trace_structured_artifact(name, encoding, payload)
