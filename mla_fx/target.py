"""What a file in `lowering/` holds: a target, which compiles a graph once it has been rewritten."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from torch.fx import GraphModule

from .errors import OptionError
from .options import Options

Rewrite = Callable[[GraphModule], GraphModule]
Compiled = Callable[..., Any]


class Target:
    """A place to run a rewritten graph. Its library is imported inside methods, so that the file imports anywhere."""

    name: ClassVar[str]

    def missing(self) -> str | None:
        """Why the target cannot be used here, or None."""
        return None

    def accepts(self) -> frozenset[str]:
        """The names of the target's own options."""
        return frozenset()

    def mode_options(self, mode: str) -> dict[str, Any]:
        """The target's options that torch.compile's `mode` stands for. Raises OptionError if it has no modes."""
        raise OptionError(f"target {self.name!r} has no modes, so mode={mode!r} does not apply")

    def lower(self, gm: GraphModule) -> None:
        """Replaces the fused operators of a graph by what the target has for them; the rest keep their bodies."""

    def compile(self, gm: GraphModule, example_inputs: Sequence[Any], rewrite: Rewrite, options: Options) -> Compiled:
        """Traces a Dynamo graph to operators, has `rewrite` rewrite it once, and compiles the result."""
        raise NotImplementedError
