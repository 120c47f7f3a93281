"""The Triton kernel for attention over latents, under Triton's interpreter: it means what its operators mean.

The oracle is the body of the operator in float64, over the same numbers."""

from dataclasses import replace
from random import Random

import pytest
import torch
from lib import latent_calls
from lib.kernels import draw, interpretable
from lib.latent_calls import (
    DTYPES,
    POOL,
    call,
    check_infinities,
    check_means_body,
    check_no_pages,
    check_samples,
    check_strides_and_dtypes,
    check_unseen_pages_are_not_read,
)

from mla_fx.ops.emitted.attention import operator as attention
from mla_fx.ops.emitted.attention import samples
from mla_fx.ops.emitted.attention.codes import CODES, dtype_of

pytest.importorskip("triton")
from mla_fx.lowering.cuda import split_keys as kernel

pytestmark = pytest.mark.usefixtures("no_gradients")

DRAWS = 100


def run(a):
    out, lse = kernel.run(interpretable(a))
    return out.to(dtype_of(a)), lse


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_sample(dtype):
    check_samples(run, dtype)


SHAPES = {"one token": (3, 1, 8, 6), "drafts": (2, 5, 4, 7), "many heads": (1, 2, 40, 5), "long": (1, 1, 3, 40)}
OTHERS = [shape for shape in SHAPES if shape != "drafts"]
HIDDEN = {
    **latent_calls.HIDDEN,
    "edges of a page": lambda shape: {"context_lens": torch.tensor([16, 32, 1])[: shape[0]]},
    "filled": lambda shape: {"context_lens": torch.full((1,), 20), "fill": -1.5},
}


@pytest.mark.slow
@pytest.mark.parametrize("hidden", HIDDEN)
@pytest.mark.parametrize("shape", ["drafts", *OTHERS])
def test_shapes_and_masks(shape, hidden):
    for dtype in DTYPES:
        check_means_body(run, call(*SHAPES[shape], dtype, **HIDDEN[hidden](SHAPES[shape])))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_infinities(dtype):
    check_infinities(run, dtype)


def test_strides_and_dtypes():
    check_strides_and_dtypes(run)


def test_ranks_that_are_no_power_of_two():
    for rank, rope in ((48, 24), (20, 6), (80, 16)):
        queries, caches = ([draw(2, size, 3, width)[:, :, 0] for width in (rank, rope)] for size in (4, 50))
        queries = [query.unsqueeze(2).expand(-1, -1, 3, -1) for query in queries]
        check_means_body(run, attention.Arguments(*queries, *caches, None, scale=0.3, is_causal=True))


def test_memory_of_pages_that_no_query_sees_is_not_read():
    check_unseen_pages_are_not_read(run)


def test_numbers_that_are_not_finite():
    """A score of NaN or infinity makes its row NaN, as in the body; others keep theirs."""
    a = call(2, 2, 3, 4, torch.float32)
    a.query[0, 1, 2, 3] = torch.nan
    a.query[1, 0, 0, 0] = torch.inf
    out, wanted = run(a)[0], attention.body(a)[0]
    assert torch.equal(out.isnan(), wanted.isnan())
    torch.testing.assert_close(out, wanted, equal_nan=True, rtol=1e-4, atol=1e-5)


def test_an_absorbed_query_that_float16_does_not_hold():
    """A row of zeros, and one that is infinite, are what they are in the body."""
    a = call(2, 2, 3, 4, torch.float16, context_lens=torch.tensor([60, 33]))
    query = a.query.float() * 2**20
    query[0, 1, 2] = 0
    a = replace(a, query=query, scale=a.scale * 2**-20)
    check_means_body(run, a)
    a.query[1, 0, 0, 3] = torch.inf
    out, wanted = run(a)[0], attention.body(a)[0]
    assert torch.equal(out.isnan(), wanted.isnan()) and bool(out[1, 0, 0].isnan().all())


def test_no_keys_and_no_rows():
    check_no_pages(run)
    a = call(2, 3, 4, 0)
    none = replace(a, query=a.query[:, :0], query_rope=a.query_rope[:, :0])
    assert run(none)[0].shape == none.query.shape


@pytest.mark.parametrize("number", [POOL, -POOL - 1])
def test_a_number_of_no_page_gives_nan(number):
    """A device cannot raise: nothing is read there, and the row is not a number."""
    a = call(2, 1, 3, 4, context_lens=torch.tensor([64, 20]))
    a.block_table[0, 2] = a.block_table[1, 3] = number
    out, _ = run(a)
    assert bool(out[0].isnan().all()) and bool(out[1].isfinite().all())


@pytest.mark.slow
def test_drawn_calls():
    """Sizes, pages, lengths, masks, sinks and strides of any kind; rows that no query sees are NaN."""
    for seed in range(DRAWS):
        a = drawn(Random(seed))
        try:
            check_means_body(lambda asked, a=a: run(replace(a, return_lse=asked.return_lse)), with_zeros(a))
        except AssertionError as error:
            raise AssertionError(f"seed {seed}") from error


def with_zeros(a):
    """The same with zeros in place of NaN, which the kernel does not read and the body does; codes have none."""
    if a.kv_scales is not None:
        return a
    kr_cache = None if a.kr_cache is None else a.kr_cache.nan_to_num(0)
    return replace(a, kv_cache=a.kv_cache.nan_to_num(0), kr_cache=kr_cache)


def drawn(random):
    batch, tokens, heads = random.randint(1, 3), random.randint(1, 5), random.randint(1, 20)
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
    """The same with latents in codes of any kind, and sometimes rotary keys: a scale for each column, some, or all."""
    _, _, latents, keys = operands

    def scales(cache):
        columns = random.choice([count for count in (1, 2, 4, cache.shape[2]) if cache.shape[2] % count == 0])
        return *(random.choice((1, size)) for size in cache.shape[:2]), columns

    rotary = None if keys is None or random.random() < 0.5 else scales(keys)
    return samples.in_codes(operands, options, scales(latents), random.choice(CODES), rotary)
