"""packed_mla_attention: attention of packed prompts, in which each sequence attends to itself alone."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch import Tensor

from mla_fx.ops.common.check import Sizes, check_letters, check_tensors, known_to_differ
from mla_fx.ops.common.define import Sample, define
from mla_fx.ops.common.sample import Sampler
from mla_fx.ops.common.sizes import statically_known_true

from . import mla_attention
from .attention import check_rotary


@dataclass(frozen=True)
class Arguments:
    q_nope: Tensor
    q_rope: Tensor | None
    kv_cache: Tensor
    kr_cache: Tensor | None
    weight_uk: Tensor
    weight_uv: Tensor
    lens: list[int]
    _: KW_ONLY
    scale: float
    is_causal: bool = False


def body(a: Arguments) -> Tensor:
    """The attention of `mla_attention` for several sequences, whose tokens follow one another::

        out = cat(mla_attention(q_nope[i], q_rope[i], kv_cache[i], kr_cache[i]) for the rows i of each sequence)

    q_nope is [T, N, D], q_rope [T, N, Dr], kv_cache [T, Hckv], kr_cache [T, Dr], weight_uk [N, D, Hckv], weight_uv
    [N, Dv, Hckv], all of one dtype: bfloat16, float16, float32 or float64; any of them may have any strides. q_rope and
    kr_cache are None if there is no rotary part. scale and is_causal are those of `mla_attention`.

    lens are the numbers of tokens of the sequences, one or more; they sum to T. A sequence may be empty.

    Returns [T, N, Dv]. Raises ValueError for arguments that do not fit. Inference only.
    """
    return one_by_one(a, mla_attention.expanded)


def kernel(a: Arguments) -> Tensor:
    """The same in memory that does not grow with the scores."""
    return one_by_one(a, mla_attention.kernel)


def one_by_one(a: Arguments, attend: Callable[[mla_attention.Arguments], Tensor]) -> Tensor:
    """The same by attention of one sequence."""
    return torch.cat([attend(sequence).squeeze(0) for sequence in sequences(a)])


def sequences(a: Arguments) -> Iterator[mla_attention.Arguments]:
    """The call of each sequence."""

    def own(rows: Tensor | None) -> Sequence[Any]:
        return [None] * len(a.lens) if rows is None else torch.split(rows.unsqueeze(0), a.lens, 1)

    for q_nope, q_rope, *caches in zip(*map(own, (a.q_nope, a.q_rope, a.kv_cache, a.kr_cache)), strict=True):
        operands = q_nope, q_rope, *caches, a.weight_uk, a.weight_uv, None
        yield mla_attention.Arguments(*operands, scale=a.scale, is_causal=a.is_causal)


def check(a: Arguments) -> None:
    check_tensors(vars(a))
    sizes: Sizes = {}
    check_letters(a, sizes, q_nope="T, N, D")
    check_rotary("q_rope", a, sizes, "T, N, Dr")
    check_letters(a, sizes, kv_cache="T, Hckv", kr_cache="T, Dr", weight_uk="N, D, Hckv", weight_uv="N, Dv, Hckv")
    if not a.lens or any(statically_known_true(length < 0) for length in a.lens):
        raise ValueError(f"lens is {a.lens}; it must have one or more numbers, each 0 or more.")
    if known_to_differ(sum(a.lens), sizes["T"]):
        raise ValueError(f"lens is {a.lens}; its sum must be T = {sizes['T']}.")


def fake(a: Arguments) -> Tensor:
    return a.q_nope.new_empty(*a.q_nope.shape[:2], a.weight_uv.shape[1])


def samples(dtype: torch.dtype) -> Iterator[Sample]:
    """Sequences of different lengths, causal or not, without a rotary part, empty ones, one alone."""
    yield Sample("causal", sample(dtype, 0, 3, 1, 5), {"scale": 0.3, "is_causal": True})
    yield Sample("all keys", sample(dtype, 1, 2, 4), {"scale": 0.3})
    q_nope, _, kv_cache, _, *rest = sample(dtype, 2, 4, 2)
    yield Sample("no rotary part", (q_nope, None, kv_cache, None, *rest), {"scale": 0.5, "is_causal": True})
    yield Sample("empty sequences", sample(dtype, 3, 0, 3, 0, 2, 0), {"scale": 0.3, "is_causal": True})
    yield Sample("one sequence", sample(dtype, 4, 5), {"scale": 0.3, "is_causal": True})


def sample(dtype: torch.dtype, seed: int, *lens: int) -> tuple[Tensor | list[int], ...]:
    heads, nope, rank, width, value = 3, 8, 16, 4, 6
    draw, tokens = Sampler(dtype, seed), sum(lens)
    up = draw.weight(heads, nope + value, rank, fan_in=rank)
    queries = draw.normal(tokens, heads, nope), draw.normal(tokens, heads, width)
    return *queries, draw.normal(tokens, rank), draw.normal(tokens, width), up[:, :nope], up[:, nope:], [*lens]


operator = define(
    "packed_mla_attention", Arguments, body, returns=("out",), check=check, fake=fake, samples=samples, kernel=kernel
)
