"""Attention to chosen keys is the kernel for attention over rows, whose pages are the chosen rows; heads of prompts are
absorbed over them, or expanded under a mask if most keys are chosen.

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
KERNELS = {False: "sparse_attention_over_rows.default", True: "sparse_mla_attention_over_rows.default"}  # with weights
UP = (draw(HEADS, NOPE + VALUE, RANK) * RANK**-0.5).bfloat16()
WEIGHTS = {"weight_uk": UP[:, :NOPE], "weight_uv": UP[:, NOPE:]}


def call(tokens, chosen=CHOSEN, *, is_paged=False, width=RANK, **options):
    """Arguments over one pool, in which a row has both parts. The last places have no key, and one row has no keys."""
    count = KEYS // PAGE
    pool = draw(3 * count, PAGE, RANK + ROPE).bfloat16()
    table = torch.randperm(3 * count, generator=torch.Generator().manual_seed(0))[: BATCH * count].view(BATCH, count)
    pool = pool if is_paged else pool[table].flatten(1, 2)
    queries = (draw(BATCH, tokens, HEADS, columns, seed=1).bfloat16() for columns in (width, ROPE))
    indices = draw(BATCH, tokens, 1, KEYS, seed=2).argsort(-1)[..., :chosen].to(torch.int32)
    indices[..., chosen - 6 :] = -1
    indices[0, tokens - 1] = -1
    given = {"block_table": table if is_paged else None, "indices": indices, "scale": 0.2, **options}
    return attention.Arguments(*queries, pool[..., :RANK], pool[..., RANK:], **given)


def prompt(tokens, chosen=CHOSEN, **options):
    """A call that expands heads by weights."""
    return call(tokens, chosen, width=NOPE, **WEIGHTS, **options)


LATENTS = {
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
HIDDEN = {
    "nothing": {},
    "pages": {"is_paged": True},
    "lengths": {"context_lens": torch.tensor([70, 90])},
    "condition": {"mask": draw(30, KEYS) > -1},
    "numbers of each head": {"mask": draw(BATCH, HEADS, 30, KEYS)},
    "sinks": {"sinks": draw(HEADS)},
}
PROMPTS = {
    **{f"{name}, all rows": prompt(30, **options) for name, options in HIDDEN.items()},
    **{f"{name}, chosen rows": prompt(30, 12, **options) for name, options in HIDDEN.items()},
    "causal condition": prompt(30, mask=torch.arange(KEYS) < torch.arange(30).unsqueeze(-1) + 1),
    "absorbed over all rows": prompt(3, max_absorbed_tokens=3),
    "no rotary part of heads": replace(prompt(30), query_rope=None, kr_cache=None),
}
CALLS = LATENTS | PROMPTS


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
    assert f"torch.ops.mla_fx.{KERNELS[name in PROMPTS]}" in code
    check(found, CALLS[name])


@pytest.mark.parametrize("name", LATENTS)
def test_all_keys_under_a_mask_are_the_same(name):
    a = LATENTS[name]
    exact = attention.body(a)[0].double()
    assert error(attention.body(chosen_keys.of_latents(a))[0], exact) <= 2**-7


@pytest.mark.parametrize("name", PROMPTS)
def test_all_forms_are_the_same(small, name):
    """Targets without kernels, packages, and the check of a rewrite have their own."""
    a = PROMPTS[name]
    check(attention.kernel(a)[0], a)
    check(loops.from_copies(a)[0], a)
    torch.testing.assert_close(chosen_keys.run_prompt(doubled(a))[0], attention.body(doubled(a))[0])


@pytest.mark.parametrize("has_weights", KERNELS)
def test_symbolic_sizes_choose_at_each_call(has_weights, monkeypatch):
    """All keys are read where most are chosen, of prompts also only where the queries are many."""
    sizes = ((1, 96, 40), (1, 90, 12), (1, 96, 7), (1, 70, 20))
    if has_weights:
        sizes = ((30, 96, 40), (29, 90, 12), (28, 96, 30), (9, 96, 30), (8, 70, 7))
    whole, taken = (prompt if has_weights else call)(sizes[0][0]), []
    in_parts = prompts.in_parts
    monkeypatch.setattr(prompts, "in_parts", lambda a: taken.append(a.mask.shape) or in_parts(a))
    options = {**(WEIGHTS if has_weights else {}), "scale": 0.2, "max_absorbed_tokens": 10}

    def attend(*operands):
        *rows, indices = operands
        return torch.ops.mla_fx.attention(*rows, indices=indices, **options)[0]

    def operands(tokens, keys, chosen):
        indices = torch.where(whole.indices < keys, whole.indices, -1)[:, :tokens, :, :chosen]
        caches = (cache[:, :keys].contiguous() for cache in (whole.kv_cache, whole.kr_cache))
        return whole.query[:, :tokens], whole.query_rope[:, :tokens], *caches, indices.sort(-1, descending=True).values

    _, code, step = compiled(attend, *operands(*sizes[0]), dynamic=True)
    assert f"torch.ops.mla_fx.{KERNELS[has_weights]}" in code
    for others in sizes[1:]:
        *rows, indices = operands(*others)
        check(step(*rows, indices), attention.Arguments(*rows, indices=indices, **options))
    assert taken == ([(BATCH, 1, 30, 96), (BATCH, 1, 28, 96)] if has_weights else [])


@pytest.mark.parametrize("is_paged", [False, True], ids=["flat", "pages"])
@pytest.mark.parametrize("number", [KEYS, KEYS + 30], ids=["T", "beyond T"])
def test_an_index_of_the_next_sequence_is_an_error(number, is_paged):
    """The pool holds such a row, but that is not of the sequence which asks for it."""
    for right in (call(3, is_paged=is_paged), prompt(3, is_paged=is_paged)):
        given = right.indices.clone()
        given[0, 1, 0, 2] = number
        a, sentence = replace(right, indices=given), f"indices hold {number}; they must be below {KEYS}, the length of"
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
    assert KERNELS[False] not in code and error(found, attention.body(right)[0]) <= 1e-12
    given = right.indices.clone()
    given[0, 0, 0, 2] = KEYS
    with pytest.raises(RuntimeError, match="index out of bounds"):
        compiled_call(attention.operator, replace(right, indices=given))
