"""Both forms of attention: of absorbed queries over latents, and of heads whose keys and values are expanded."""

import torch

from mla_fx.ops.emitted.attention import samples

OPERANDS = ("query", "query_rope", "kv_cache", "kr_cache")
TABLE = torch.tensor([[1, 0, 2], [2, -3, 2]])


def latents(dtype, seed, steps=3):
    """Dense operands by name, without a mask."""
    return dict(zip(OPERANDS, samples.sample(dtype, seed, steps), strict=False))


def heads(dtype, seed, steps=3):
    """The same with weights."""
    operands, weights = samples.with_heads(samples.sample(dtype, seed, steps), {})
    return dict(zip(OPERANDS, operands, strict=False)) | weights


def pages(size, table=TABLE, steps=2):
    """Latents in three pages of any size."""
    query, rope, *_ = samples.sample(torch.float64, 0, steps)
    generator = torch.Generator().manual_seed(1)
    caches = [torch.randn(3, size, part.shape[-1], generator=generator, dtype=torch.float64) for part in (query, rope)]
    return dict(zip(OPERANDS, (query, rope, *caches), strict=True)) | {"block_table": table}


def fractals(lanes=8):
    """Latents in pages of FRACTAL_NZ."""
    query, rope, *_ = samples.sample(torch.float64, 0, 2, width=16)
    generator = torch.Generator().manual_seed(1)
    shapes = ((3, part.shape[-1] // lanes, 4, lanes) for part in (query, rope))
    caches = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return dict(zip(OPERANDS, (query, rope, *caches), strict=True)) | {"block_table": TABLE}


FORMS = (latents, heads)
