"""Attention of prompts to chosen keys: absorbed over the chosen rows, or expanded under a mask if most are chosen.

The oracle is the body of the operator in float64, over the same numbers."""

from dataclasses import replace

import pytest
import torch
from lib.kernels import compiled, compiled_call, doubled, draw, error
from mla_fx.lowering.cpu import chosen_keys, prompts
from mla_fx.lowering.loops import attention as loops

from mla_fx.ops.emitted.attention import heads
from mla_fx.ops.emitted.attention import operator as attention

pytestmark = pytest.mark.usefixtures("no_gradients")

BATCH, HEADS, KEYS, CHOSEN, PAGE, NOPE, RANK, ROPE, VALUE = 2, 20, 96, 40, 16, 24, 32, 8, 12
KERNEL = "torch.ops.mla_fx.sparse_mla_attention_over_rows.default"


def call(tokens, chosen=CHOSEN, *, is_paged=False, **options):
    """Arguments over one pool, in which a row has both parts. The last places have no key, and one row has no keys."""
    count = KEYS // PAGE
    pool = draw(3 * count, PAGE, RANK + ROPE).bfloat16()
    table = torch.randperm(3 * count, generator=torch.Generator().manual_seed(0))[: BATCH * count].view(BATCH, count)
    pool = pool if is_paged else pool[table].flatten(1, 2)
    queries = (draw(BATCH, tokens, HEADS, width, seed=1).bfloat16() for width in (NOPE, ROPE))
    up = (draw(HEADS, NOPE + VALUE, RANK) * RANK**-0.5).bfloat16()
    indices = draw(BATCH, tokens, 1, KEYS, seed=2).argsort(-1)[..., :chosen].to(torch.int32)
    indices[..., chosen - 6 :] = -1
    indices[0, tokens - 1] = -1
    given = {"block_table": table if is_paged else None, "indices": indices, "scale": 0.2, **options}
    weights = {"weight_uk": up[:, :NOPE], "weight_uv": up[:, NOPE:]}
    return attention.Arguments(*queries, pool[..., :RANK], pool[..., RANK:], **weights, **given)


CALLS = {
    "chosen rows": call(30, 12),
    "all rows": call(30),
    "absorbed over all rows": call(3, max_absorbed_tokens=3),
    "pages": call(30, is_paged=True),
    "pages, chosen rows": call(30, 12, is_paged=True),
    "lengths": call(30, context_lens=torch.tensor([70, 90])),
    "lengths, chosen rows": call(30, 12, context_lens=torch.tensor([70, 90])),
    "condition": call(30, mask=torch.arange(KEYS) < torch.arange(30).unsqueeze(-1) + 1),
    "condition, chosen rows": call(30, 12, mask=draw(30, KEYS) > -1),
    "numbers of each head": call(30, mask=draw(BATCH, HEADS, 30, KEYS)),
    "numbers of each head, chosen rows": call(30, 12, mask=draw(BATCH, HEADS, 30, KEYS)),
    "sinks": call(30, sinks=draw(HEADS)),
    "sinks, chosen rows": call(30, 12, sinks=draw(HEADS)),
    "no rotary part": replace(call(30), query_rope=None, kr_cache=None),
}


@pytest.fixture
def small(monkeypatch):
    """Parts so small that there are several, the last one smaller than the others."""
    for module, name, size in ((heads, "ROWS", 8), (prompts, "ROWS", 8), (prompts, "KEYS", 1)):
        monkeypatch.setattr(module, name, size)


def check(found, a):
    exact = attention.body(doubled(a))[0]
    assert error(found, exact) <= 2 * error(attention.body(a)[0], exact) + 2**-8


@pytest.mark.parametrize("name", CALLS)
def test_compiled_code_calls_the_kernel(small, name):
    found, code = compiled_call(attention.operator, CALLS[name])
    assert KERNEL in code
    check(found, CALLS[name])


@pytest.mark.parametrize("name", CALLS)
def test_all_forms_are_the_same(small, name):
    """Targets without kernels, packages, and the check of a rewrite have their own."""
    a = CALLS[name]
    check(attention.kernel(a)[0], a)
    check(loops.from_copies(a)[0], a)
    torch.testing.assert_close(chosen_keys.run_prompt(doubled(a))[0], attention.body(doubled(a))[0])


def test_symbolic_sizes_choose_at_each_call(monkeypatch):
    """All keys are read where most are chosen and the queries are many."""
    whole, taken = call(30), []
    in_parts = prompts.in_parts
    monkeypatch.setattr(prompts, "in_parts", lambda a: taken.append(a.mask.shape) or in_parts(a))

    weights = {"weight_uk": whole.weight_uk, "weight_uv": whole.weight_uv}

    def attend(*operands):
        *rows, indices = operands
        options = {"indices": indices, "scale": 0.2, "max_absorbed_tokens": 10}
        return torch.ops.mla_fx.attention(*rows, **weights, **options)[0]

    def operands(tokens, keys, chosen):
        indices = torch.where(whole.indices < keys, whole.indices, -1)[:, :tokens, :, :chosen]
        caches = (cache[:, :keys].contiguous() for cache in (whole.kv_cache, whole.kr_cache))
        return whole.query[:, :tokens], whole.query_rope[:, :tokens], *caches, indices.sort(-1, descending=True).values

    _, code, step = compiled(attend, *operands(30, 96, 40), dynamic=True)
    assert KERNEL in code
    for sizes in ((29, 90, 12), (28, 96, 30), (9, 96, 30), (8, 70, 7)):
        *rows, indices = operands(*sizes)
        check(step(*rows, indices), attention.Arguments(*rows, **weights, indices=indices, scale=0.2))
    assert taken == [(BATCH, 1, 30, 96), (BATCH, 1, 28, 96)]
