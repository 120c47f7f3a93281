"""What the operands of an attention must be, beside what the patterns say."""

from __future__ import annotations

from mla_fx.rule import Match, NoMatch
from mla_fx.rule.operands import check_is_causal
from mla_fx.rule.readings import Attention, Element, at_most, down_projection, is_projected_from, product, rank

SHARED = {"kv_cache": "the latent", "kr_cache": "k_rope"}  # by all heads


def forms(match: Match) -> tuple[str, str]:
    """ "expanded" if keys and values are expanded from the latents, "absorbed" if they are the latents."""
    return match.choices.get("keys", "absorbed"), match.choices.get("values", "absorbed")


def columns_of(match: Match, found: Attention) -> str:
    """The letter of the columns of the attention's result: "v", or "c" if the values are the latents."""
    if forms(match)[1] == "expanded":
        return "v"
    outer = {axis for part in found.index for axis in part.axes}
    if match.axes("v") or not outer.issuperset(match.axes("c")):  # a column that is repeated
        raise NoMatch("the attention's result and the latents have different columns", found.node)
    return "c"


def check_operands(match: Match, found: Attention) -> None:
    """Each operand has its own dimensions and no others."""
    for name in ("weight_uk", "weight_uv", "kv_cache", "kr_cache", "q_nope", "q_rope", "query"):
        if name in match.elements:
            if name in SHARED:
                _check_shared(match, name)
            _check_axes(match, match[name], name, match.letters[name])
    for mask in found.masks:
        _check_axes(match, mask.element, "the mask", "bnst")
    if isinstance(found.sink, Element) and not found.sink.axes <= set(match.axes("n")):
        what = "the softmax has one column beside the keys of the context"
        raise NoMatch(f"{what}, and its score is no attention sink, one number per head", found.sink.origin)
    check_is_causal(found, match.axes("s"))


def check_rank(match: Match, columns: str) -> None:
    """Heads share latents that were projected down for keys and values. In multi-head attention keys, values and
    queries are all computed from the hidden states."""
    latent, weight = match["kv_cache"], match["weight_uk"]
    if not match.axes("n"):
        raise NoMatch("there is no rotary part, and no heads share a latent", latent.origin)
    if {match.choices["keys"], match.choices["values"]} == {"absorbed"}:
        return
    down = down_projection(latent)
    width = product(axis.size for axis in latent.axes & weight.axes)
    wider = () if down is None else (rank(down), product(axis.size for axis in match.axes(columns)))
    is_latent = wider and all(at_most(width + 1, size) for size in wider)
    if not is_latent or is_projected_from(match["q_nope"], latent):
        reason = "there is no rotary part, and keys and values are not expanded from a down-projected latent"
        raise NoMatch(reason, latent.origin)


def _check_shared(match: Match, name: str) -> None:
    element = match[name]
    if not element.axes.isdisjoint(match.axes("n")):
        raise NoMatch(f"{SHARED[name]} is not shared across heads", element.node)
    if element.axes.isdisjoint(match.axes("t")):
        raise NoMatch(f"{SHARED[name]} is not along the context", element.node)


def _check_axes(match: Match, element: Element, name: str, letters: str) -> None:
    if not element.axes <= set(match.axes(letters)):
        raise NoMatch(f"{SHARED.get(name, name)} depends on more than its own dimensions", element.node)
