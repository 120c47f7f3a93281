"""The rewrite as a graph pass for pipelines that users already have: Inductor's hook, and torchair's namesake."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph, GraphModule

from . import discover
from .compilation import Compilation


class MlaPass(CustomGraphPass):
    """Fuses MLA in an operator graph, in place.

    `torch._inductor.config.post_grad_custom_pre_pass = mla_fx.MlaPass()`, or as torchair's
    `CompilerConfig().post_grad_custom_pre_pass`, which calls it with `(gm, example_inputs, config)`. Takes the options
    of `mla_backend`; the target says for whom the operators are lowered, Inductor unless named."""

    def __init__(self, **options: Any) -> None:
        self.given = {"target": "inductor", **options}
        self.report: Any = None

    def __call__(self, graph: Graph | GraphModule, example_inputs: Sequence[Any] = (), config: Any = None) -> None:
        gm = graph if isinstance(graph, GraphModule) else _module_of(graph)
        compilation = Compilation.prepare(example_inputs, None, self.given, keep_text=False)
        self.report = compilation.report
        compilation.rewrite(gm)

    def uuid(self) -> str:
        """Changes with the options and with the source of every rule, operator and lowering."""
        options = repr(sorted(self.given.items()))
        return hashlib.sha256((source_hash() + options).encode()).hexdigest()


@functools.cache
def source_hash() -> str:
    """A hash of the sources that decide what a graph is rewritten to."""
    digest = hashlib.sha256()
    for package in ("mla_fx", "mla_fx.canonical", "mla_fx.ops", "mla_fx.patterns", "mla_fx.lowering"):
        for path in sorted(Path(discover.folder(package)).glob("*.py")):
            digest.update(path.name.encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _module_of(graph: Graph) -> GraphModule:
    """The module that owns a graph, or one made around that very graph."""
    owner = graph.owning_module
    if isinstance(owner, GraphModule) and owner.graph is graph:
        return owner
    raise TypeError("MlaPass needs a graph that belongs to a GraphModule, this one belongs to none")
