"""Attention over latents by users' libraries: what reaches them, and that their results mean what ours do.

The oracle is the body of the operator in float64, over the same numbers."""

from dataclasses import replace

import pytest
import torch
from lib.kernels import compiled, draw, error
from lib.latent_calls import check_means_body

from mla_fx.ops.common.define import on_arguments
from mla_fx.ops.emitted.attention import operator as attention
from mla_fx.target import modules_of_operators

pytest.importorskip("triton")
from mla_fx.lowering import cuda
from mla_fx.lowering.cuda import flash_mla, flashinfer, libraries, split_keys

from . import stand_ins

pytestmark = pytest.mark.usefixtures("no_gradients")

POOL, PAGE, BLOCKS, HEADS = 12, 64, 3, 16
LIBRARIES = {"flash_mla": flash_mla, "flashinfer": flashinfer}


@pytest.fixture(autouse=True)
def _installed(monkeypatch):
    stand_ins.install(monkeypatch)


@pytest.fixture(params=LIBRARIES)
def library(request):
    return LIBRARIES[request.param]


def call(batch=3, tokens=1, dtype=torch.bfloat16, **options):
    """Views of one cache; a page is named from the end."""
    pool = draw(POOL, PAGE, 576).to(dtype)
    table = torch.randint(-POOL, POOL, (batch, BLOCKS), generator=torch.Generator().manual_seed(batch))
    queries = (draw(batch, tokens, HEADS, width, seed=1).to(dtype) for width in (512, 64))
    given = {"block_table": table, "scale": 0.05, **options}
    return attention.Arguments(*queries, pool[..., :512], pool[..., 512:], **given)


def run(library, a):
    return libraries.by_tokens(library.run, a)


def lengths(*numbers):
    return {"context_lens": torch.tensor(numbers)}


CALLS = {
    "no lengths": call(),
    "lengths": call(**lengths(64, 1, 130)),
    "drafts": call(tokens=3, **lengths(191, 65, 192)),
    "drafts, first rows see nothing": call(tokens=3, **lengths(1, 2, 3)),
    "beyond both ends": call(tokens=3, **lengths(10**9, -5, 0)),
    "just beyond the end": call(tokens=3, **lengths(193, 194, 195)),
    "one length for all": call(tokens=2, **lengths(100)),
    "causal": call(tokens=4, is_causal=True),
    "float16": call(dtype=torch.float16, **lengths(64, 1, 130)),
    "a table of int32": replace(call(**lengths(64, 1, 130)), block_table=call().block_table.int()),
    "queries by head": replace(call(tokens=2), query=call(tokens=2).query.mT.contiguous().mT),
}


@pytest.mark.parametrize("name", CALLS)
def test_means_the_operator(name, library):
    check_means_body(lambda a: run(library, a), CALLS[name])


def test_rows_that_see_no_key_are_ours_exactly(library):
    out, lse = run(library, replace(CALLS["beyond both ends"], return_lse=True))
    assert torch.equal(out[1:], torch.zeros_like(out[1:]))
    assert bool(lse[1:].eq(-torch.inf).all()) and bool(lse[0].isfinite().all())


@pytest.mark.parametrize("number", [POOL, -POOL - 1])
def test_a_number_of_no_page_gives_nan_where_it_is_read(number, library):
    a = call(**lengths(192, 100, 20), return_lse=True)
    a.block_table[0, 2] = a.block_table[1, 2] = number
    out, lse = run(library, a)
    assert bool(out[0].isnan().all()) and bool(lse[0].isnan().all())
    assert bool(out[1:].isfinite().all()) and bool(lse[1:].isfinite().all())


def flat(dtype=torch.bfloat16):
    """Two caches of their own, without pages."""
    a = call(dtype=dtype, **lengths(64, 1, 190))
    caches = draw(3, 192, 512).to(dtype), draw(3, 192, 64, seed=1).to(dtype)
    return replace(a, kv_cache=caches[0], kr_cache=caches[1], block_table=None)


def test_flashinfer_takes_two_caches_and_sequences_without_pages():
    check_means_body(lambda a: run(flashinfer, a), flat())
    a = CALLS["lengths"]
    check_means_body(lambda a: run(flashinfer, a), replace(a, kr_cache=a.kr_cache.clone()))


def moved(a, by):
    """The same numbers, `by` elements further on in memory."""
    pool = torch.empty(by + POOL * PAGE * 576, dtype=a.kv_cache.dtype)[by:].view(POOL, PAGE, 576)
    pool.copy_(torch.cat((a.kv_cache, a.kr_cache), -1))
    return replace(a, kv_cache=pool[..., :512], kr_cache=pool[..., 512:])


def wider(a):
    """Rows with a gap after them."""
    pool = torch.nn.functional.pad(torch.cat((a.kv_cache, a.kr_cache), -1), (0, 64))
    return replace(a, kv_cache=pool[..., :512], kr_cache=pool[..., 512:576])


OTHERS = {
    "a copy": lambda a: replace(a, kr_cache=a.kr_cache.clone()),
    "another page": lambda a: replace(a, kv_cache=a.kv_cache[:-1], kr_cache=a.kr_cache[1:]),
    "fewer pages": lambda a: replace(a, kv_cache=a.kv_cache[:-1]),
    "not aligned": lambda a: moved(a, 1),
    "rows with gaps": wider,
    "no pages": lambda a: replace(a, block_table=a.block_table[:, :0]),
    "no tokens": lambda a: replace(a, query=a.query[:, :0], query_rope=a.query_rope[:, :0]),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_flash_mla_leaves_other_caches_to_split_keys(kind, monkeypatch):
    """Addresses say it, when a call runs."""
    calls, a = [], OTHERS[kind](call())
    monkeypatch.setattr(split_keys, "run", lambda a: (calls.append(a), libraries.asked(a))[1])
    run(flash_mla, a)
    assert len(calls) == 1
    run(flash_mla, moved(call(), 8))
    assert len(calls) == 1


def test_split_keys_gets_what_means_the_same():
    a = call(tokens=2, dtype=torch.float32, **lengths(100, -5, 10**9))
    check_means_body(lambda a: run(flash_mla, a), replace(a, kr_cache=a.kr_cache.clone()))


def test_dense_decoding_of_sgl_flash_mla(monkeypatch):
    stand_ins.install(monkeypatch, **stand_ins.OF_SGL)
    check_means_body(lambda a: run(flash_mla, a), CALLS["drafts"])


@pytest.mark.slow
def test_layers_share_the_conversion_of_lengths_and_tables(library, monkeypatch):
    """Compiled for a CPU, where the operator of the library gets a kernel. Caches are not copied for it."""
    combined, own = [], flash_mla.is_combined
    monkeypatch.setattr(flash_mla, "is_combined", lambda a: combined.append(own(a)) or own(a))
    monkeypatch.setattr(library, "check", lambda a: None)
    found = {entry.overload: module for entry, module in modules_of_operators("mla_fx.lowering.cuda")}
    monkeypatch.setattr(cuda, "LOWERINGS", found)
    attend, first, second = torch.ops.mla_fx.attention.default, CALLS["drafts"], moved(CALLS["drafts"], 0)

    def layers(query, rope, pool, other, lens, table):
        for cache in (pool, other):
            parts = cache[..., :512], cache[..., 512:]
            query, _ = attend(query, rope, *parts, None, lens, None, table, scale=0.05)
        return query

    pools = (a.kv_cache.as_strided((POOL, PAGE, 576), a.kv_cache.stride()) for a in (first, second))
    inputs = first.query, first.query_rope, *pools, first.context_lens, first.block_table
    with torch.library._scoped_library("mla_fx", "IMPL") as kernels:
        run = on_arguments(library.run, attention.Arguments)
        kernels.impl(f"attention_by_{library.KERNEL}", run, "CPU")
        out, code, _ = compiled(layers, *inputs, options={"kernels": library.KERNEL})
    calls = code.partition("def call(")[2].partition("def get_args")[0]
    assert calls.count(f"= torch.ops.mla_fx.attention_by_{library.KERNEL}.default(") == 2
    assert calls.count("cpp_fused") == 3, "before, between and after the calls"
    exact = layers(*(value.double() if value.is_floating_point() else value for value in inputs))
    assert error(out, exact) <= error(layers(*inputs), exact) + 2**-8
    assert combined[-2:] == ([True, True] if library is flash_mla else []), "before them, the lowering is checked"


def test_flashinfer_stays_out_of_cuda_graphs():
    """It waits for the device; FlashMLA does not."""
    unsafe = torch.Tag.cudagraph_unsafe
    assert unsafe in torch.ops.mla_fx.attention_by_flashinfer.default.tags
    assert unsafe not in torch.ops.mla_fx.attention_by_flash_mla.default.tags
