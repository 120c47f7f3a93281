"""The content of a file in `lowering/`: a target, which compiles a rewritten graph."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule

from .errors import NoMatch, OptionError
from .graph.torch_private import OpOverload
from .ops import Operator, catalogue
from .ops.common.define import NAMESPACE, OPERATORS, on_arguments

if TYPE_CHECKING:
    from .ops.emitted.attention.arguments import Arguments
    from .readings.sizes import Size
    from .rewriting.draft import Change
    from .rewriting.emitter import Emitter

Compiled = Callable[..., Any]

# A graph of torch's, or the operators of one in another format, each as a line of text.
Shown = Graph | Sequence[str]


@dataclass(frozen=True)
class Instead:
    """A function that is traced in place of a call, but is not what the user asked for, and why."""

    function: Compiled
    reason: str

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


# Gets what is known about a call's arguments; returns the plain function to trace in its place. Raises NoMatch with the
# reason if the call stays.
Lowering = Callable[..., Compiled]

# A compiler of operator graphs, called as `compiler(gm, inputs, is_inference=..., **keywords of the target)`.
Compiler = Callable[..., Compiled]


def to_body(entry: Operator, *args: Any, **kwargs: Any) -> Compiled:
    """The body of an operator. Raises NoMatch for a call that a compiler would not compute alike."""
    if entry.host is not None:
        raise NoMatch("it reads lengths")
    if any(isinstance(value, Tensor) and value.dtype == torch.int8 for value in (*args, *kwargs.values())):
        raise NoMatch("it is quantised, and compilers do not keep its intermediate roundings")
    return entry.body


def modules_of_operators(package: str) -> Iterator[tuple[Operator, ModuleType]]:
    """The modules of a package, and of the packages in it, that lower an operator, `OPERATOR`, each with that
    operator."""
    known = catalogue()
    for found in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
        module = importlib.import_module(found.name)
        if hasattr(module, "OPERATOR"):
            yield known[module.OPERATOR], module


def first_of(module: ModuleType, other: Lowering) -> Lowering:
    """The lowering of a module from `modules_of_operators`, or the other one where it raises NoMatch."""

    def lower(*args: Any, **kwargs: Any) -> Compiled:
        try:
            return on_arguments(module.lower(module.Arguments(*args, **kwargs)), module.Arguments)
        except NoMatch:
            return other(*args, **kwargs)

    return lower


class Fusing(Protocol):
    """Fuses the graphs of a target's compiler, and keeps reports for cached graphs."""

    @property
    def key(self) -> str | None:
        """What decides the result besides the graph itself; None if the graph must be compiled anew."""

    def __call__(self, compiler: Compiler) -> Compiler:
        """Return `compiler` with every graph fused before it is compiled."""

    def report_weights(self, size: int) -> None:
        """Report bytes that the compiler keeps in addition to the model's weights."""

    def save_report(self, graph_key: str | None) -> bool:
        """Save the report of the graph that was just compiled for a later process, under the compiler's own key for
        that graph. Return False if the graph must not be cached either."""

    def load_report(self, graph_key: str | None) -> bool:
        """Use the report of a cached graph. Return False if there is none."""


class Target:
    """Something that runs a rewritten graph. Methods import its library, so the file imports everywhere."""

    name: ClassVar[str] = "none"
    writes_in_place: ClassVar[bool] = True
    """Whether graphs may contain in-place cache writes; otherwise they are functional."""
    is_fallback: ClassVar[bool] = False
    """Whether "auto" chooses it only if no other target serves the inputs."""
    runs_operators: ClassVar[bool] = True
    """Whether it can run a call of a fused operator."""
    refuses_positions: ClassVar[bool] = True
    """Whether a write past the end of its cache is an error at run time; otherwise such rows are skipped."""
    fuses_loops: ClassVar[bool] = False
    """Whether elementwise operations and reductions share loops, without storing intermediate results."""
    prepares: ClassVar[bool] = False
    """Whether values that depend on weights alone are hoisted out of the graph and computed once."""
    laid_out_by: ClassVar[frozenset[str]] = frozenset()
    """Operators that lay out weights and cannot be in a graph, so all their arguments count as weights."""
    read_ahead_by: ClassVar[frozenset[str]] = frozenset()
    """Operators that read numbers for the host, which a captured graph cannot do, so they run before the graph."""
    is_saved: ClassVar[bool] = False
    """Whether its result can be saved and run by a later process, as `aot_compile` does."""
    left_out: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """Operators that it runs for users who call them, but that the compiler does not add, each with the reason."""
    releases: ClassVar[Sequence[str]] = ()
    """The releases of the device's software whose limits are known, the oldest first: values of its option `cann`."""

    def missing(self) -> str | None:
        """Why the target cannot be used here, or None."""
        return None

    def stand_in(self) -> Mapping[str, str]:
        """The environment variables with which a child process can compile for this target, though it is missing here,
        and run nothing. Raises OptionError if there are none."""
        raise OptionError("nothing takes the place of what it needs")

    def only_compiles(self, example_inputs: Sequence[Any]) -> bool:
        """Whether `explain` compiles for these inputs and runs nothing, because the device is another one."""
        return False

    def serves(self, example_inputs: Sequence[Any]) -> bool:
        """Whether "auto" may choose it for these inputs."""
        return False

    def accepts(self) -> frozenset[str]:
        """The names of the target's own options."""
        return frozenset()

    def check(self, options: Mapping[str, Any]) -> None:
        """Raise OptionError for a value that one of the target's own options does not accept."""

    def most_absorbed_tokens(self, device: torch.device, context: Size) -> int:
        """The most query tokens for which attention over so many keys is absorbed."""
        return 128

    def refuse(self, a: Arguments) -> None:
        """Raise ByDesign for a call of attention that takes longer than what a rule would replace by it."""

    def takes_pieces(self, options: Mapping[str, Any]) -> bool:
        """Whether norms and rotations that no larger operator took become operators; otherwise they stay the user's
        operations."""
        return False

    def mode_options(self, mode: Any) -> Mapping[str, Any]:
        """The target's options for torch.compile's `mode`. Raises OptionError for an unknown mode."""
        raise OptionError(f"target {self.name!r} has no modes, so mode={mode!r} does not apply")

    def lowerings(self, options: Mapping[str, Any], *, prepares: bool) -> Mapping[OpOverload, Lowering]:
        """The lowering of each operator, in the order in which they are applied; other operators stay calls.

        With `prepares`, values that depend on weights alone are computed once, and not at each step."""
        return {}

    def bodies(self) -> Mapping[OpOverload, Lowering]:
        """What calls become that are not lowered, if the target cannot run them: the operators' bodies, also those of
        users' own operators. Where these refuse, calls stay."""
        every = {} if self.runs_operators else OPERATORS
        return {overload: functools.partial(to_body, entry) for overload, entry in every.items()}

    def takes(self, operator: OpOverload) -> bool:
        """Whether its graphs may call an operator that the body of another one calls."""
        return operator.namespace != NAMESPACE

    def plain_lowerings(self, options: Mapping[str, Any]) -> Mapping[OpOverload, Lowering]:
        """The lowering of plain operators, including the user's own, in graphs in which something fused. It also gets
        `are_parameters`: for each operand, whether it is a graph input or attribute, or a view of one."""
        return {}

    def coded_lowerings(self, options: Mapping[str, Any]) -> Mapping[OpOverload, Lowering]:
        """The lowering of plain products whose weight is dequantised in the graph, where something fused. It gets the
        rows and what `CodedWeight` has."""
        return {}

    def mended(self, emit: Emitter) -> Iterator[tuple[str, Change]]:
        """Changes of plain calls, including the user's own, in graphs in which something fused, and what the report
        says of them."""
        return iter(())

    def remarks(self, graph: Graph) -> Iterable[str]:
        """What the report says of a graph in which something fused, once it is lowered."""
        return ()

    def decompositions(self) -> Mapping[Any, Compiled]:
        """The decompositions to use when a lowering is traced."""
        return {}

    def shown(self, made: Compiled, graph: Graph) -> Shown | None:
        """What the target's compiler made of a graph, for a dump; None if it cannot be shown."""
        return None

    def compile(
        self,
        gm: GraphModule,
        example_inputs: Sequence[Any],
        fusing: Fusing,
        options: Mapping[str, Any],
    ) -> Compiled:
        """Trace a Dynamo graph to operators, and compile these with a compiler passed through `fusing`.

        A forward graph that needs gradients is passed, too, with `is_inference=False`; a backward graph is not."""
        raise NotImplementedError
