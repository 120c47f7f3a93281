"""An attention layer of a server, with paged caches: steps of prompts, drafts and single tokens, eager and compiled.

Latents and rotary keys of all sequences share two pools of blocks, and a block table lists the blocks of each sequence.
A step has any tokens of any sequences, one after the other. Each has its position and its sequence's row of the table:
rows are written before any is read, so that a token of a prompt, or of a draft, sees those before it. One graph serves
all steps. The fused operators write and read the pools in place, without copying a context.

python examples/server_step.py
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm

import mla_fx

HIDDEN, HEADS, QUERY_RANK, RANK, NOPE, ROPE, VALUE = 64, 4, 32, 24, 16, 8, 16
BLOCKS, BLOCK, SEQUENCES, MOST = 32, 16, 3, 64  # MOST tokens in a sequence

# What a server decides in each step: parts of (sequence, first position, tokens).
STEPS = (
    [(0, 0, 19), (1, 0, 7)],  # two prompts
    [(0, 19, 1), (1, 7, 1), (2, 0, 11)],  # a third prompt beside the next tokens
    [(0, 20, 4), (1, 8, 2), (2, 11, 3)],  # drafts of several tokens
    [(0, 22, 4), (1, 10, 2), (2, 12, 2)],  # the first tokens of each draft are accepted, the others written again
)


class Attention(nn.Module):
    """Multi-head Latent Attention with a paged cache."""

    latents: Tensor  # [BLOCKS, BLOCK, RANK]
    keys: Tensor  # [BLOCKS, BLOCK, ROPE]
    cos: Tensor  # [MOST, ROPE]
    sin: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.q_a = nn.Linear(HIDDEN, QUERY_RANK, bias=False)
        self.q_b = nn.Linear(QUERY_RANK, HEADS * (NOPE + ROPE), bias=False)
        self.kv_a = nn.Linear(HIDDEN, RANK + ROPE, bias=False)
        self.kv_b = nn.Linear(RANK, HEADS * (NOPE + VALUE), bias=False)
        self.o = nn.Linear(HEADS * VALUE, HIDDEN, bias=False)
        self.q_norm = nn.Parameter(1 + 0.3 * torch.randn(QUERY_RANK))
        self.kv_norm = nn.Parameter(1 + 0.3 * torch.randn(RANK))
        self.register_buffer("latents", torch.zeros(BLOCKS, BLOCK, RANK))
        self.register_buffer("keys", torch.zeros(BLOCKS, BLOCK, ROPE))
        angles = torch.outer(torch.arange(MOST), 1e4 ** -(torch.arange(0, ROPE, 2) / ROPE)).repeat(1, 2)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, x: Tensor, positions: Tensor, table: Tensor) -> Tensor:
        """x [tokens, HIDDEN]; positions [tokens]; table [tokens, blocks], a row of the token's sequence."""
        q = self.q_b(rms_norm(self.q_a(x), (QUERY_RANK,), self.q_norm, 1e-6)).unflatten(-1, (HEADS, -1))
        q_nope, q_rope = q.split([NOPE, ROPE], -1)
        latent, k_rope = self.kv_a(x).split([RANK, ROPE], -1)
        latent = rms_norm(latent, (RANK,), self.kv_norm, 1e-6)
        cos, sin = self.cos[positions], self.sin[positions]
        q_rope, k_rope = rotate(q_rope, cos.unsqueeze(1), sin.unsqueeze(1)), rotate(k_rope, cos, sin)

        slots = table.gather(1, (positions // BLOCK)[:, None]).squeeze(1) * BLOCK + positions % BLOCK
        self.latents.view(-1, RANK)[slots] = latent
        self.keys.view(-1, ROPE)[slots] = k_rope
        latents, keys = self.latents[table].flatten(1, 2), self.keys[table].flatten(1, 2)  # [tokens, MOST, ...]

        k_nope, value = self.kv_b(latents).unflatten(-1, (HEADS, -1)).split([NOPE, VALUE], -1)
        scores = torch.einsum("bnd,btnd->bnt", q_nope, k_nope) + torch.einsum("bnd,btd->bnt", q_rope, keys)
        hidden = torch.arange(keys.shape[1]) > positions[:, None, None]
        weights = (scores * (NOPE + ROPE) ** -0.5).masked_fill(hidden, -torch.inf).softmax(-1)
        out: Tensor = self.o(torch.einsum("bnt,btnd->bnd", weights, value).flatten(1))
        return out


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def batch(parts: list[tuple[int, int, int]], tables: Tensor) -> tuple[Tensor, Tensor]:
    """The position of each token of a step, and its row of the table."""
    positions = torch.cat([torch.arange(first, first + count) for _, first, count in parts])
    sequences = torch.cat([torch.full((count,), sequence) for sequence, _, count in parts])
    return positions, tables[sequences]


@torch.no_grad()
def main() -> None:
    torch.manual_seed(0)
    plain = Attention()
    plain.latents.normal_()  # what earlier sequences left
    plain.keys.normal_()
    served = copy.deepcopy(plain)
    fast = torch.compile(served, backend="mla", dynamic=True)
    tables = torch.randperm(BLOCKS)[: SEQUENCES * MOST // BLOCK].view(SEQUENCES, -1)
    for parts in STEPS:
        positions, table = batch(parts, tables)
        x = torch.randn(len(positions), HIDDEN)
        torch.testing.assert_close(fast(x, positions, table), plain(x, positions, table))
        torch.testing.assert_close((served.latents, served.keys), (plain.latents, plain.keys))
        print(f"{len(positions)} tokens of {len(parts)} sequences: outputs and caches are as in eager mode")
    print(mla_fx.last_report())


if __name__ == "__main__":
    main()
