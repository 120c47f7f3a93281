"""Layers that fuse to a prolog, or do not."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mla_fx.cases import DR, DV, HCKV, HE, B, D, Layer, N, S, T

TILE = 128


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


# --- caches that hold codes -------------------------------------------------------------------------------------------


class Quantised(Layer):
    """One sequence, with an int8 projection of the query and caches of slots."""

    rank, dtype = HCKV, torch.float32
    q_b_scales: Tensor

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(2)

        def dense(*sizes: int) -> Tensor:
            return torch.randn(*sizes, generator=generator)

        self.kv_a = nn.Parameter(dense(self.rank + DR, HE) * HE**-0.5)
        self.kv_b = nn.Parameter(dense(N * (D + DV), self.rank) * self.rank**-0.5)
        self.kv_gamma = nn.Parameter(1 + 0.3 * dense(self.rank))
        codes, scales = Quantised.quantise(self, self.q_b.data)
        del self.q_b, self.kv_cache, self.kr_cache
        self.to(self.dtype)
        rows = self.cached(dense(T, self.rank), dense(T, DR).to(self.dtype))
        for name, value in {"q_b": codes, "q_b_scales": scales.squeeze(1), **rows}.items():
            self.register_buffer(name, value)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, position: Tensor) -> Tensor:
        tokens, cos, sin = (value.to(self.dtype) for value in (x[0], cos, sin))
        query = self.query(tokens).view(-1, N, D + DR)
        latent, k_rope = torch.split(nn.functional.linear(tokens, self.kv_a), [self.rank, DR], dim=-1)
        q_rope = self.rotate(query[..., D:], cos.unsqueeze(1), sin.unsqueeze(1))
        rows = self.cached(self.norm(latent, self.kv_gamma), self.rotate(k_rope, cos, sin))
        for name, row in rows.items():
            getattr(self, name).index_copy_(0, position, row)
        latents, keys = self.context()
        expanded = (latents @ self.kv_b.T).view(T, N, D + DV)
        key = torch.cat((expanded[..., :D], keys.unsqueeze(1).expand(-1, N, -1)), dim=-1)
        scores = torch.einsum("snd,tnd->nst", torch.cat((query[..., :D], q_rope), dim=-1), key) * (D + DR) ** -0.5
        scores = scores.masked_fill(torch.arange(T) > position[:, None], -torch.inf)
        return torch.einsum("nst,tnv->snv", scores.softmax(-1), expanded[..., D:]).flatten(1) @ self.o.T

    def query(self, x: Tensor) -> Tensor:
        codes, scales = self.quantise(self.norm(x @ self.q_a.T, self.q_gamma))
        return ((codes.int() @ self.q_b.int().T).float() * scales * self.q_b_scales).to(x.dtype)

    def quantise(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scales = x.abs().amax(-1, keepdim=True) / 127
        return (x / scales).round().to(torch.int8), scales

    def cached(self, latent: Tensor, keys: Tensor) -> dict[str, Tensor]:
        """The rows of each cache."""
        raise NotImplementedError

    def context(self) -> tuple[Tensor, Tensor]:
        """Latents and rotary keys."""
        raise NotImplementedError


# --- codes and scales in two caches ----------------------------------------------------------------------------------


class FourTiles(Quantised):
    tiles = 4
    scale_cache: Tensor

    def quantise(self, x: Tensor) -> tuple[Tensor, Tensor]:
        largest = x.abs().amax(-1, keepdim=True)
        factor = torch.full_like(largest, 127.0) / largest
        return (x * factor).round().to(torch.int8), 1 / factor

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return super().rotate(torch.cat((x[..., ::2], x[..., 1::2]), dim=-1), cos, sin)

    def cached(self, latent: Tensor, keys: Tensor) -> dict[str, Tensor]:
        codes, scales = self.quantise(latent.view(-1, self.tiles, HCKV // self.tiles))
        return {"kv_cache": codes.flatten(1), "scale_cache": scales.squeeze(-1), "kr_cache": keys}

    def context(self) -> tuple[Tensor, Tensor]:
        tiles = self.kv_cache.view(T, self.tiles, -1).float()
        return (tiles * self.scale_cache.unsqueeze(-1)).flatten(1), self.kr_cache


class FiveTiles(FourTiles):
    tiles = 5


class OtherFactor(FourTiles):
    def quantise(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return Quantised.quantise(self, x)


class Halves(FourTiles):
    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return Layer.rotate(self, x, cos, sin)


class PlainQuery(FourTiles):
    def query(self, x: Tensor) -> Tensor:
        return self.norm(x @ self.q_a.T, self.q_gamma) @ (self.q_b.float() * self.q_b_scales.unsqueeze(1)).T


# --- codes, keys and scales in one row -------------------------------------------------------------------------------


class PackedRows(Quantised):
    rank, tile, dtype = 2 * TILE, TILE, torch.bfloat16
    packed_cache: Tensor

    def norm(self, x: Tensor, gamma: Tensor) -> Tensor:
        wide = x.float()
        return wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * gamma

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return super().rotate(x.float(), cos.float(), sin.float()).to(x.dtype)

    def cached(self, latent: Tensor, keys: Tensor) -> dict[str, Tensor]:
        tiles = latent.view(len(latent), -1, self.tile)
        scales = self.scales(tiles)
        codes = (tiles * scales.reciprocal()).round().to(torch.int8).flatten(-2)
        return {"packed_cache": self.joined(codes, keys.view(torch.int8), scales.squeeze(-1).view(torch.int8))}

    def context(self) -> tuple[Tensor, Tensor]:
        codes, keys, scales = self.split()
        values = codes.view(T, -1, self.tile).float() * scales.view(torch.float32).unsqueeze(-1)
        return values.flatten(-2).bfloat16(), keys.view(torch.bfloat16)

    def scales(self, tiles: Tensor) -> Tensor:
        return tiles.abs().amax(-1, keepdim=True) * (1 / 127)

    def joined(self, codes: Tensor, keys: Tensor, scales: Tensor) -> Tensor:
        return torch.cat((codes, keys, scales), -1)

    def split(self) -> tuple[Tensor, ...]:
        return torch.split(self.packed_cache, [self.rank, 2 * DR, 4 * self.rank // self.tile], dim=-1)


class ScalesFirst(PackedRows):
    """FlashMLA's order."""

    def joined(self, codes: Tensor, keys: Tensor, scales: Tensor) -> Tensor:
        return torch.cat((codes, scales, keys), -1)

    def split(self) -> tuple[Tensor, ...]:
        parts = [self.rank, 4 * self.rank // self.tile, 2 * DR]
        codes, scales, keys = torch.split(self.packed_cache, parts, dim=-1)
        return codes, keys, scales


class NarrowTiles(PackedRows):
    tile = TILE // 2


class Divided(PackedRows):
    def scales(self, tiles: Tensor) -> Tensor:
        return tiles.abs().amax(-1, keepdim=True) / 127
