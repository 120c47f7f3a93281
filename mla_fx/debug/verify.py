"""Compares the fused graph and the compiled one with the original graph.

The rules are checked in float64, which hardly rounds: there the original and the fused graph return and write the same
numbers, up to `SAME`. So a wrong factor, sign, epsilon or slot shows, however small its effect is next to 16-bit
rounding, and the first value that differs names the rule and the layer.

The compiled graph is then compared with these exact numbers. Its error may be at most `TIMES` the error of the original
graph in its own precision, plus `ULPS` of the dtype and `SAME`. Both the largest error, relative to the largest
element,
and the root mean square, relative to that of all elements, must be within that. NaN and infinity must be in the same
places, except in rows that attend to nothing, which are zeros in fused attention; integers and flags must be equal.
Values that depend on a random number, or on a choice that rounding may flip, such as an expert chosen by almost equal
scores, are checked by the first comparison only."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from mla_fx.errors import VerificationError
from mla_fx.graph.aliasing import written
from mla_fx.graph.provenance import RULE, STANDS_FOR, fused_name, label_of, module_of
from mla_fx.graph.torch_compilers import as_boxed, is_boxed

from .exact import Dry, Results, Wide, choices, undecided
from .report import Report

TIMES = 2
ULPS = 4
SAME = {torch.float64: 1e-6, torch.float32: 1e-3}  # relative to the largest element
NO_FLOAT64 = {"mps", "npu"}
MOST_NAMED = 4


class Closeness(NamedTuple):
    """One output or written input, and the distance of its compiled and its unfused value from the exact one."""

    what: str
    error: float
    unfused: float
    share: float
    """As a share of the allowed error."""

    def __str__(self) -> str:
        return f"{self.what} error {self.error:.1e} (unfused {self.unfused:.1e})"


@dataclass
class Verification:
    """The comparison at each call of one compiled graph, or at the first. `unfused` is the original graph, `fused` the
    rewritten one before anything was lowered or written in place. The report gets a line for each call."""

    unfused: GraphModule
    fused: GraphModule
    report: Report
    once: bool
    calls: int = field(default=0, init=False)

    def around(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """Run `compiled` and compare its results. Raises VerificationError; for a wrong rule, before anything is
        run."""
        takes_list = is_boxed(compiled)

        def checked(*given: Any) -> Any:
            if self.once and self.calls:
                return compiled(*given)
            self.calls += 1
            inputs = list(given[0] if takes_list else given)
            exact, agreement = self._check_rules(inputs)
            plain, is_open = self._check_rounding(inputs, exact)
            outputs = compiled(*given)
            compared = self._check_compiled(outputs, inputs, plain, exact, is_open)
            self.report.verified.append(f"call {self.calls}: {agreement}; {compared}")
            return outputs

        return as_boxed(checked) if takes_list else checked

    # --- rules -------------------------------------------------------------------------------------------------------

    def _check_rules(self, inputs: Sequence[Any]) -> tuple[Results, str]:
        dtype = _wide(inputs)
        theirs = _run(Wide(self.unfused, dtype, _choosing(self.unfused.graph)), inputs)
        ours = _run(Wide(self.fused, dtype), inputs)
        pairs = [*zip(ours.outputs, theirs.outputs, strict=True)]
        pairs += [(ours.written[place], value) for place, value in theirs.written.items()]
        error = max((_distance(*pair) for pair in pairs), default=0.0)
        blind = sum(int(_blind(*pair).sum()) for pair in pairs if isinstance(pair[0], Tensor))
        name = str(dtype).removeprefix("torch.")
        if not error <= SAME[dtype]:
            raise VerificationError(
                f"call {self.calls}: in {name}, where hardly anything rounds, results of the fused graph are "
                f"{error:.3g} away from those of the unfused one, relative to the largest element; the limit is "
                f"{SAME[dtype]:.3g}. {self._culprit(inputs, dtype)}"
            )
        but = f", but for {blind} numbers in rows that attend to nothing: NaN unfused, finite fused" if blind else ""
        return theirs, f"rules agree in {name} to {error:.1e}{but}"

    def _culprit(self, inputs: Sequence[Any], dtype: torch.dtype) -> str:
        """The first replaced value that differs, and what computes it."""
        names = {node.name for node in self.unfused.graph.nodes}
        marked = [(node, node.meta.get(STANDS_FOR)) for node in self.fused.graph.nodes]
        stand_ins = {node: old for node, old in marked if old in names}
        theirs = _run(Wide(self.unfused, dtype, set(stand_ins.values())), inputs).values
        ours = _run(Wide(self.fused, dtype, {node.name for node in stand_ins}), inputs).values
        agreeing: set[Node] = set()
        for node, old in stand_ins.items():
            error = _distance(ours[node.name], theirs[old])
            if not error <= SAME[dtype]:
                computed = _behind(node, agreeing)
                rules = dict.fromkeys(rule for one in computed if (rule := one.meta.get(RULE)))
                return (
                    f"The first value to differ, by {error:.3g}, replaces {old}; it is computed by "
                    f"{_listed(computed)}, added by {', '.join(rules)}"
                )
            agreeing.add(node)
        return f"None of the replaced values differs by itself; fused are {_listed(self.fused.graph.nodes)}"

    # --- what was compiled -------------------------------------------------------------------------------------------

    def _check_rounding(self, inputs: Sequence[Any], exact: Results) -> tuple[Results, set[Node]]:
        """What the original graph returns, and the values that its own precision does not decide."""
        graph = self.unfused.graph
        plain = _run(Dry(self.unfused, _choosing(graph)), inputs)
        return plain, undecided(graph, plain.values, exact.values)

    def _check_compiled(
        self, outputs: Sequence[Any], inputs: Sequence[Any], plain: Results, exact: Results, is_open: set[Node]
    ) -> str:
        worst, left_out = dict[str, Closeness](), 0
        for kind, what, node, *values in self._compared(outputs, inputs, plain, exact):
            if node in is_open:
                left_out += 1
                continue
            one = _closeness(what, *values)
            if not one.share <= 1:
                raise VerificationError(
                    f"call {self.calls}: {what} of the compiled graph is {one.error:.3g} away from the exact one, "
                    f"relative to its largest element, which is {one.share:.3g} times what is allowed; the unfused "
                    f"graph is {one.unfused:.3g} away. The rules agree, so the error is in what their operators were "
                    f"lowered or compiled to: {_listed(self.fused.graph.nodes)}"
                )
            worst[kind] = max(one, worst.get(kind, one), key=lambda one: one.share)
        lines = [*map(str, worst.values())]
        lines += [f"{left_out} results depend on a choice that rounding may flip"] if left_out else []
        return ", ".join(lines)

    def _compared(
        self, outputs: Sequence[Any], inputs: Sequence[Any], plain: Results, exact: Results
    ) -> Iterator[tuple[str, str, Node | None, Any, Any, Any]]:
        """Outputs and written inputs: their kind, name and node, and the values to compare."""
        nodes = self.unfused.graph.output_node().args[0]
        assert isinstance(nodes, (list, tuple)), "an operator graph returns several values"
        for place, (node, *values) in enumerate(zip(nodes, outputs, plain.outputs, exact.outputs, strict=True)):
            yield "output", f"output {place}", node, *values
        places = self.unfused.graph.find_nodes(op="placeholder")
        for place, value in plain.written.items():
            (write,) = (user for user in places[place].users if places[place] in written(user))
            name = f"input {label_of(places[place])}"
            yield "input", name, write.all_input_nodes[-1], inputs[place], value, exact.written[place]


def _behind(node: Node, agreeing: Set[Node]) -> list[Node]:
    """A value and what it is computed from, in the same module, except for what is behind agreeing values."""
    module, pending, found = module_of(node), [node], dict[Node, None]()
    while pending:
        one = pending.pop()
        if one not in agreeing and one not in found and module_of(one) in (module, ""):
            found[one] = None
            pending += one.all_input_nodes
    return [*found]


def _listed(nodes: Iterable[Node]) -> str:
    """The fused operators among some nodes, and their modules."""
    calls = [(name, module_of(node)) for node in nodes if (name := fused_name(node))]
    listed = [f"{name} in {module}" if module else name for name, module in calls]
    more = [f"{len(listed) - MOST_NAMED} more"] if len(listed) > MOST_NAMED else []
    return ", ".join(listed[:MOST_NAMED] + more)


def _choosing(graph: Graph) -> set[str]:
    return {operand.name for node in choices(graph) for operand in node.all_input_nodes}


def _wide(inputs: Sequence[Any]) -> torch.dtype:
    devices = {value.device.type for value in inputs if isinstance(value, Tensor)}
    return torch.float32 if devices & NO_FLOAT64 else torch.float64


def _run(graph: Dry, inputs: Sequence[Any]) -> Results:
    """Let all runs and the compiled graph draw the same random numbers."""
    found = {value.device for value in inputs if isinstance(value, Tensor)}
    devices = [device for device in found if device.type not in ("cpu", "meta")]
    kind = next((device.type for device in devices), "cuda")
    with torch.random.fork_rng(devices=[device.index or 0 for device in devices], device_type=kind):
        return graph.results(inputs)


def _closeness(what: str, mine: Any, plain: Any, exact: Any) -> Closeness:
    if not isinstance(plain, Tensor) or mine is plain:
        return Closeness(what, 0.0, 0.0, 0.0)
    if not _is_alike(mine, plain):
        return Closeness(what, math.inf, 0.0, math.inf)
    mine, plain, exact = map(_real, (mine, plain, exact))
    seen = plain.isfinite() & exact.isfinite()
    if not plain.is_floating_point() or not seen.any():
        return Closeness(what, 0.0, 0.0, 0.0)
    floor = ULPS * torch.finfo(plain.dtype).eps + SAME[exact.dtype]
    mine, plain, exact = (value.to(exact.dtype)[seen] for value in (mine, plain, exact))
    (error, mean), (unfused, own_mean) = (_errors(value - exact) for value in (mine, plain))
    largest, size = _errors(exact)
    shares = _share(error, TIMES * unfused + floor * largest), _share(mean, TIMES * own_mean + floor * size)
    return Closeness(what, _share(error, largest), _share(unfused, largest), max(shares))


def _distance(mine: Any, theirs: Any) -> float:
    """The distance of two wide values, relative to the largest element."""
    if not isinstance(theirs, Tensor):
        return 0.0
    if not _is_alike(mine, theirs):
        return math.inf
    mine, theirs = _real(mine), _real(theirs)
    if not theirs.is_floating_point():
        return 0.0
    seen = theirs.isfinite()
    return _share(_errors((mine - theirs)[seen])[0], _errors(theirs[seen])[0])


def _is_alike(mine: Tensor, theirs: Tensor) -> bool:
    """Whether both are of the same kind, with equal values wherever they are not finite floating numbers."""
    if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
        return False
    mine, theirs = _real(mine), _real(theirs)
    if not theirs.is_floating_point():
        return torch.equal(mine, theirs)
    wild = ~theirs.isfinite() & ~_blind(mine, theirs)
    is_same_place = torch.equal(~mine.isfinite(), wild)
    return is_same_place and torch.equal(mine[wild].nan_to_num(0.0), theirs[wild].nan_to_num(0.0))


def _blind(mine: Tensor, theirs: Tensor) -> Tensor:
    """Where a row attends to nothing: fused attention gives zeros, a plain softmax NaN."""
    return theirs.isnan() & mine.isfinite()


def _real(value: Tensor) -> Tensor:
    return torch.view_as_real(value) if value.is_complex() else value


def _errors(difference: Tensor) -> tuple[float, float]:
    """The largest value, and the root mean square."""
    if difference.numel() == 0:
        return 0.0, 0.0
    return float(difference.abs().max()), float(difference.abs().square().mean().sqrt())


def _share(error: float, whole: float) -> float:
    return error / whole if whole else math.inf * bool(error)
