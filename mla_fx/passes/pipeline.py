"""The list of passes in order. After each pass, one hook checks, times, records and dumps the graph."""

import contextlib
import functools
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from torch.fx import Graph

from mla_fx.debug.memory import MemoryUse, bytes_of_caches, peak_of_temporaries
from mla_fx.debug.report import PassRecord, Report
from mla_fx.errors import NoMatch
from mla_fx.graph.default_device import on_processor
from mla_fx.graph.provenance import RULE, count_fused, fused_name, module_of
from mla_fx.graph.torch_private import OpOverload, detect_fake_mode, python_dispatcher
from mla_fx.ops.common.collector import collector_paused
from mla_fx.passes.functionalize import calls_in_place_forms, functionalize
from mla_fx.passes.hoist import hoist
from mla_fx.passes.triage import has_bottleneck, is_functional, triage
from mla_fx.readings.equal_sizes import written_alike
from mla_fx.readings.sizes import size_facts
from mla_fx.rewriting.cleanup import Snapshot, empty_parts, erase_orphans, rejoined, round_trips, turns
from mla_fx.rewriting.replacement import ATTENTION, has_heads
from mla_fx.rule import Stage
from mla_fx.target import Lowering

from .absorb import absorb
from .apply_rules import recognise, tell_miss
from .chosen_keys import chosen_keys
from .fuel import Rewrite
from .hoist import inputs_of, read_ahead
from .lower import lower
from .lower_coded import lower_coded
from .prove import apply
from .reinplace import reinplace
from .run import Pass, Run, check, old_readers


def take_back_in_place_forms(run: Run) -> None:
    """Make the user's own calls functional if the target cannot run them as they are."""
    if not run.target.runs_operators and calls_in_place_forms(run.graph):
        run.keep_original()
        _note(run.report, functionalize(run.graph, functools.partial(apply, run)))


def look_around(run: Run) -> None:
    """End the run if there is nothing to try; otherwise, make the size facts of the graph available until it ends.
    Rules are for functional graphs."""
    run.is_done = not triage(run.graph, run.report)
    run.rules = run.rules if is_functional(run.graph) else ()
    if not run.is_done:
        fake_mode = detect_fake_mode([node.meta.get("val") for node in run.graph.find_nodes(op="placeholder")])
        environment = getattr(fake_mode, "shape_env", None)
        run.until_done.enter_context(size_facts(environment, lambda: written_alike(run.graph)))


def choose_absorbed(run: Run) -> None:
    if not run.is_changed:
        return
    for node in filter(has_heads, run.graph.find_nodes(op="call_function", target=ATTENTION)):
        try:
            absorb(node, run.emit, run.options.absorb, run.target, functools.partial(apply, run))
        except NoMatch as miss:
            tell_miss(run, "absorb", node, miss)


def recognise_pieces(run: Run) -> None:
    """Recognise the remaining norms and rotations if the target takes them and something else fused in the graph."""
    if run.fired and run.target.takes_pieces(run.options.extra):
        recognise(Stage.PIECE)(run)


def clean_up(run: Run) -> None:
    """Remove what the fusions left unused, and count the fused operators before the target lowers them."""
    if run.is_changed:
        for plan in (one for find in (round_trips, empty_parts, rejoined, turns) for one in find(run.emit)):
            with contextlib.suppress(NoMatch):  # the call stays
                apply(run, run.emit, "cleaning up", plan)
    _erase_orphans(run)
    rules = {rule.name for rule in run.rules if rule.stage == Stage.PIECE}
    for node in run.graph.nodes:
        rule, name = node.meta.get(RULE), fused_name(node)
        if name is not None and rule in rules:
            run.pieces[rule] += 1
        elif name is not None:
            run.fused.setdefault(name, []).append(module_of(node))
    run.report.notes += chosen_keys(run.graph)
    run.caches = bytes_of_caches(run.graph)
    if run.fused and run.options.verify != "off":
        run.keep_original()
        run.rewritten = Snapshot(run.graph)


def reinplace_caches(run: Run) -> None:
    if run.fused and run.target.writes_in_place:
        run.keep_original()
        _note(run.report, reinplace(run.graph, functools.partial(apply, run)))


def lower_fused(run: Run) -> None:
    """Lower the fused operators, including the user's own calls."""
    if run.fused:
        _lower(run, run.lowerings, run.target.bodies())


def lower_plain(run: Run) -> None:
    """Apply the target's lowerings of plain operators if something fused in the graph."""
    if run.fused:
        _lower_coded(run, run.target.coded_lowerings(run.options.extra))
        _lower(run, run.target.plain_lowerings(run.options.extra), {})
        for note, plan in run.target.mended(run.emit):
            run.keep_original()
            with contextlib.suppress(NoMatch):  # the call stays
                apply(run, run.emit, note, plan)
                run.report.notes.append(note)
        _note(run.report, Counter(run.target.remarks(run.graph)))


def hoist_weights(run: Run) -> None:
    if run.fused and run.weights is not None:
        run.keep_original()
        changing = functools.partial(apply, run)
        run.numbers = read_ahead(run.graph, run.target.read_ahead_by, changing)
        seldom_change = run.weights | inputs_of(run.graph, run.target.laid_out_by)
        run.hoisted = hoist(run.graph, seldom_change, changing)
        _erase_orphans(run)
        summaries = (run.hoisted.summary(), run.numbers.summary())
        _note(run.report, {summary: 1 for summary in summaries if summary})


TRIAGE = Pass("triage", look_around)
PIPELINE = (
    Pass("functionalize", take_back_in_place_forms),
    TRIAGE,
    Pass("recognise attention", recognise(Stage.ATTENTION)),
    Pass("choose absorbed or expanded", choose_absorbed, is_optional=True),
    Pass("recognise context", recognise(Stage.CONTEXT)),
    Pass("recognise prolog", recognise(Stage.PROLOG)),
    Pass("recognise cache", recognise(Stage.CACHE)),
    Pass("recognise pieces", recognise_pieces),
    Pass("clean up", clean_up),
    Pass("reinplace", reinplace_caches, is_optional=True),
    Pass("lower", lower_fused),
    Pass("lower the rest", lower_plain, is_optional=True),
    Pass("hoist", hoist_weights),
)


def run_pipeline(run: Run, passes: tuple[Pass, ...] = PIPELINE) -> None:
    """Run the passes on a graph, until one of them marks the run as done."""
    run.on_stage("captured", run.graph)
    with run.until_done, collector_paused(), python_dispatcher(), on_processor():
        for step in passes:
            if not run.is_done:
                _run_pass(run, step)
    run.report.pieces, run.report.modules = dict(run.pieces), run.fused
    run.report.fused = {name: len(modules) for name, modules in run.fused.items()}
    _mark_unfused_mla(run)
    if run.fused and run.is_changed:
        run.report.memory = [_memory(run)]


def _mark_unfused_mla(run: Run) -> None:
    """Where nothing fused although latents are projected up, the nearest miss looks like MLA."""
    misses = run.report.misses
    if run.fused or not misses or not has_bottleneck(run.graph):
        return
    nearest = max(range(len(misses)), key=lambda place: misses[place].depth)
    misses[nearest] = replace(misses[nearest], looks_like_mla=True)


def _run_pass(run: Run, step: Pass) -> None:
    run.step = step.name
    start, nodes, fired = time.perf_counter(), len(run.graph.nodes), run.fired.copy()
    if step.is_optional and run.fuel.is_limited:
        _apply_within_fuel(run, step)
    else:
        step.apply(run)
    if run.original is not None:
        check(run.graph, run.original.originals, run.readers_before)
        run.readers_before = old_readers(run.graph)
    milliseconds = (time.perf_counter() - start) * 1e3
    record = PassRecord(step.name, milliseconds, nodes, len(run.graph.nodes), run.fired - fired)
    run.report.passes.append(record)
    run.on_stage(step.name, run.graph)


def _apply_within_fuel(run: Run, step: Pass) -> None:
    """A pass that changes the graph counts as a rewrite."""
    if run.fuel.is_empty:
        return
    before = _content(run.graph)
    step.apply(run)
    if _content(run.graph) != before:
        run.fuel.burn(Rewrite(step.name))


def _content(graph: Graph) -> list[tuple[object, ...]]:
    return [(node, node.target, node.args, node.kwargs) for node in graph.nodes]


def _lower(run: Run, lowerings: Mapping[OpOverload, Lowering], bodies: Mapping[OpOverload, Lowering]) -> None:
    if lowerings:
        run.keep_original()
        decompositions, changing = run.target.decompositions(), functools.partial(apply, run)
        _note(run.report, lower(run.graph, lowerings, decompositions, changing, bodies))
        _erase_orphans(run)


def _lower_coded(run: Run, lowerings: Mapping[OpOverload, Lowering]) -> None:
    if lowerings:
        run.keep_original()
        _note(run.report, lower_coded(run.graph, lowerings, functools.partial(apply, run)))
        _erase_orphans(run)


def _memory(run: Run) -> MemoryUse:
    weights = sum(value.bytes for value in run.hoisted.laid_out if value.sources)
    calls = sum(count_fused(run.graph).values())
    peak = peak_of_temporaries(run.graph, is_fused=run.target.fuses_loops)
    return MemoryUse(max(map(len, run.fused.values())), run.caches, weights, peak, run.unfused, calls)


def _erase_orphans(run: Run) -> None:
    if run.original is not None:
        erase_orphans(run.graph, run.original)


def _note(report: Report, reasons: Mapping[str, int]) -> None:
    report.notes += [reason if count == 1 else f"{reason} ({count} times)" for reason, count in reasons.items()]
