"""What torchair would capture of a test's functions: operator graphs, which are recorded and replayed on the CPU.

Importing this replaces capture and replay (`NPUGraph`). Everything that torchair does before is real: its passes, the
operators that write in place, the source that it makes of the graph, the key by which it finds a captured graph, and
what it updates before a replay. A replay repeats the recorded operators on the recorded memory, with the numbers of the
recording: a length that torchair does not update stays what it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch._functorch import config as functorch_config
from torch.fx import GraphModule
from torch.utils._python_dispatch import TorchDispatchMode
from torchair._acl_concrete_graph import acl_graph, fx2acl_converter

from mla_fx.graph.torch_private import memory_of, tree_leaves
from npu import converted, cpu_kernels  # noqa: F401  `converted` is the machine that both modes see


class Recording(TorchDispatchMode):
    """The operators of one run, each with its arguments and results."""

    def __init__(self, forward: Callable[..., Any], inputs: list[Any]) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self.inputs = inputs
        with self:
            self.outputs = forward(*inputs)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, results))
        return results

    def replay(self, updates: list[dict[str, Any]]) -> None:
        """Run all operators again. `updates` are the new arguments of the attention operators, in order."""
        remaining = iter(updates)
        for func, args, kwargs, results in self.calls:
            updated = kwargs | (next(remaining) if func in UPDATED else {})
            given = {memory_of(tensor) for tensor in _tensors((args, kwargs))}
            for old, new in zip(_tensors(results), _tensors(func(*args, **updated)), strict=True):
                if memory_of(old) not in given:
                    old.copy_(new)


def _tensors(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


class RecordedGraph:
    """Replaces torchair's `AclGraph`, which is made twice: of a graph, and of the source made of that graph.

    `module` is the graph, `info` what torchair found out about it, such as what it updates between replays."""

    def __init__(
        self, fx_graph: GraphModule | None = None, fx_forward: Callable[..., Any] | None = None, config: Any = None
    ) -> None:
        self.module, self.forward = fx_graph, fx_forward
        self.recordings: dict[Any, Recording] = {}
        if fx_graph is not None:
            graphs.append(self)

    def load(self, info: acl_graph.AclGraphCacheInfo) -> None:
        self.info, self.name = info, info.fx_graph_name

    def __call__(self, *inputs: Any) -> Any:
        source = next(graph for graph in graphs if graph.name == self.name)
        recordings, copied = source.recordings, self.copied(inputs)
        key = self.key(inputs)
        if key not in recordings:
            held = [value.clone() if place in copied else value for place, value in enumerate(inputs)]
            recordings[key] = Recording(self.forward, held)
            return recordings[key].outputs
        for place in copied:
            recordings[key].inputs[place].copy_(inputs[place])
        updates = acl_graph.get_updated_ops_fn(self.info.ops_update_rulers)(*inputs)
        nodes = [node for node in source.module.graph.nodes if node.target in UPDATED]
        recordings[key].replay([updates.get(node.name, {}) for node in nodes])
        return recordings[key].outputs

    def key(self, inputs: Any) -> Any:
        """What a captured graph is found by: torchair's own key, and the memory of what is written in place."""
        own = acl_graph.get_unupdated_input_fn(self.info.unupdated_sym_input_index, [], {})(*inputs)
        fixed = [inputs[place].data_ptr() for place in self.fixed()]
        return own, *fixed

    def fixed(self) -> list[int]:
        """The places of inputs whose memory a captured graph uses: weights, and what is written in place."""
        written = self.info.mutated_user_inputs
        others = [place for name, place in self.info.user_inputs_mapping.items() if name in written]
        return [*self.info.parameter_user_inputs, *others]

    def copied(self, inputs: Any) -> list[int]:
        """The places of inputs that are copied to the memory of the captured graph."""
        tensors = (place for place, value in enumerate(inputs) if isinstance(value, Tensor))
        return [place for place in tensors if place not in self.fixed()]

    def calls(self, *names: str) -> list[int]:
        """How often it calls each of these operators."""
        found = [str(node.target) for node in self.module.graph.nodes if node.op == "call_function"]
        return [found.count(name) for name in names]


UPDATED = [entry.out_operator for entry in acl_graph._REPLACE_FUNC_MAP.values()]
graphs: list[RecordedGraph] = []
"""What was handed over for capture since the test began, in order."""

# torch_npu declares what its `.out` operators return as new tensors, though they return what they write. Where the
# variable CI is set, torch raises for that instead of warning.
if hasattr(functorch_config, "error_on_custom_op_aliasing"):  # not in torch 2.10
    functorch_config.error_on_custom_op_aliasing = False

acl_graph.AclGraph = fx2acl_converter.AclGraph = RecordedGraph
cpu_kernels.register()
