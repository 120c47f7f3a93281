"""Operands of fused attention that no fused operator computes, and what a report says about them."""

from __future__ import annotations

from unittest import mock

from mla_fx.debug import recorder
from mla_fx.debug.outcomes import layer_of
from mla_fx.driver import discovery
from mla_fx.graph.provenance import module_of
from mla_fx.rule import Stage

RECOGNISED = "recognise cache"  # after it, no rule for a whole operator is tried
OPERANDS = {
    "attention": {"query": 0, "rows": 2},
    "paged_attention": {},
}
PROLOGS, CACHES = (
    {rule.name for rule in discovery.rules() if rule.stage in stages}
    for stages in ((Stage.PROLOG,), (Stage.PROLOG, Stage.CACHE))
)
TELL = {"query": PROLOGS | {"absorb"}, "rows": CACHES}
PRODUCTS = {"mm", "bmm", "addmm", "baddbmm", "matmul", "_int_mm"}


def name_of(node):
    return getattr(node.target, "_opname", "")


def layer(path):
    """Empty in a model without layers."""
    found = layer_of(path)
    return found if found[-1:].isdigit() else ""


def is_fused(node):
    return getattr(node.target, "namespace", "") == "mla_fx"


def are_left(graph):
    """The layer and role of each operand of attention that plain operators compute by a product."""
    for node in graph.nodes:
        for role, place in OPERANDS[name_of(node)].items() if is_fused(node) and name_of(node) in OPERANDS else ():
            if not is_whole(node.args[place]):
                yield layer(module_of(node)), role


def is_whole(value):
    """Whether a fused operator, or no product at all, is behind a value. Products are not looked behind."""
    pending, seen, is_product = [value], set(), False
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        if is_fused(node):
            return True
        if name_of(node) in PRODUCTS:
            is_product = True
        else:
            pending += node.all_input_nodes
    return not is_product


class Watched:
    """The roles that are left in each graph that is compiled while it is entered, and their reports."""

    def __init__(self):
        self.left = []
        self.patch = mock.patch.object(recorder.Recorder, "stage", self._stage())

    def _stage(self):
        def stage(_, name, graph):
            if name == RECOGNISED:
                self.left += are_left(graph)

        return stage

    def __enter__(self):
        self.patch.__enter__()
        return self

    def __exit__(self, *error):
        self.patch.__exit__(*error)

    def check(self, report):
        """Returns how many roles are left."""
        told = {(layer(miss.module), miss.pattern) for miss in report.misses}
        silent = [(at, role) for at, role in self.left if not any((at, name) in told for name in TELL[role])]
        assert not silent, str(report)
        return len(self.left)
