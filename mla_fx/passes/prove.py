"""The one way to change a graph: a plan is proved, as the option `prove` asks, and then applied."""

import torch
from torch.fx import Node

from mla_fx.comparing import in_place
from mla_fx.comparing.interpreter import may_run, on_real_tensors
from mla_fx.comparing.plans import Difference, difference, kind_of
from mla_fx.comparing.region import UncheckedError
from mla_fx.comparing.reproducer import of_plan, reproduced
from mla_fx.errors import NoMatch
from mla_fx.graph.provenance import fused_name, placed_name
from mla_fx.readings.sizes import size_of
from mla_fx.rewriting.draft import Change, Draft, value_of
from mla_fx.rewriting.emitter import Emitter

from .run import Run

UNKNOWN = ""  # of a kind that was not compared yet; a refusal is a sentence


def apply(run: Run, emit: Emitter, what: str, plan: Change) -> list[Node]:
    """Apply a plan as a whole; return the erased nodes.

    Raises NoMatch, and changes nothing, if the plan computes something else than what it replaces, which is a fault of
    the rule or pass; with `prove="required"` also if that cannot be found out. Plans of one kind are compared once."""
    is_taken = run.options.prove == "off" or any(map(_runs_elsewhere, plan.calls)) or _says_sizes(plan)
    refusal = None if is_taken else _known(run, what, plan)
    if refusal is not None:
        raise NoMatch(refusal, plan.olds[0])
    return emit.apply(plan)


def _runs_elsewhere(call: Draft) -> bool:
    """Vendors' operators do not run here, nor do branches of a conditional."""
    return fused_name(call) is None and not may_run(call)


def _says_sizes(plan: Change) -> bool:
    """Whether symbolic sizes alone are replaced, by others with the same expressions, which say all about them."""
    pairs = [(old.meta["val"], value_of(new)) for old, new in plan.replacements]
    are_sizes = all(isinstance(value, torch.SymInt) for pair in pairs for value in pair)
    return bool(pairs) and are_sizes and all(size_of(old) == size_of(new) for old, new in pairs)


def _known(run: Run, what: str, plan: Change) -> str | None:
    """Why a plan is refused. Who shares memory is not part of a kind."""
    if plan.dropped:
        return _refusal(run, what, plan)
    try:
        kind = kind_of(plan)
        known = run.proved.get(kind, UNKNOWN)
    except Exception as error:
        return _unchecked(run, what, error)
    if known is UNKNOWN:
        known = run.proved[kind] = _refusal(run, what, plan)
    return known


def _refusal(run: Run, what: str, plan: Change) -> str | None:
    try:
        found = in_place.difference(plan) if plan.dropped else difference(plan)
    except Exception as error:
        return _unchecked(run, what, error)
    if found is None:
        run.report.checked += 1
        return None
    changed = found if isinstance(found, str) else f"{placed_name(found.old)}: {found.sentence}"
    reason, dump = f"{what} would change {changed}", run.options.dump
    run.report.refuted.append(reason if dump is None or isinstance(found, str) else _reproduced(reason, found, dump))
    return reason


def _unchecked(run: Run, what: str, error: Exception) -> str | None:
    """A check that fails says nothing. It refuses the plan if the user requires it."""
    cause = error if isinstance(error, UncheckedError) else f"{type(error).__name__}: {error}"
    reason = f"{what} could not be checked: {cause}"
    if run.options.prove == "required":
        return reason
    run.report.unchecked.append(reason)
    return None


def _reproduced(reason: str, found: Difference, dump: str) -> str:
    with on_real_tensors():
        return reproduced(f"{reason}.", lambda: of_plan(reason, found), dump)
