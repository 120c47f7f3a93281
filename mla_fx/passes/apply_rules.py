"""Applies every rule of a stage at every anchor, and reports the nearest miss where a rule does not fire."""

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Set
from typing import Any

import torch
from torch.fx import Node

from mla_fx.debug.report import Miss
from mla_fx.errors import ByDesign, NoMatch
from mla_fx.graph.provenance import ORIGINS, fused_name, module_of, note_sources, source_of
from mla_fx.graph.schemas import updated_arguments
from mla_fx.graph.torch_private import OpOverload, tree_leaves
from mla_fx.matching.match import Match, NearestMiss
from mla_fx.ops.common.define import on_arguments
from mla_fx.ops.emitted.attention.arguments import Arguments
from mla_fx.readings.calls import noting
from mla_fx.rewriting.draft import Change, Draft, in_order
from mla_fx.rewriting.emitter import Emitter
from mla_fx.rewriting.plan import Plan
from mla_fx.rewriting.replacement import ATTENTION, change_of, check_nothing_is_lost, fitted
from mla_fx.rule import Rule

from .fuel import Rewrite
from .lower import lowered, told, unlowered
from .prove import apply
from .repeat import Recipe, recipe, replay
from .run import Run

MOST_RECIPES = 3  # per rule: models alternate between a few kinds of layers


def recognise(stage: str) -> Callable[[Run], None]:
    """Return a pass that applies the rules of one stage at all their anchors."""

    def apply_rules(run: Run) -> None:
        for rule in run.rules:
            if rule.stage == stage and rule.name not in run.options.disable:
                _apply_rule(run, rule)

    return apply_rules


def _apply_rule(run: Run, rule: Rule) -> None:
    recipes: deque[Recipe] = deque(maxlen=MOST_RECIPES)
    for anchor in list(rule.anchors(run.graph)):
        nearest = NearestMiss()
        if run.fuel.is_empty:
            return
        if anchor._erased:
            continue
        if _replay(run, rule, anchor, recipes) or _try_at(run, rule, anchor, nearest, recipes):
            run.fired[rule.name] += 1
            calls = tuple(name for node in run.emit.added if (name := fused_name(node)))
            run.fuel.burn(Rewrite(rule.name, module_of(anchor), source_of(anchor), calls))
        elif nearest.miss is not None and rule.tells_misses:
            tell_miss(run, rule.name, anchor, nearest.miss, nearest.depth, looks_like_mla=rule.looks_like_mla(anchor))


def tell_miss(
    run: Run, name: str, anchor: Node, miss: NoMatch, depth: int = 0, *, looks_like_mla: bool = False
) -> None:
    """Report why a rule or a pass does not apply at `anchor`."""
    place = _place(miss.node if miss.node is not None else anchor)
    by_design = isinstance(miss, ByDesign)
    run.report.misses.append(Miss(name, miss.reason, *place, depth, looks_like_mla, by_design))


def _place(node: Node) -> tuple[str, str, str]:
    return node.name, source_of(node), module_of(node)


def _replay(run: Run, rule: Rule, anchor: Node, recipes: Iterable[Recipe]) -> bool:
    """Repeat the rewrite found at an earlier anchor if the graph is the same here; return whether it was."""
    for found in recipes:
        images = found.images(anchor, run.emit.fakes)
        if images is None:
            continue
        with contextlib.suppress(NoMatch), run.emit.at(anchor, rule.name):
            plan = replay(run.emit, found, images)
            _ask_target(run, rule, plan)
            _apply(run, rule, plan)
            return True
    return False


def _try_at(run: Run, rule: Rule, anchor: Node, nearest: NearestMiss, recipes: deque[Recipe]) -> bool:
    with noting() as looked_into:
        try:
            for match in rule.bindings(anchor, nearest):
                if _rewrite(run, rule, anchor, match, nearest, recipes, looked_into):
                    return True
        except NoMatch as miss:
            nearest.fail(Match(), miss)
    return False


def _rewrite(
    run: Run,
    rule: Rule,
    anchor: Node,
    match: Match,
    nearest: NearestMiss,
    recipes: deque[Recipe],
    looked_into: Set[Node],
) -> bool:
    """Draft the rule's plan, check it, and apply it; return whether it was applied."""
    try:
        planned = rule.rewrite(match.settled())
        with run.emit.at(anchor, rule.name):
            planned, plan = _taken(run, rule, planned)
            _check_quantisation(run, planned)
            checked = _check_loss(plan)
            found = recipe(run.emit, anchor, looked_into | checked, plan)
            _apply(run, rule, plan)
    except NoMatch as miss:
        nearest.fail(match, miss)
        return False
    run.report.notes += [f"{rule.name}: {difference}" for difference in planned.differences]
    if found is not None:
        recipes.appendleft(found)
    return True


def _taken(run: Run, rule: Rule, planned: Plan) -> tuple[Plan, Change]:
    """The plan, or the one to try instead, that the target takes. Raises NoMatch if it takes neither."""
    plan = change_of(run.emit, planned)
    try:
        _ask_target(run, rule, plan)
    except NoMatch:
        if planned.instead is None:
            raise
        return _taken(run, rule, planned.instead)
    return planned, plan


def _check_quantisation(run: Run, plan: Plan) -> None:
    if plan.differences and run.options.quant == "exact":
        raise NoMatch(f"{'; '.join(plan.differences)}; quant='vendor' takes the operator's codes")


def _apply(run: Run, rule: Rule, plan: Change) -> None:
    """Raises NoMatch if the plan is refuted."""
    erased = apply(run, run.emit, rule.name, fitted(run.emit, plan))
    _note_origins(run.emit, erased)
    note_sources(run.emit.added, erased, rule.name)


def _note_origins(emit: Emitter, erased: Iterable[Node]) -> None:
    origins = [(node.name, source_of(node), module_of(node)) for node in erased]
    for node in emit.added:
        if fused_name(node) is not None:
            node.meta[ORIGINS] = origins


def _check_loss(plan: Change) -> set[Node]:
    """Refuse a rewrite that loses an input; return the nodes that the check looked at."""
    checked: set[Node] = set()
    for call in plan.fused:
        checked |= check_nothing_is_lost(plan.olds, plan.sources, _first_dtype(call.value), plan.exact)
    return checked


def _ask_target(run: Run, rule: Rule, plan: Change) -> None:
    """Raises NoMatch if the target refuses a call, or has a faster way. A rule that yields to the target takes no body
    for its lowering."""
    for call in plan.fused:
        if call.target is ATTENTION:
            lowered(call, on_arguments(run.target.refuse, Arguments))
        try:
            _ask_about(run, call)
        except NoMatch as refusal:
            if run.target.runs_operators or (rule.yields_to_target and call.target in run.lowerings):
                raise ByDesign(f"target {run.target.name!r}: {refusal.reason}") from refusal
            _ask_about_body(run, call, refusal.reason)


def _ask_about(run: Run, call: Draft) -> None:
    """Raises NoMatch if the target leaves a call out, or neither lowers nor runs it."""
    reason, lowering = run.target.left_out.get(fused_name(call) or ""), run.lowerings.get(call.target)
    if reason is not None:
        raise NoMatch(reason)
    would_copy = lowering is not None and not run.target.writes_in_place and _updates_codes(call)
    if not run.target.runs_operators or would_copy:
        lowered(call, lowering or unlowered)


def _ask_about_body(run: Run, call: Draft, reason: str) -> None:
    """Raises NoMatch if the target does not take the operator's body in place of a call."""
    refused = f"target {run.target.name!r} cannot run {fused_name(call)}: {reason}, and its body"
    try:
        body = lowered(call, run.target.bodies().get(call.target, unlowered))
        results = run.emit.inlined(body, *call.args, decompositions=run.target.decompositions(), **call.kwargs)
    except Exception as error:  # a user's own body may raise any
        raise ByDesign(f"{refused} cannot be inlined: {told(error)}") from error
    for target in {one.target for one in in_order(tree_leaves(results))} - {one.target for one in in_order([call])}:
        if isinstance(target, OpOverload) and not run.target.takes(target):
            raise ByDesign(f"{refused} calls {target}, which its graphs do not take")


def _updates_codes(call: Draft) -> bool:
    """Whether a result is an updated cache of int8 codes, which a functional call copies."""
    is_tuple = isinstance(call.value, (tuple, list))
    return is_tuple and any(call.value[place].dtype == torch.int8 for place in updated_arguments(call.target))


def _first_dtype(value: Any) -> torch.dtype:
    """Return the dtype of the first result; if that holds codes, the coarsest floating dtype of the others."""
    results = [value] if isinstance(value, torch.Tensor) else value
    dtypes: list[torch.dtype] = [result.dtype for result in results]
    floating = [dtype for dtype in dtypes if dtype.is_floating_point]
    return dtypes[0] if dtypes[0] in floating else min(floating, key=lambda dtype: dtype.itemsize)
