"""Plans with a planted fault: one operand or option of a call is another one."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_aggregate

from mla_fx.comparing import plans
from mla_fx.graph.provenance import fused_name
from mla_fx.rewriting.draft import Change, Draft, value_of

aten = torch.ops.aten


Fault = Callable[[dict[str, Any]], dict[str, Any]]


def changed(name: str, target: Any, *args: Any) -> Fault:
    """An operand is passed through a call."""
    return lambda given: {**given, name: Draft(target, (given[name], *args), {}, value_of(given[name]))}


def swapped(one: str, other: str) -> Fault:
    return lambda given: {**given, one: given[other], other: given[one]}


def option(name: str, change: Callable[[Any], Any]) -> Fault:
    return lambda given: {**given, name: change(given[name])}


def doubled(number):
    return 2 * number


FAULTS: dict[tuple[str, str], Fault] = {
    ("mla_prolog", "a factor"): changed("weight_uk", aten.mul.Tensor, 1.001),
    ("mla_prolog", "a sign"): changed("rope_sin", aten.neg.default),
    ("mla_prolog", "another frequency"): changed("rope_cos", aten.roll.default, [1], [-1]),
    ("mla_prolog", "cos for sin"): swapped("rope_sin", "rope_cos"),
    ("mla_prolog", "the next column"): changed("weight_uq_qr", aten.roll.default, [1], [-1]),
    ("mla_prolog", "another head's columns"): changed("weight_uk", aten.flip.default, [0]),
    ("mla_prolog", "another row of a projection"): changed("weight_dkv_kr", aten.flip.default, [0]),
    ("mla_prolog", "the next slot"): changed("cache_index", aten.add.Tensor, 1),
    ("mla_prolog", "another sequence's tokens"): changed("token_x", aten.flip.default, [0]),
    ("mla_prolog", "the epsilon of a norm"): option("rmsnorm_epsilon_cq", doubled),
    ("mla_prolog", "the epsilon of the other norm"): option("rmsnorm_epsilon_ckv", doubled),
    ("mla_prolog", "gamma plus one"): changed("rmsnorm_gamma_ckv", aten.add.Tensor, 1.0),
    ("mla_prolog", "another rotation"): option("rope_layout", lambda layout: "half_half"),
    ("mla_prolog", "a cache that is moved"): changed("kv_cache", aten.flip.default, [0]),
    ("latent_attention", "the scale of scores"): option("scale", lambda scale: scale * math.sqrt(1.001)),
    ("latent_attention", "a mask that is off by one"): changed("mask", aten.roll.default, [1], [-1]),
    ("latent_attention", "no mask"): lambda given: {**given, "mask": None},
    ("latent_attention", "another sequence's cache"): changed("kv_cache", aten.flip.default, [0]),
    ("latent_attention", "the cache of one token ago"): changed("kr_cache", aten.roll.default, [1], [1]),
    ("latent_attention", "another head's rotary query"): changed("query_rope", aten.flip.default, [1]),
}


def with_fault(plan: Change, operator: str, fault: Fault) -> Change:
    """The same plan, but for the operands of an operator."""
    made: dict[Any, Any] = {}

    def again(part: Draft | Node) -> Draft | Node:
        if not isinstance(part, Draft):
            return part
        if part not in made:
            args, kwargs = map_aggregate((part.args, part.kwargs), lambda leaf: again(leaf) if leaf in drafts else leaf)
            if part in plan.fused and fused_name(part) == operator:
                names = [argument.name for argument in part.target._schema.arguments]
                args, kwargs = (), fault({**dict(zip(names, args, strict=False)), **kwargs})
            made[part] = Draft(part.target, args, kwargs, part.value)
        return made[part]

    drafts = set(plan.calls)
    return Change.of([(old, again(new)) for old, new in plan.replacements], plan.sources, plan.exact)


def difference(program, plan, *given):
    """What the check finds in two functions of the same inputs."""
    graph = make_fx(lambda *given: (program(*given), plan(*given)), tracing_mode="fake")(*given).graph
    (results,) = graph.output_node().args
    found = plans.difference(Change.of([tuple(results)], {*graph.find_nodes(op="placeholder")}))
    return None if found is None else found.sentence
