"""Chooses between absorbed and expanded attention by the number of query tokens, S.

The two are algebraically equal: `q . (W_uk c) = (W_uk^T q) . c`.

Per head and batch element, with R the latent rank and d = Dn + Dv, expanding T context tokens costs T R d once and
S T (d + Dr) for the scores and values. Absorbed attention costs S R d and S T (2R + Dr). Absorbed wins while

    S < R d / (R d / T + 2R - d)

which is 164 for DeepSeek-V3 at T = 4096 and hardly depends on T. The measured crossover is higher or lower, so each
kind of device has its own threshold. S <= 8 is always absorbed. Above that, a cold prefill (S = T) never is, nor is one
of unknown length: expanding few keys costs little.
"""

import operator

import torch
from torch.fx import Node

from mla_fx.errors import ByDesign
from mla_fx.graph.provenance import ORIGINS
from mla_fx.ops.emitted.attention.heads import absorb_query, expand_output
from mla_fx.readings.calls import args_of, named_argument
from mla_fx.readings.sizes import Size, at_most
from mla_fx.readings.views import shape_of
from mla_fx.rewriting.draft import Change, Draft
from mla_fx.rewriting.emitter import Apply, Emitter
from mla_fx.rewriting.operands import call_with
from mla_fx.target import Target

ALWAYS = 2**62
LIMIT = "max_absorbed_tokens"
SURELY_ABSORBED = 8
UNABSORBED = "the query is not absorbed, and prologs compute absorbed ones only"


def absorb(node: Node, emit: Emitter, policy: str, target: Target, apply: Apply) -> None:
    """Rewrites attention of heads whose S is provably small to attention of absorbed queries. Raises NoMatch with the
    reason if it stays as it is; `apply` may refuse, too.

    If S is a symbol that may be large, a call with the limit at which it decides at run time takes its place. It stays
    expanded if the target cannot run the operator.

    An absorbed float16 query may overflow where the original program does not. If the target runs the operators, such a
    call therefore keeps its weights, and computes the absorbed query in float32."""
    if named_argument(node, "lens") is not None:
        raise ByDesign(f"{UNABSORBED}: packed sequences are expanded", node)
    query, kv_cache = (named_argument(node, name) for name in ("query", "kv_cache"))
    value = query.meta["val"]
    tokens, context = shape_of(query)[1], shape_of(kv_cache)[1]
    limits = {"always": ALWAYS, "never": 0}
    limit = limits[policy] if policy in limits else target.most_absorbed_tokens(value.device, context)
    if not _is_absorbed(tokens, context, limit):
        if not isinstance(tokens, int) and not _is_cold(tokens, context):
            _limit(node, emit, limit if target.runs_operators else 0, apply)
        raise ByDesign(f"{UNABSORBED}: {_why_not(tokens, context, limit)}", node)
    if value.dtype == torch.float16 and target.runs_operators:
        _limit(node, emit, ALWAYS, apply)
        raise ByDesign(f"{UNABSORBED}: absorbed, it might leave the range of torch.float16", node)
    with emit.at(node, "absorb"):
        absorbed, weight_uv = _absorbed(node, emit), named_argument(node, "weight_uv")
        pairs = [
            (old, new if _is_sum(old) else emit.inlined(expand_output, new, weight_uv))  # contiguous, as the node's is
            for old, new in _results(node, absorbed, emit)
        ]
        apply(emit, "absorb", Change.of(pairs, {*node.all_input_nodes}))


def _is_absorbed(tokens: Size, context: Size, limit: int) -> bool:
    if limit == ALWAYS:
        return True
    return at_most(tokens, limit) and not _is_cold(tokens, context)


def _is_cold(tokens: Size, context: Size) -> bool:
    return tokens == context and not at_most(tokens, SURELY_ABSORBED)


def _why_not(tokens: Size, context: Size, limit: int) -> str:
    if limit == 0:
        return "option absorb is 'never'"
    if _is_cold(tokens, context):
        return f"a prompt of {tokens} tokens without earlier ones costs less like this"
    if not isinstance(tokens, int):
        return f"the number of its tokens, {tokens}, is known at run time only"
    return f"{tokens} tokens are more than the {limit} up to which absorbing costs less"


def _limit(node: Node, emit: Emitter, limit: int, apply: Apply) -> None:
    """Let a call decide by its number of tokens when it runs."""
    if node.kwargs.get(LIMIT, 0) == limit:
        return
    with emit.at(node, "absorb"):
        call = emit.evaluate(call_with(node, **{LIMIT: limit}))
        apply(emit, "absorb", Change.of(_results(node, call, emit), {*node.all_input_nodes}))


def _results(node: Node, call: Draft | Node, emit: Emitter) -> list[tuple[Node, Draft | Node]]:
    """What a call computes, and what another one computes instead."""
    call.meta[ORIGINS] = node.meta.get(ORIGINS, [])
    return [(result, emit.call(operator.getitem, call, args_of(result)[1])) for result in node.users]


def _is_sum(result: Node) -> bool:
    """Whether this is the logarithm of a sum, rather than attention."""
    return result.target is operator.getitem and args_of(result)[1] == 1


def _absorbed(node: Node, emit: Emitter) -> Draft | Node:
    """Attention over the latents, before its result is expanded."""
    query = emit.inlined(absorb_query, named_argument(node, "query"), named_argument(node, "weight_uk"))
    call = call_with(node, query=query, weight_uk=None, weight_uv=None, **{LIMIT: 0})
    return emit.evaluate(call)  # type: ignore[no-any-return]
