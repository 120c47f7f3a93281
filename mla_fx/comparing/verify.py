"""Compares the fused graph and the compiled one with the original graph.

The rules are checked in float64, which hardly rounds: there the original and the fused graph return and write the same
numbers, up to `SAME`. So a wrong factor, sign, epsilon or slot shows, however small its effect is next to 16-bit
rounding, and the first value that differs names the rule and the layer.

The compiled graph is then compared with these exact numbers. Its error may be at most `TIMES` the error of the original
graph in its own precision, plus `ULPS` of the dtype and `SAME`. Both the largest error, relative to the largest
element, and the root mean square, relative to that of all elements, must be within that. NaN and infinity must be in
the same places, except in rows that attend to nothing, which are zeros in fused attention; integers and flags must be
equal. Choices, as of experts or codes, are those of the original graph. A result that is further away may follow from
another choice that rounding flips, between almost equal scores: `choices` and `Envelope` bound how far. Values that
depend on a random number are checked by the first comparison only."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from mla_fx.errors import VerificationError
from mla_fx.graph.provenance import label_of
from mla_fx.graph.schemas import written
from mla_fx.graph.torch_compilers import as_boxed, compile_fx, compile_fx_inner, is_boxed
from mla_fx.graph.walk import behind

from .choices import Choosing, choices, depends_on, errors, nearby, of_bytes, rounding_of, seen_by
from .closeness import SAME, Closeness, Envelope, blind, closeness, distance, wide_dtype
from .culprit import Culprit, Cutout, find, listed, whole
from .exact import Dry, Results, Wide, in_copies, is_random, writes
from .reproducer import of_lowering, of_rule, reproduced


class _Result(NamedTuple):
    """An output or a written input, and its values in the unfused and in the fused graph. Outputs may be constants."""

    kind: str
    name: str
    unfused: Any
    fused: Any

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


class _Call(NamedTuple):
    """A call: its inputs before it, what the original graph returns, and exact numbers for its choices."""

    inputs: Sequence[Any]
    plain: Results
    exact: Results
    chooses: bool


@dataclass
class Verification:
    """The comparison at each call of one compiled graph, or at the first. `unfused` is the original graph, `fused` the
    rewritten one before anything was lowered or written in place. `lines` gets one for each call.

    Reproducers of differences are written to the folder `dump`, and those of wrong lowerings compile with
    `options`."""

    unfused: GraphModule
    fused: GraphModule
    lines: list[str]
    once: bool
    dump: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
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
            run = self._in_own_precision(inputs, exact)
            outputs = compiled(*given)
            compared = self._check_compiled([*outputs, *(inputs[place] for place in run.plain.written)], run)
            self.lines.append(f"call {self.calls}: {agreement}; {compared}")
            return outputs

        return as_boxed(checked) if takes_list else checked

    # --- rules -------------------------------------------------------------------------------------------------------

    def _check_rules(self, inputs: Sequence[Any]) -> tuple[Results, str]:
        dtype = wide_dtype(inputs)
        chosen = choices(self.unfused.graph)
        theirs = _run(Wide(self.unfused, dtype, seen_by(chosen)), inputs)
        ours = _run(Wide(self.fused, dtype), inputs)
        pairs = [*zip(ours.outputs, theirs.outputs, strict=True)]
        pairs += [(ours.written[place], value) for place, value in theirs.written.items()]
        errors = [distance(*pair) for pair in pairs]
        doubtful = [number for number, error in enumerate(errors) if chosen and not error <= SAME[dtype]]
        envelopes = {number: Envelope("", *pairs[number], pairs[number][1]) for number in doubtful}
        flips = self._with_flips(envelopes, inputs, rounding_of(theirs.values))
        flipped = {number for number, one in flips.items() if one.share <= 1}
        errors = [0.0 if number in flipped else error for number, error in enumerate(errors)]
        if not all(error <= SAME[dtype] for error in errors):
            raise VerificationError(self._wrong_rule(inputs, dtype, errors))
        hidden = sum(int(blind(*pair).sum()) for pair in pairs if isinstance(pair[0], Tensor))
        but = f", but for {hidden} numbers in rows that attend to nothing: NaN unfused, finite fused" if hidden else ""
        but += f", but for {len(flipped)} results that ties decide" if flipped else ""
        return theirs, f"rules agree in {_name(dtype)} to {max(errors, default=0.0):.1e}{but}"

    def _wrong_rule(self, inputs: Sequence[Any], dtype: torch.dtype, errors: Sequence[float]) -> str:
        """Which result is wrong, by how much, and what computes it."""

        def values(gm: GraphModule, wanted: Collection[str]) -> Mapping[str, Any]:
            return _run(Wide(gm, dtype, wanted), inputs).values

        wrong = [pair for pair in zip(errors, self._results(), strict=True) if not pair[0] <= SAME[dtype]]
        error, worst = max(wrong, key=lambda pair: pair[0])
        more = f" ({len(wrong) - 1} other results are wrong, too)" if len(wrong) > 1 else ""
        found = find(self.unfused, self.fused, values, SAME[dtype])
        because = found or f"None of the replaced values differs by itself; fused are {listed(self.fused.graph.nodes)}"
        sentence = (
            f"call {self.calls}: in {_name(dtype)}, where hardly anything rounds, {worst} of the fused graph is "
            f"{error:.3g} away from that of the unfused one, relative to its largest element{more}; the limit is "
            f"{SAME[dtype]:.3g}. {because}."
        )
        return reproduced(sentence, lambda: of_rule(sentence, self._candidates(found), _values(inputs)), self.dump)

    def _candidates(self, found: Culprit | None) -> Iterator[tuple[Cutout, Cutout, Sequence[str]]]:
        """Parts of both graphs that may show what a rule does wrong, and the names of their results."""
        if found is not None:
            yield *found.parts(), [f"what replaces {found.old}"]
        computed = [one for one in self._results() if isinstance(one.unfused, Node) and isinstance(one.fused, Node)]
        unfused = whole(self.unfused, [one.unfused for one in computed])
        yield unfused, whole(self.fused, [one.fused for one in computed]), [*map(str, computed)]

    # --- what was compiled -------------------------------------------------------------------------------------------

    def _in_own_precision(self, inputs: Sequence[Any], exact: Results) -> _Call:
        """What the original graph returns, and exact numbers for its choices, if it makes any."""
        chosen = choices(self.unfused.graph)
        plain = _run(Dry(self.unfused, seen_by(chosen)), inputs)
        before = in_copies(inputs, [inputs[place] for place in plain.written])
        if chosen:
            exact = _run(Choosing(self.unfused, wide_dtype(inputs), plain.values), inputs)
        return _Call(before, plain, exact, chooses=bool(chosen))

    def _check_compiled(self, ours: Sequence[Any], call: _Call) -> str:
        graph, results = self.unfused.graph, self._results()
        random, in_bytes = depends_on(graph, is_random), of_bytes(graph)
        values = [*zip(ours, call.plain.all, call.exact.all, strict=True)]
        found = {
            number: closeness(str(result), *values[number])
            for number, result in enumerate(results)
            if result.unfused not in random
        }
        doubtful = [number for number, one in found.items() if not one.share <= 1]
        unread = [number for number in doubtful if results[number].unfused in in_bytes and _is_whole(values[number][1])]
        flipped = [number for number in doubtful if number not in unread] if call.chooses else []
        envelopes = {number: Envelope(str(results[number]), *values[number]) for number in flipped}
        found |= self._with_flips(envelopes, call.inputs, errors(call.plain.values, call.exact.values))
        places = {node: place for place, node in enumerate(graph.nodes)}
        worst = dict[str, Closeness]()
        for number in sorted(found.keys() - unread, key=lambda number: places.get(results[number].unfused, 0)):
            result, one = results[number], found[number]
            if not one.share <= 1:
                raise VerificationError(self._wrong_lowering(one, number, call))
            worst[result.kind] = max(one, worst.get(result.kind, one), key=lambda one: one.share)
        counts = {
            "depend on random numbers": len(results) - len(found),
            "hold bytes of numbers that rounding may change": len(unread),
            "differ by no more than choices that rounding may flip": len(flipped),
        }
        return ", ".join([*map(str, worst.values()), *(f"{n} results {what}" for what, n in counts.items() if n)])

    def _with_flips(
        self, envelopes: Mapping[int, Envelope], inputs: Sequence[Any], moves: Mapping[str, float]
    ) -> dict[int, Closeness]:
        """How close results are, if choices may flip whose values move so far, by the numbers of results."""
        for draw in nearby(self.unfused, wide_dtype(inputs), moves):
            if all(envelope.is_drawn for envelope in envelopes.values()):
                break
            drawn = _run(draw, inputs).all
            for number, envelope in envelopes.items():
                envelope.widen(drawn[number])
        return {number: envelope.closeness for number, envelope in envelopes.items()}

    def _wrong_lowering(self, one: Closeness, number: int, call: _Call) -> str:
        """How far the first wrong result is off, and which calls it depends on, or that it is without them, too."""
        result = self._results()[number]
        calls = listed(behind([result.fused]) if isinstance(result.fused, Node) else self.fused.graph.nodes)
        sentence = (
            f"call {self.calls}: {one.what} of the compiled graph is {one.error:.3g} away from the exact one, "
            f"relative to its largest element, which is {one.share:.3g} times what is allowed; the unfused graph is "
            f"{one.unfused:.3g} away."
        )
        stock = self._by_stock(number, call)
        if stock is not None and not stock.share <= 1:
            return f"{sentence} Stock Inductor differs here, too: from the unfused graph it makes {stock.error:.3g}."
        sentence += (
            " The rules agree, so the error is in what their operators were lowered or compiled to, the nearest first: "
            f"{calls or 'none'}."
        )
        returned = [one.fused for one in self._results() if one.kind == "output" and isinstance(one.fused, Node)]
        part = whole(self.fused, [*returned, *filter(written, self.fused.graph.nodes)])
        return reproduced(sentence, lambda: of_lowering(sentence, part, self.options, _values(call.inputs)), self.dump)

    def _by_stock(self, number: int, call: _Call) -> Closeness | None:
        """How close a result is that stock Inductor's code of the original graph computes; None for other targets."""
        if self.options.get("target") != "inductor":
            return None
        given = in_copies(call.inputs, [call.inputs[place] for place in call.plain.written])
        with ThreadPoolExecutor(1) as thread:  # without the modes of compiled code
            compiling = thread.submit(torch.no_grad()(compile_fx), self.unfused, given, compile_fx_inner, {}, None)
        found = [*compiling.result()(*given), *(given[place] for place in call.plain.written)][number]
        return closeness("", found, call.plain.all[number], call.exact.all[number])

    # --- results -----------------------------------------------------------------------------------------------------

    def _results(self) -> list[_Result]:
        """Outputs and written inputs, in the order of `Results.all`."""
        unfused, fused = self.unfused.graph, self.fused.graph
        outputs: list[Any] = [graph.output_node().args[0] for graph in (unfused, fused)]
        found = [_Result("output", str(place), *nodes) for place, nodes in enumerate(zip(*outputs, strict=True))]
        names, new = [label_of(node) for node in unfused.find_nodes(op="placeholder")], writes(fused)
        return found + [_Result("input", names[place], old, new[place]) for place, old in writes(unfused).items()]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _values(inputs: Sequence[Any]) -> Callable[[Dry], Mapping[str, Any]]:
    return lambda graph: _run(graph, inputs).values


def _is_whole(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.is_floating_point() and not value.is_complex()


def _run(graph: Dry, inputs: Sequence[Any]) -> Results:
    """Let all runs and the compiled graph draw the same random numbers."""
    found = {value.device for value in inputs if isinstance(value, Tensor)}
    devices = [device for device in found if device.type not in ("cpu", "meta")]
    kind = next((device.type for device in devices), "cuda")
    with torch.random.fork_rng(devices=[device.index or 0 for device in devices], device_type=kind):
        return graph.results(inputs)
