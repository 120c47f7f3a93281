"""paged_attention.batched against a float64 oracle, one query row and head at a time, and what it refuses."""

import pytest
import torch
from lib.operators.harness import CATALOGUE, DTYPES, TOLERANCE, by_name, cases, compiles_once, double, refuses

from mla_fx.ops.emitted.paged_attention import MANY, in_codes, sample

OPERATOR = CATALOGUE["paged_attention.batched"]


def numbers(cache, scale, offset):
    """What the codes of a cache stand for."""
    offset, scale = (0 if offset is None else offset), (1 if scale is None else scale)
    return (cache.double() + offset) * scale if cache.dtype == torch.int8 else cache


def oracle(
    query, key_cache, value_cache, block_table, context_lens=None, mask=None, key_scale=None, value_scale=None,
    key_offset=None, value_offset=None, *, scale, fill=None, dequant_dtype=None,
):  # fmt: skip
    key_cache = numbers(key_cache, key_scale, key_offset)
    value_cache = numbers(value_cache, value_scale, value_offset)
    batch, steps, heads, _ = query.shape
    size, group = key_cache.shape[1], heads // key_cache.shape[2]
    out = torch.zeros(batch, steps, heads, value_cache.shape[3]).double()
    context = [[(int(block), row) for block in table for row in range(size)] for table in block_table]
    shape = batch, heads, steps, len(context[0])
    mask = None if mask is None else mask.expand(shape)
    for b, s, n in [(b, s, n) for b in range(batch) for s in range(steps) for n in range(heads)]:
        keys = torch.stack([key_cache[block, row, n // group] for block, row in context[b]])
        values = torch.stack([value_cache[block, row, n // group] for block, row in context[b]])
        scores = keys @ query[b, s, n] * scale
        hidden = torch.zeros(len(scores), dtype=torch.bool)
        if context_lens is not None:
            hidden = torch.arange(len(scores)) >= context_lens[b % len(context_lens)] - steps + 1 + s
        if mask is not None and mask.dtype == torch.bool:
            hidden = ~mask[b, n, s]
        elif mask is not None:
            scores = scores + mask[b, n, s]
        scores = scores.masked_fill(hidden, -torch.inf if fill is None else fill)
        if scores.max() > -torch.inf:
            out[b, s, n] = scores.softmax(0) @ values
    return out


@pytest.mark.slow
@pytest.mark.parametrize(("operator", "args", "kwargs"), cases(DTYPES, [OPERATOR.name]))
def test_sample_against_oracle(operator, args, kwargs):
    few = by_name(operator, double(args), kwargs)
    if few["query"].shape[1] >= MANY:  # some rows of many are enough
        few["query"] = few["query"][:1]
        few["block_table"] = few["block_table"][:1]
        few["context_lens"] = None if few["context_lens"] is None else few["context_lens"][:1]
    found = operator.overload(*args, **kwargs)
    rtol, atol = TOLERANCE[found.dtype]
    wanted = oracle(**few)
    torch.testing.assert_close(found[: len(wanted)].double(), wanted, rtol=rtol, atol=atol)


def test_caches_narrower_than_the_query_are_read_as_they_are():
    query, *caches, table = sample(torch.float64, 0, 3)
    caches = [cache.bfloat16() for cache in caches]
    wanted = oracle(query, *[cache.double() for cache in caches], table, scale=0.3)
    torch.testing.assert_close(OPERATOR.overload(query, *caches, table, scale=0.3), wanted)


def test_caches_of_any_strides_and_block_size():
    query, *caches, table = sample(torch.float64, 1, 2)
    turned = [cache.transpose(1, 2).contiguous().transpose(1, 2)[:, :3] for cache in caches]
    wanted = oracle(query, *turned, table, scale=0.3)
    torch.testing.assert_close(OPERATOR.overload(query, *turned, table.int(), scale=0.3), wanted)


@pytest.mark.parametrize("steps", [2, MANY])
def test_values_wider_than_keys(steps):
    query, key_cache, value_cache, table = sample(torch.float64, 2, steps)
    value_cache = torch.cat((value_cache, value_cache + 1, value_cache - 1), -1)
    lens = torch.tensor([100, 9 + steps])
    wanted = oracle(query, key_cache, value_cache, table[:, :2], lens, scale=0.3)
    found = OPERATOR.overload(query, key_cache, value_cache, table[:, :2], lens, scale=0.3)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("steps", [2, MANY])
def test_codes_beside_values(steps):
    """Only keys are codes."""
    codes, _ = in_codes(torch.float64, 5, steps, torch.tensor([70, 300]))
    query, key_cache, _, table, lens, mask, key_scale, *_ = codes
    given = query, key_cache, sample(torch.float64, 6, steps)[2], table, lens, mask, key_scale
    torch.testing.assert_close(OPERATOR.overload(*given, scale=0.3), oracle(*given, scale=0.3))


@pytest.mark.parametrize("steps", [2, MANY])
def test_codes_are_rounded_to_a_dtype(steps):
    """Products of bfloat16, multiplied further in a wider dtype."""
    given, options = in_codes(torch.float32, 7, steps, torch.tensor([70, 300]))
    query, *caches, table, lens, mask, key_scale, value_scale, key_offset, value_offset = given
    parts = zip(caches, (key_scale, value_scale), (key_offset, value_offset), strict=True)
    rounded = [((cache.float() + offset) * scale).bfloat16() for cache, scale, offset in parts]
    found = OPERATOR.overload(*given, **options, dequant_dtype=torch.bfloat16)
    torch.testing.assert_close(found, OPERATOR.overload(query, *rounded, table, lens, mask, **options))
    assert not torch.allclose(found, OPERATOR.overload(*given, **options))


def test_no_blocks_give_zeros():
    query, *caches, table = sample(torch.float64, 3, 2)
    out = OPERATOR.overload(query, *caches, table[:, :0], scale=0.3)
    assert torch.equal(out, torch.zeros(2, 2, 4, 8).double())


def test_one_compilation_for_all_sizes():
    def layer(query, key_cache, value_cache, table, lens):
        return OPERATOR.overload(query, key_cache, value_cache, table, lens, scale=0.3)

    given = [(*sample(torch.float32, seed, steps), torch.tensor([70, 5])) for seed, steps in ((0, 3), (1, 5))]
    compiles_once(layer, given)


REFUSED = {
    r"query has 4 heads, key_cache 3; the latter must divide the former": {
        "key_cache": torch.zeros(20, 64, 3, 16), "value_cache": torch.zeros(20, 64, 3, 8)
    },
    r"value_cache has shape \[20, 32, 2, 8\]; it must be": {"value_cache": torch.zeros(20, 32, 2, 8)},
    r"key_cache has dtype torch.float64; allowed: torch.bfloat16, torch.float16, torch.float32": {
        "key_cache": torch.zeros(20, 64, 2, 16).double()
    },
    r"key_cache has shape \[20, 64, 2, 8\]; it must be": {"key_cache": torch.zeros(20, 64, 2, 8)},
    r"block_table holds 20; it must be below 20, the number of blocks of key_cache": {
        "block_table": torch.full((2, 9), 20)
    },
    r"block_table has shape \[3, 9\]; it must be \[B, Blocks\]": {"block_table": torch.zeros(3, 9).long()},
    r"context_lens has dtype torch.int32": {"context_lens": torch.tensor([1, 2]).int()},
    r"context_lens is given and mask is given": {"context_lens": torch.tensor([1, 2]), "mask": torch.ones(1).bool()},
    r"mask has shape \[3, 576\]; it must broadcast": {"mask": torch.ones(3, 576).bool()},
    r"key_scale is given and key_cache has dtype torch.float32": {"key_scale": torch.ones(2, 16)},
    r"value_offset has shape \[2, 16\]; it must be \[Hkv, Dv\]": {
        "value_cache": torch.zeros(20, 64, 2, 8).char(), "value_offset": torch.ones(2, 16)
    },
    r"key_scale has dtype torch.int64; allowed": {
        "key_cache": torch.zeros(20, 64, 2, 16).char(), "key_scale": torch.ones(2, 16).long()
    },
    r"dequant_dtype is torch.float64; allowed: torch.bfloat16, torch.float16, torch.float32": {
        "dequant_dtype": torch.float64
    },
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_refused(message):
    query, key_cache, value_cache, table = sample(torch.float32, 4, 2)
    given = {"key_cache": key_cache, "value_cache": value_cache, "block_table": table, "scale": 0.3}
    refuses(OPERATOR, (query,), given | REFUSED[message], message)
