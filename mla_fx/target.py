"""What a file in `lowering/` holds: a target, which compiles a graph once it has been rewritten."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol

from torch.fx import GraphModule

from .errors import OptionError
from .graph.torch_private import OpOverload

Compiled = Callable[..., Any]

# Asked with what is known of a call's arguments: the plain function to be traced in its place. Raises NoMatch with the
# reason if the call stays.
Lowering = Callable[..., Compiled]

# A compiler of operator graphs, called as `compiler(gm, inputs, is_inference=..., **whatever the target likes)`.
Compiler = Callable[..., Compiled]


class Fusing(Protocol):
    """What a target hands its compiler of operator graphs through, and what it needs to keep graphs for later."""

    @property
    def key(self) -> str | None:
        """What decides, besides the graph that came, what becomes of it; None where that must be done anew."""

    def __call__(self, compiler: Compiler) -> Compiler:
        """`compiler` with every graph fused on its way in."""

    def report_weights(self, size: int) -> None:
        """Takes note of so many bytes that the compiler keeps beside the model's weights."""

    def save_report(self, graph_key: str | None) -> bool:
        """Saves the report of the graph that was compiled just now for a later process, under the key by which the
        compiler keeps that graph, if it does. Returns False if the graph must not be kept either."""

    def load_report(self, graph_key: str | None) -> bool:
        """Takes up the report of a graph that the compiler had kept. Returns False if there is none."""


class Target:
    """A place to run a rewritten graph. Its library is imported inside methods, so that the file imports anywhere."""

    name: ClassVar[str] = "none"
    writes_in_place: ClassVar[bool] = True
    """Whether graphs with operators that write caches in place are welcome; else they come as functional ones."""
    is_fallback: ClassVar[bool] = False
    """Whether "auto" asks it only when no other target serves the inputs."""
    runs_operators: ClassVar[bool] = True
    """Whether it can run a call of a fused operator as it is; else a call that is not lowered becomes its body."""
    refuses_positions: ClassVar[bool] = True
    """Whether a write beyond the end of its cache is an error when a graph runs; else such rows are skipped."""
    fuses_loops: ClassVar[bool] = False
    """Whether what is computed element by element, or summed up, shares loops and is not stored in between."""
    prepares: ClassVar[bool] = False
    """Whether what depends on weights alone is taken out of the graph and computed once, ahead of its calls."""
    laid_out_by: ClassVar[frozenset[str]] = frozenset()
    """Operators that lay weights out and can be in no graph, so that whatever they are given counts as a weight."""
    is_saved: ClassVar[bool] = False
    """Whether what it compiles can be saved and run by a later process, as `aot_compile` does."""
    max_absorbed_tokens: ClassVar[int | None] = None
    """The most query tokens for which attention is absorbed; None where the device decides."""

    def missing(self) -> str | None:
        """Why the target cannot be used here, or None."""
        return None

    def serves(self, example_inputs: Sequence[Any]) -> bool:
        """Whether "auto" may choose it for such inputs."""
        return False

    def accepts(self) -> frozenset[str]:
        """The names of the target's own options."""
        return frozenset()

    def check(self, options: Mapping[str, Any]) -> None:
        """Raises OptionError for a value that one of the target's own options does not take."""

    def takes_pieces(self, options: Mapping[str, Any]) -> bool:
        """Whether it wants norms and rotations that no larger operator took as operators of their own; else they stay
        the user's operations."""
        return False

    def mode_options(self, mode: Any) -> Mapping[str, Any]:
        """The target's options that torch.compile's `mode` stands for. Raises OptionError if there is no such mode."""
        raise OptionError(f"target {self.name!r} has no modes, so mode={mode!r} does not apply")

    def lowerings(self, options: Mapping[str, Any], *, prepares: bool) -> Mapping[OpOverload, Lowering]:
        """What becomes of which operators, in the order in which they are lowered; the others stay calls.

        `prepares` says whether what depends on weights alone is computed once, and not at each step."""
        return {}

    def plain_lowerings(self, options: Mapping[str, Any]) -> Mapping[OpOverload, Lowering]:
        """What becomes of which plain operators, the user's own among them, where something else was fused."""
        return {}

    def decompositions(self) -> Mapping[Any, Compiled]:
        """How operators are taken apart where a lowering is traced."""
        return {}

    def compile(
        self,
        gm: GraphModule,
        example_inputs: Sequence[Any],
        fusing: Fusing,
        options: Mapping[str, Any],
    ) -> Compiled:
        """Traces a Dynamo graph to operators, and compiles these by a compiler that was handed through `fusing`.

        A forward graph that needs gradients goes there too, with `is_inference=False`; a backward graph does not."""
        raise NotImplementedError
