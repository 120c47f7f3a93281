"""The arguments of attention, and what they say about a call."""

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor

CHOOSES = "it chooses its form by the number of query tokens of each call"
RESULTS = "out", "lse"

Results = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Arguments:
    query: Tensor
    query_rope: Tensor | None
    kv_cache: Tensor
    kr_cache: Tensor | None
    mask: Tensor | None = None
    context_lens: Tensor | None = None
    sinks: Tensor | None = None
    block_table: Tensor | None = None
    kv_scales: Tensor | None = None
    kr_scales: Tensor | None = None
    indices: Tensor | None = None
    weight_uk: Tensor | None = None
    weight_uv: Tensor | None = None
    lens: list[int] | None = None
    _: KW_ONLY
    scale: float
    is_causal: bool = False
    fill: float | None = None
    return_lse: bool = False
    max_absorbed_tokens: int = 0

    @property
    def weights(self) -> tuple[Tensor, Tensor]:
        """weight_uk and weight_uv of a call that expands latents."""
        assert self.weight_uk is not None and self.weight_uv is not None, "latents are expanded"
        return self.weight_uk, self.weight_uv


Attend = Callable[[Arguments], Results]


def is_absorbed(a: Arguments) -> bool:
    """Whether a call with weights is computed in the latent space."""
    return a.max_absorbed_tokens != 0 and a.query.shape[1] <= a.max_absorbed_tokens


def is_chosen_at_run_time(a: Arguments) -> bool:
    """Whether a trace does not know the number of query tokens, by which a call with weights chooses its form."""
    return a.max_absorbed_tokens != 0 and isinstance(a.query.shape[1], torch.SymInt)


def is_masked(a: Arguments) -> bool:
    return a.mask is not None or a.context_lens is not None
