"""Kernels for attention over latents mean what the operator means: in C++, and in Triton under its interpreter.

The oracle is the body of the operator in float64, over the same numbers. `tests/ops/test_kernel_means_body.py` asks it
of NaN, infinities and extreme numbers."""

from dataclasses import replace
from random import Random

import pytest
import torch
from lib.kernels import draw, interpretable, threads
from lib.latent_calls import DTYPES, HIDDEN, POOL, ROUNDING, call, check_means_body
from lib.operators.harness import samples as samples_of
from mla_fx.lowering.cpu import attention_over_rows

from mla_fx.ops.emitted.attention import operator as attention
from mla_fx.ops.emitted.attention import samples
from mla_fx.ops.emitted.attention.codes import CODES, dtype_of

pytestmark = pytest.mark.usefixtures("no_gradients")

DRAWS = 100
SHAPES = {
    "C++": {
        "one token": (3, 1, 8, 6),
        "chunk": (2, 40, 4, 12),
        "many heads": (1, 2, 130, 5),
        "parts of one context": (1, 1, 3, 80),
        "tiles of one context": (1, 3, 2, 37),
    },
    "Triton": {"one token": (3, 1, 8, 6), "drafts": (2, 5, 4, 7), "many heads": (1, 2, 40, 5), "long": (1, 1, 3, 40)},
}
KERNELS = ("C++", pytest.param("Triton", marks=pytest.mark.slow))  # interpreted, it takes seconds


@pytest.fixture
def run(kernel):
    if kernel == "C++":
        return threads(2)(attention_over_rows.run)
    pytest.importorskip("triton")
    from mla_fx.lowering.cuda import split_keys

    def interpreted(a):
        out, lse = split_keys.run(interpretable(a))
        return out.to(dtype_of(a)), lse

    return interpreted


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_sample(run, dtype):
    """Those with logarithms are asked for by the check."""
    given = [s for s in samples_of("attention", dtype) if not s.kwargs.keys() & {"weight_uk", "return_lse"}]
    asked = [sample for sample in given if sample.args[2].dim() == 3]
    for sample in asked:
        check_means_body(run, attention.Arguments(*sample.args, **sample.kwargs))
    assert len(asked) > 10


@pytest.mark.parametrize("hidden", HIDDEN)
@pytest.mark.parametrize("kernel", KERNELS)
def test_shapes_and_masks(run, kernel, hidden):
    """Under the interpreter each shape has one dtype, which is another one for the next mask."""
    for place, shape in enumerate(SHAPES[kernel].values(), [*HIDDEN].index(hidden)):
        for dtype in DTYPES if kernel == "C++" else (DTYPES[place % len(DTYPES)],):
            check_means_body(run, call(*shape, dtype, **HIDDEN[hidden](shape)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kernel", KERNELS)
def test_infinities(run, dtype):
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


@pytest.mark.parametrize("kernel", SHAPES)
def test_strides_and_dtypes(run):
    a = call(2, 5, 3, 4)
    turned = a.block_table.T.contiguous().T
    for table in (a.block_table.int(), turned, turned.int(), a.block_table[:1].expand(2, -1)):
        check_means_body(run, replace(a, block_table=table))
    by_head = a.query.transpose(1, 2).contiguous().transpose(1, 2)
    check_means_body(run, replace(a, query=by_head))
    check_means_body(run, replace(a, query=a.query.mT.contiguous().mT, kv_cache=a.kv_cache.mT.contiguous().mT))
    check_means_body(run, replace(a, query_rope=None, kr_cache=None))


@pytest.mark.parametrize("kernel", SHAPES)
def test_ranks_that_are_no_power_of_two(run):
    for rank, rope in ((48, 24), (20, 6), (80, 16)):
        queries, caches = ([draw(2, size, 3, width)[:, :, 0] for width in (rank, rope)] for size in (4, 50))
        queries = [query.unsqueeze(2).expand(-1, -1, 3, -1) for query in queries]
        check_means_body(run, attention.Arguments(*queries, *caches, None, scale=0.3, is_causal=True))


@pytest.mark.parametrize("kernel", SHAPES)
def test_memory_of_pages_that_no_query_sees_is_not_read(run):
    a = call(2, 1, 3, 4, context_lens=torch.tensor([5, 20]))
    a = replace(a, block_table=torch.tensor([[0, 9, 9, 9], [1, 2, 9, 9]]))
    wanted, _ = run(a)
    for cache in (a.kv_cache, a.kr_cache):
        cache[9] = cache[0, 5:] = cache[2, 4:] = torch.nan
    assert torch.equal(run(a)[0], wanted)


@pytest.mark.parametrize("kernel", SHAPES)
def test_numbers_that_are_not_finite(run):
    """A score of NaN or infinity makes its row NaN, as in the body; others keep theirs."""
    a = call(2, 2, 3, 4, torch.float32)
    a.query[0, 1, 2, 3] = torch.nan
    a.query[1, 0, 0, 0] = torch.inf
    out, wanted = run(a)[0], attention.body(a)[0]
    assert torch.equal(out.isnan(), wanted.isnan())
    torch.testing.assert_close(out, wanted, equal_nan=True, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kernel", SHAPES)
def test_an_absorbed_query_that_float16_does_not_hold(run):
    """A row of zeros, and one that is infinite, are what they are in the body."""
    a = call(2, 2, 3, 4, torch.float16, context_lens=torch.tensor([60, 33]))
    check_means_body(run, replace(a, query=a.query.float()))
    query = a.query.float() * 2**20
    query[0, 1, 2] = 0
    a = replace(a, query=query, scale=a.scale * 2**-20)
    check_means_body(run, a)
    a.query[1, 0, 0, 3] = torch.inf
    out, wanted = run(a)[0], attention.body(a)[0]
    assert torch.equal(out.isnan(), wanted.isnan()) and bool(out[1, 0, 0].isnan().all())


@pytest.mark.parametrize("kernel", SHAPES)
def test_no_keys_and_no_rows(run):
    a = call(2, 3, 4, 0, return_lse=True)
    out, lse = run(a)
    assert torch.equal(out, torch.zeros_like(a.query)) and bool(lse.eq(-torch.inf).all())
    none = replace(a, query=a.query[:, :0], query_rope=a.query_rope[:, :0])
    assert run(none)[0].shape == none.query.shape
    empty = replace(a, kv_cache=a.kv_cache[:, :0], kr_cache=a.kr_cache[:, :0], block_table=torch.zeros(2, 3).long())
    assert torch.equal(run(empty)[0], torch.zeros_like(a.query))


@pytest.mark.parametrize("number", [POOL, -POOL - 1])
@pytest.mark.parametrize("kernel", SHAPES)
def test_a_number_of_no_page(run, kernel, number):
    """It is an error. A device cannot raise: nothing is read there, and the row is not a number."""
    a = call(2, 1, 3, 4, context_lens=torch.tensor([64, 20]))
    a.block_table[0, 2] = a.block_table[1, 3] = number
    if kernel == "C++":
        with pytest.raises(ValueError, match=f"block_table holds {number}; it must be below {POOL}"):
            run(a)
    else:
        out, _ = run(a)
        assert bool(out[0].isnan().all()) and bool(out[1].isfinite().all())


@pytest.mark.parametrize("kernel", KERNELS)
def test_drawn_calls(run):
    """Sizes, pages, lengths, masks, sinks and strides of any kind; rows that no query sees are NaN."""
    for seed in range(DRAWS):
        a = drawn(Random(seed))
        try:
            check_means_body(lambda asked, a=a: run(replace(a, return_lse=asked.return_lse)), with_zeros(a))
        except AssertionError as error:
            raise AssertionError(f"seed {seed}") from error


def with_zeros(a):
    """The call with zeros in place of NaN. The body reads rows that the kernel skips. Codes have no NaN."""
    if a.kv_scales is not None:
        return a
    kr_cache = None if a.kr_cache is None else a.kr_cache.nan_to_num(0)
    return replace(a, kv_cache=a.kv_cache.nan_to_num(0), kr_cache=kr_cache)


def drawn(random):
    batch, tokens, heads = random.randint(1, 3), random.randint(1, 5), random.choice((1, 2, 3, 7))
    rank, rope, dtype = random.choice((16, 20, 32, 48)), random.choice((0, 6, 16)), random.choice(DTYPES)
    page, columns = random.choice((1, 4, 16)), random.randint(1, 6)
    context, seed = page * columns, random.randint(0, 2**20)
    queries = [draw(batch, tokens, heads, width, seed=seed).to(dtype) for width in (rank, rope)]
    is_paged = random.random() < 0.5
    rows = (batch * columns + 1, page) if is_paged else (batch, context)
    pool = draw(*rows, rank + rope, seed=seed).to(dtype)
    options = {"block_table": torch.randperm(batch * columns).view(batch, columns)} if is_paged else {}
    kind = random.choice(("nothing", "causal", "lengths", "bool", "added"))
    if kind == "causal":
        options["is_causal"] = True
    if kind == "lengths":
        lengths = [random.randint(-3, context + 5) for _ in range(batch)]
        options["context_lens"] = torch.tensor(lengths)
        if not is_paged:
            for own, length in zip(pool, lengths, strict=True):
                own[max(length, 0) :] = torch.nan
    if kind == "bool":
        options["mask"] = draw(random.choice((1, heads)), tokens, context, seed=seed) > 0
    if kind == "added":
        options["mask"] = draw(batch, 1, random.choice((1, tokens)), context, seed=seed)
    if kind in ("lengths", "bool") and not pool.isnan().any() and random.random() < 0.3:
        options["fill"] = -1.5
    if random.random() < 0.3:
        options["sinks"] = draw(heads, seed=seed)
    parts = (queries[1], pool[..., rank:]) if rope else (None, None)
    operands = queries[0], parts[0], pool[..., :rank], parts[1]
    options = {"mask": None, "scale": random.choice((0.3, -0.2)), **options}
    if not pool.isnan().any() and random.random() < 0.4:
        operands, options = in_codes(random, operands, options)
    return attention.Arguments(*operands, **options)


def in_codes(random, operands, options):
    """Replace the latents, and sometimes the rotary keys, by codes with a scale for each column, some, or all."""
    _, _, latents, keys = operands

    def scales(cache):
        columns = random.choice([count for count in (1, 2, 4, cache.shape[2]) if cache.shape[2] % count == 0])
        return *(random.choice((1, size)) for size in cache.shape[:2]), columns

    rotary = None if keys is None or random.random() < 0.5 else scales(keys)
    return samples.in_codes(operands, options, scales(latents), random.choice(CODES), rotary)
