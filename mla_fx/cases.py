"""Cases: programs from which the tests of a pattern are generated, and a small layer to vary."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

B, S, T, N = 2, 3, 16, 4  # batch, query tokens, context, heads
HE, HCQ, HCKV, D, DR, DV = 32, 24, 20, 8, 6, 10  # hidden, query rank, latent rank, nope, rope and value widths
# Of attention without latents: query heads, key heads, their widths, those of values, rows of a page, pages
HEADS, KV_HEADS, WIDTH, COLUMNS, BLOCK, PAGES = 4, 2, 8, 6, 4, 16

Build = Callable[[], nn.Module]


@dataclass(frozen=True)
class Case:
    """A program for a rule's tests, called as `module(x, cos, sin, position)`.

    An accepted case gives the number of calls of each fused operator, a rejected one a part of the rule's reason. With
    `pieces`, the target also takes single norms and rotations."""

    name: str
    build: Build
    fused: Mapping[str, int] = field(default_factory=dict)
    because: str = ""
    pieces: bool = False


class Layer(nn.Module):
    """One layer of MLA as Hugging Face writes it: latents cached, keys and values expanded. Cases override methods."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def weight(out: int, inner: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(out, inner, generator=generator) * inner**-0.5)

        def gamma(size: int) -> nn.Parameter:
            return nn.Parameter(1 + 0.3 * torch.randn(size, generator=generator))

        self.q_a, self.q_b = weight(HCQ, HE), weight(N * (D + DR), HCQ)
        self.kv_a, self.kv_b = weight(HCKV + DR, HE), weight(N * (D + DV), HCKV)
        self.o = weight(HE, N * DV)
        self.q_gamma, self.kv_gamma = gamma(HCQ), gamma(HCKV)
        self.kv_cache: Tensor
        self.kr_cache: Tensor
        self.register_buffer("kv_cache", torch.randn(B, 1, T, HCKV, generator=generator))
        self.register_buffer("kr_cache", torch.randn(B, 1, T, DR, generator=generator))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, position: Tensor) -> Tensor:
        query = self.query(x)
        tokens = query.shape[1]
        q_nope, q_rope = torch.split(query.view(B, tokens, N, D + DR).transpose(1, 2), [D, DR], dim=-1)
        latent, k_rope = self.rows(x)
        q_rope, k_rope = self.rotate(q_rope, cos, sin), self.rotate_key(k_rope, cos, sin)
        latent, k_rope = self.store(latent, k_rope, position)
        mask = torch.zeros(tokens, T).masked_fill(torch.arange(T) > position[:, None], -torch.inf)
        out: Tensor = self.attend(q_nope, q_rope, latent, k_rope, mask)
        return out.transpose(1, 2).reshape(B, tokens, -1) @ self.o.T

    def query(self, x: Tensor) -> Tensor:
        return self.norm(x @ self.q_a.T, self.q_gamma) @ self.q_b.T

    def rows(self, x: Tensor) -> tuple[Tensor, Tensor]:
        latent, k_rope = torch.split(x @ self.kv_a.T, [HCKV, DR], dim=-1)
        return self.norm(latent, self.kv_gamma).unsqueeze(1), k_rope.unsqueeze(1)

    def norm(self, x: Tensor, gamma: Tensor) -> Tensor:
        return gamma * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-second, first), dim=-1) * sin

    def rotate_key(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return self.rotate(x, cos, sin)

    def store(self, latent: Tensor, k_rope: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        self.kv_cache.index_copy_(2, position, latent)
        self.kr_cache.index_copy_(2, position, k_rope)
        return self.kv_cache, self.kr_cache

    def keys(self, latent: Tensor, k_rope: Tensor) -> tuple[Tensor, Tensor]:
        expanded = (latent @ self.kv_b.T).view(B, T, N, D + DV).transpose(1, 2)
        k_nope, value = torch.split(expanded, [D, DV], dim=-1)
        return torch.cat((k_nope, k_rope.expand(-1, N, -1, -1)), dim=-1), value

    def attend(self, q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, mask: Tensor) -> Tensor:
        key, value = self.keys(latent, k_rope)
        scores = torch.cat((q_nope, q_rope), dim=-1) @ key.transpose(-1, -2) * (D + DR) ** -0.5 + mask
        out: Tensor = scores.softmax(-1) @ value
        return out


class WeightedQuery(Layer):
    """Each column of the query is weighted after its projection, so no prolog fuses. The key side does."""

    def query(self, x: Tensor) -> Tensor:
        return super().query(x) * torch.linspace(0.5, 1.5, N * (D + DR))


class NoRotaryPart(Layer):
    """GLM-5 Next: neither query nor key has a rotary part."""

    def attend(self, q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, mask: Tensor) -> Tensor:
        key, value = self.keys(latent, k_rope)
        return nn.functional.scaled_dot_product_attention(q_nope, key[..., :D], value, attn_mask=mask)


class GrowingCache(Layer):
    """A cache that grows by cat."""

    def store(self, latent: Tensor, k_rope: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        old = self.kv_cache[:, :, : T - S], self.kr_cache[:, :, : T - S]
        return torch.cat((old[0], latent), dim=2), torch.cat((old[1], k_rope), dim=2)


class Heads(nn.Module):
    """A layer of a serving engine, without latents: keys and values of each head lie in pages."""

    key_cache: Tensor
    value_cache: Tensor

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        widths = HEADS * WIDTH, KV_HEADS * WIDTH, KV_HEADS * COLUMNS
        self.qkv = nn.ParameterList(torch.randn(HE, width, generator=generator) * HE**-0.5 for width in widths)
        for name, width in (("key_cache", WIDTH), ("value_cache", COLUMNS)):
            self.register_buffer(name, torch.randn(PAGES, BLOCK, KV_HEADS, width, generator=generator))

    def projected(self, x: Tensor) -> tuple[Tensor, ...]:
        """Query, keys and values, [B, S, heads, columns]."""
        heads = HEADS, KV_HEADS, KV_HEADS
        return tuple((x @ weight).unflatten(-1, (n, -1)) for weight, n in zip(self.qkv, heads, strict=True))

    def write(self, slots: Tensor, *rows: Tensor) -> None:
        for cache, row in zip((self.key_cache, self.value_cache), rows, strict=True):
            cache.flatten(0, 1)[slots] = row.to(cache.dtype)


def inputs(tokens: int = S) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The arguments of a Layer: hidden states, cos, sin [S, Dr], and the positions written [S]."""
    generator = torch.Generator().manual_seed(1)
    angle = torch.rand(tokens, DR // 2, generator=generator).repeat(1, 2) * 6
    position = torch.arange(T - tokens - 2, T - 2)
    return torch.randn(B, tokens, HE, generator=generator), angle.cos(), angle.sin(), position
