"""An attention layer with a paged cache, as in a serving loop: three decode steps, eager and compiled.

Latents and rotary keys of all sequences share two pools of blocks. A block table lists the blocks of each sequence. The
fused operators write and read the pools in place, without copying a context.

python examples/paged_cache.py
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm

import mla_fx

HIDDEN, HEADS, QUERY_RANK, RANK, NOPE, ROPE, VALUE = 64, 4, 32, 24, 16, 8, 16
BLOCKS, BLOCK, SEQUENCES, MOST = 32, 16, 2, 64  # MOST tokens in a sequence


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
        """x [sequences, HIDDEN], one token each; positions [sequences]; table [sequences, blocks]."""
        q = self.q_b(rms_norm(self.q_a(x), (QUERY_RANK,), self.q_norm, 1e-6)).unflatten(-1, (HEADS, -1))
        q_nope, q_rope = q.split([NOPE, ROPE], -1)
        latent, k_rope = self.kv_a(x).split([RANK, ROPE], -1)
        latent = rms_norm(latent, (RANK,), self.kv_norm, 1e-6)
        cos, sin = self.cos[positions], self.sin[positions]
        q_rope, k_rope = rotate(q_rope, cos.unsqueeze(1), sin.unsqueeze(1)), rotate(k_rope, cos, sin)

        slots = table.gather(1, (positions // BLOCK)[:, None]).squeeze(1) * BLOCK + positions % BLOCK
        self.latents.view(-1, RANK)[slots] = latent
        self.keys.view(-1, ROPE)[slots] = k_rope
        latents, keys = self.latents[table].flatten(1, 2), self.keys[table].flatten(1, 2)  # [sequences, tokens, ...]

        k_nope, value = self.kv_b(latents).unflatten(-1, (HEADS, -1)).split([NOPE, VALUE], -1)
        scores = torch.einsum("bnd,btnd->bnt", q_nope, k_nope) + torch.einsum("bnd,btd->bnt", q_rope, keys)
        hidden = torch.arange(keys.shape[1]) > positions[:, None, None]
        weights = (scores * (NOPE + ROPE) ** -0.5).masked_fill(hidden, -torch.inf).softmax(-1)
        out: Tensor = self.o(torch.einsum("bnt,btnd->bnd", weights, value).flatten(1))
        return out


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


@torch.no_grad()
def main() -> None:
    torch.manual_seed(0)
    plain = Attention()
    plain.latents.normal_()  # as if the sequences had a history
    plain.keys.normal_()
    served = copy.deepcopy(plain)
    fast = torch.compile(served, backend="mla")
    table = torch.randperm(BLOCKS)[: SEQUENCES * MOST // BLOCK].view(SEQUENCES, -1)
    positions = torch.tensor([40, 7])
    for _ in range(3):
        x = torch.randn(SEQUENCES, HIDDEN)
        torch.testing.assert_close(fast(x, positions, table), plain(x, positions, table))
        positions = positions + 1
    torch.testing.assert_close((served.latents, served.keys), (plain.latents, plain.keys))
    print(mla_fx.last_report())
    print("outputs and caches are as in eager mode")


if __name__ == "__main__":
    main()
