"""Writes a program that shows a difference without the user's model: `python reproduce.py`.

It holds graphs as functions, and what random inputs look like. The graphs are those of the guilty layer if the
difference shows there, else the whole ones. `mla_fx.comparing.reproduce` runs them."""

import itertools
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from mla_fx.graph.node_text import Source
from mla_fx.graph.provenance import label_of, module_of

from .closeness import SAME, wide_dtype
from .culprit import Cutout
from .exact import Dry
from .interpreter import Interpreter
from .plans import Difference
from .reproduce import Like, distances, drawn, like
from .small_sizes import Value

FILE = "reproduce.py"
IMPORTS = ("import sys", "from mla_fx.comparing import reproduce")

Values = Callable[[Dry], Mapping[str, Any]]
"""Runs a graph on the user's inputs and returns the values that it was asked for."""


@dataclass(frozen=True)
class Reproducer:
    """A program. `call` returns its exit status, 1 if the difference shows, as `shows` says it does."""

    title: str
    functions: Mapping[str, GraphModule]
    inputs: Mapping[str, Any]
    labels: Mapping[str, str]
    call: str
    shows: bool

    def saved(self, dump: str | None) -> str:
        """Write the program; return the sentence that names it."""
        file = _new_folder(dump) / FILE
        file.write_text(self.text(), encoding="utf-8")
        shown = "shows the difference with random inputs" if self.shows else "finds no difference with random inputs"
        return f"`python {file}` {shown}"

    def text(self) -> str:
        writers = {name: Source(gm.graph) for name, gm in self.functions.items()}
        imports = {*IMPORTS, *(line for writer in writers.values() for line in writer.imports())}
        namespaces = {line for writer in writers.values() for line in writer.namespaces()}
        sources = [writer.function(name) for name, writer in writers.items()]
        plain = self.title.replace("\\", "/").replace('"', "'")
        about = f'"""{plain}\n\nThe inputs are random. Written with torch {torch.__version__}."""'
        table = [f"    {name!r}: {_drawn_by(value)},  # {self.labels[name]}" for name, value in self.inputs.items()]
        names = "\n".join([*sorted(imports), "", *sorted(namespaces)])
        parts = [about, names, *sources, "\n".join(["INPUTS = {", *table, "}"]), f"sys.exit({self.call})"]
        return "\n\n\n".join(parts) + "\n"


def reproduced(sentence: str, write: Callable[[], Reproducer], dump: str | None) -> str:
    """A sentence and where its reproducer is."""
    try:
        return f"{sentence} {write().saved(dump)}"
    except Exception as error:  # the difference itself matters more
        return f"{sentence} No reproducer could be written: {type(error).__name__}: {error}"


def of_rule(title: str, candidates: Iterable[tuple[Cutout, Cutout, Sequence[str]]], values: Values) -> Reproducer:
    """The reproducer of a wrong rule, for the first pair of an unfused and a fused part that differ on random inputs.

    Each pair comes with the names of its results."""
    for unfused, fused, names in candidates:
        inputs = {**_samples(fused, values), **_samples(unfused, values)}
        labels = {**_labels(fused), **_labels(unfused)}
        found = _of_two(title, unfused.module, fused.module, inputs, labels, names)
        if found.shows:
            break
    return found


def of_plan(title: str, found: Difference) -> Reproducer:
    """The reproducer of a plan that was not made, at the small sizes at which it was checked."""
    inputs = {str(leaf.name): like(found.run.values[leaf]) for leaf in found.run.leaves}
    labels = {str(leaf.name): label_of(leaf) for leaf in found.run.leaves if isinstance(leaf, Node)}
    unfused, fused = (_Writer(found.run).program(part) for part in (found.old, found.new))
    return _of_two(title, unfused, fused, inputs, labels, [found.old.name])


class _Writer(Interpreter):
    """Writes down the calls that another interpreter runs, at the small sizes at which it does."""

    def __init__(self, run: Interpreter) -> None:
        self.graph = Graph()
        inputs: dict[Value, Any] = {leaf: self.graph.placeholder(str(leaf.name)) for leaf in run.leaves}
        super().__init__(run.numbers, run.small, inputs, run.coarsest and torch.float64)

    def program(self, part: Value) -> GraphModule:
        self.graph.output([self.run(part)])
        return GraphModule({}, self.graph)

    def called(self, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], fake: Any) -> Any:
        return self.graph.call_function(target, tuple(args), dict(kwargs))


def _of_two(
    title: str,
    unfused: GraphModule,
    fused: GraphModule,
    inputs: Mapping[str, Any],
    labels: Mapping[str, str],
    names: Sequence[str],
) -> Reproducer:
    given = drawn(inputs)
    errors = distances(unfused, fused, given)
    shows = not all(error <= SAME[wide_dtype(given.values())] for error in errors)
    call = f"reproduce.reproduce(unfused, fused, INPUTS, {names!r})"
    return Reproducer(title, {"unfused": unfused, "fused": fused}, inputs, labels, call, shows)


def of_lowering(title: str, fused: Cutout, options: Mapping[str, Any], values: Values) -> Reproducer:
    """The reproducer of a graph that differs once it is compiled."""
    plain = {name: value for name, value in options.items() if type(value) in (bool, int, float, str)}
    given = "".join(f", {name}={value!r}" for name, value in plain.items())
    call = f"reproduce.reproduce_compiled(fused, INPUTS{given})"
    return Reproducer(title, {"fused": fused.module}, _samples(fused, values), _labels(fused), call, True)


def _samples(part: Cutout, values: Values) -> dict[str, Any]:
    """What to draw in place of the inputs of a part, by their names in it."""
    found = values(Dry(part.owner, {node.name for node in part.inputs}))
    return {name: like(found[node.name]) for node, name in part.inputs.items()}


def _labels(part: Cutout) -> dict[str, str]:
    """The user's names of the inputs, or the modules that compute them."""
    return {name: label_of(node) if node.op == "placeholder" else module_of(node) for node, name in part.inputs.items()}


def _drawn_by(value: Any) -> str:
    return f"reproduce.{value!r}" if isinstance(value, Like) else repr(value)


def _new_folder(dump: str | None) -> Path:
    """The next free folder for a reproducer in the user's dump folder, or else a temporary one."""
    if dump is None:
        return Path(tempfile.mkdtemp(prefix="mla_fx_reproducer_"))
    numbered = (Path(dump) / f"reproducer_{number:03d}" for number in itertools.count())
    free = next(folder for folder in numbered if not folder.exists())
    free.mkdir(parents=True)
    return free
