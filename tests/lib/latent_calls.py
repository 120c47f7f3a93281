"""Calls of attention over latents in one pool, and what kernels and libraries must give for them."""

from dataclasses import replace

import torch

from lib.kernels import doubled, draw
from mla_fx.ops.emitted.attention import operator as attention
from mla_fx.ops.emitted.attention.codes import dtype_of

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROUNDING = {torch.float32: 2**-22, torch.bfloat16: 2**-8, torch.float16: 2**-11}  # of one rounding, at most
POOL, PAGE, RANK, ROPE = 40, 16, 32, 8
HIDDEN = {  # by the arguments of `call`
    "nothing": lambda shape: {},
    "causal": lambda shape: {"is_causal": True},
    "ragged": lambda shape: {"context_lens": torch.arange(shape[0]) * 61 + 17},
    "beyond both ends": lambda shape: {"context_lens": torch.tensor([10**9, -5, 0])[: shape[0]]},
    "mask of tokens": lambda shape: {"mask": draw(shape[1], shape[3] * PAGE) > 0},
    "mask of heads": lambda shape: {"mask": draw(shape[2], shape[1], shape[3] * PAGE) > 0, "fill": -1.0},
    "added": lambda shape: {"mask": draw(shape[0], 1, shape[1], shape[3] * PAGE).bfloat16()},
    "sinks": lambda shape: {"context_lens": torch.full((1,), 70), "sinks": draw(shape[2])},
    "edges of a page": lambda shape: {"context_lens": torch.tensor([16, 32, 1])[: shape[0]]},
    "filled": lambda shape: {"context_lens": torch.full((1,), 20), "fill": -1.5},
}


def call(batch, tokens, heads, columns, dtype=torch.bfloat16, **options):
    """Arguments of attention over latents in one pool, in which a row has both parts."""
    pool = draw(POOL, PAGE, RANK + ROPE).to(dtype)
    table = torch.randint(-POOL, POOL, (batch, columns), generator=torch.Generator().manual_seed(batch))
    queries = (draw(batch, tokens, heads, width, seed=1).to(dtype) for width in (RANK, ROPE))
    given = {"block_table": table, "scale": 0.2, **options}
    return attention.Arguments(*queries, pool[..., :RANK], pool[..., RANK:], **given)


def check_means_body(run, a):
    """Both results are as near to the exact ones as the body's, up to one rounding."""
    a = replace(a, return_lse=a.sinks is None)
    out, lse = run(a)
    exact, exact_lse = attention.body(doubled(a))
    dtype = dtype_of(a)
    assert out.dtype == dtype and lse.dtype == torch.float32
    off, body_off = ((found.double() - exact).norm() for found in (out, attention.body(a)[0]))
    assert off <= 2 * body_off + ROUNDING[dtype] * exact.norm()
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-2 if out.dtype != torch.float32 else 1e-4, atol=1e-2)
