"""Private names of torch's own compilers: Dynamo, AOTAutograd and Inductor. `torch_private` has the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast, get_origin

import torch

if TYPE_CHECKING:
    from torch._inductor.custom_graph_pass import CustomInferenceAwareGraphPass as GraphPass
    from torch.fx import GraphModule, Node

__all__ = ["GraphPass"]  # torch's own; all else is defined here

# --- Dynamo and AOTAutograd ------------------------------------------------------------------------------------------


def passing_dynamo(error: Exception) -> Exception:
    """Make `error` one of the same type that Dynamo and Inductor pass on to the user without wrapping it."""
    from torch._dynamo.exc import ShortenTraceback

    if isinstance(error, ShortenTraceback):
        return error
    kind = type(error)
    passing = type(kind.__name__, (ShortenTraceback, kind), {"__module__": kind.__module__})
    wrapped: Exception = passing(*error.args, first_useful_frame=None)
    return wrapped


def dynamo_run() -> object | None:
    """An object that changes with each reset of Dynamo; None if Dynamo is not compiling."""
    from torch._guards import CompileContext

    if CompileContext.try_get() is None:
        return None
    marks = _frames()
    found: object = next((mark for mark in marks if isinstance(mark, _RunMark)), None)
    if found is None:
        found = _RunMark()
        marks[found] = 0
    return found


def was_reset(dynamo: object) -> bool:
    """Whether Dynamo was reset since an object of `dynamo_run`."""
    return dynamo not in _frames()


def _frames() -> Any:
    """Dynamo's numbers of frames. A reset empties it; our keys cannot collide with the numbers."""
    from torch._dynamo.convert_frame import FRAME_COMPILE_COUNTER

    return FRAME_COMPILE_COUNTER


class _RunMark:
    """Identifies what is compiled between two resets of Dynamo."""


def when_compiled(callback: Callable[[Any], None]) -> None:
    """Call `callback` whenever Dynamo has compiled something, until its next reset; in the thread that compiled."""
    from torch._dynamo.callback import callback_handler, on_compile_end

    if callback not in callback_handler.end_callbacks:
        on_compile_end(callback)


def aot_autograd(
    compiler: Callable[..., Any], backward: Callable[..., Any], decompositions: Any = None
) -> Callable[..., Any]:
    """A backend for operator graphs that writes inputs in the graph: the only way to such graphs without Inductor.

    Both compilers return a function of all inputs; AOTAutograd expects one that may empty its list of inputs."""
    from functorch.compile import make_boxed_func  # type: ignore[import-untyped]  # torch ships it without types
    from torch._dynamo.backends.common import aot_autograd

    def boxed(compile_graph: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        return lambda gm, inputs: make_boxed_func(compile_graph(gm, inputs, **options))

    backend: Callable[..., Any] = aot_autograd(
        fw_compiler=boxed(compiler, is_inference=False),
        bw_compiler=boxed(backward),
        inference_compiler=boxed(compiler, is_inference=True),
        decompositions=decompositions,
        keep_inference_input_mutations=True,
    )
    return backend


def is_boxed(compiled: Callable[..., Any]) -> bool:
    """Whether a compiled graph takes its inputs as one list, which it may empty."""
    return bool(getattr(compiled, "_boxed_call", False))


def as_boxed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mark `function` as one that takes a list."""
    vars(function)["_boxed_call"] = True
    return function


def input_path(placeholder: Node) -> str:
    """Where Dynamo found an input of its graph, as Python: `L['self']._modules['o']._parameters['weight']`."""
    source = getattr(placeholder, "_dynamo_source", None)
    return "" if source is None else str(source.name() if callable(source.name) else source.name)


def static_inputs() -> frozenset[int]:
    """The positions of parameters and buffers among the inputs of the graph that AOTAutograd has just traced."""
    from torch._guards import TracingContext

    context = TracingContext.try_get()
    metadata = None if context is None else context.fw_metadata
    return frozenset() if metadata is None else frozenset(metadata.static_input_indices)


def is_lifted(attribute: Node) -> bool:
    """Whether an attribute of a graph was an input when it was exported, as parameters and buffers are.

    AOTAutograd's description of its inputs decides; names may be anything."""
    return "desc" in attribute.meta


# --- debugging -------------------------------------------------------------------------------------------------------


def debug_folder() -> Path:
    """Where this process puts files if TORCH_COMPILE_DEBUG asks for them."""
    from torch._dynamo.utils import get_debug_dir

    return Path(get_debug_dir())


# --- Inductor --------------------------------------------------------------------------------------------------------


def compile_fx(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    inner_compile: Callable[..., Any],
    options: Mapping[str, Any],
    key: str | None,
) -> Callable[..., Any]:
    """Inductor as a backend with the caller's inner compiler, so that one trace serves both.

    AOTAutograd's own cache returns a graph before the inner compiler sees it. So that compiler is part of its key.
    Without a key, the cache is off. It is also off where graphs are bundled, because such graphs are found again
    without this backend. Inductor's own cache sees only what the inner compiler returns."""
    from torch._dynamo import config as dynamo_config
    from torch._functorch import config as functorch_config
    from torch._inductor.compile_fx import compile_fx
    from torch.compiler import config as compiler_config

    is_found_again = functorch_config.bundled_autograd_cache and not is_saving()
    is_bundled = is_found_again or dynamo_config.caching_precompile
    is_kept = key is not None and not is_bundled
    off = {} if is_kept else {"enable_autograd_cache": False, "enable_remote_autograd_cache": False}
    tag, patch = compiler_config.cache_key_tag, compiler_config.patch  # type: ignore[attr-defined]  # made at run time
    inner = patch(cache_key_tag=tag)(inner_compile)
    with functorch_config.patch(off), patch(cache_key_tag=f"{tag} {key}"):
        compiled = compile_fx(gm, list(example_inputs), inner_compile=inner, config_patches=dict(options) or None)
    return cast("Callable[..., Any]", compiled)


def is_saving() -> bool:
    """Whether the graph is compiled for `aot_compile`, whose result the user saves and no cache looks up."""
    from torch._functorch import config

    is_told = getattr(config, "bypass_autograd_cache_key", config.strict_autograd_cache)  # the second in torch 2.10
    return bool(config.bundled_autograd_cache and is_told)


def not_cached(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Inductor's result for a graph, as a function that AOTAutograd's cache does not keep: it keeps what has a key."""

    def call(inputs: Any) -> Any:
        return compiled(inputs)

    vars(call)["__wrapped__"] = compiled  # `aot_compile` saves what is wrapped
    return as_boxed(call)


def inductor_key(compiled: Callable[..., Any]) -> str | None:
    """The key in Inductor's cache of a graph that Inductor has just compiled, or that comes from AOTAutograd's cache;
    None if it is in neither."""
    if key := getattr(compiled, "_fx_graph_cache_key", None):
        return str(key)
    serialize = getattr(compiled, "serialize", None)
    forward = getattr(serialize and serialize(), "compiled_fw", None)
    key, _ = getattr(forward, "fx_graph_cache_info", (None, ()))
    return key


def cpp_compiler() -> str:
    """The C++ compiler that Inductor uses on CPUs. Raises an error with a sentence if there is none."""
    from torch._inductor.cpp_builder import get_cpp_compiler

    return get_cpp_compiler()


def cpp_library(source: str) -> Any:
    """A library that Inductor's C++ compiler built from source for this processor. Its folder of caches keeps it."""
    from torch._inductor.codecache import CppCodeCache

    return CppCodeCache.load(source, needs_vec_isa=True)


def inductor_counts() -> Counter[str]:
    """Inductor's counters. What is counted while a graph is compiled is counted again when it comes from a cache."""
    from torch._dynamo.utils import counters

    counts: Counter[str] = counters["inductor"]
    return counts


def cache_folder() -> Path:
    """The folder of PyTorch's compiler caches."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return Path(cache_dir())


def compile_fx_inner(gm: GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Callable[..., Any]:
    """Inductor's compiler of operator graphs; torch._inductor.compile would trace again."""
    from torch._inductor.compile_fx import compile_fx_inner

    compiled: Callable[..., Any] = compile_fx_inner(gm, inputs, **kwargs)
    return compiled


def is_freezing() -> bool:
    """Whether Inductor is configured to turn weights into constants; Dynamo reads this, too."""
    from torch._inductor import config

    return bool(config.freezing) and not torch.is_grad_enabled()


def is_frozen(value: torch.Tensor) -> bool:
    """Whether a tensor is a constant that Inductor made from weights, as its user asked."""
    from torch._inductor.freezing_utils import is_frozen_param

    return is_frozen_param(value)


def is_packaging() -> bool:
    """Whether Inductor is making a package of AOTInductor; its passes have no other way to know."""
    from torch._inductor.virtualized import V

    return bool(V.aot_compilation)


def compile_fx_frozen(traced: GraphModule, gm: GraphModule, inputs: Sequence[Any], **given: Any) -> Callable[..., Any]:
    """Inductor's compiler of operator graphs that turns the weights of Dynamo's graph `traced` into constants, and
    packs those of plain products. The constants become attributes of `gm`."""
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner, fw_compiler_freezing

    settings = {"cudagraphs": given["cudagraphs"], "graph_id": given["graph_id"]}
    device = given["boxed_forward_device_index"]
    if "forward_device" in signature(fw_compiler_freezing).parameters:
        settings["forward_device"] = device
    else:  # from torch 2.15 on
        settings = {"compiler_config_extra": SimpleNamespace(forward_device_index=device, **settings)}
    with config.patch(freezing=True):
        compiled: Callable[..., Any] = fw_compiler_freezing(
            gm,
            inputs,
            dynamo_model=traced,
            num_example_inputs=len(inputs),
            inner_compile=compile_fx_inner,
            **settings,
        )
    return compiled


def inductor_options() -> frozenset[str]:
    """The names of Inductor's options."""
    from torch._inductor import list_options

    return frozenset(list_options())


def inductor_type(option: str) -> type:
    """The type of an Inductor option's values; `object` if it is not a plain type."""
    from torch._inductor import config

    found = config.get_type(option)  # type: ignore[attr-defined]  # made at run time
    is_plain = isinstance(found, type) and get_origin(found) is None and found is not type(None)
    return found if is_plain else object


def inductor_modes() -> Mapping[str, Mapping[str, Any]]:
    """The options that torch.compile's modes set."""
    from torch._inductor import list_mode_options

    return list_mode_options()


def inductor_decompositions() -> dict[Any, Any]:
    """Inductor's decompositions; graphs that enter it late must have been decomposed in the same way."""
    from torch._inductor.decomposition import select_decomp_table

    return dict(select_decomp_table())


def __getattr__(name: str) -> Any:
    """GraphPass, imported when it is needed: the base class of passes that can be part of the key of Inductor's cache.
    They are also called for training graphs, from torch 2.12 on."""
    if name != "GraphPass":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from torch._inductor import custom_graph_pass

    return getattr(custom_graph_pass, "CustomInferenceAwareGraphPass", custom_graph_pass.CustomGraphPass)
