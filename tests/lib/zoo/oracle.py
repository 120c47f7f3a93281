"""What latent attention computes, from the weights, in float64: no views to get wrong, nothing absorbed."""

from __future__ import annotations

import torch
from torch import Tensor

from .factors import Factor
from .ropes import angles
from .sizes import Sizes, Step, Weights


def norm(x: Tensor, gamma: Tensor, epsilon: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + epsilon).sqrt() * gamma


def rotated(x: Tensor, angle: Tensor, read: str, written: str) -> Tensor:
    """`x` [..., D] turned by `angle` [..., D / 2], from one layout of pairs to the other."""
    if read == "none":
        return x
    half = x.shape[-1] // 2
    x1, x2 = (x[..., ::2], x[..., 1::2]) if read == "interleave" else (x[..., :half], x[..., half:])
    first, second = x1 * angle.cos() - x2 * angle.sin(), x2 * angle.cos() + x1 * angle.sin()
    return torch.cat((first, second), -1) if written == "half" else torch.stack((first, second), -1).flatten(-2)


def latent_attention(
    weights: Weights,
    sizes: Sizes,
    step: Step,
    x: Tensor,
    positions: Tensor,
    old: tuple[Tensor, Tensor],
    rope: tuple[str, str],
    scale: float,
    factor: Factor,
) -> tuple[Tensor, Tensor, Tensor]:
    """The output and the new rows of both caches. `old` are their rows before, [B, at least start, width]; `rope` is
    (layout read, layout written)."""
    w = {name: None if value is None else value.double() for name, value in vars(weights).items()}
    angle = angles(positions.double(), sizes.rope).expand(step.batch, -1, -1)
    x = x.double()
    compressed = x if w["q_down"] is None else norm(x @ w["q_down"].T, w["q_gamma"], sizes.epsilon)
    compressed = compressed * (factor.compressed * factor.query)
    q = (compressed @ w["q_up"].T).view(step.batch, step.tokens, sizes.heads, sizes.query)
    if factor.each is not None:
        q = q * factor.each(positions.double(), sizes.heads).unsqueeze(-1)
    q_nope, q_rope = q[..., : sizes.nope], rotated(q[..., sizes.nope :], angle.unsqueeze(2), *rope)
    down = x @ w["kv_down"].T
    latent = factor.latent * norm(down[..., : sizes.kv_rank], w["kv_gamma"], sizes.epsilon)
    k_rope = rotated(down[..., sizes.kv_rank :], angle, *rope)

    out = torch.empty(step.batch, step.tokens, sizes.heads, sizes.value, dtype=torch.float64)
    up = w["kv_up"].view(sizes.heads, sizes.nope + sizes.value, sizes.kv_rank)
    for b in range(step.batch):
        first = int(positions.expand(step.batch, -1)[b, 0])
        latents = torch.cat((old[0][b, :first].double(), latent[b]))
        keys = torch.cat((old[1][b, :first].double(), k_rope[b]))
        for s in range(step.tokens):
            seen = len(latents) - step.tokens + s + 1
            for h in range(sizes.heads):
                nope = latents[:seen] @ up[h, : sizes.nope].T @ q_nope[b, s, h]
                weight = torch.softmax((nope + keys[:seen] @ q_rope[b, s, h]) * scale, dim=0)
                out[b, s, h] = weight @ (latents[:seen] @ up[h, sizes.nope :].T)
    return out.flatten(2) @ w["out"].T, latent, k_rope
