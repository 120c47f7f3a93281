"""Parts of a call: some of its sequences, heads, or query tokens; and packed sequences, which follow one another in a
row, where each attends to itself alone."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mla_fx.ops.common.check import Sizes, known_to_differ
from mla_fx.ops.common.sizes import statically_known_true

from .arguments import HEADS, Arguments, Attend, Results, given_beside
from .tiles import mask_of_rows

ROWS = "query", "query_rope", "kv_cache", "kr_cache"  # of tokens
TAKEN_WITH_LENS = (*HEADS, "lens", "is_causal", "return_lse")


def of_sequences(a: Arguments, some: slice) -> Arguments:
    rows = _cut(a, lambda value: value[some], *ROWS)
    return replace(a, **rows, mask=_of_mask(a.mask, 0, some), context_lens=_of(a.context_lens, 0, some))


def of_packed(a: Arguments, some: slice, lens: list[int]) -> Arguments:
    """Some neighbours of packed sequences, which have these tokens."""
    return replace(a, **_cut(a, lambda value: value[:, some], *ROWS), lens=lens)


def of_heads(a: Arguments, some: slice) -> Arguments:
    queries = _cut(a, lambda value: value[:, :, some], "query", "query_rope")
    weights = _cut(a, lambda value: value[some], *HEADS, "sinks")
    return replace(a, **queries, **weights, mask=_of_mask(a.mask, 1, some))


def of_tokens(a: Arguments, first: int, last: int) -> Arguments:
    """Tokens before the last one see fewer keys, and so their lengths are smaller."""
    lens = None if a.context_lens is None else a.context_lens - (a.query.shape[1] - last)
    return replace(
        a,
        **_cut(a, lambda value: value[:, first:last], "query", "query_rope", "indices"),
        mask=mask_of_rows(a.mask, first, last),
        context_lens=a.query.new_full((1,), last, dtype=torch.int64) if a.is_causal else lens,
        is_causal=False,
    )


def each_token(a: Arguments) -> dict[str, Any]:
    """The queries, if each token is a sequence of its own."""
    return _cut(a, lambda value: value.flatten(0, 1).unsqueeze(1), "query", "query_rope")


def _cut(a: Arguments, cut: Callable[[Tensor], Any], *names: str) -> dict[str, Any]:
    """The named arguments that are given, each cut."""
    return {name: cut(value) for name in names if (value := getattr(a, name)) is not None}


def _of_mask(mask: Tensor | None, dim: int, some: slice) -> Tensor | None:
    """The part along a dimension of [B, N, S, T], which a mask may lack."""
    return mask if mask is None or mask.dim() < 4 - dim else _of(mask, mask.dim() - 4 + dim, some)


def _of(value: Tensor | None, dim: int, some: slice) -> Tensor | None:
    """A part of what may be the same along a dimension."""
    if value is None or value.shape[dim] == 1:
        return value
    return value.narrow(dim, some.start, some.stop - some.start)


# --- packed sequences ------------------------------------------------------------------------------------------------


def concatenated(results: Iterable[Results]) -> Results:
    """The results of tokens that follow one another in a row."""
    out, lse = (torch.cat(parts, 1 if parts[0].dim() > 1 else 0) for parts in zip(*results, strict=True))
    return out, lse


def one_by_one(a: Arguments, attend: Attend) -> Results:
    """A call with lens by attention of one sequence."""
    return concatenated(map(attend, sequences(a)))


def sequences(a: Arguments) -> Iterator[Arguments]:
    """The call of each sequence."""
    assert a.lens is not None, "sequences are packed"
    lens = a.lens
    rows = _cut(a, lambda value: torch.split(value, lens, 1), *ROWS)
    for number in range(len(lens)):
        yield replace(a, **{name: parts[number] for name, parts in rows.items()}, lens=None)


def check_lens(a: Arguments, sizes: Sizes) -> None:
    """Check that lens are those of one row of tokens, and that nothing excludes them."""
    if a.lens is None:
        return
    for name in given_beside(a, *TAKEN_WITH_LENS):
        raise ValueError(f"{name} is given and lens are given; packed sequences have causality alone.")
    for axis, wanted, why in (("B", 1, ""), ("T", sizes["S"], ", the S of query")):
        if known_to_differ(sizes[axis], wanted):
            raise ValueError(f"{axis} is {sizes[axis]} and lens are given; it must be {wanted}{why}.")
    if not a.lens or any(statically_known_true(length < 0) for length in a.lens):
        raise ValueError(f"lens is {a.lens}; it must have one or more numbers, each 0 or more.")
    if known_to_differ(sum(a.lens), sizes["S"]):
        raise ValueError(f"lens is {a.lens}; its sum must be S = {sizes['S']}.")
