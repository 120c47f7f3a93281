"""Every change of a graph is that of a plan, which was proved before."""

from mla_fx.graph.schemas import written
from mla_fx.passes import prove
from mla_fx.passes.run import Pass
from mla_fx.rewriting.emitter import Emitter


def live(graph):
    """What a graph takes, computes and writes, as text."""
    order, kept = list(graph.nodes), set()
    for node in reversed(order):
        if node.op != "call_function" or node in kept or written(node):
            kept |= {node, *node.all_input_nodes}
    return [f"{node.name} {node.target} {node.args} {node.kwargs} {shape_of(node)}" for node in order if node in kept]


def shape_of(node):
    return getattr(node.meta.get("val"), "shape", None)


class Watch:
    """Every change of a graph is that of a plan that was proved just before, when the graph was as it had been. Calls
    of vendors are not proved, and sizes need not be."""

    def __init__(self, patch):
        self.before, self.proved, self.passes = None, None, set()
        known, apply = prove._known, Emitter.apply

        def proving(run, what, plan):
            assert live(run.graph) == self.before, f"{what}: the graph changed before the proof"
            self.proved = plan
            return known(run, what, plan)

        def applying(emit, plan):
            is_taken = any(map(prove._runs_elsewhere, plan.calls)) or prove._says_sizes(plan)
            assert plan is self.proved or is_taken
            assert live(emit.graph) == self.before, "the graph changed after the proof"
            erased = apply(emit, plan)
            self.before = live(emit.graph)
            return erased

        patch.setattr(prove, "_known", proving)
        patch.setattr(Emitter, "apply", applying)

    def step(self, step):
        def run_pass(run):
            self.before = before = live(run.graph)
            step.apply(run)
            assert live(run.graph) == self.before, f"{step.name} changed the graph without a proof"
            self.passes |= {step.name} if self.before != before else set()

        return Pass(step.name, run_pass, step.is_optional)
