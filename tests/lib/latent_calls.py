"""Calls of attention over latents in one pool, and what kernels for them must give: common to the tests of kernels
for CPUs and for other devices."""

from dataclasses import replace

import torch

from lib.kernels import doubled, draw
from lib.operators.harness import samples
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


def check_infinities(run, dtype):
    """Infinite sinks and scores give NaN where the softmax of the body does: both results, in parts of a context."""
    tokens, keys = torch.arange(3).unsqueeze(-1), torch.arange(640)
    added = torch.where(keys < 90 * tokens, 0.25, -torch.inf)  # the first token sees nothing
    late = added.masked_fill((keys == 600) & (tokens != 1), torch.inf)
    for options in (
        {"sinks": torch.tensor([torch.inf, -torch.inf, 0.5])},
        {"mask": added, "sinks": torch.tensor([-torch.inf, 0.5, torch.inf])},
        {"mask": added.masked_fill((keys == 70) & (tokens == 1), torch.inf)},
        {"mask": added.masked_fill((keys > 80) & (tokens == 2), torch.inf)},
        {"mask": late, "sinks": torch.tensor([0.0, 1, -torch.inf])},
    ):
        a = call(1, 3, 3, 40, dtype, return_lse="sinks" not in options, **options)  # two parts of one context
        (out, lse), (meant, sums) = run(a), attention.body(a)
        assert bool(meant.isnan().any())
        tolerance = {"rtol": 8 * ROUNDING[dtype], "atol": 8 * ROUNDING[dtype], "equal_nan": True}
        torch.testing.assert_close(out, meant, **tolerance)
        torch.testing.assert_close(lse, sums.float(), **tolerance)


def check_samples(run, dtype):
    asked = [s for s in samples("attention", dtype) if "weight_uk" not in s.kwargs and s.args[2].dim() == 3]
    for sample in asked:
        check_means_body(run, attention.Arguments(*sample.args, **sample.kwargs))
    assert len(asked) > 10


def check_strides_and_dtypes(run):
    a = call(2, 5, 3, 4)
    turned = a.block_table.T.contiguous().T
    for table in (a.block_table.int(), turned, turned.int(), a.block_table[:1].expand(2, -1)):
        check_means_body(run, replace(a, block_table=table))
    by_head = a.query.transpose(1, 2).contiguous().transpose(1, 2)
    check_means_body(run, replace(a, query=by_head))
    check_means_body(run, replace(a, query=a.query.mT.contiguous().mT, kv_cache=a.kv_cache.mT.contiguous().mT))
    check_means_body(run, replace(a, query_rope=None, kr_cache=None))
    halves = call(2, 5, 3, 4, torch.float16)
    check_means_body(run, replace(halves, query=halves.query.float()))  # an absorbed query


def check_unseen_pages_are_not_read(run):
    a = call(2, 1, 3, 4, context_lens=torch.tensor([5, 20]))
    a = replace(a, block_table=torch.tensor([[0, 9, 9, 9], [1, 2, 9, 9]]))
    wanted, _ = run(a)
    for cache in (a.kv_cache, a.kr_cache):
        cache[9] = cache[0, 5:] = cache[2, 4:] = torch.nan
    assert torch.equal(run(a)[0], wanted)


def check_no_pages(run):
    a = call(2, 3, 4, 0, return_lse=True)
    out, lse = run(a)
    assert torch.equal(out, torch.zeros_like(a.query))
    assert bool(lse.eq(-torch.inf).all())
