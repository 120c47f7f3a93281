"""What attention refuses of heads, of chosen rows, and of packed sequences."""

import pytest
import torch
from lib import attention_forms as forms
from lib.operators.harness import change, drop, option

from mla_fx.ops.emitted.attention import samples
from mla_fx.ops.emitted.attention.chosen_rows import chosen

HEADS = {
    "query": (lambda q: q[0], r"query has shape \[3, 3, 8\]; it must be \[B, S, N, D\]"),
    "query_rope": (lambda q: q[1:], r"query_rope has shape \[1, 3, 3, 4\]"),
    "kv_cache": (lambda c: c[:1], r"kv_cache has shape \[1, 5, 16\]"),
    "kr_cache": (torch.Tensor.half, "kr_cache has dtype torch.float16"),
    "weight_uk": (lambda w: w[:, 1:], r"weight_uk has shape \[3, 7, 16\]"),
    "weight_uv": (lambda w: w[1:], r"weight_uv has shape \[2, 6, 16\]"),
    "weight_uk, None": (drop, "weight_uv is given and weight_uk is None; heads are expanded by both, or by none"),
    "query_rope, None": (drop, "kr_cache is given and query_rope is None"),
    "kr_cache, None": (drop, "query_rope is given and kr_cache is None"),
    "sinks": (lambda _: torch.zeros(1, 3), r"sinks has shape \[1, 3\]; it must be \[N\]"),
    "max_absorbed_tokens": (lambda _: -1, "max_absorbed_tokens is -1; it must be 0 or more"),
    "lens": (lambda _: [3], "B is 2 and lens are given; it must be 1"),
    "indices": (lambda _: torch.zeros(1, 3, 1, 4).long(), r"indices has shape \[1, 3, 1, 4\]"),
}


@pytest.mark.parametrize("case", HEADS)
def test_refusal_of_heads(case):
    name, (spoil, message) = case.removesuffix(", None"), HEADS[case]
    given = forms.heads(torch.float32, 0)
    with pytest.raises(ValueError, match=message):
        torch.ops.mla_fx.attention(**{**given, name: spoil(given.get(name)), "scale": 0.3})


def test_chosen_rows_are_not_read_out_of_fractals():
    paged = samples.in_fractals(*samples.paged_sample(torch.float32, 0, 3, torch.tensor([70, 3]), 16))
    args, options = chosen(*paged)
    with pytest.raises(ValueError, match=r"kv_cache has shape .*: chosen rows are not read out of FRACTAL_NZ"):
        torch.ops.mla_fx.attention(*args, **options)


PACKED = [
    (change(1, drop), "kr_cache is given and query_rope is None"),
    (change(2, lambda c: c[:, 1:]), r"kr_cache has shape \[1, 9, 4\]"),
    (lambda args, _: args.__setitem__(slice(2, 4), [args[2][:, 1:], args[3][:, 1:]]), "T is 8 and lens are given"),
    (lambda _, options: options.update(weight_uk=options["weight_uk"][1:]), r"weight_uk has shape \[2, 8, 16\]"),
    (lambda _, options: options.update(weight_uk=None, weight_uv=None), "lens are given and weight_uk is None"),
    (option(lens=[]), r"lens is \[\]; it must have one or more numbers, each 0 or more"),
    (option(lens=[10, -1]), r"lens is \[10, -1\]; it must have one or more numbers, each 0 or more"),
    (option(lens=[3, 1, 4]), r"lens is \[3, 1, 4\]; its sum must be S = 9"),
    (option(sinks=torch.zeros(3)), "sinks is given and lens are given; packed sequences have causality alone"),
    (option(context_lens=torch.tensor([9]), is_causal=False), "context_lens is given and lens are given"),
]


@pytest.mark.parametrize(("spoil", "message"), PACKED)
def test_refusal_of_packed_sequences(spoil, message):
    args, options = samples.packed(torch.float32, 0, {"scale": 0.3, "is_causal": True}, 3, 1, 5)
    args = list(args)
    spoil(args, options)
    with pytest.raises(ValueError, match=message):
        torch.ops.mla_fx.attention(*args, **options)
