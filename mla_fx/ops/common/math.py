"""RMSNorm and rotary embedding as the operators define them."""

import torch
from torch import Tensor

from .check import check_choice, check_shape
from .sizes import statically_known_true

ROPE_LAYOUTS = ("interleave_half", "half_half", "interleave_interleave")


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums: float64 for float64, float32 for everything narrower."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def to_accumulation_dtype(x: Tensor) -> Tensor:
    return x.to(accumulation_dtype(x.dtype))


def wide_product(left: Tensor, right: Tensor) -> Tensor:
    """Return `left @ right`, in float32 for float16, because a product may leave float16's range."""
    if torch.float16 not in (left.dtype, right.dtype):
        return left @ right
    return to_accumulation_dtype(left) @ to_accumulation_dtype(right)


def normalized(x: Tensor, epsilon: float) -> Tensor:
    """Return `x / sqrt(mean(x^2) + epsilon)` over the last axis, unrounded, in the accumulation dtype."""
    x = to_accumulation_dtype(x)
    mean_square = x.square().sum(-1, keepdim=True) * (1 / x.shape[-1])
    return x / (mean_square + epsilon).sqrt()


def wide_rms_norm(x: Tensor, gamma: Tensor, epsilon: float, gamma_after_cast: bool = False) -> Tensor:
    """Return the RMSNorm over the last axis in the accumulation dtype: unrounded, or with gamma_after_cast as
    `rms_norm` rounds it."""
    if gamma_after_cast:
        return to_accumulation_dtype(rms_norm(x, gamma, epsilon, True))
    return normalized(x, epsilon) * gamma


def rms_norm(x: Tensor, gamma: Tensor, epsilon: float, gamma_after_cast: bool) -> Tensor:
    """Return the RMSNorm over the last axis, rounded to the dtype of `x`. gamma is multiplied before that rounding, or
    after it with `gamma_after_cast`."""
    if gamma_after_cast:
        return (normalized(x, epsilon).to(x.dtype) * gamma).to(x.dtype)
    return wide_rms_norm(x, gamma, epsilon).to(x.dtype)


def rescaled(x: Tensor, factor: float) -> Tensor:
    """Return `x * factor`; a factor closer to 1 than float32 resolves counts as 1, as in the kernels."""
    return x if abs(factor - 1) < torch.finfo(torch.float32).eps else x * factor


def wide_rope(x: Tensor, cos: Tensor, sin: Tensor, layout: str = "interleave_half") -> Tensor:
    """Rotate the pairs of the last axis of `x`, unrounded, in the accumulation dtype.

    With h = Dr / 2 and pairs (x1, x2): `a[i] = x1[i] cos[i] - x2[i] sin[i]`, `b[i] = x2[i] cos[h+i] + x1[i] sin[h+i]`.
    `layout` is (layout read)_(layout written): the elements of interleaved pairs are adjacent, those of halves h
    apart.
    """
    x, cos, sin = to_accumulation_dtype(x), to_accumulation_dtype(cos), to_accumulation_dtype(sin)
    read, written = layout.split("_")
    half = x.shape[-1] // 2
    first, second = (x[..., 0::2], x[..., 1::2]) if read == "interleave" else (x[..., :half], x[..., half:])
    pairs = (
        first * cos[..., :half] - second * sin[..., :half],
        second * cos[..., half:] + first * sin[..., half:],
    )
    return torch.cat(pairs, -1) if written == "half" else torch.stack(pairs, -1).flatten(-2)


def rope(x: Tensor, cos: Tensor | None, sin: Tensor | None, layout: str) -> Tensor:
    """`wide_rope` rounded to the dtype of `x`; without tables, `x` unchanged."""
    return x if cos is None or sin is None else wide_rope(x, cos, sin, layout).to(x.dtype)


def check_rope(width: int, layout: str, letters: str, sizes: tuple[int, ...], **tables: Tensor | None) -> None:
    """Check that both tables are given or neither; each has the axes `letters` of `sizes`, where a batch axis may be 1.

    Without tables there may be no rotary part."""
    check_choice("rope_layout", layout, ROPE_LAYOUTS)
    given = [name for name, table in tables.items() if table is not None]
    least, when = (1, "with") if given else (0, "without")
    if statically_known_true(width < least):
        columns = f"The columns after the first Hckv are the rope part Dr, {width} here"
        raise ValueError(f"{columns}; Dr must be {least} or more {when} {' and '.join(tables)}.")
    if len(given) == 1:
        raise ValueError(f"Only {given[0]} is given; {' and '.join(tables)} must both be tensors or both be None.")
    if given and statically_known_true(width % 2 != 0):
        raise ValueError(f"The rope width Dr is {width}; it must be even.")
    for name, table in tables.items():
        if table is not None:
            check_shape(name, table, letters, sizes, broadcast=len(sizes) > 2)


def nan_where_blind(value: Tensor, lse: Tensor) -> Tensor:
    """[...] or [..., C], and the logarithms [...] of sums: NaN for rows that see no key."""
    blind = lse == -torch.inf
    return torch.where(blind if value.dim() == lse.dim() else blind.unsqueeze(-1), torch.nan, value)
