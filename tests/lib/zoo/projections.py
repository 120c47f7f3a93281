"""From hidden states to latents: how a product is written, how weights are laid out, how parts are taken."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

Part = Callable[..., tuple[Tensor, ...]]
Multiply = Callable[[Tensor, Tensor], Tensor]


# --- a product with a weight [out, in] -------------------------------------------------------------------------------


def transposed(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight.T


def on_tokens(x: Tensor, weight: Tensor) -> Tensor:
    flat = torch.mm(x.reshape(-1, x.shape[-1]), weight.t())
    return flat.view(*x.shape[:-1], -1)


def by_einsum(x: Tensor, weight: Tensor) -> Tensor:
    return torch.einsum("...i,oi->...o", x, weight)


def weight_first(x: Tensor, weight: Tensor) -> Tensor:
    return torch.matmul(weight, x.transpose(-1, -2)).transpose(-1, -2)


MULTIPLY: dict[str, Multiply] = {
    "linear": F.linear,
    "transposed": transposed,
    "on_tokens": on_tokens,
    "einsum": by_einsum,
    "weight_first": weight_first,
}


# --- parts of the last dimension -------------------------------------------------------------------------------------


def split(x: Tensor, *sizes: int) -> tuple[Tensor, ...]:
    return torch.split(x, list(sizes), dim=-1)


def slices(x: Tensor, first: int, *rest: int) -> tuple[Tensor, ...]:
    return (x[..., :first], *slices(x[..., first:], *rest)) if rest else (x,)


def from_the_end(x: Tensor, first: int, second: int, *rest: int) -> tuple[Tensor, ...]:
    tail = (x[..., -sum((second, *rest)) :],)
    return (x[..., :first], *(from_the_end(tail[0], second, *rest) if rest else tail))


def narrow(x: Tensor, *sizes: int) -> tuple[Tensor, ...]:
    return tuple(x.narrow(-1, sum(sizes[:place]), size) for place, size in enumerate(sizes))


def chunk(x: Tensor, *sizes: int) -> tuple[Tensor, ...]:
    return x.chunk(len(sizes), dim=-1) if len(set(sizes)) == 1 else split(x, *sizes)


def tensor_split(x: Tensor, *sizes: int) -> tuple[Tensor, ...]:
    return torch.tensor_split(x, [sum(sizes[:end]) for end in range(1, len(sizes))], dim=-1)


def split_of_split(x: Tensor, first: int, second: int, *rest: int) -> tuple[Tensor, ...]:
    """An outer split takes half of the first part with it."""
    head, tail = torch.split(x, [first // 2, x.shape[-1] - first // 2], dim=-1)
    middle, *parts = torch.split(tail, [first - first // 2, second, *rest], dim=-1)
    return torch.cat((head, middle), dim=-1), *parts


def split_again(x: Tensor, *sizes: int) -> tuple[Tensor, ...]:
    """Each part from a split of its own, as separate helper functions leave it."""
    return tuple(torch.split(x, list(sizes), dim=-1)[place] for place in range(len(sizes)))


PARTS: dict[str, Part] = {
    "split": split,
    "slices": slices,
    "from_the_end": from_the_end,
    "narrow": narrow,
    "chunk": chunk,
    "tensor_split": tensor_split,
    "split_of_split": split_of_split,
    "split_again": split_again,
}


# --- the arrangement of the down projections -------------------------------------------------------------------------


class Down(nn.Module):
    """`forward` returns what the query is made of, the latent and the rotary key, [..., size] each."""

    def __init__(self, query: Tensor, kv: Tensor, sizes: tuple[int, int], multiply: Multiply, part: Part) -> None:
        super().__init__()
        self.sizes, self.multiply, self.part = sizes, multiply, part
        self.hold(query, kv)

    def hold(self, query: Tensor, kv: Tensor) -> None:
        self.query, self.kv = nn.Parameter(query), nn.Parameter(kv)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.multiply(x, self.query), *self.part(self.multiply(x, self.kv), *self.sizes)


class Separate(Down):
    """fla: latent and rotary key have projections of their own."""

    def hold(self, query: Tensor, kv: Tensor) -> None:
        self.query = nn.Parameter(query)
        self.latent, self.key = (nn.Parameter(part.clone()) for part in kv.split(self.sizes))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.multiply(x, weight) for weight in (self.query, self.latent, self.key))


class Fused(Down):
    """vLLM, sglang: one projection for query and latents, split twice."""

    def hold(self, query: Tensor, kv: Tensor) -> None:
        self.qkv, self.query_size = nn.Parameter(torch.cat((query, kv))), len(query)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        query, kv = self.part(self.multiply(x, self.qkv), self.query_size, sum(self.sizes))
        return query, *self.part(kv, *self.sizes)


class FusedOnce(Fused):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.part(self.multiply(x, self.qkv), self.query_size, *self.sizes)


class InFirst(Down):
    """ambisinister: weights are stored [in, out] and multiplied as they are."""

    def hold(self, query: Tensor, kv: Tensor) -> None:
        self.query, self.kv = nn.Parameter(query.T.contiguous()), nn.Parameter(kv.T.contiguous())

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return x @ self.query, *self.part(x @ self.kv, *self.sizes)


class Biased(nn.Linear):
    """A linear layer with a bias, from its weight."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__(weight.shape[1], weight.shape[0])
        self.weight.data.copy_(weight)
        self.bias.data.copy_(torch.linspace(-0.5, 0.5, weight.shape[0]))


DOWN: dict[str, type[Down]] = {
    "joint": Down,
    "separate": Separate,
    "fused": Fused,
    "fused_once": FusedOnce,
    "in_first": InFirst,
}
