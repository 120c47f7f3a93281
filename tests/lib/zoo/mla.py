"""Latent attention composed from one choice on each axis."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from .caches import CACHES
from .factors import FACTORS, times
from .norms import NORMS
from .projections import DOWN, MULTIPLY, PARTS
from .ropes import ROPES
from .scores import ATTEND, KEYS
from .sizes import SMALL, Sizes, Weights


@dataclass(frozen=True)
class Spelling:
    """One choice on each axis. The defaults are those of transformers 5 on a StaticCache."""

    query: str = "low"  # low, direct, or low_returned: the normed latent is an output too
    down: str = "joint"
    multiply: str = "linear"
    part: str = "split"
    norm: str = "hf"
    rope: str = "stride_two"
    tables: str = "given"  # given [B, S, D]; looked up by position in the module: indexed, or indexed_twice
    cache: str = "index_copy"
    keys: str = "cat_expand"
    attend: str = "sdpa"
    scale: str = "times"
    factor: str = "none"  # in layout bhsd
    layout: str = "bhsd"  # bhsd, bshd, tokens [B*S, ...], sbhd (the hidden states come as [S, B, hidden])
    noise: str = "none"
    sizes: Sizes = SMALL


NOISE = {
    "none": lambda x: x,
    "views": lambda x: x.view(x.shape).unsqueeze(0).squeeze(0) if x.is_contiguous() else x[...],
    "contiguous": lambda x: x.contiguous(),
    "clone": lambda x: x.clone(),
    "detach": lambda x: x.detach(),
    "dropout": lambda x: F.dropout(x, p=0.0, training=True),
    "casts": lambda x: x.double().to(x.dtype),
    "transposes": lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2),
    "flatten": lambda x: x.flatten(0, 1).unflatten(0, x.shape[:2]),
    "times_one": lambda x: x * 1.0 + 0.0,
}


class LatentAttention(nn.Module):
    """`forward(x, tables, positions, mask, caches, place)` gives the output, and the caches where those are new.

    `positions` are [B or 1, S]; `place` is what the spelling of the cache takes."""

    def __init__(self, spelling: Spelling, weights: Weights) -> None:
        super().__init__()
        self.spelling, self.sizes = spelling, spelling.sizes
        self.multiply, self.part = MULTIPLY[spelling.multiply], PARTS[spelling.part]
        self.norm, self.rotate = NORMS[spelling.norm], ROPES[spelling.rope].rotate
        self.noise, self.cache = NOISE[spelling.noise], CACHES[spelling.cache]
        self.factor = FACTORS[spelling.factor]
        self.keys, self.attend = KEYS[spelling.keys], ATTEND[spelling.attend].run
        self.scale = 1.3 * self.sizes.query**-0.5

        offset = 1.0 if spelling.norm == "unit_offset" else 0.0
        is_direct = weights.q_down is None
        first = weights.q_up if is_direct else weights.q_down
        sizes = self.sizes.kv_rank, self.sizes.rope
        self.down = DOWN[spelling.down](first, weights.kv_down, sizes, self.multiply, self.part)
        self.q_gamma = None if is_direct else nn.Parameter(weights.q_gamma - offset)
        self.q_up = None if is_direct else nn.Parameter(weights.q_up)
        self.kv_gamma = nn.Parameter(weights.kv_gamma - offset)
        self.kv_up = nn.Parameter(weights.kv_up)
        self.out = nn.Parameter(weights.out)

    def forward(
        self,
        x: Tensor,
        tables: tuple[Tensor, ...],
        positions: Tensor,
        mask: Tensor | None,
        caches: tuple[Tensor | None, ...],
        place: Any,
    ) -> tuple[Tensor, ...]:
        sizes, layout, noise = self.sizes, self.spelling.layout, self.noise
        shape = x.shape[:2] if layout != "sbhd" else (x.shape[1], x.shape[0])
        if layout == "tokens":
            x = x.reshape(-1, x.shape[-1])
        q, latent, k_rope = self.down(noise(x))
        extra: tuple[Any, ...] = ()
        if self.q_up is not None:
            compressed = times(self.norm(q, self.q_gamma, sizes.epsilon), self.factor.compressed)
            extra = (compressed,) if self.spelling.query == "low_returned" else ()
            q = self.multiply(compressed, self.q_up)
        q = noise(q).view(*q.shape[:-1], sizes.heads, sizes.query)
        if layout == "bhsd":
            q = q.transpose(1, 2)
        is_behind = self.factor.is_behind
        q = q if is_behind else self._scaled(q, positions)
        q_nope, q_rope = (times(part, self.factor.query) for part in self.part(q, sizes.nope, sizes.rope))
        latent = times(noise(self.norm(latent, self.kv_gamma, sizes.epsilon)), self.factor.latent)

        heads = 1 if layout == "bhsd" else -2
        of_query = self._tables(tables, positions, shape)
        of_key = self._tables(tables, positions, shape) if self.spelling.tables == "indexed_twice" else of_query
        q_rope = self.rotate(q_rope, *of_query)
        k_rope = self.rotate(k_rope.unsqueeze(heads), *of_key).squeeze(heads)

        if is_behind:
            q_nope, q_rope = self.part(self._scaled(torch.cat((q_nope, q_rope), -1), positions), sizes.nope, sizes.rope)
        latent, k_rope = self._rows(latent, shape), self._rows(k_rope, shape)
        new, latents, keys = self.cache.store_both(caches, latent, k_rope, place)
        extra += new

        q_nope, q_rope = (noise(self._by_head(part, shape)) for part in (q_nope, q_rope))
        if self.spelling.scale == "query":
            q_nope, q_rope = q_nope * self.scale, q_rope * self.scale
        operands = self.keys(q_nope, q_rope, noise(latents), keys, self.kv_up, sizes)
        attended = operands.finish(self.attend(operands, mask, self.spelling.scale, self.scale))
        out = self.multiply(attended.transpose(1, 2).reshape(*shape, -1), self.out)
        return (out.transpose(0, 1) if layout == "sbhd" else out, *extra)

    def _scaled(self, q: Tensor, positions: Tensor) -> Tensor:
        """`q` [B, H, S, D] times the factor that each token has."""
        if self.factor.each is None:
            return q
        each = self.factor.each(positions, self.sizes.heads).transpose(1, 2)
        return q * each.unsqueeze(-1).to(q.dtype)

    def _tables(self, tables: tuple[Tensor, ...], positions: Tensor, shape: tuple[int, int]) -> list[Tensor]:
        """Tables that broadcast against [..., heads, ...] in this layout."""
        if self.spelling.tables.startswith("indexed"):
            tables = tuple(table[positions] for table in tables)
        if self.spelling.layout == "bhsd":
            return [table.unsqueeze(1) for table in tables]
        if self.spelling.layout == "tokens":
            return [table.expand(*shape, -1).reshape(-1, 1, table.shape[-1]) for table in tables]
        if self.spelling.layout == "sbhd":
            tables = tuple(table.transpose(0, 1) for table in tables)
        return [table.unsqueeze(2) for table in tables]

    def _rows(self, rows: Tensor, shape: tuple[int, int]) -> Tensor:
        """[B, S, D]."""
        if self.spelling.layout == "sbhd":
            return rows.transpose(0, 1)
        return rows.view(*shape, -1)

    def _by_head(self, q: Tensor, shape: tuple[int, int]) -> Tensor:
        """[B, H, S, D]."""
        if self.spelling.layout == "bhsd":
            return q
        if self.spelling.layout == "sbhd":
            return q.permute(1, 2, 0, 3)
        return q.unflatten(0, shape).transpose(1, 2) if self.spelling.layout == "tokens" else q.transpose(1, 2)


def name_of(spelling: Spelling) -> str:
    """What differs from the default spelling."""
    default = Spelling()
    changed = {axis: value for axis, value in vars(spelling).items() if value != getattr(default, axis)}
    changed.pop("sizes", None)
    return "-".join(f"{axis}={value}" for axis, value in changed.items()) or "transformers"
