"""Layers whose keys and values lie in pages, or only look like it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from mla_fx.cases import BLOCK, COLUMNS, HEADS, KV_HEADS, PAGES, WIDTH, B, Heads, S, T


class Serving(Heads):
    """Rows are written by slot, and contexts gathered through a table."""

    table: Tensor
    starts: Tensor

    def __init__(self) -> None:
        super().__init__()
        pages = torch.randperm(PAGES, generator=torch.Generator().manual_seed(1))
        self.register_buffer("table", pages[: B * T // BLOCK].view(B, -1))
        self.register_buffer("starts", torch.tensor([T - S, 5]))

    def forward(self, x: Tensor, *_: Tensor) -> Tensor:
        query, *rows = self.projected(x)
        positions = self.starts[:, None] + torch.arange(S)
        self.write(self.table.gather(1, positions // BLOCK) * BLOCK + positions % BLOCK, *rows)
        caches = self.key_cache, self.value_cache
        key, value = (self.context(cache, table) for cache, table in zip(caches, self.tables(), strict=True))
        seen = self.seen(torch.arange(T), positions.unsqueeze(-1))
        return self.attend(query, key, value, seen.unsqueeze(1))

    def tables(self) -> tuple[Tensor, Tensor]:
        return self.table, self.table

    def context(self, cache: Tensor, table: Tensor) -> Tensor:
        """[B, T, Hkv, columns]."""
        return cache[table].view(B, T, KV_HEADS, -1)

    def seen(self, keys: Tensor, positions: Tensor) -> Tensor:
        """[B, S, T]."""
        return keys <= positions

    def attend(self, query: Tensor, key: Tensor, value: Tensor, seen: Tensor) -> Tensor:
        """[B, S, H, columns]."""
        key, value = (rows.repeat_interleave(HEADS // KV_HEADS, 2).transpose(1, 2) for rows in (key, value))
        return self.weigh(query.transpose(1, 2) @ key.mT * WIDTH**-0.5, value, seen).transpose(1, 2)

    def weigh(self, scores: Tensor, value: Tensor, seen: Tensor) -> Tensor:
        return scores.masked_fill(~seen, -torch.inf).softmax(-1) @ value


class Fused(Serving):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, seen: Tensor) -> Tensor:
        query, key, value = (part.transpose(1, 2) for part in (query, key, value))
        return scaled_dot_product_attention(query, key, value, attn_mask=seen, enable_gqa=True).transpose(1, 2)


class Grouped(Serving):
    """Einsum over the query heads of each key head."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, seen: Tensor) -> Tensor:
        scores = torch.einsum("bshgd,bthd->bhgst", query.reshape(B, S, KV_HEADS, -1, WIDTH), key)
        weights = (scores + torch.where(seen, 0.0, -torch.inf).unsqueeze(2)).softmax(-1)
        return torch.einsum("bhgst,bthd->bshgd", weights, value).flatten(2, 3)


class BySlots(Serving):
    def context(self, cache: Tensor, table: Tensor) -> Tensor:
        return cache.flatten(0, 1)[(table.unsqueeze(-1) * BLOCK + torch.arange(BLOCK)).flatten(1)]


class ByLength(Serving):
    """The number of keys of each sequence; the last token sees all of them."""

    def seen(self, keys: Tensor, positions: Tensor) -> Tensor:
        lengths = positions[:, -1:] + 1
        return keys < lengths - S + torch.arange(1, S + 1).unsqueeze(-1)


class Window(Serving):
    """A mask that no length describes stays a mask."""

    def seen(self, keys: Tensor, positions: Tensor) -> Tensor:
        return (keys <= positions) & (keys > positions - 4)


class Coded(Serving):
    """Caches hold codes in int8."""

    key_scale: Tensor
    value_scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name in ("key", "value"):
            cache = getattr(self, f"{name}_cache")
            self.register_buffer(f"{name}_scale", torch.linspace(0.02, 0.05, cache[0, 0].numel()).view(cache.shape[2:]))
            setattr(self, f"{name}_cache", (cache * 30).round().to(torch.int8))

    def attend(self, query: Tensor, key: Tensor, value: Tensor, seen: Tensor) -> Tensor:
        return super().attend(query, self.numbers(key, self.key_scale), self.numbers(value, self.value_scale), seen)

    def numbers(self, codes: Tensor, scale: Tensor) -> Tensor:
        return codes.float() * scale


class CodedTokens(Coded):
    """Each token has its own scale."""

    def numbers(self, codes: Tensor, scale: Tensor) -> Tensor:
        return codes.float() * torch.linspace(0.02, 0.05, T).view(T, 1, 1)


class TwoTables(Serving):
    def tables(self) -> tuple[Tensor, Tensor]:
        return self.table, self.table.flip(1)


class RowsFirst(Serving):
    """A context reads all first rows of its blocks, then all second rows."""

    def context(self, cache: Tensor, table: Tensor) -> Tensor:
        return cache[table].transpose(1, 2).reshape(B, T, KV_HEADS, -1)


class WeighedKeys(Serving):
    """Keys are weighted after they were gathered."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, seen: Tensor) -> Tensor:
        return super().attend(query, key * torch.linspace(0.5, 1.5, T).view(T, 1, 1), value, seen)


class Sink(Serving):
    def weigh(self, scores: Tensor, value: Tensor, seen: Tensor) -> Tensor:
        scores = torch.cat((scores.masked_fill(~seen, -torch.inf), torch.ones(B, HEADS, S, 1)), -1)
        return scores.softmax(-1)[..., :-1] @ value


class OneLatent(Serving):
    """All heads share one key, whose first columns are the value."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, seen: Tensor) -> Tensor:
        latent = key[:, :, :1].transpose(1, 2)
        return self.weigh(query.transpose(1, 2) @ latent.mT, latent[..., :COLUMNS], seen).transpose(1, 2)


class HeadsOfValues(Serving):
    """Keys and values are repeated in another order."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, seen: Tensor) -> Tensor:
        key = key.repeat_interleave(HEADS // KV_HEADS, 2).transpose(1, 2)
        value = value.unsqueeze(2).expand(-1, -1, HEADS // KV_HEADS, -1, -1).flatten(2, 3).transpose(1, 2)
        return self.weigh(query.transpose(1, 2) @ key.mT, value, seen).transpose(1, 2)


class OneHeadOfValues(Serving):
    """Each query head has a key head; all share one head of values."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, seen: Tensor) -> Tensor:
        key = key.repeat_interleave(HEADS // KV_HEADS, 2).transpose(1, 2)
        return self.weigh(query.transpose(1, 2) @ key.mT, value[:, :, :1].transpose(1, 2), seen).transpose(1, 2)


class WiderKeys(Serving):
    """Keys are stored and read in float32; values are bfloat16, and so are the probabilities that multiply them."""

    def __init__(self) -> None:
        super().__init__()
        self.value_cache = self.value_cache.bfloat16()

    def attend(self, query: Tensor, key: Tensor, value: Tensor, seen: Tensor) -> Tensor:
        return super().attend(query.bfloat16().float(), key, value, seen).float()

    def weigh(self, scores: Tensor, value: Tensor, seen: Tensor) -> Tensor:
        return scores.masked_fill(~seen, -torch.inf).softmax(-1).bfloat16() @ value
