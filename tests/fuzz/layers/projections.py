"""Projections: with something added, with weights split, joined or folded beforehand."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.functional import linear

from .heads import Absorbed
from .plain import Layer, Sizes


class Biased(Layer):
    """Query and key side have a bias each, with equal widths if the sizes are equal."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.q_bias = nn.Parameter(self.random(sizes.heads * sizes.query))
        self.kv_bias = nn.Parameter(self.random(sizes.rank + sizes.rope))

    def query(self, compressed: Tensor) -> Tensor:
        return linear(compressed, self.q_b, self.q_bias)

    def rows(self, x: Tensor) -> Tensor:
        return linear(x, self.kv_a, self.kv_bias)


class Lora(Layer):
    """A second product of small rank on the key side, times a number."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        out, inner = self.kv_a.shape
        self.lora_a, self.lora_b = self.weight(2, inner), self.weight(out, 2)

    def rows(self, x: Tensor) -> Tensor:
        return super().rows(x) + linear(linear(x, self.lora_a), self.lora_b) * 0.7


class Presplit(Absorbed):
    """The up projection comes as two parameters, one of them transposed."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        up, down = (part.detach() for part in Absorbed.weights(self))
        self.w_kc, self.w_vc = nn.Parameter(up.clone()), nn.Parameter(down.mT.contiguous())

    def weights(self) -> tuple[Tensor, ...]:
        return self.w_kc, self.w_vc.mT


class Tied(Layer):
    """Rows of one parameter project to the latents of query and key."""

    def compressed(self, x: Tensor) -> Tensor:
        return x @ self.kv_a[-self.sizes.q_rank :].T


class ScaledApart(Layer):
    """Both parts of the query are multiplied by numbers per head and token, after the rotation."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.by_head, self.by_token = self.gamma(sizes.heads), self.gamma(sizes.tokens)

    def attend(self, q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, mask: Any) -> Tensor:
        scale = (self.by_head[:, None] * self.by_token).unsqueeze(-1)
        return super().attend(q_nope * scale, q_rope * scale, latent, k_rope, mask)
