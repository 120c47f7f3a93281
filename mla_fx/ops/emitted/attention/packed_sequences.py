"""Packed sequences: their tokens follow one another, and each sequence attends to itself alone."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mla_fx.ops.common.check import Sizes, known_to_differ
from mla_fx.ops.common.sizes import statically_known_true

from .arguments import HEADS, Arguments, Attend, Results, given_beside
from .latents import concatenated

TAKEN = (*HEADS, "lens", "is_causal", "return_lse")


def one_by_one(a: Arguments, attend: Attend) -> Results:
    """A call with lens by attention of one sequence."""
    return concatenated(map(attend, sequences(a)))


def sequences(a: Arguments) -> Iterator[Arguments]:
    """The call of each sequence."""
    assert a.lens is not None, "sequences are packed"
    lens = a.lens

    def own(rows: Tensor | None) -> Sequence[Any]:
        return [None] * len(lens) if rows is None else torch.split(rows, lens, 1)

    rows = map(own, (a.query, a.query_rope, a.kv_cache, a.kr_cache))
    for query, query_rope, kv_cache, kr_cache in zip(*rows, strict=True):
        yield replace(a, query=query, query_rope=query_rope, kv_cache=kv_cache, kr_cache=kr_cache, lens=None)


def check_lens(a: Arguments, sizes: Sizes) -> None:
    """Check that lens are those of one row of tokens, and that nothing excludes them."""
    if a.lens is None:
        return
    for name in given_beside(a, *TAKEN):
        raise ValueError(f"{name} is given and lens are given; packed sequences have causality alone.")
    for axis, wanted, why in (("B", 1, ""), ("T", sizes["S"], ", the S of query")):
        if known_to_differ(sizes[axis], wanted):
            raise ValueError(f"{axis} is {sizes[axis]} and lens are given; it must be {wanted}{why}.")
    if not a.lens or any(statically_known_true(length < 0) for length in a.lens):
        raise ValueError(f"lens is {a.lens}; it must have one or more numbers, each 0 or more.")
    if known_to_differ(sum(a.lens), sizes["S"]):
        raise ValueError(f"lens is {a.lens}; its sum must be S = {sizes['S']}.")
