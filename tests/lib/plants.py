"""Faults planted in what rules emit, calls of fused operators with other arguments than were read, and in what runs."""

import torch
from mla_fx.lowering.reference import Reference
from torch.fx import Interpreter

from mla_fx.graph.provenance import module_of
from mla_fx.graph.torch_compilers import aot_autograd
from mla_fx.passes import prove
from mla_fx.rewriting.emitter import Emitter

aten, ops = torch.ops.aten, torch.ops.mla_fx


def _times(name, factor):
    def change(emit, target, args, options):
        return args, {**options, name: options[name] * factor}

    return change


def _operand(target, name, change):
    """Another value in place of an operand."""
    place = [argument.name for argument in target._schema.arguments].index(name)

    def changed(emit, target, args, options):
        return (*args[:place], change(emit, args[place]), *args[place + 1 :]), options

    return changed


PROLOG, ATTENTION = ops.mla_prolog.default, ops.attention.default
FAULTS = {
    "scale 5 % off": (ATTENTION, _times("scale", 1.05)),
    "scale 1 % off": (ATTENTION, _times("scale", 1.01)),
    "epsilon of the keys 100 times as large": (PROLOG, _times("rmsnorm_epsilon_ckv", 100)),
    "epsilon of the query 100 times as large": (PROLOG, _times("rmsnorm_epsilon_cq", 100)),
    "rotation the other way": (
        PROLOG,
        _operand(PROLOG, "rope_sin", lambda emit, sin: emit.call(aten.neg.default, sin)),
    ),
    "sine and cosine swapped": (
        PROLOG,
        lambda emit, target, args, options: ((*args[:7], args[8], args[7], *args[9:]), options),
    ),
    "rows written one slot further": (
        PROLOG,
        _operand(PROLOG, "cache_index", lambda emit, index: emit.call(aten.add.Tensor, index, 1)),
    ),
}


def plant(patch, fault, path=""):
    """Make the rules emit one fault, in all modules or where the path of the anchor contains `path`."""
    wrong, change = FAULTS[fault]
    call = Emitter.call

    def planted(self, target, *args, **options):
        is_absorbed = target is ATTENTION and options.get("weight_uk") is None  # from one with the fault
        if target is wrong and not is_absorbed and path in f".{module_of(self._before)}.":
            args, options = change(self, target, args, options)
        return call(self, target, *args, **options)

    patch.setattr(Emitter, "call", planted)
    patch.setattr(Emitter, "again", lambda self, same, args, options: planted(self, same.target, *args, **options))
    unproved(patch)


def unproved(patch):
    """Rewrites are not checked: the option prove would refuse wrong ones."""
    patch.setattr(prove, "difference", lambda plan: None)


def plant_in_lowering(patch):
    """Attention by loops is slightly wrong: the rules are right, and what the target makes of them is not."""

    def wrong(self, function, *args, **options):
        def slightly(*given, **settings):
            out, lse = function(*given, **settings)
            return out * 1.001, lse

        return inlined(self, slightly if "loops.attention" in function.__module__ else function, *args, **options)

    inlined = Emitter.inlined
    patch.setattr(Emitter, "inlined", wrong)
    unproved(patch)


def plant_in_runs(patch, operator, change):
    """What the reference target runs gets another result of one operator; no graph is wrong."""

    class Planted(Interpreter):
        def call_function(self, target, args, kwargs):
            value = super().call_function(target, args, kwargs)
            return change(value) if target is operator else value

    def forward(gm, inputs, is_inference=False):
        return lambda *given: Planted(gm).run(*given)

    def compiled(self, gm, inputs, fusing, options):
        return aot_autograd(fusing(forward), forward)(gm, inputs)

    patch.setattr(Reference, "compile", compiled)
