"""Faults planted into calls of attention, one at a time: the results differ from those in float64, or the kernel
refuses. Scores are so large that a hundredth of them shows."""

import functools
from dataclasses import replace

import pytest
import torch
from mla_fx.lowering.ascend import numbers_of_sizes
from mla_fx.lowering.ascend.operators import attention

from mla_fx.ops.common.sample import Sampler
from npu import user_calls
from npu.calls import BF16, BLOCKS, DR, HCKV, PAGE, D
from npu.lowered import Call
from npu.planted import caught_by_numbers, change_attention

N, BATCH, SCALE = 4, 2, 0.25  # of scores with a standard deviation of six
TOKENS = 20  # of a prompt
FEW = 16  # slots of a contiguous cache, so that each counts


@functools.cache
def latent_call(steps, is_paged):
    """Attention over latents. The second sequence fills its cache; a negative block counts from the end."""
    draw = Sampler(BF16, seed=11)
    lead, lengths = ((BLOCKS, PAGE), [200, 256]) if is_paged else ((BATCH, FEW), [9, FEW])
    table = torch.tensor([[3, 0], [-2, 1]]) if is_paged else None
    queries = [draw.normal(BATCH, steps, N, width) for width in (HCKV, DR)]
    caches = [draw.normal(*lead, width) for width in (HCKV, DR)]
    return [*queries, *caches, None, torch.tensor(lengths), None, table], {"scale": SCALE}


def expected_latent(query, query_rope, kv_cache, kr_cache, mask, lengths, sinks, table):
    """In float64, sequence by sequence; the last row sees all keys, and each before it one less."""
    rows = []
    for row, length in enumerate(lengths.tolist()):
        latents, keys = (
            (cache[row] if table is None else cache[table[row]].flatten(0, 1))[:length].double()
            for cache in (kv_cache, kr_cache)
        )
        scores = torch.einsum("snc,tc->snt", query[row].double(), latents)
        scores = scores + torch.einsum("snr,tr->snt", query_rope[row].double(), keys)
        hidden = torch.ones(len(scores), length, dtype=torch.bool).triu(length - len(scores) + 1)
        weights = (scores * SCALE).masked_fill(hidden[:, None], -torch.inf).softmax(-1)
        rows.append(torch.einsum("snt,tc->snc", weights, latents))
    return torch.stack(rows)


def compare_latent(converted, steps, is_paged):
    args, options = latent_call(steps, is_paged)
    found, _ = Call("attention", args, options).on_npu(converted)
    user_calls.check_exact(found, expected_latent(*args))


@functools.cache
def prompt_call():
    """Arguments of attention of heads: two prompts and nothing before them. Scores are of usual size."""
    draw = Sampler(BF16, seed=12)
    up = draw.weight(N, 2 * D, HCKV, fan_in=HCKV)
    queries = [draw.normal(BATCH, TOKENS, N, width) for width in (D, DR)]
    latents, keys = (draw.normal(BATCH, TOKENS, width) for width in (HCKV, DR))
    weights = {"weight_uk": up[:, :D], "weight_uv": up[:, D:]}
    return [*queries, latents, keys], {**weights, "scale": 0.1, "is_causal": True}


def expected_prompt(*operands):
    """In float64."""
    q_nope, q_rope, latents, k_rope, up_keys, up_values = (x.double() for x in operands)
    keys, values = (torch.einsum("btc,ndc->bntd", latents, up) for up in (up_keys, up_values))
    scores = torch.einsum("bsnd,bntd->bnst", q_nope, keys) + torch.einsum("bsnr,btr->bnst", q_rope, k_rope)
    hidden = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
    weights = (scores * 0.1).masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("bnst,bntd->bsnd", weights, values)


def compare_prompt(converted):
    """Keys and values are rounded to bfloat16 as well as weights and results, each by up to 2^-9 of itself."""
    args, options = prompt_call()
    found, _ = Call("attention", args, options).on_npu(converted)
    wanted = expected_prompt(*args, options["weight_uk"], options["weight_uv"])
    torch.testing.assert_close(found.double(), wanted, rtol=2**-7, atol=2**-8 * float(wanted.abs().max()))


COMPARISONS = {
    "pages": functools.partial(compare_latent, steps=1, is_paged=True),
    "pages, drafts": functools.partial(compare_latent, steps=3, is_paged=True),
    "contiguous": functools.partial(compare_latent, steps=1, is_paged=False),
    "prompt": compare_prompt,
}


@pytest.mark.parametrize("name", COMPARISONS)
def test_no_fault(converted, name):
    COMPARISONS[name](converted)


# --- the call that is made ----------------------------------------------------------------------------------------


def moved(x, dim):
    return torch.cat((x.narrow(dim, 1, x.shape[dim] - 1), x.narrow(dim, 0, 1)), dim)


def lengths_of(ends):
    """The numbers that were summed."""
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]


FAULTS = {
    "the scale is a hundredth too large": ("pages", {"softmax_scale": lambda scale: scale * 1.01}),
    "the scale of a prompt is lost": ("prompt", {"softmax_scale": lambda scale: 1.0}),
    "a length is one short where the cache is full": (
        "contiguous",
        {"actual_seq_kvlen": lambda lengths: lengths.clamp(max=FEW - 1)},
    ),
    "a length is one short where the pages are full": (
        "pages",
        {"actual_seq_kvlen": lambda lengths: lengths.clamp(max=2 * PAGE - 1)},
    ),
    "every length is that of the cache": ("contiguous", {"actual_seq_kvlen": lambda n: torch.full_like(n, FEW)}),
    "lengths of the other sequence": ("pages, drafts", {"actual_seq_kvlen": lambda lengths: lengths.flip(0)}),
    "columns of the table in reverse": ("pages", {"block_table": lambda table: table.flip(1)}),
    "rows of the table in reverse": ("contiguous", {"block_table": lambda table: table.flip(0)}),
    "rotary parts of another head": ("pages", {"query_rope": lambda rope: moved(rope, 2)}),
    "rotary parts of another token": ("pages, drafts", {"query_rope": lambda rope: moved(rope, 1)}),
    "rotary parts of another head in a prompt": ("prompt", {"query_rope": lambda rope: moved(rope, 1)}),
    "rotary keys of the next slot": ("pages", {"key_rope": lambda keys: moved(keys, 1)}),
    "rotary keys of the other prompt": ("prompt", {"key_rope": lambda keys: keys.flip(0)}),
    "a prompt sees its own future": (
        "prompt",
        {"sparse_mode": lambda mode: 0, "atten_mask": lambda mask: None},
    ),
    "two prompts as one": (
        "prompt",
        {name: lambda ends: [0, ends[-1]] for name in ("actual_seq_qlen", "actual_seq_kvlen")},
    ),
}

REFUSED = {
    "lengths of prompts that are no sums": (
        "prompt",
        {"actual_seq_qlen": lengths_of},
        r"actual_seq_lengths is \[20, 20\]; of TND they are sums",
    ),
    "lengths of keys that are no sums": (
        "prompt",
        {"actual_seq_kvlen": lengths_of},
        r"actual_seq_lengths_kv is \[20, 20\]; of TND they are sums",
    ),
    "drafts without a causal mask": (
        "pages, drafts",
        {"sparse_mode": lambda mode: 0, "atten_mask": lambda mask: None},
        "sparse_mode is 0 for 3 queries; it must be 3",
    ),
    "a mask that hides what is to be seen": (
        "pages, drafts",
        {"atten_mask": lambda mask: ~mask},
        "with sparse_mode 3 it is 2048 x 2048, ones above the diagonal",
    ),
    "pages of another size": ("pages", {"block_size": lambda size: 64}, "block_size is 64, the cache .* of 128"),
    "queries without rotary parts": ("pages", {"query_rope": lambda rope: None}, "given together or not at all"),
    "a key too many in a full cache": (
        "contiguous",
        {"actual_seq_kvlen": lambda lengths: lengths + 1},
        "sequence 1 has 17 keys, and block_table 1 blocks",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_options(converted, monkeypatch, fault):
    name, changes = FAULTS[fault]
    change_attention(monkeypatch, **changes)
    with caught_by_numbers():
        COMPARISONS[name](converted)


@pytest.mark.parametrize("fault", REFUSED)
def test_options_that_the_kernel_refuses(converted, monkeypatch, fault):
    name, changes, sentence = REFUSED[fault]
    change_attention(monkeypatch, **changes)
    with pytest.raises(ValueError, match=sentence):
        COMPARISONS[name](converted)


def change_blocks(monkeypatch, change):
    whole = attention.paged
    monkeypatch.setattr(attention, "paged", lambda a, keys: whole(replace(a, block_table=change(a.block_table)), keys))


def test_negative_blocks_are_the_first(converted, monkeypatch):
    change_blocks(monkeypatch, lambda table: table.clamp(min=0))
    with caught_by_numbers():
        COMPARISONS["pages"](converted)


def test_negative_blocks_are_handed_on(converted, monkeypatch):
    whole = attention.in_parts

    def as_given(table, count):
        return whole(torch.where(table == BLOCKS - 2, -2, table), count)

    monkeypatch.setattr(attention, "in_parts", as_given)
    with pytest.raises(ValueError, match=r"block_table has \[-2\] for sequence 1; blocks are 0 to 3"):
        COMPARISONS["pages"](converted)


# --- the graph around it ------------------------------------------------------------------------------------------


def test_sizes_are_read_from_caches_that_are_written(converted, monkeypatch):
    """Each then keeps the copy that it is written through: user_calls counts them."""
    monkeypatch.setattr(numbers_of_sizes, "read", lambda graph: None)
    with torch.no_grad(), pytest.raises(AssertionError, match=r"prologs and copies: \[1, 2\]"):
        user_calls.check_one_graph_for_pages_of_several_sizes(converted)
