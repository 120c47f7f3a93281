"""Checks a plan before it is applied, as the option `prove` asks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch.fx import Node

from mla_fx.debug.reproducer import of_plan, reproduced
from mla_fx.errors import NoMatch
from mla_fx.graph.provenance import module_of
from mla_fx.proving.check import Difference, difference
from mla_fx.proving.interpreter import on_real_tensors
from mla_fx.proving.kind import kind_of
from mla_fx.proving.memory import Memory
from mla_fx.proving.region import UncheckedError
from mla_fx.rewriting.replacement import Drafted

from .run import Run


def prove(run: Run, rule: str, plan: Drafted) -> None:
    """Raises NoMatch if the plan computes something else than what it replaces, which is a fault of the rule; with
    `prove="required"` also if that cannot be found out. Plans of one kind are compared once."""
    if run.options.prove == "off":
        return
    try:
        kind = kind_of(plan)
        is_known = kind in run.proved
    except Exception as error:
        _leave_unchecked(run, rule, error)
        return
    if not is_known:
        run.proved[kind] = _refusal(run, rule, plan)
    refusal = run.proved[kind]
    if refusal is not None:
        raise NoMatch(refusal, plan.olds[0])


def _refusal(run: Run, rule: str, plan: Drafted) -> str | None:
    try:
        found = difference(plan)
    except Exception as error:
        _leave_unchecked(run, rule, error)
        return None
    if found is None:
        run.report.checked += 1
        return None
    reason = f"{rule} would change {_named(found.old)}: {found.sentence}"
    run.report.refuted.append(reason if run.options.dump is None else _reproduced(reason, found, run.options.dump))
    return reason


def prove_write(run: Run, call: Node, sources: Sequence[Node], copies: Sequence[Node]) -> Callable[[Node], None]:
    """Returns a check of the call that will write into the sources in place, instead of the copies. It raises
    RuntimeError if another call would then read other numbers."""
    what = f"writing in place by {_named(call)}"
    if run.options.prove == "off":
        return lambda changed: None
    try:
        memory = Memory(call, sources, copies)
    except Exception as error:
        _leave_unchecked(run, what, error)
        return lambda changed: None

    def check(changed: Node) -> None:
        try:
            sentence = memory.difference(changed)
        except Exception as error:
            run.report.unchecked.append(_unchecked(what, error))
            return
        if sentence is not None:
            run.report.refuted.append(f"{what} would change {sentence}")
            raise RuntimeError(run.report.refuted[-1])
        run.report.checked += 1

    return check


def _named(node: Node) -> str:
    where = module_of(node)
    return f"{node.name} of {where}" if where else node.name


def _leave_unchecked(run: Run, what: str, error: Exception) -> None:
    """A check that fails says nothing. Raises NoMatch if the user requires it."""
    reason = _unchecked(what, error)
    if run.options.prove == "required":
        raise NoMatch(reason) from error
    run.report.unchecked.append(reason)


def _unchecked(what: str, error: Exception) -> str:
    cause = error if isinstance(error, UncheckedError) else f"{type(error).__name__}: {error}"
    return f"{what} could not be checked: {cause}"


def _reproduced(reason: str, found: Difference, dump: str) -> str:
    with on_real_tensors():
        return reproduced(f"{reason}.", lambda: of_plan(reason, found), dump)
