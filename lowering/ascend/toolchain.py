"""What both NPU targets need from torch_npu and torchair: whether they are installed, the chip, and the compiler.

Three private functions of torchair are used. `get_npu_default_decompositions` and `add_npu_patch` are applied by its
public backend, which has no hook between AOTAutograd and its compiler. For `register_inplaceable_npu_op` see
`_register_in_place`."""

import contextlib
import copy
import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, Literal, NoReturn

import torch
from torch.fx import GraphModule

from mla_fx.errors import NoMatch, OptionError, first_line
from mla_fx.graph.provenance import is_laid_out
from mla_fx.graph.torch_compilers import aot_autograd, static_inputs
from mla_fx.graph.torch_private import OpOverload
from mla_fx.ops import Operator
from mla_fx.ops.common.define import on_arguments
from mla_fx.target import Compiled, Compiler, Lowering, modules_of_operators

from . import converters, numbers_of_sizes
from .limits import RELEASES, Prolog, Release, Surface
from .stub import environment

HERE = __name__.rpartition(".")[0]
OPTIONS = frozenset({"cann", "causal_masks", "compiler_config", "mode", "prolog", "soc"})
GE_MODE = "max-autotune"
PROLOGS: Mapping[Prolog, str] = {
    "v3": "npu_mla_prolog_v3_functional",
    "v2": "npu_mla_prolog_v2",
    "v1": "npu_mla_prolog",
}
FORMAT_CASTS = frozenset({"_npu_format_cast"})
REFUSED = {
    "mla_prolog_quant": "torch_npu has no such operator, only pypto has a kernel; mla_prolog_v3 has similar int8 modes",
}
"""Operators that no kernel computes, each with the reason."""
IN_PLACE = {"npu_kv_rmsnorm_rope_cache_v2": [5, 6], "npu_mla_prolog_v3": [9, 10]}
"""Operators that write arguments at these positions. A name with _functional is that of the one that returns them."""


@functools.cache
def missing() -> str | None:
    """The reason why no graph can be compiled for NPUs here, or None."""
    if importlib.util.find_spec("torch_npu") is None:
        try:
            version = environment.torch_npu(torch.__version__)
        except OptionError as error:
            return f"torch_npu is not installed; {error}"
        return f"torch_npu is not installed; pip install torch-npu=={version}, on a machine with Ascend's CANN"
    try:
        _torchair()
    except Exception as error:  # a library of CANN that is not there, or another torch
        return f"torch_npu cannot be imported: {first_line(error)}"
    return None


def is_on_npu(example_inputs: Sequence[Any]) -> bool:
    return any(isinstance(value, torch.Tensor) and value.device.type == "npu" for value in example_inputs)


def chip(options: Mapping[str, Any]) -> str:
    """CANN's name of the chip, such as "Ascend910B1": option `soc`, or the name of the device."""
    given = options.get("soc")
    if given is None:
        importlib.import_module("torch_npu")
        return str(torch.get_device_module("npu").get_device_name())
    if not isinstance(given, str) or not given.startswith("Ascend"):
        raise OptionError(f'option soc is {given!r}; it takes the name of a chip, such as "Ascend910B"')
    return given


def release(options: Mapping[str, Any]) -> Release:
    """The release of CANN: option `cann`, or the last known one that is not newer than the installed one, or the oldest
    if nothing here knows that."""
    given = options.get("cann")
    if given is None:
        return next(filter(_is_installed, reversed(RELEASES)), RELEASES[0])
    known = {release.removesuffix(".0"): release for release in RELEASES} | {release: release for release in RELEASES}
    if given not in known:
        raise OptionError(f"option cann is {given!r}; it takes {', '.join(map(repr, RELEASES))}")
    return known[given]


def _is_installed(version: str) -> bool:
    """Whether CANN here is of this version or of a newer one."""
    try:
        from torch_npu.npu.utils import _is_gte_cann_version  # type: ignore[import-not-found]

        return bool(_is_gte_cann_version(version))
    except (ImportError, RuntimeError):  # no torch_npu, or no CANN that says which it is
        return False


def prolog(options: Mapping[str, Any]) -> Prolog:
    """The interface of the vendor's prolog: option `prolog`, or the newest one in torch_npu."""
    importlib.import_module("torch_npu")
    present = [version for version, operator in PROLOGS.items() if hasattr(torch.ops.npu, operator)]
    given = options.get("prolog", present[0])
    if given not in present:
        raise OptionError(f"option prolog is {given!r}; this torch_npu has {', '.join(map(repr, present))}")
    version: Prolog = given
    return version


def lowerings(
    mode: Literal["ge", "aclgraph"], options: Mapping[str, Any], *, prepares: bool
) -> Mapping[OpOverload, Lowering]:
    """The lowerings in this folder: those of every module that names the operator it lowers."""
    converters.register()
    sinks_tiling = mode == "ge" and _sinks_tiling(options)
    surface = Surface(
        chip(options),
        mode,
        prepares,
        release(options),
        reads_ahead=prepares and not sinks_tiling,
        sinks_tiling=sinks_tiling,
        trusts_masks=bool(options.get("causal_masks")),
        prolog=prolog(options),
    )
    own = torch.ops.mla_fx
    found: dict[OpOverload, Lowering] = {
        getattr(own, name).default: functools.partial(_refused, reason) for name, reason in REFUSED.items()
    }
    for entry, module in modules_of_operators(HERE):
        for overload in filter(None, (entry.overload, entry.host)):
            found[overload] = functools.partial(lowered, module, surface)
    return found


def _refused(reason: str, *args: Any, **kwargs: Any) -> NoReturn:
    raise NoMatch(reason)


def lowered(module: ModuleType, surface: Surface, *args: Any, **kwargs: Any) -> Compiled:
    return on_arguments(module.lower(surface, module.Arguments(*args, **kwargs)), module.Arguments, surface)


def bodies() -> Mapping[OpOverload, Lowering]:
    """The bodies that the calls of some operators become, unless their modules refuse them."""
    modules = ((entry, module) for entry, module in modules_of_operators(HERE) if hasattr(module, "refuse_body"))
    return {entry.overload: functools.partial(_to_body, entry, module) for entry, module in modules}


def _to_body(entry: Operator, module: ModuleType, *args: Any, **kwargs: Any) -> Compiled:
    module.refuse_body(module.Arguments(*args, **kwargs))
    return entry.body


def _sinks_tiling(options: Mapping[str, Any]) -> bool:
    """Whether the user's CompilerConfig lets the device choose how kernels tile, which is off by default."""
    config = options.get("compiler_config")
    return config is not None and bool(config.experimental_config.tiling_schedule_optimize)


def config(options: Mapping[str, Any], modes: Sequence[str]) -> Any:
    """The user's CompilerConfig, or a new one. Its mode must be one of `modes`. Raises OptionError.

    Returns a copy without torchair's optimisation of views, which in 2.13 drops a transposition before a reshape and so
    gives a wrong result."""
    torchair = _torchair()
    _check(options)
    given = options.get("compiler_config")
    if given is None:
        given = torchair.CompilerConfig()
        given.mode = options.get("mode", modes[0])
    if given.mode.value not in modes:
        allowed = ", ".join(map(repr, modes))
        raise OptionError(f"option compiler_config has mode {given.mode.value!r}; this target takes {allowed}")
    if not given.experimental_config.keep_inference_input_mutations:
        raise OptionError(
            "option compiler_config turns keep_inference_input_mutations off; caches are written in the graph, "
            "so it must stay on"
        )
    safe = copy.deepcopy(given)
    safe.experimental_config.enable_view_optimize = False
    last = given.post_grad_custom_post_pass.value

    def post_pass(gm: GraphModule, inputs: Sequence[Any], config: Any) -> None:
        numbers_of_sizes.read(gm)
        if last is not None:
            last(gm, inputs, config)

    safe.post_grad_custom_post_pass = post_pass
    return safe


def _check(options: Mapping[str, Any]) -> None:
    chip(options)
    prolog(options)
    release(options)
    word = options.get("causal_masks", False)
    if not isinstance(word, bool):
        raise OptionError(f"option causal_masks is {word!r}; it takes False, True")


def compiled(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    fusing: Callable[[Compiler], Compiler],
    config: Any,
) -> Compiled:
    """Compile with AOTAutograd as torchair runs it, and with torchair's compiler after `fusing`."""
    from torchair._utils import add_npu_patch, get_npu_default_decompositions  # type: ignore[import-not-found]

    decompositions = get_npu_default_decompositions()
    add_npu_patch(decompositions, config)
    compiler = _torchair().get_compiler(config)
    converters.register()
    _register_in_place()

    def forward(graph_module: GraphModule, inputs: Sequence[Any], is_inference: bool = False) -> Compiled:
        _mark_weights(graph_module, inputs)
        made = compiler(graph_module, list(inputs))
        if config.mode.value != GE_MODE:
            _check_written_in_place(runner(made).fx_graph)
        return made  # type: ignore[no-any-return]

    backend = aot_autograd(fusing(forward), compiler, decompositions)
    found: Compiled = backend(gm, list(example_inputs))
    return found


def runner(made: Any) -> Any:
    """What torchair's compiler put around its graph."""
    return made.runner


@functools.cache
def _register_in_place() -> None:
    """Tell torchair which operators write caches in place. It registers those that exist when it is imported: none, if
    that was before torch_npu."""
    from torchair._acl_concrete_graph.graph_pass import (  # type: ignore[import-not-found]
        register_inplaceable_npu_op,
    )

    for name, written in IN_PLACE.items():
        register_inplaceable_npu_op(f"{name}_functional", name, written)


def _check_written_in_place(gm: GraphModule) -> None:
    """Raises RuntimeError if torchair left an operator that torch_npu 2.13 computes wrongly outside of GE graphs: it
    returns caches to which nothing is written."""
    operator = torch.ops.npu.npu_kv_rmsnorm_rope_cache_v2_functional.default
    if gm.graph.find_nodes(op="call_function", target=operator):
        raise RuntimeError(
            "caches of kv_rmsnorm_rope_cache are not written in place; the operator that returns new ones is wrong "
            "in torch_npu 2.13"
        )


def _mark_weights(gm: GraphModule, inputs: Sequence[Any]) -> None:
    """Mark the inputs with a fixed address for torchair, by its own attribute: weights and values derived from them."""
    places = static_inputs()
    for position, node in enumerate(gm.graph.find_nodes(op="placeholder")):
        if position in places or is_laid_out(node):
            inputs[position]._torchair_is_parameter = True


def _torchair() -> Any:
    with contextlib.redirect_stdout(sys.stderr):  # they print warnings, and commands print JSON
        importlib.import_module("torch_npu")  # makes torchair importable
        torchair = importlib.import_module("torchair")
    if environment.is_used():
        environment.leave_out_engine()
    return torchair
