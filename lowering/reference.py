"""The operators' own bodies, run eagerly: available everywhere, and the oracle of every other target."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.fx import GraphModule

from mla_fx.options import Options
from mla_fx.reinplace import reinplace
from mla_fx.target import Compiled, Rewrite, Target


class Reference(Target):
    name = "reference"

    def lower(self, gm: GraphModule) -> None:
        """Caches are written in place where nobody reads the old ones; the operators stay what they are."""
        reinplace(gm.graph)

    def compile(self, gm: GraphModule, example_inputs: Sequence[Any], rewrite: Rewrite, options: Options) -> Compiled:
        from functorch.compile import make_boxed_func
        from torch._dynamo.backends.common import aot_autograd

        def forward(graph_module: GraphModule, _: Sequence[Any]) -> Any:
            return make_boxed_func(graph_module.forward)

        def inference(graph_module: GraphModule, inputs: Sequence[Any]) -> Any:
            return forward(rewrite(graph_module), inputs)

        compiler = aot_autograd(fw_compiler=forward, inference_compiler=inference, keep_inference_input_mutations=True)
        return compiler(gm, example_inputs)  # type: ignore[no-any-return]  # torch leaves this untyped
