"""Attention to chosen keys is the kernel for attention over rows, whose pages are the chosen rows.

The oracle is the body of the operator in float64, over the same numbers."""

from dataclasses import replace

import pytest
import torch
from lib.kernels import compiled, compiled_call, doubled, draw, error
from mla_fx.lowering.cpu.chosen_keys import of_latents

from mla_fx.ops.emitted.attention import operator as attention

pytestmark = pytest.mark.usefixtures("no_gradients")

BATCH, HEADS, KEYS, CHOSEN, PAGE, RANK, ROPE = 2, 20, 96, 40, 16, 32, 8
KERNEL = "torch.ops.mla_fx.sparse_attention_over_rows.default"


def call(tokens, *, is_paged=False, **options):
    """Arguments over one pool, in which a row has both parts. The last places have no key, and one row has no keys."""
    count = KEYS // PAGE
    pool = draw(3 * count, PAGE, RANK + ROPE).bfloat16()
    table = torch.randperm(3 * count, generator=torch.Generator().manual_seed(0))[: BATCH * count].view(BATCH, count)
    pool = pool if is_paged else pool[table].flatten(1, 2)
    queries = (draw(BATCH, tokens, HEADS, width, seed=1).bfloat16() for width in (RANK, ROPE))
    indices = draw(BATCH, tokens, 1, KEYS, seed=2).argsort(-1)[..., :CHOSEN].to(torch.int32)
    indices[..., CHOSEN - 6 :] = -1
    indices[0, tokens - 1] = -1
    given = {"block_table": table if is_paged else None, "indices": indices, "scale": 0.2, **options}
    return attention.Arguments(*queries, pool[..., :RANK], pool[..., RANK:], **given)


CALLS = {
    "one token": call(1),
    "three tokens": call(3),
    "pages": call(3, is_paged=True),
    "lengths": call(3, context_lens=torch.tensor([70, 90])),
    "lengths of pages": call(1, is_paged=True, context_lens=torch.tensor([30, 96])),
    "condition": call(3, mask=draw(3, KEYS) > -1),
    "numbers of each head": call(3, mask=draw(BATCH, HEADS, 3, KEYS)),
    "sinks": call(1, sinks=draw(HEADS)),
    "a key that is named twice": replace(call(3), indices=call(3).indices.clamp(max=60)),
    "no rotary part": replace(call(3), query_rope=None, kr_cache=None),
}


@pytest.mark.parametrize("name", CALLS)
def test_compiled_code_calls_the_kernel(name):
    a = CALLS[name]
    found, code = compiled_call(attention.operator, a)
    exact = attention.body(doubled(a))[0]
    assert KERNEL in code
    assert error(found, exact) <= 2 * error(attention.body(a)[0], exact) + 2**-8


def test_symbolic_sizes_choose_at_each_call():
    """All keys are read where most are chosen."""
    whole = call(1)

    def attend(*given):
        *rows, indices = given
        return torch.ops.mla_fx.attention(*rows, None, indices=indices, scale=0.2)[0]

    def operands(keys, chosen):
        indices = torch.where(whole.indices < keys, whole.indices, -1)[..., :chosen].sort(-1, descending=True).values
        caches = (cache[:, :keys].contiguous() for cache in (whole.kv_cache, whole.kr_cache))
        return whole.query, whole.query_rope, *caches, indices

    _, code, step = compiled(attend, *operands(96, 40), dynamic=True)
    assert KERNEL in code
    for sizes in ((90, 12), (96, 7), (70, 20)):
        given = operands(*sizes)
        rows, indices = given[:-1], given[-1]
        wanted = attention.body(attention.Arguments(*rows, None, indices=indices, scale=0.2))[0]
        torch.testing.assert_close(step(*given), wanted, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("name", CALLS)
def test_all_keys_under_a_mask_are_the_same(name):
    a = CALLS[name]
    exact = attention.body(a)[0].double()
    assert error(attention.body(of_latents(a))[0], exact) <= 2**-7


@pytest.mark.parametrize("is_paged", [False, True], ids=["flat", "pages"])
@pytest.mark.parametrize("number", [KEYS, KEYS + 30], ids=["T", "beyond T"])
def test_an_index_of_the_next_sequence_is_an_error(number, is_paged):
    """The pool holds such a row, but that is not of the sequence which asks for it."""
    right = call(3, is_paged=is_paged)
    given = right.indices.clone()
    given[0, 1, 0, 2] = number
    wrong, sentence = replace(right, indices=given), f"indices hold {number}; they must be below {KEYS}, the length of"
    more = {"weight_uk": draw(HEADS, 4, RANK).bfloat16(), "weight_uv": draw(HEADS, 5, RANK, seed=1).bfloat16()}
    for a in (wrong, replace(wrong, query=draw(BATCH, 3, HEADS, 4).bfloat16(), **more)):
        with pytest.raises(ValueError, match=sentence):
            attention.operator.overload(**vars(a))
        with pytest.raises(ValueError, match=sentence):
            compiled_call(attention.operator, a)


@pytest.mark.slow
@pytest.mark.parametrize("is_paged", [False, True], ids=["flat", "pages"])
def test_loops_refuse_an_index_of_the_next_sequence(is_paged):
    """No kernel is for float64. Loops refuse a number in a table that names no block alike. On several threads,
    Inductor's own check of an index ends the process."""
    torch.set_num_threads(1)
    right = doubled(call(1, is_paged=is_paged))
    found, code = compiled_call(attention.operator, right)
    assert KERNEL not in code and error(found, attention.body(right)[0]) <= 1e-12
    given = right.indices.clone()
    given[0, 0, 0, 2] = KEYS
    with pytest.raises(RuntimeError, match="index out of bounds"):
        compiled_call(attention.operator, replace(right, indices=given))
