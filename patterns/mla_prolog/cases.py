"""Layers that fuse to a prolog, or do not."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mla_fx.cases import DR, HCKV, HE, B, D, Layer, N, S


class DirectQuery(Layer):
    """DeepSeek-V2-Lite: no low-rank query."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Parameter(torch.randn(N * (D + DR), HE) * HE**-0.5)

    def query(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.q)


class Complex(Layer):
    """DeepSeek's own code: rotation as a product of complex numbers, read and written interleaved."""

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        turn = torch.complex(cos[..., : DR // 2], sin[..., : DR // 2])
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], DR // 2, 2))
        return torch.view_as_real(pairs * turn).flatten(-2)


class NoRotation(Layer):
    """Kimi Linear: the last columns of query and key are shared but not rotated."""

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return x


class Scaled(Layer):
    """LongCat: query and latent are multiplied by numbers."""

    def query(self, x: Tensor) -> Tensor:
        return super().query(x) * 1.5

    def rows(self, x: Tensor) -> tuple[Tensor, Tensor]:
        latent, k_rope = super().rows(x)
        return latent * 0.75, k_rope


class ScaledByToken(Layer):
    """Mistral 4: the query is multiplied by a number per position; Mistral Large 4: and per head."""

    def query(self, x: Tensor) -> Tensor:
        scale = torch.arange(1.0, S + 1).view(S, 1, 1) + torch.linspace(0, 1, N).view(N, 1)
        return super().query(x).view(B, S, N, D + DR) * scale


class Bias(Layer):
    def rows(self, x: Tensor) -> tuple[Tensor, Tensor]:
        kv = nn.functional.linear(x, self.kv_a, torch.ones(HCKV + DR))
        latent, k_rope = torch.split(kv, [HCKV, DR], dim=-1)
        return self.norm(latent, self.kv_gamma).unsqueeze(1), k_rope.unsqueeze(1)


class LayerNorm(Layer):
    def norm(self, x: Tensor, gamma: Tensor) -> Tensor:
        return nn.functional.layer_norm(x, gamma.shape, gamma)


class OtherTables(Layer):
    def rotate_key(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return self.rotate(x, sin, cos)


class OtherTokens(Layer):
    def query(self, x: Tensor) -> Tensor:
        return super().query(x.flip(1))
