"""Prompts are attended to in parts: of heads, of query rows, and of keys that some row sees.

The oracle is the body of the operator in float64, over the same numbers."""

from dataclasses import replace

import pytest
import torch
from lib.kernels import compiled_call, doubled, error
from lib.prompt_calls import BATCH, CALLS, KEYS, NOPE, VALUE, call
from mla_fx.lowering.cpu import attention as lowering
from mla_fx.lowering.cpu import costs, heads_over_rows, prompts
from mla_fx.lowering.loops import attention as loops

from mla_fx.ops.emitted.attention import operator as attention

pytestmark = pytest.mark.usefixtures("no_gradients")


@pytest.fixture
def small(monkeypatch):
    """Parts so small that there are several, the last one smaller than the others, by PyTorch's kernel."""
    monkeypatch.setattr(heads_over_rows, "is_fast", lambda a: False)
    monkeypatch.setattr(prompts, "ROWS", 8)
    monkeypatch.setattr(prompts, "KEYS", 2 * KEYS * NOPE)  # of two heads
    monkeypatch.setattr(heads_over_rows, "EXPANDED", 2 * KEYS * (NOPE + VALUE))


@pytest.mark.parametrize("name", CALLS)
def test_parts_are_the_whole(small, name):
    a = CALLS[name]
    exact = attention.body(doubled(a))[0]
    assert error(prompts.in_parts(a)[0], exact) <= 2 * error(attention.body(a)[0], exact) + 2**-8


@pytest.mark.parametrize("name", CALLS)
def test_heads_are_sequences_of_attention_over_rows(small, name):
    a = CALLS[name]
    out, lse = heads_over_rows.attend(replace(a, return_lse=a.sinks is None))
    exact, plain = attention.body(doubled(a))[0], attention.body(a)[0]
    assert error(out, exact) <= 2 * error(plain, exact) + 2**-8
    sums = attention.body(doubled(replace(a, return_lse=a.sinks is None)))[1]
    torch.testing.assert_close(lse.double(), sums, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(out, heads_over_rows.attend(a)[0], rtol=0, atol=0)


@pytest.mark.parametrize("steps", [1, 7, 300])
@pytest.mark.parametrize("kind", ["mask", "lengths", "first token"])
def test_blocks_of_rows_skip_what_they_do_not_see(steps, kind):
    keys = 700
    masks = {
        "mask": {"mask": torch.arange(keys) <= torch.arange(steps).unsqueeze(-1) + 350},
        "lengths": {"context_lens": torch.tensor([600, 3])},
        "first token": {"is_causal": True},
    }
    a = call(steps=steps, keys=keys, **masks[kind])
    exact = attention.body(doubled(a))[0]
    assert error(heads_over_rows.attend(a)[0], exact) <= 2 * error(attention.body(a)[0], exact)


def test_rows_after_a_length_of_a_cache_are_not_read():
    a = call(context_lens=torch.tensor([40, 20]))
    stale = a.kv_cache.clone()
    stale[1, 20:] = torch.nan
    torch.testing.assert_close(heads_over_rows.attend(replace(a, kv_cache=stale))[0], heads_over_rows.attend(a)[0])


def test_keys_that_no_row_of_a_part_sees_are_not_read(small, monkeypatch):
    attend, read = prompts.attend, []

    def noted(query, key, *rest):
        read.append(key.shape[2])
        return attend(query, key, *rest)

    monkeypatch.setattr(prompts, "attend", noted)
    prompts.in_parts(CALLS["condition"])
    assert read == [8, 16, 24, 30] * 3 * BATCH


@pytest.mark.slow
def test_compiled_code_goes_by_parts_of_many_scores(small, monkeypatch):
    a = CALLS["condition"]
    assert "mla_attention_over_rows" not in compiled_call(attention.operator, a)[1]
    monkeypatch.setattr(loops, "FEW_SCORES", 1)
    found, code = compiled_call(attention.operator, a)
    assert "torch.ops.mla_fx.mla_attention_over_rows.default" in code
    torch.testing.assert_close(found, prompts.in_parts(a)[0], rtol=0, atol=0)
    assert lowering.lower(a) is lowering.chosen_by_call


def test_heads_over_rows_are_called_where_pairs_are_multiplied(monkeypatch):
    for name in ("condition", "no mask"):
        monkeypatch.setattr(heads_over_rows, "is_fast", lambda a: True)
        monkeypatch.setattr(costs, "SCORES_OF_HEADS", 0)
        a = CALLS[name]
        found, code = compiled_call(attention.operator, a)
        assert "torch.ops.mla_fx.mla_attention_over_rows.default" in code
        torch.testing.assert_close(found, heads_over_rows.attend(a)[0], rtol=0, atol=0)
        a = replace(a, return_lse=True)
        found, code = compiled_call(attention.operator, a)
        assert "torch.ops.mla_fx.mla_attention_over_rows.default" in code
        torch.testing.assert_close(found, heads_over_rows.attend(a), rtol=0, atol=0)
