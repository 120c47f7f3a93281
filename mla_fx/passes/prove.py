"""Checks a plan before it is applied, as the option `prove` asks."""

from __future__ import annotations

from mla_fx.debug.reproducer import of_plan, reproduced
from mla_fx.errors import NoMatch
from mla_fx.graph.provenance import module_of
from mla_fx.graph.torch_private import python_dispatcher_off, unset_fake_temporarily
from mla_fx.proving.check import Difference, difference
from mla_fx.proving.region import UncheckedError
from mla_fx.rewriting.replacement import Drafted

from .run import Run


def prove(run: Run, rule: str, plan: Drafted) -> None:
    """Raises NoMatch if the plan computes something else than what it replaces, which is a fault of the rule; with
    `prove="required"` also if that cannot be found out."""
    if run.options.prove == "off":
        return
    try:
        found = difference(plan)
    except Exception as error:  # a check that fails says nothing about the plan
        cause = error if isinstance(error, UncheckedError) else f"{type(error).__name__}: {error}"
        reason = f"{rule} could not be checked: {cause}"
        if run.options.prove == "required":
            raise NoMatch(reason) from error
        run.report.unchecked.append(reason)
        return
    if found is None:
        run.report.checked += 1
        return
    where = module_of(found.old)
    reason = f"{rule} would change {found.old.name}{f' of {where}' if where else ''}: {found.sentence}"
    run.report.refuted.append(reason if run.options.dump is None else _reproduced(reason, found, run.options.dump))
    raise NoMatch(reason, found.old)


def _reproduced(reason: str, found: Difference, dump: str) -> str:
    with unset_fake_temporarily(), python_dispatcher_off():
        return reproduced(f"{reason}.", lambda: of_plan(reason, found), dump)
