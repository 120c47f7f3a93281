"""The softmax scale of an attention, and the numbers that multiply its operands."""

from __future__ import annotations

import torch

from mla_fx.rule import Match, NoMatch
from mla_fx.rule.readings import Attention, Contraction


def attention_factors(match: Match, keys: str, dtype: torch.dtype) -> tuple[float, dict[str, float]]:
    """The softmax scale, and the other numbers that multiply operands and the result. Nope and rotary scores have one
    scale. In float16, values that the program scales down before a product are not left larger."""
    found = match.reading(Attention, "attention")
    nope, up, rotary, down = (match.get(Contraction, name) for name in ("nope", "up", "rope", "down"))
    assert nope is not None, "every pattern has it"
    # an absorbed query is used unchanged, and its factor is part of it
    expanded = 1.0 if up is None or keys == "absorbed" else up.factor
    values = found.value_factor * (1.0 if down is None else down.factor)
    factors: dict[str, float] = {}
    if dtype == torch.float16 and abs(expanded) < 1 and keys == "expanded":
        factors["weight_uk"], expanded = expanded, 1.0
    if dtype == torch.float16 and abs(values) < 1 and down is not None:
        factors["weight_uv"], values = values, 1.0
    factors["out"], query = values, "query" if keys == "absorbed" else "q_nope"
    scale = own = nope.factor * expanded
    if rotary is not None and rotary.factor != own:
        # a float16 query is only made smaller, one of another dtype not much larger
        most = 1.0 if dtype == torch.float16 else torch.finfo(dtype).max ** 0.25
        if abs(own) > most * abs(rotary.factor):
            factors["q_rope"] = rotary.factor / own
        else:
            scale, factors[query] = rotary.factor, own / rotary.factor
    for name, factor in factors.items():
        if not 16 * torch.finfo(dtype).tiny <= abs(factor) <= torch.finfo(dtype).max:
            raise NoMatch(f"{name} would be multiplied by {factor:.6g}, which {dtype} may not hold", found.node)
    return scale, factors
