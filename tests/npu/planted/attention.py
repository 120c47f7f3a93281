"""Calls of attention, whose results are those of the operator in float64, and their faults. Scores are so large that a
hundredth of them shows."""

import functools
from dataclasses import replace

import torch
from lib.operators.harness import double
from mla_fx.lowering.ascend.operators import attention

from mla_fx.ops import catalogue
from mla_fx.ops.common.sample import Sampler
from npu.calls import BF16, BLOCKS, DR, HCKV, PAGE, D
from npu.lowered import Call
from npu.planted import moved, options, replaced

KERNEL = "FusedInferAttentionScore"
N, BATCH = 4, 2
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
    # scores have a standard deviation of six
    return [*queries, *caches, None, torch.tensor(lengths), None, table], {"scale": 0.25}


@functools.cache
def prompt_call(slots=TOKENS, lengths=None):
    """Attention of heads: two prompts and nothing before them, or caches with more slots than are seen. Scores are of
    usual size."""
    draw = Sampler(BF16, seed=12)
    up = draw.weight(N, 2 * D, HCKV, fan_in=HCKV)
    queries = [draw.normal(BATCH, TOKENS, N, width) for width in (D, DR)]
    latents, keys = (draw.normal(BATCH, slots, width) for width in (HCKV, DR))
    options = {"weight_uk": up[:, :D], "weight_uv": up[:, D:], "scale": 0.1, "context_lens": lengths}
    return [*queries, latents, keys], options | {"is_causal": lengths is None}


CALLS = {
    "pages": lambda: latent_call(1, True),
    "pages, drafts": lambda: latent_call(3, True),
    "contiguous": lambda: latent_call(1, False),
    "prompt": prompt_call,
    "prompt in a cache": lambda: prompt_call(2 * TOKENS, torch.tensor([TOKENS + 3, TOKENS])),
}


@functools.cache
def wanted(name):
    args, options = CALLS[name]()
    options = dict(zip(options, double(options.values()), strict=True))
    return catalogue()["attention"].body(*double(args), **options)[0]


def run(name, how):
    """Weights of attention are rounded to bfloat16 as well as the result, each by up to 2^-9 of itself; of prompts,
    keys and values, too."""
    args, options = CALLS[name]()
    found, _ = how(Call("attention", args, options))
    close = 2**-7 if "prompt" in name else 2**-8
    torch.testing.assert_close(found.double(), wanted(name), rtol=close, atol=2**-8 * float(wanted(name).abs().max()))


# --- what is planted ----------------------------------------------------------------------------------------------


def lengths_of(ends):
    """The numbers that were summed."""
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]


def blocks(change):
    """The table as the operator has it is another one."""
    return replaced(
        attention,
        "paged",
        lambda whole: lambda a, keys: whole(replace(a, block_table=change(a.block_table)), keys),
    )


UNMASKED = {"sparse_mode": lambda mode: 0, "atten_mask": lambda mask: None}
FAULTS = {
    "the scale is a hundredth too large": ("pages", options(softmax_scale=lambda scale: scale * 1.01)),
    "the scale of a prompt is lost": ("prompt", options(softmax_scale=lambda scale: 1.0)),
    "a length is one short where the cache is full": (
        "contiguous",
        options(actual_seq_kvlen=lambda lengths: lengths.clamp(max=FEW - 1)),
    ),
    "a length is one short where the pages are full": (
        "pages",
        options(actual_seq_kvlen=lambda lengths: lengths.clamp(max=2 * PAGE - 1)),
    ),
    "three keys too many are seen": (
        "contiguous",
        options(actual_seq_kvlen=lambda lengths: (lengths + 3).clamp(max=FEW)),
    ),
    "every length is that of the cache": ("contiguous", options(actual_seq_kvlen=lambda n: torch.full_like(n, FEW))),
    "lengths of the other sequence": ("pages, drafts", options(actual_seq_kvlen=lambda lengths: lengths.flip(0))),
    "columns of the table in reverse": ("pages", options(block_table=lambda table: table.flip(1))),
    "rows of the table in reverse": ("contiguous", options(block_table=lambda table: table.flip(0))),
    "negative blocks are the first": ("pages", blocks(lambda table: table.clamp(min=0))),
    "rotary parts of another head": ("pages", options(query_rope=lambda rope: moved(rope, 1, 2))),
    "rotary parts of another token": ("pages, drafts", options(query_rope=lambda rope: moved(rope, 1, 1))),
    "rotary parts of another head in a prompt": ("prompt", options(query_rope=lambda rope: moved(rope, 1, 1))),
    "rotary keys of the next slot": ("pages", options(key_rope=lambda keys: moved(keys, 1, 1))),
    "rotary keys of the other prompt": ("prompt", options(key_rope=lambda keys: keys.flip(0))),
    "a prompt sees its own future": ("prompt", options(**UNMASKED)),
    "two prompts as one": (
        "prompt",
        options(**dict.fromkeys(("actual_seq_qlen", "actual_seq_kvlen"), lambda ends: [0, ends[-1]])),
    ),
    "prompts see a key too many": (
        "prompt in a cache",
        options(actual_seq_kvlen=lambda ends: ends + (torch.arange(4) + 1) % 2),
    ),
    # what the kernel refuses
    "keys that no prompt sees are left out": (
        "prompt in a cache",
        options(actual_seq_qlen=lambda ends: ends[1::2], actual_seq_kvlen=lambda ends: ends[::2]),
        r"actual_seq_lengths_kv is .* the last of them 80",
    ),
    "lengths of prompts that are no sums": (
        "prompt",
        options(actual_seq_qlen=lengths_of),
        r"actual_seq_lengths is \[20, 20\]; of TND they are sums",
    ),
    "lengths of keys that are no sums": (
        "prompt",
        options(actual_seq_kvlen=lengths_of),
        r"actual_seq_lengths_kv is \[20, 20\]; of TND they are sums",
    ),
    "drafts without a causal mask": (
        "pages, drafts",
        options(**UNMASKED),
        "sparse_mode is 0 for 3 queries; it must be 3",
    ),
    "a mask that hides what is to be seen": (
        "pages, drafts",
        options(atten_mask=lambda mask: ~mask),
        "with sparse_mode 3 it is 2048 x 2048, ones above the diagonal",
    ),
    "pages of another size": (
        "pages",
        options(block_size=lambda size: 64),
        "block_size is 64, the cache .* of 128",
    ),
    "queries without rotary parts": (
        "pages",
        options(query_rope=lambda rope: None),
        "given together or not at all",
    ),
    "a key too many in a full cache": (
        "contiguous",
        options(actual_seq_kvlen=lambda lengths: lengths + 1),
        "sequence 1 has 17 keys, and block_table 1 blocks",
    ),
    "negative blocks are handed on": (
        "pages",
        replaced(
            attention,
            "in_parts",
            lambda whole: lambda table, count: whole(torch.where(table == BLOCKS - 2, -2, table), count),
        ),
        r"block_table has \[-2\] for sequence 1; blocks are 0 to 3",
    ),
}
