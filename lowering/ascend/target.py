"""The common base of the targets for torchair's two kinds of graph."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch.fx import GraphModule

from mla_fx.errors import OptionError
from mla_fx.graph.torch_private import OpOverload
from mla_fx.readings.sizes import Size
from mla_fx.target import Compiled, Compiler, Lowering, Target

from . import toolchain
from .fused_infer_attention_score import LATENT_TOKENS, READ
from .limits import RELEASES
from .stub import environment


class AscendTarget(Target):
    """A target for one kind of graph. `modes` are the modes of torchair's configuration for it, the default first."""

    kind: ClassVar[Literal["ge", "aclgraph"]]
    modes: ClassVar[tuple[str, ...]]
    writes_in_place = False  # torchair expects functional graphs, and reinplaces cache writes itself
    runs_operators = False
    refuses_positions = False  # the vendor's kernels skip negative positions and do not check the end
    prepares = True
    laid_out_by = toolchain.FORMAT_CASTS
    read_ahead_by = READ
    releases = RELEASES

    def most_absorbed_tokens(self, device: torch.device, context: Size) -> int:
        return LATENT_TOKENS

    def missing(self) -> str | None:
        return toolchain.missing()

    def stand_in(self) -> Mapping[str, str]:
        return environment.variables()

    def only_compiles(self, example_inputs: Sequence[Any]) -> bool:
        return not toolchain.is_on_npu(example_inputs)

    def accepts(self) -> frozenset[str]:
        return toolchain.OPTIONS

    def check(self, options: Mapping[str, Any]) -> None:
        if "cann" in options:
            toolchain.release(options)

    def takes_pieces(self, options: Mapping[str, Any]) -> bool:
        return True

    def mode_options(self, mode: Any) -> Mapping[str, Any]:
        if mode not in self.modes:
            raise OptionError(f"mode is {mode!r}; target {self.name!r} has {', '.join(map(repr, self.modes))}")
        return {"mode": mode}

    def lowerings(self, options: Mapping[str, Any], *, prepares: bool) -> Mapping[OpOverload, Lowering]:
        return toolchain.lowerings(self.kind, options, prepares=prepares)

    def bodies(self) -> Mapping[OpOverload, Lowering]:
        return {**super().bodies(), **toolchain.bodies()}

    def compile(
        self,
        gm: GraphModule,
        example_inputs: Sequence[Any],
        fusing: Callable[[Compiler], Compiler],
        options: Mapping[str, Any],
    ) -> Compiled:
        return toolchain.compiled(gm, example_inputs, fusing, toolchain.config(options, self.modes))
