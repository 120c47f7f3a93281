"""Calls of lightning_index, and what kernels for them must give, on CPUs and other devices.

The oracle is the body of the operator in float64, over the same numbers. Which hidden keys are named is not defined."""

from dataclasses import replace

import torch

from lib.kernels import doubled, draw
from mla_fx.ops.emitted import lightning_index
from mla_fx.ops.emitted.lightning_index import Arguments

BATCH, HEADS, KEYS, CHOSEN, PAGE, WIDTH = 2, 20, 600, 40, 24, 33


def call(tokens, *, is_paged=False, dtype=torch.bfloat16, **options):
    pool = draw(BATCH * KEYS // PAGE, PAGE, WIDTH).to(dtype)
    table = torch.randperm(len(pool), generator=torch.Generator().manual_seed(0)).view(BATCH, -1)
    query, weights = draw(BATCH, tokens, HEADS, WIDTH, seed=1).to(dtype), draw(BATCH, tokens, HEADS, seed=2)
    given = {"block_table": table - len(pool) if is_paged else None, "sparse_count": CHOSEN, "scale": -0.3, **options}
    return Arguments(query, pool if is_paged else pool[table].flatten(1, 2), weights, **given)


CALLS = {
    "one token": call(1),
    "several tokens": call(5),
    "pages": call(3, is_paged=True, context_lens=torch.tensor([500, 90])),
    "lengths": call(3, context_lens=torch.tensor([10, 590])),
    "condition": call(3, mask=draw(3, KEYS) > -1),
    "condition of each sequence": call(3, mask=draw(BATCH, 1, 1, KEYS) > -1, fill=0.25, sparse_count=3),
    "numbers": call(3, mask=draw(BATCH, 1, 3, KEYS)),
    "minus infinity": call(3, mask=torch.zeros(3, KEYS).masked_fill(draw(3, KEYS) > 0, -torch.inf)),
    "float32": call(3, dtype=torch.float32),
    "float16": call(3, dtype=torch.float16),
    "weights in bfloat16": replace(call(3), weights=call(3).weights.bfloat16()),
    "more than there are": call(2, sparse_count=KEYS + 5),
    "many heads": replace(call(2), query=call(2).query.repeat(1, 1, 9, 1), weights=draw(BATCH, 2, 9 * HEADS)),
    "scaled keys": replace(call(3, mask=draw(3, KEYS) > -1, fill=0.25), key_scale=draw(BATCH, KEYS)),
    "scaled pages": replace(call(3, is_paged=True), key_scale=draw(BATCH * KEYS // PAGE, PAGE)),
    "keys with gaps": replace(call(2), key=draw(BATCH, KEYS, 2 * WIDTH).bfloat16()[..., :WIDTH]),
}


def check(found, a):
    """Scores are those in float64, and belong to the keys that are named."""
    indices, values = found
    wanted, scores = lightning_index.body(doubled(a))
    tolerance = 2**-7 if a.weights.dtype == torch.bfloat16 else 1e-4
    torch.testing.assert_close(values.double(), scores, rtol=tolerance, atol=tolerance)
    seen = scores.isfinite() & (scores != a.fill)
    agree = (indices == wanted) | ~seen
    assert indices.dtype == torch.int32
    assert agree.double().mean() > (0.9 if a.weights.dtype == torch.bfloat16 else 0.99)
    for row, named in zip(indices.flatten(0, 2), wanted.flatten(0, 2), strict=True):
        assert len(set(row.tolist())) == len(set(named.tolist())), "a key is named twice"


def check_rows_in_parts(module, run, monkeypatch):
    """Memory for one row is enough."""
    monkeypatch.setattr(module, "AT_ONCE", 1)
    for name in ("several tokens", "pages", "condition", "condition of each sequence", "numbers"):
        check(run(CALLS[name]), CALLS[name])


def check_not_a_number(run):
    """It is chosen first, unless it is hidden."""
    a = call(1)
    a.key[:, 7] = torch.nan
    assert (run(a)[0][..., 0] == 7).all()
    hidden = replace(a, mask=torch.arange(KEYS) != 7)
    assert not (run(hidden)[0] == 7).any()
