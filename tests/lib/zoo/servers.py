"""Layers as servers write them: drafts of several tokens for each sequence, and packed tokens of many sequences.

`forward` takes what a server hands to a layer: hidden states, positions, caches, and where in these the rows go."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention

from .sizes import SMALL, Sizes, Weights, weights


class Server(nn.Module):
    """What the spellings share: projections of tokens in any number of dimensions, tables looked up by position."""

    def __init__(self, sizes: Sizes = SMALL, given: Weights | None = None) -> None:
        super().__init__()
        given = given or weights(sizes)
        self.sizes, self.scale = sizes, sizes.query**-0.5
        self.q_a, self.q_b, self.kv_a, self.kv_b, self.o = (
            nn.Parameter(weight) for weight in (given.q_down, given.q_up, given.kv_down, given.kv_up, given.out)
        )
        self.q_gamma, self.kv_gamma = nn.Parameter(given.q_gamma), nn.Parameter(given.kv_gamma)
        angle = torch.arange(4 * sizes.context)[:, None] * 10.0 ** -torch.arange(sizes.rope // 2)
        self.register_buffer("cos_sin_cache", torch.cat((angle.cos(), angle.sin()), dim=-1))

    def rows(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q_nope [..., N, D], q_pe [..., N, Dr], latent [..., R], k_pe [..., Dr]."""
        z = self.sizes
        q = linear(rms_norm(linear(x, self.q_a), (z.q_rank,), self.q_gamma, 1e-6), self.q_b)
        q_nope, q_pe = q.unflatten(-1, (z.heads, z.query)).split([z.nope, z.rope], dim=-1)
        latent, k_pe = linear(x, self.kv_a).split([z.kv_rank, z.rope], dim=-1)
        cos, sin = self.cos_sin_cache[positions].chunk(2, dim=-1)
        latent = rms_norm(latent, (z.kv_rank,), self.kv_gamma, 1e-6)
        q_pe = self.rotate(q_pe, cos.unsqueeze(-2), sin.unsqueeze(-2))
        return q_nope, q_pe, latent, self.rotate(k_pe, cos, sin)

    @staticmethod
    def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    def attend(self, q_nope: Tensor, q_pe: Tensor, latent: Tensor, k_pe: Tensor, allowed: Tensor) -> Tensor:
        """[B,S,N,D], [B,S,N,Dr], [B,T,R], [B,T,Dr], [B,S,T]; absorbed, as all servers decode."""
        z = self.sizes
        weight = self.kv_b.unflatten(0, (z.heads, -1))
        query = torch.einsum("bsnd,ndc->bsnc", q_nope, weight[:, : z.nope])
        scores = torch.einsum("bsnc,btc->bnst", query, latent) + torch.einsum("bsnr,btr->bnst", q_pe, k_pe)
        scores = (scores * self.scale).masked_fill(~allowed.unsqueeze(1), -torch.inf)
        out = torch.einsum("bnst,btc->bsnc", scores.softmax(-1), latent)
        return torch.einsum("bsnc,nvc->bsnv", out, weight[:, z.nope :])

    def attend_expanded(self, q_nope: Tensor, q_pe: Tensor, latent: Tensor, k_pe: Tensor, **mask: Any) -> Tensor:
        """[T,N,D], [T,N,Dr], [L,R], [L,Dr] of one sequence, keys and values expanded, as servers prefill."""
        z = self.sizes
        k_nope, value = linear(latent, self.kv_b).unflatten(-1, (z.heads, -1)).split([z.nope, z.value], dim=-1)
        key = torch.cat((k_nope, k_pe.unsqueeze(1).expand(-1, z.heads, -1)), dim=-1)
        return self.attend_per_head(torch.cat((q_nope, q_pe), dim=-1), key, value, **mask)

    def attend_per_head(self, query: Tensor, key: Tensor, value: Tensor, **mask: Any) -> Tensor:
        """[S,N,D+Dr], [L,N,D+Dr], [L,N,Dv] of one sequence."""
        query, key, value = (part.transpose(0, 1).unsqueeze(0) for part in (query, key, value))
        out = scaled_dot_product_attention(query, key, value, scale=self.scale, **mask)
        return out.squeeze(0).transpose(0, 1)

    def project(self, out: Tensor) -> Tensor:
        return linear(out.flatten(-2), self.o)


class Drafts(Server):
    """[B, S, He] over a contiguous cache, each sequence at positions [B, S] of its own."""

    def forward(self, x: Tensor, positions: Tensor, caches: tuple[Tensor, Tensor]) -> Tensor:
        q_nope, q_pe, *rows = self.rows(x, positions)
        for cache, new in zip(caches, rows, strict=True):
            self.write(cache, new, positions)
        allowed = torch.arange(caches[0].shape[1]) <= positions.unsqueeze(-1)
        return self.project(self.attend(q_nope, q_pe, *caches, allowed))

    def write(self, cache: Tensor, rows: Tensor, positions: Tensor) -> None:
        cache[torch.arange(rows.shape[0])[:, None], positions] = rows


class DraftsScattered(Drafts):
    def write(self, cache: Tensor, rows: Tensor, positions: Tensor) -> None:
        cache.scatter_(1, positions.unsqueeze(-1).expand(-1, -1, rows.shape[-1]), rows)


class DraftsFlat(Drafts):
    """Written through a flat view, at sequence * length + position."""

    def write(self, cache: Tensor, rows: Tensor, positions: Tensor) -> None:
        flat = torch.arange(cache.shape[0])[:, None] * cache.shape[1] + positions
        cache.view(-1, cache.shape[-1])[flat.flatten()] = rows.flatten(0, 1)


class DraftsExpanded(Drafts):
    """The same with keys and values expanded."""

    def attend(self, q_nope: Tensor, q_pe: Tensor, latent: Tensor, k_pe: Tensor, allowed: Tensor) -> Tensor:
        z = self.sizes
        k_nope, value = linear(latent, self.kv_b).unflatten(-1, (z.heads, -1)).split([z.nope, z.value], dim=-1)
        key = torch.cat((k_nope, k_pe.unsqueeze(2).expand(-1, -1, z.heads, -1)), dim=-1)
        query, key, value = (part.transpose(1, 2) for part in (torch.cat((q_nope, q_pe), -1), key, value))
        out = scaled_dot_product_attention(query, key, value, allowed.unsqueeze(1), scale=self.scale)
        return out.transpose(1, 2)


class Window(Drafts):
    """A token sees the last ones alone."""

    WINDOW = 8

    def forward(self, x: Tensor, positions: Tensor, caches: tuple[Tensor, Tensor]) -> Tensor:
        q_nope, q_pe, *rows = self.rows(x, positions)
        for cache, new in zip(caches, rows, strict=True):
            self.write(cache, new, positions)
        places, last = torch.arange(caches[0].shape[1]), positions.unsqueeze(-1)
        return self.project(self.attend(q_nope, q_pe, *caches, (places <= last) & (places > last - self.WINDOW)))


class PagedDrafts(Server):
    """vLLM: tokens [B * S, He], rows by slot_mapping, contexts by block tables, masks by the lengths of sequences."""

    def forward(
        self, x: Tensor, positions: Tensor, caches: Any, slot_mapping: Tensor, block_table: Tensor, seq_lens: Tensor
    ) -> Tensor:
        q_nope, q_pe, *rows = self.rows(x, positions)
        for cache, new in zip(caches, rows, strict=True):
            cache.view(-1, cache.shape[-1])[slot_mapping] = new
        q_nope, q_pe = (self.by_sequence(q, block_table) for q in (q_nope, q_pe))
        latent, k_pe = (cache[block_table].flatten(1, 2) for cache in caches)
        out = self.attend(q_nope, q_pe, latent, k_pe, self.allowed(seq_lens, q_nope.shape[1], latent.shape[1]))
        return self.project(out.flatten(0, 1))

    def by_sequence(self, q: Tensor, block_table: Tensor) -> Tensor:
        return q.view(block_table.shape[0], -1, *q.shape[1:])

    def allowed(self, seq_lens: Tensor, tokens: int, length: int) -> Tensor:
        last = seq_lens[:, None] - tokens + torch.arange(tokens)
        return torch.arange(length) <= last.unsqueeze(-1)


class PagedDraftsDivided(PagedDrafts):
    """The number of tokens of a sequence is what a division of all leaves."""

    def by_sequence(self, q: Tensor, block_table: Tensor) -> Tensor:
        batch = block_table.shape[0]
        return q.reshape(batch, q.shape[0] // batch, q.shape[1], q.shape[2])


class PagedDraftsBatched(Server):
    """[B, S, He], slots computed from positions [B, S] and the block table."""

    def forward(self, x: Tensor, positions: Tensor, caches: Any, block_table: Tensor) -> Tensor:
        q_nope, q_pe, *rows = self.rows(x, positions)
        size = caches[0].shape[1]
        slots = block_table.gather(1, positions // size) * size + positions % size
        for cache, new in zip(caches, rows, strict=True):
            cache.flatten(0, 1).index_copy_(0, slots.flatten(), new.flatten(0, 1))
        latent, k_pe = (cache[block_table].flatten(1, 2) for cache in caches)
        allowed = torch.arange(latent.shape[1]) <= positions.unsqueeze(-1)
        return self.project(self.attend(q_nope, q_pe, latent, k_pe, allowed))


class TokensOfPositions(Server):
    """SGLang: tokens [T, He], which are as many as positions [B, S]; blocks and offsets of each."""

    def forward(self, x: Tensor, positions: Tensor, caches: Any, block_table: Tensor) -> Tensor:
        q_nope, q_pe, *rows = self.rows(x, positions.flatten())
        size = caches[0].shape[1]
        blocks, offsets = block_table.gather(1, positions // size), positions % size
        for cache, new in zip(caches, rows, strict=True):
            cache[blocks, offsets] = new.view(*positions.shape, -1)
        q_nope, q_pe = (q.view(*positions.shape, *q.shape[1:]) for q in (q_nope, q_pe))
        latent, k_pe = (cache[block_table].flatten(1, 2) for cache in caches)
        allowed = torch.arange(latent.shape[1]) <= positions.unsqueeze(-1)
        return self.project(self.attend(q_nope, q_pe, latent, k_pe, allowed).flatten(0, 1))


class VarlenPrefill(Server):
    """Packed tokens [T, He], split by the lengths of sequences; each attends to itself, as in vLLM's prefill."""

    def forward(self, x: Tensor, positions: Tensor, caches: Any, slot_mapping: Tensor, lens: list[int]) -> Tensor:
        q_nope, q_pe, *rows = self.rows(x, positions)
        for cache, new in zip(caches, rows, strict=True):
            cache.view(-1, cache.shape[-1])[slot_mapping] = new
        parts = zip(*(part.split(lens) for part in (q_nope, q_pe, *rows)), strict=True)
        return self.project(torch.cat([self.attend_expanded(*part, is_causal=True) for part in parts]))


class VarlenSliced(VarlenPrefill):
    """The same by slices between cumulated lengths."""

    def forward(self, x: Tensor, positions: Tensor, caches: Any, slot_mapping: Tensor, lens: list[int]) -> Tensor:
        q_nope, q_pe, *rows = self.rows(x, positions)
        for cache, new in zip(caches, rows, strict=True):
            cache.view(-1, cache.shape[-1])[slot_mapping] = new
        outs, start = [], 0
        for length in lens:
            end = start + length
            parts = (part[start:end] for part in (q_nope, q_pe, *rows))
            outs.append(self.attend_expanded(*parts, is_causal=True))
            start = end
        return self.project(torch.cat(outs))


class VarlenExpanded(VarlenPrefill):
    """The same with keys and values expanded once for all tokens, and split then."""

    def forward(self, x: Tensor, positions: Tensor, caches: Any, slot_mapping: Tensor, lens: list[int]) -> Tensor:
        z = self.sizes
        q_nope, q_pe, latent, k_pe = self.rows(x, positions)
        for cache, new in zip(caches, (latent, k_pe), strict=True):
            cache.view(-1, cache.shape[-1])[slot_mapping] = new
        k_nope, value = linear(latent, self.kv_b).unflatten(-1, (z.heads, -1)).split([z.nope, z.value], dim=-1)
        key = torch.cat((k_nope, k_pe.unsqueeze(1).expand(-1, z.heads, -1)), dim=-1)
        query = torch.cat((q_nope, q_pe), dim=-1)
        parts = zip(*(part.split(lens) for part in (query, key, value)), strict=True)
        return self.project(torch.cat([self.attend_per_head(*part, is_causal=True) for part in parts]))


class VarlenCached(Server):
    """Packed tokens, one sequence after the other: each is written to and reads its own line of a cache."""

    def forward(self, x: Tensor, positions: Tensor, caches: Any, lens: list[int], starts: list[int]) -> Tensor:
        q_nope, q_pe, *rows = self.rows(x, positions)
        outs, first = [], 0
        for line, (length, start) in enumerate(zip(lens, starts, strict=True)):
            for cache, new in zip(caches, rows, strict=True):
                cache[line, start : start + length] = new[first : first + length]
            latent, k_pe = (cache[line, : start + length].unsqueeze(0) for cache in caches)
            parts = (q[first : first + length].unsqueeze(0) for q in (q_nope, q_pe))
            allowed = torch.arange(start + length) <= torch.arange(start, start + length)[:, None]
            outs.append(self.attend(*parts, latent, k_pe, allowed.unsqueeze(0)).squeeze(0))
            first = first + length
        return self.project(torch.cat(outs))


class VarlenPaged(Server):
    """Packed tokens written by slots, then a loop over sequences, each over the pages of its own table."""

    def forward(
        self, x: Tensor, positions: Tensor, caches: Any, slot_mapping: Tensor, block_table: Tensor, lens: list[int]
    ) -> Tensor:
        q_nope, q_pe, *rows = self.rows(x, positions)
        for cache, new in zip(caches, rows, strict=True):
            cache.view(-1, cache.shape[-1])[slot_mapping] = new
        outs = []
        parts = (part.split(lens) for part in (q_nope, q_pe, positions))
        for line, (nope, pe, where) in enumerate(zip(*parts, strict=True)):
            latent, k_pe = (cache[block_table[line]].flatten(0, 1).unsqueeze(0) for cache in caches)
            allowed = torch.arange(latent.shape[1]) <= where[:, None]
            outs.append(self.attend(nope.unsqueeze(0), pe.unsqueeze(0), latent, k_pe, allowed.unsqueeze(0)).squeeze(0))
        return self.project(torch.cat(outs))


class OneSequence(Server):
    """[T, He] of one sequence, no batch at all: positions and a cache [L, width]."""

    def forward(self, x: Tensor, positions: Tensor, caches: Any) -> Tensor:
        q_nope, q_pe, *rows = self.rows(x, positions)
        for cache, new in zip(caches, rows, strict=True):
            cache.index_copy_(0, positions, new)
        allowed = torch.arange(caches[0].shape[0]) <= positions[:, None]
        return self.project(self.attend_expanded(q_nope, q_pe, *caches, attn_mask=allowed))


# --- what they are given ---------------------------------------------------------------------------------------------


def drafts(batch: int, tokens: int) -> tuple[Any, ...]:
    return _dense(batch, tokens, SMALL.hidden), _positions(batch, tokens), _caches(batch, SMALL.context)


def paged_drafts(batch: int, tokens: int, blocks: int) -> tuple[Any, ...]:
    positions, caches, table = _paged(batch, tokens, blocks)
    slots = _slots(table, torch.arange(batch)[:, None], positions)
    lens = positions[:, -1] + 1
    return _dense(batch * tokens, SMALL.hidden), positions.flatten(), caches, slots.flatten(), table, lens


def paged_drafts_batched(batch: int, tokens: int, blocks: int) -> tuple[Any, ...]:
    return _dense(batch, tokens, SMALL.hidden), *_paged(batch, tokens, blocks)


def tokens_of_positions(batch: int, tokens: int, blocks: int) -> tuple[Any, ...]:
    return _dense(batch * tokens, SMALL.hidden), *_paged(batch, tokens, blocks)


def prefill(*lens: int) -> tuple[Any, ...]:
    positions = torch.cat([torch.arange(length) for length in lens])
    slots = torch.arange(90, 90 - sum(lens), -1)
    return _dense(sum(lens), SMALL.hidden), positions, _caches(6, SMALL.block), slots, [*lens]


def cached(*starts_and_lens: tuple[int, int]) -> tuple[Any, ...]:
    starts, lens = map(list, zip(*starts_and_lens, strict=True))
    positions = _counted(*starts_and_lens)
    return _dense(len(positions), SMALL.hidden), positions, _caches(len(lens) + 1, SMALL.context), lens, starts


def paged(blocks: int, *starts_and_lens: tuple[int, int]) -> tuple[Any, ...]:
    _, lens = map(list, zip(*starts_and_lens, strict=True))
    positions = _counted(*starts_and_lens)
    _, caches, table = _paged(len(lens), 1, blocks)
    sequences = torch.repeat_interleave(torch.arange(len(lens)), torch.tensor(lens))
    slots = _slots(table, sequences, positions)
    return _dense(len(positions), SMALL.hidden), positions, caches, slots, table, lens


def one_sequence(tokens: int) -> tuple[Any, ...]:
    caches = tuple(cache.squeeze(0) for cache in _caches(1, SMALL.context))
    return _dense(tokens, SMALL.hidden), torch.arange(5, 5 + tokens), caches


def _paged(batch: int, tokens: int, blocks: int) -> tuple[Tensor, tuple[Tensor, Tensor], Tensor]:
    """Positions, pages (two belong to no sequence), and the page table of each sequence."""
    order = torch.randperm(batch * blocks + 2, generator=torch.Generator().manual_seed(3))
    return _positions(batch, tokens), _caches(len(order), SMALL.block), order[2:].view(batch, blocks)


def _slots(table: Tensor, sequences: Tensor, positions: Tensor) -> Tensor:
    return table[sequences, positions // SMALL.block] * SMALL.block + positions % SMALL.block


def _positions(batch: int, tokens: int) -> Tensor:
    return 5 + 2 * torch.arange(batch)[:, None] + torch.arange(tokens)


def _counted(*starts_and_lens: tuple[int, int]) -> Tensor:
    return torch.cat([torch.arange(start, start + length) for start, length in starts_and_lens])


def _caches(*lead: int) -> tuple[Tensor, Tensor]:
    return _dense(*lead, SMALL.kv_rank, seed=2), _dense(*lead, SMALL.rope, seed=3)


def _dense(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
