"""The calls that split_keys is for."""

import torch
from torch import Tensor

from mla_fx.errors import NoMatch

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MOST_COLUMNS = 512  # of latents: sums of more do not fit the registers
MOST_TOKENS = 16  # of a sequence; more are a prompt, which multiplies more than it reads


def check_served(query: Tensor, kv_cache: Tensor, tokens: int) -> None:
    """Raise NoMatch for a call that the kernel is not for. `tokens` see the same keys."""
    if query.device.type != "cuda":
        raise NoMatch("the kernel is for CUDA devices")
    if kv_cache.dtype not in DTYPES or kv_cache.dim() != 3:
        raise NoMatch("the kernel is for caches of rows, and at most 32 bits")
    rank = query.shape[3]
    if not isinstance(rank, int) or rank > MOST_COLUMNS:
        raise NoMatch(f"the kernel is for at most {MOST_COLUMNS} columns of a latent")
    if isinstance(tokens, int) and tokens > MOST_TOKENS:
        raise NoMatch(f"the kernel is for at most {MOST_TOKENS} new tokens of a sequence")
