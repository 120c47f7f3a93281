"""The arguments of attention, and what they say about a call."""

from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, MISSING, dataclass, fields

import torch
from torch import Tensor

from mla_fx.errors import NoMatch

CHOOSES = "it chooses its form by the number of query tokens of each call"
RESULTS = "out", "lse"

# Names of arguments that go together, for what kernels take
HIDING = "mask", "context_lens", "is_causal"
HEADS = "weight_uk", "weight_uv"
FORM = "max_absorbed_tokens"  # which chooses between two ways to one result: every kernel takes it

Results = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Scoring:
    """How products of queries and keys become what a softmax gets."""

    scale: float
    fill: float | None = None
    sinks: Tensor | None = None


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
    def scoring(self) -> Scoring:
        return Scoring(self.scale, self.fill, self.sinks)

    @property
    def weights(self) -> tuple[Tensor, Tensor]:
        """weight_uk and weight_uv of a call that expands latents."""
        assert self.weight_uk is not None and self.weight_uv is not None, "latents are expanded"
        return self.weight_uk, self.weight_uv


Attend = Callable[[Arguments], Results]


def refuse_others(a: Arguments, kernel: str, *taken: str) -> None:
    """Raise NoMatch for an argument that a kernel does not take. So a kernel refuses a new argument until it says that
    it takes it."""
    for name in given_beside(a, *taken):
        raise NoMatch(f"{name} {'are' if name.endswith('s') else 'is'} given; {kernel} takes none")


def given_beside(a: Arguments, *taken: str) -> Iterator[str]:
    """The names of arguments that are not their defaults, beside some, those that have none, and the choice of a
    form."""
    for field in fields(a):
        value = getattr(a, field.name)
        is_given = field.default is not MISSING and value is not None and value is not field.default
        if is_given and field.name not in (FORM, *taken):
            yield field.name


def is_absorbed(a: Arguments) -> bool:
    """Whether a call with weights is computed in the latent space."""
    return a.max_absorbed_tokens != 0 and a.query.shape[1] <= a.max_absorbed_tokens


def is_chosen_at_run_time(a: Arguments) -> bool:
    """Whether a trace does not know the number of query tokens, by which a call with weights chooses its form."""
    return a.max_absorbed_tokens != 0 and isinstance(a.query.shape[1], torch.SymInt)


def is_masked(a: Arguments) -> bool:
    return a.mask is not None or a.context_lens is not None
