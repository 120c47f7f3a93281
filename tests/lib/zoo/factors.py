"""Factors of queries and latents on the way to the attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Factor:
    """Numbers for the normed latent of the query, for the query and for the normed latent of the key; and a tensor
    [B or 1, S, heads or 1] for the query, behind its rotation or in front of it."""

    compressed: float = 1.0
    query: float = 1.0
    latent: float = 1.0
    each: Callable[[Tensor, int], Tensor] | None = None
    is_behind: bool = False


def by_position(positions: Tensor, heads: int) -> Tensor:
    return 1 + 0.3 * (positions + 1).log().unsqueeze(-1)


def by_head(positions: Tensor, heads: int) -> Tensor:
    return (positions + 1).log().unsqueeze(-1) * torch.linspace(0.5, 1.5, heads) + torch.linspace(1, 0.5, heads)


FACTORS = {
    "none": Factor(),
    "after_projection": Factor(query=1.5, latent=0.75),  # LongCat
    "before_projection": Factor(compressed=1.5, latent=0.75),  # dots3
    "by_position": Factor(each=by_position, is_behind=True),  # Mistral 4, Llama 4
    "by_head": Factor(each=by_head),  # Mistral Large 4
}


def times(x: Tensor, number: float) -> Tensor:
    return x if number == 1.0 else x * number
