"""Parts of a call of mla_attention: some of its sequences, or of its heads. Masks have four dimensions here."""

from dataclasses import replace

from torch import Tensor

from mla_fx.ops.emitted.mla_attention import Arguments


def of_sequences(a: Arguments, some: slice) -> Arguments:
    return replace(
        a,
        q_nope=a.q_nope[some],
        q_rope=None if a.q_rope is None else a.q_rope[some],
        kv_cache=a.kv_cache[some],
        kr_cache=None if a.kr_cache is None else a.kr_cache[some],
        mask=_of(a.mask, 0, some),
        context_lens=_of(a.context_lens, 0, some),
    )


def of_heads(a: Arguments, some: slice) -> Arguments:
    return replace(
        a,
        q_nope=a.q_nope[:, :, some],
        q_rope=None if a.q_rope is None else a.q_rope[:, :, some],
        weight_uk=a.weight_uk[some],
        weight_uv=a.weight_uv[some],
        mask=_of(a.mask, 1, some),
        sinks=None if a.sinks is None else a.sinks[some],
    )


def _of(value: Tensor | None, dim: int, some: slice) -> Tensor | None:
    """A part of what may be the same along a dimension."""
    if value is None or value.shape[dim] == 1:
        return value
    return value.narrow(dim, some.start, some.stop - some.start)
