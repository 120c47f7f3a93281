"""Packed sequences by one call of the C++ kernel, some at a time.

The oracle is the body of the operator in float64, over the same numbers."""

from dataclasses import replace

import pytest
import torch
from lib.kernels import compiled_call, doubled, draw, error, threads
from mla_fx.lowering.cpu import heads_over_rows
from mla_fx.lowering.cpu import packed_sequences as lowering

from mla_fx.errors import NoMatch
from mla_fx.ops.emitted.attention import operator as attention
from mla_fx.ops.emitted.attention.arguments import Arguments
from mla_fx.ops.emitted.attention.operator import body
from mla_fx.ops.emitted.attention.parts import of_heads

pytestmark = pytest.mark.usefixtures("no_gradients")
HEADS, NOPE, RANK, ROPE, VALUE = 5, 16, 24, 8, 12
ALL_LENS = [(20, 33, 27), (0, 5, 0, 300, 1, 0), (7, 290, 3), (0, 0), (9,)]


def call(*lens, dtype=torch.bfloat16, has_rope=True, is_causal=True):
    up = draw(HEADS, NOPE + VALUE, RANK) * RANK**-0.5
    widths = (HEADS, NOPE), (HEADS, ROPE), (RANK,), (ROPE,)
    rows = [draw(1, sum(lens), *width, seed=seed).to(dtype) for seed, width in enumerate(widths)]
    rows = [value if has_rope or width[-1] != ROPE else None for value, width in zip(rows, widths, strict=True)]
    weights = {"weight_uk": up[:, :NOPE].to(dtype), "weight_uv": up[:, NOPE:].to(dtype)}
    return Arguments(*rows, **weights, lens=[*lens], scale=0.2, is_causal=is_causal)


def check(a):
    exact, out = body(doubled(a))[0], lowering._run(a)[0]
    assert out.shape == exact.shape and out.is_contiguous()
    assert exact.numel() == 0 or error(out, exact) <= 2 * error(body(a)[0], exact) + 2**-8


@pytest.fixture
def fast(monkeypatch):
    """The kernel, whatever the machine multiplies fast."""
    monkeypatch.setattr(heads_over_rows, "is_fast", lambda a: a.query.dtype == torch.bfloat16)


@pytest.mark.parametrize("lens", ALL_LENS)
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("has_rope", [True, False])
def test_sequences_attend_to_themselves(fast, lens, is_causal, has_rope):
    check(call(*lens, is_causal=is_causal, has_rope=has_rope))


@pytest.mark.parametrize("most", [1, 30, 60])
def test_keys_are_expanded_for_some_sequences_at_a_time(fast, monkeypatch, most):
    monkeypatch.setattr(heads_over_rows, "EXPANDED", most * HEADS * (NOPE + VALUE))
    check(call(20, 33, 27, 0, 2))


@pytest.mark.parametrize("count", [1, 3])
def test_keys_of_one_long_sequence_are_taken_in_parts(fast, count):
    a = call(3, 700)
    with threads(count):
        check(replace(of_heads(a, slice(0, 1)), is_causal=False))


def test_operands_may_have_any_strides(fast):
    a = call(4, 6)
    names = "query", "query_rope", "kv_cache", "kr_cache"
    strided = {name: getattr(a, name).mT.contiguous().mT for name in names}
    check(replace(a, **strided, weight_uk=a.weight_uk.clone()))


def test_compiled_code_calls_it_where_pairs_are_multiplied(fast):
    a = call(10, 14)
    found, code = compiled_call(attention.operator, a)
    assert "torch.ops.mla_fx.packed_mla_attention_over_rows.default" in code
    torch.testing.assert_close(found, lowering._run(a)[0], rtol=0, atol=0)


@pytest.mark.slow
def test_loops_attend_to_one_sequence_after_the_other():
    a = call(10, 14, dtype=torch.float32)
    with pytest.raises(NoMatch, match="loops are for other dtypes and machines"):
        lowering.lower(a)
    found, code = compiled_call(attention.operator, a)
    assert "mla_fx.packed_mla" not in code
    torch.testing.assert_close(found, body(a)[0], rtol=1e-4, atol=1e-5)
