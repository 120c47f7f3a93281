"""The C++ kernel for attention over pages: when compiled code calls it.

`tests/lowering/test_attention_over_latents.py` is about what it means."""

import re
import subprocess
import sys

import pytest
import torch
from lib.kernels import compiled, doubled, draw, error, without_a_compiler
from lib.latent_calls import PAGE, POOL, RANK, ROPE, ROUNDING, call
from mla_fx.lowering.cpu import attention_over_rows as rows

import mla_fx
from mla_fx.ops.emitted.attention import heads
from mla_fx.ops.emitted.attention import operator as attention

pytestmark = pytest.mark.usefixtures("no_gradients")


def over_pages(query, query_rope, pool, table, lengths):
    return torch.ops.mla_fx.attention(
        query, query_rope, pool[..., :RANK], pool[..., RANK:], None, lengths, None, table, scale=0.2
    )[0]


def operands(batch, tokens, columns):
    a = call(batch, tokens, 8, columns)
    pool = draw(POOL, PAGE, RANK + ROPE).bfloat16()
    return a.query, a.query_rope, pool, a.block_table, torch.arange(batch) * 50 + 30


def check_compiled(found, inputs):
    query, query_rope, pool, table, lengths = inputs
    caches = pool.split([RANK, ROPE], -1)
    a = attention.Arguments(query, query_rope, *caches, None, lengths, None, table, scale=0.2)
    exact = attention.body(doubled(a))[0]
    assert error(found, exact) <= 2 * error(attention.body(a)[0], exact) + ROUNDING[torch.bfloat16]


@pytest.mark.slow
def test_pages_are_read_by_the_kernel_and_few_keys_by_loops():
    for columns, calls in ((20, 1), (4, 0)):
        inputs = operands(2, 2, columns)
        found, code, _ = compiled(over_pages, *inputs)
        assert len(re.findall(r"= torch\.ops\.mla_fx\.attention_over_rows", code)) == calls
        assert "mla_fx.attention.default" not in code
        check_compiled(found, inputs)


def test_one_graph_for_every_number_of_tokens_and_pages():
    _, code, step = compiled(over_pages, *operands(2, 3, 20), dynamic=True)
    assert "attention_over_rows" in code
    with torch.compiler.set_stance("fail_on_recompile"):
        for sizes in ((3, 5, 10), (2, 30, 33), (4, 2, 2)):
            inputs = operands(*sizes)
            check_compiled(step(*inputs), inputs)


@pytest.mark.slow
@pytest.mark.parametrize("parts", ["one pool", "two pools"])
def test_a_form_chosen_at_each_call(parts):
    """Few tokens are absorbed, and many are not, in one graph."""
    up = (draw(4, 24, RANK) * RANK**-0.5).bfloat16()

    options = {"weight_uk": up[:, :16], "weight_uv": up[:, 16:], "scale": 0.2, "max_absorbed_tokens": 32}

    def attend(query, query_rope, kv_cache, kr_cache, table, lengths):
        caches = kv_cache, kr_cache, None, lengths, None, table
        return torch.ops.mla_fx.attention(query, query_rope, *caches, **options)[0]

    def inputs(tokens):
        pool = draw(POOL, PAGE, RANK + ROPE).bfloat16()
        caches = pool.split([RANK, ROPE], -1)
        caches = caches if parts == "one pool" else [cache.contiguous() for cache in caches]
        table = torch.randint(0, POOL, (2, 15), generator=torch.Generator().manual_seed(tokens))
        queries = draw(2, tokens, 4, 16).bfloat16(), draw(2, tokens, 4, ROPE, seed=2).bfloat16()
        return *queries, *caches, table, torch.tensor([100, 240])

    _, code, step = compiled(attend, *inputs(5), dynamic=True)
    assert "attention_over_rows" in code
    for tokens in (1, 7, 32, 33, 90):
        *rows, table, lengths = inputs(tokens)
        a = attention.Arguments(*rows, None, lengths, None, table, **options)
        exact = heads.expanded(doubled(a))[0]
        near = max(error(form(a)[0], exact) for form in (heads.expanded, heads.absorbed))
        assert error(step(*inputs(tokens)), exact) <= 2 * near + ROUNDING[torch.bfloat16]


def test_without_a_compiler_its_body_runs_and_a_warning_says_so(monkeypatch):
    without_a_compiler(monkeypatch, rows)
    a = call(2, 2, 3, 20, return_lse=True)
    with pytest.warns(mla_fx.MlaWarning, match="attention over pages runs without its C.. kernel: no compiler$"):
        found = rows.run(a)
    for one, other in zip(found, attention.body(a), strict=True):
        assert torch.equal(one, other)
    _, code, _ = compiled(over_pages, *operands(2, 2, 20))
    assert "mla_fx.attention.default" in code and "attention_over_rows" not in code


@pytest.mark.slow
def test_the_target_declares_what_cached_code_calls():
    names = "ops.attention_over_rows, ops.mla_attention_over_rows, ops.few_rows"
    script = f"import torch, mla_fx.lowering.inductor; ops = torch.ops.mla_fx; {names}"
    subprocess.run([sys.executable, "-c", script], check=True)
