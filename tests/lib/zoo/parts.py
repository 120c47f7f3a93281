"""Layers as servers write them: parts of a context, each with the logarithms of its sums, by which they are merged."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_gather_tensor, all_reduce, all_to_all_single
from torch.nn.functional import linear

from .servers import Server, _dense, _paged, paged
from .sizes import SMALL, Sizes, weights

Part = tuple[Tensor, Tensor]  # attention [B,S,N,V] and the logarithms [B,S,N] of its sums
CHUNK = 2  # pages


class Parts(Server):
    """What the spellings share: attention with logarithms, and merges. Rows that see no key have minus infinity."""

    def part(self, q_nope: Tensor, q_pe: Tensor, latent: Tensor, k_pe: Tensor, allowed: Tensor) -> Part:
        """[B,S,N,D], [B,S,N,Dr], [B,T,R], [B,T,Dr] and what broadcasts to [B,S,T]; keys and values are expanded."""
        z = self.sizes
        k_nope, value = linear(latent, self.kv_b).unflatten(-1, (z.heads, -1)).split([z.nope, z.value], dim=-1)
        key = torch.cat((k_nope, k_pe.unsqueeze(2).expand(-1, -1, z.heads, -1)), dim=-1)
        scores = torch.einsum("bsnd,btnd->bnst", torch.cat((q_nope, q_pe), dim=-1), key) * self.scale
        scores = scores.masked_fill(~allowed.unsqueeze(1), -torch.inf)
        lse = scores.logsumexp(-1).transpose(1, 2)
        return torch.einsum("bnst,btnv->bsnv", scores.softmax(-1), value), lse

    def absorbed(self, q_nope: Tensor, q_pe: Tensor, latent: Tensor, k_pe: Tensor, allowed: Tensor) -> Part:
        """The same over the latents; [B,S,N,R]."""
        return self.over_latents(self.in_latent_space(q_nope), q_pe, latent, k_pe, allowed)

    def in_latent_space(self, q_nope: Tensor) -> Tensor:
        weight = self.kv_b.unflatten(0, (q_nope.shape[2], -1))[:, : self.sizes.nope]
        return torch.einsum("bsnd,ndc->bsnc", q_nope, weight)

    def over_latents(self, query: Tensor, q_pe: Tensor, latent: Tensor, k_pe: Tensor, allowed: Tensor) -> Part:
        """Divided late as flash attention does it."""
        scores = torch.einsum("bsnc,btc->bnst", query, latent) + torch.einsum("bsnr,btr->bnst", q_pe, k_pe)
        scores = (scores * self.scale).masked_fill(~allowed.unsqueeze(1), -torch.inf)
        largest = scores.amax(-1, keepdim=True)
        raised = (scores - largest.masked_fill(largest == -torch.inf, 0)).exp()
        total = raised.sum(-1, keepdim=True)
        out = (raised @ latent.unsqueeze(1)) / total.clamp(min=1e-30)
        return out.transpose(1, 2), (largest + total.log()).squeeze(-1).transpose(1, 2)

    @staticmethod
    def merged(one: Part, other: Part) -> Part:
        largest = torch.maximum(one[1], other[1])
        safe = largest.masked_fill(largest == -torch.inf, 0)
        shares = [(lse - safe).exp() for _, lse in (one, other)]
        total = shares[0] + shares[1]
        outs = (torch.where(share.unsqueeze(-1) == 0, 0.0, out * share.unsqueeze(-1))
                for (out, _), share in zip((one, other), shares, strict=True))  # fmt: skip
        return sum(outs) / total.clamp(min=1e-10).unsqueeze(-1), safe + total.log()

    def expand(self, out: Tensor) -> Tensor:
        """[B,S,N,R]"""
        weight = self.kv_b.unflatten(0, (out.shape[2], -1))[:, self.sizes.nope :]
        return torch.einsum("bsnc,nvc->bsnv", out, weight)


class ChunkedPrompt(Parts):
    """vLLM: the cached context in chunks of pages, each expanded, merged with causal attention over the new tokens."""

    def forward(self, x: Tensor, positions: Tensor, caches: Any, block_table: Tensor, starts: Tensor) -> Tensor:
        q_nope, q_pe, *rows = self.rows(x, positions)
        size, tokens = caches[0].shape[1], torch.arange(x.shape[1])
        found = self.part(q_nope, q_pe, *rows, tokens <= tokens.unsqueeze(-1).unsqueeze(0))
        for number, table in enumerate(block_table.split(CHUNK, 1)):
            latent, k_pe = (cache[table].flatten(1, 2) for cache in caches)
            places = number * CHUNK * size + torch.arange(latent.shape[1])
            seen = (places < starts.unsqueeze(-1)).unsqueeze(1)
            found = self.merged(found, self.part(q_nope, q_pe, latent, k_pe, seen))
        slots = block_table.gather(1, positions // size) * size + positions % size
        for cache, new in zip(caches, rows, strict=True):
            cache.flatten(0, 1).index_copy_(0, slots.flatten(), new.flatten(0, 1))
        return self.project(found[0])


class SharedPrefix(Parts):
    """One prefix, to which the tokens of all sequences attend as one row of queries; then a context for each."""

    def forward(self, x: Tensor, positions: Tensor, caches: Any, block_table: Tensor, prefix: Any) -> Tensor:
        q_nope, q_pe, *rows = self.rows(x, positions)
        size = caches[0].shape[1]
        slots = block_table.gather(1, positions // size) * size + positions % size
        for cache, new in zip(caches, rows, strict=True):
            cache.flatten(0, 1).index_copy_(0, slots.flatten(), new.flatten(0, 1))
        folded = [query.flatten(0, 1).unsqueeze(0) for query in (q_nope, q_pe)]
        shared = self.absorbed(*folded, *prefix, torch.ones(1, 1, prefix[0].shape[1], dtype=torch.bool))
        shared = tuple(value.view(*x.shape[:2], *value.shape[2:]) for value in shared)
        latent, k_pe = (cache[block_table].flatten(1, 2) for cache in caches)
        own = self.absorbed(q_nope, q_pe, latent, k_pe, torch.arange(latent.shape[1]) <= positions.unsqueeze(-1))
        return self.project(self.expand(self.merged(shared, own)[0]))


class Shards(Parts):
    """The context as ranks of a group share it: each attends to every second row. The ranks are one process here."""

    RANKS = 2

    def forward(self, x: Tensor, positions: Tensor, caches: Any) -> Tensor:
        q_nope, q_pe, *rows = self.rows(x, positions)
        for cache, new in zip(caches, rows, strict=True):
            cache[torch.arange(new.shape[0])[:, None], positions] = new
        found = [
            self.absorbed(q_nope, q_pe, *(cache[:, some] for cache in caches), places <= positions.unsqueeze(-1))
            for some, places in self.shards(caches[0])
        ]
        return self.project(self.expand(self.joined(*(torch.stack(values) for values in zip(*found, strict=True)))))

    def shards(self, cache: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """The rows of each part, and where these are."""
        for rank in range(self.RANKS):
            some = slice(rank, None, self.RANKS)
            yield some, rank + self.RANKS * torch.arange(cache[:, some].shape[1])

    def joined(self, outs: Tensor, lses: Tensor) -> Tensor:
        """[P,B,S,N,R] and [P,B,S,N] of parts, merged."""
        shares = (lses - lses.logsumexp(0)).exp().nan_to_num(0).unsqueeze(-1)
        return (outs * shares).sum(0)


class MixedBatch(Parts):
    """[T, He]: the next token of each of some sequences, then a chunk of another's prompt: what is cached of it, and
    its new tokens, merged."""

    def forward(
        self, x: Tensor, positions: Tensor, caches: Any, slot_mapping: Tensor, block_table: Tensor, decodes: int
    ) -> Tensor:
        q_nope, q_pe, *rows = self.rows(x, positions)
        for cache, new in zip(caches, rows, strict=True):
            cache.view(-1, cache.shape[-1])[slot_mapping] = new
        next_tokens = (query[:decodes].unsqueeze(1) for query in (q_nope, q_pe))
        latent, k_pe = (cache[block_table[:decodes]].flatten(1, 2) for cache in caches)
        places = torch.arange(latent.shape[1])
        decoded = self.attend(*next_tokens, latent, k_pe, places <= positions[:decodes, None, None])
        chunk = [part[decodes:].unsqueeze(0) for part in (q_nope, q_pe, *rows)]
        tokens = torch.arange(chunk[0].shape[1])
        found = self.part(*chunk, (tokens <= tokens.unsqueeze(-1)).unsqueeze(0))
        latent, k_pe = (cache[block_table[decodes:]].flatten(1, 2) for cache in caches)
        found = self.merged(found, self.part(*chunk[:2], latent, k_pe, (places < positions[decodes]).expand(1, 1, -1)))
        return self.project(torch.cat((decoded.squeeze(1), found[0].squeeze(0))))


class ContextParallel(Parts):
    """Decode context parallel, as vLLM does it: a process has some of the heads, and every R-th row of the context. The
    last row of its caches is for rows that others have."""

    def __init__(self, sizes: Sizes = SMALL) -> None:
        self.ranks, self.rank = dist.get_world_size(), dist.get_rank()
        own = slice(self.rank * sizes.heads // self.ranks, (self.rank + 1) * sizes.heads // self.ranks)
        all_heads = weights(sizes)
        q_up, kv_up = (
            weight.unflatten(0, (sizes.heads, -1))[own].flatten(0, 1) for weight in (all_heads.q_up, all_heads.kv_up)
        )
        out = all_heads.out.unflatten(1, (sizes.heads, -1))[:, own].flatten(1, 2)
        own_heads = replace(all_heads, q_up=q_up, kv_up=kv_up, out=out)
        super().__init__(replace(sizes, heads=sizes.heads // self.ranks), own_heads)

    def forward(self, x: Tensor, positions: Tensor, caches: Any) -> Tensor:
        group = dist.group.WORLD
        q_nope, q_pe, *rows = self.rows(x, positions)
        slots = torch.where(positions % self.ranks == self.rank, positions // self.ranks, caches[0].shape[1] - 1)
        for cache, new in zip(caches, rows, strict=True):
            cache[torch.arange(new.shape[0])[:, None], slots] = new
        query, q_pe = (all_gather_tensor(part, 2, group) for part in (self.in_latent_space(q_nope), q_pe))
        latent, k_pe = (cache[:, :-1] for cache in caches)
        places = self.rank + self.ranks * torch.arange(latent.shape[1])
        part = self.over_latents(query, q_pe, latent, k_pe, places <= positions.unsqueeze(-1))
        return all_reduce(self.project(self.expand(self.of_own_heads(*part))), "sum", group)

    def of_own_heads(self, out: Tensor, lse: Tensor) -> Tensor:
        """Attention [B,S,N,R] of a process's heads to all rows, from that of all heads to its rows."""
        group = dist.group.WORLD
        lses = all_gather_tensor(lse.unsqueeze(0), 0, group)
        share = (lse - lses.logsumexp(0)).exp().nan_to_num(0)
        out = all_reduce(out * share.unsqueeze(-1), "sum", group)
        return out[:, :, self.rank * self.sizes.heads : (self.rank + 1) * self.sizes.heads]


class ContextParallelByHeads(ContextParallel):
    """The same: each process gets the attention of its heads, beside its logarithms, from all others, and merges it."""

    def of_own_heads(self, out: Tensor, lse: Tensor) -> Tensor:
        whole = torch.cat((out, lse.unsqueeze(-1)), dim=-1).unflatten(2, (self.ranks, -1)).movedim(2, 0).contiguous()
        outs, lses = all_to_all_single(whole, None, None, dist.group.WORLD).split([out.shape[-1], 1], dim=-1)
        largest = lses.amax(0)
        shares = (lses - largest.masked_fill(largest == -torch.inf, 0)).exp()
        return (outs * shares).sum(0) / shares.sum(0)


# --- what they are given ---------------------------------------------------------------------------------------------


def chunked_prompt(batch: int, tokens: int, blocks: int) -> tuple[Any, ...]:
    """The first sequence has no context, the second one that ends inside of the first chunk."""
    _, caches, table = _paged(batch, 1, blocks)
    room = blocks * SMALL.block - tokens
    starts = torch.tensor([0, 1, *range(room - batch + 3, room + 1)])[:batch]
    return _dense(batch, tokens, SMALL.hidden), starts[:, None] + torch.arange(tokens), caches, table, starts


def mixed_batch(decodes: int, tokens: int, blocks: int) -> tuple[Any, ...]:
    x, positions, caches, slots, table, _ = paged(blocks, *((5 + 2 * line, 1) for line in range(decodes)), (9, tokens))
    return x, positions, caches, slots, table, decodes


def shared_prefix(batch: int, tokens: int, blocks: int) -> tuple[Any, ...]:
    positions, caches, table = _paged(batch, tokens, blocks)
    prefix = _dense(1, 3 * tokens, SMALL.kv_rank, seed=5), _dense(1, 3 * tokens, SMALL.rope, seed=6)
    return _dense(batch, tokens, SMALL.hidden), positions, caches, table, prefix
