"""Weights packed several codes to a number, or looked up in a table, as libraries and checkpoints store them.

A spelling is `unpacked(stored, dtype)`: the weight [Out, K] in a dtype. Nothing but the graph knows how it is packed.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from lib.quantised import GROUP, Stored, by_groups

SHIFTS = torch.arange(0, 32, 4, dtype=torch.int32)
AWQ_ORDER, AWQ_BACK = [0, 2, 4, 6, 1, 3, 5, 7], [0, 4, 1, 5, 2, 6, 3, 7]
FP4 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
NF4 = [-1.0, -0.696, -0.525, -0.395, -0.284, -0.185, -0.091, 0.0, 0.08, 0.161, 0.246, 0.338, 0.441, 0.563, 0.723, 1.0]


# --- stored ----------------------------------------------------------------------------------------------------------


def _words(codes: Tensor) -> Tensor:
    """Eight codes 0..15 of neighbouring columns in each int32; zeros fill the last one."""
    padded = pad(codes.to(torch.int32), (0, -codes.shape[-1] % 8))
    return (padded.unflatten(-1, (-1, 8)) << SHIFTS).sum(-1).to(torch.int32)


def _pairs(codes: Tensor) -> Tensor:
    """Two codes 0..15 of neighbouring columns in each byte."""
    return (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)


def in_words(weight: Tensor) -> Stored:
    stored = by_groups(weight)
    return Stored(_words(stored.codes + 8), stored.scales, stored.zeros.to(torch.int32) + 8)


def in_words_of_rows(weight: Tensor) -> Stored:
    """GPTQ: the transposed weight is packed along its rows, zero points along columns and less by one."""
    stored = by_groups(weight)
    zeros = (stored.zeros + 7).clamp(0, 15).t()
    return Stored(_words(stored.codes + 8).t().contiguous(), stored.scales.t().contiguous(), _words(zeros))


def in_words_of_columns(weight: Tensor) -> Stored:
    """AWQ: the transposed weight is packed along its columns, in an order of its own."""
    stored = by_groups(weight)

    def packed(codes: Tensor) -> Tensor:
        padded = pad(codes, (0, -codes.shape[-1] % 8)).unflatten(-1, (-1, 8))
        return _words(padded[..., AWQ_ORDER].flatten(-2))

    zeros = (stored.zeros + 8).clamp(0, 15)
    return Stored(packed((stored.codes + 8).t()), stored.scales.t().contiguous(), packed(zeros.t()))


def in_halves(weight: Tensor) -> Stored:
    """HQQ: codes of the second half of columns in the upper bits."""
    stored = by_groups(weight)
    first, second = (stored.codes + 8).to(torch.uint8).chunk(2, 1)
    return Stored(first | second << 4, stored.scales, stored.zeros + 8)


def of_table(weight: Tensor) -> Stored:
    """NF4: codes are places of a table, and each row has a scale."""
    scales, table = weight.abs().amax(1, keepdim=True), torch.tensor(NF4, dtype=weight.dtype)
    return Stored(_pairs(_nearest(weight / scales, table)), scales, table)


def of_powers(weight: Tensor) -> Stored:
    """MXFP4: each group has a power of two as its scale."""
    groups = weight.unflatten(1, (-1, GROUP))
    powers = (groups.abs().amax(-1, keepdim=True) / 6).log2().ceil()
    codes = _nearest(groups / torch.exp2(powers), torch.tensor(FP4))
    return Stored(_pairs(codes.flatten(1)), (powers.squeeze(-1) + 127).to(torch.uint8))


def of_float8_scales(weight: Tensor) -> Stored:
    """NVFP4: each group has a scale in float8, and the weight has one more."""
    groups = weight.unflatten(1, (-1, GROUP))
    scales = groups.abs().amax(-1, keepdim=True) / 6
    whole = scales.amax() / 448
    scales = (scales / whole).to(torch.float8_e4m3fn)
    codes = _nearest(groups / (scales.to(whole.dtype) * whole), torch.tensor(FP4))
    return Stored(_pairs(codes.flatten(1)), scales.squeeze(-1), whole)


def _nearest(values: Tensor, table: Tensor) -> Tensor:
    return (values.unsqueeze(-1) - table).abs().argmin(-1)


# --- unpacked --------------------------------------------------------------------------------------------------------


def by_shifts(w: Stored, dtype: torch.dtype) -> Tensor:
    codes = ((w.codes.unsqueeze(-1) >> SHIFTS) & 15).flatten(1)
    return _of_groups(codes[:, : w.scales.shape[1] * GROUP], w, dtype)


def by_writes(w: Stored, dtype: torch.dtype) -> Tensor:
    """compressed-tensors writes each code's columns."""
    codes = torch.zeros((len(w.codes), 8 * w.codes.shape[1]), dtype=torch.int32)
    for place in range(8):
        codes[:, place::8] = (w.codes >> (4 * place)) & 15
    return _of_groups(codes[:, : w.scales.shape[1] * GROUP], w, dtype)


def by_broadcast_shifts(w: Stored, dtype: torch.dtype) -> Tensor:
    """GPTQ: each row looks up its group."""
    groups, columns = w.scales.shape
    group = torch.arange(groups * GROUP) // GROUP
    zeros = torch.bitwise_right_shift(w.zeros.unsqueeze(2).expand(-1, -1, 8), SHIFTS).to(torch.int16)
    zeros = (torch.bitwise_and(zeros, 15) + 1).flatten(1)[:, :columns]
    codes = torch.bitwise_right_shift(w.codes.unsqueeze(1).expand(-1, 8, -1), SHIFTS.view(8, 1)).to(torch.int16)
    codes = torch.bitwise_and(codes, 15).flatten(0, 1)[: groups * GROUP]
    return (w.scales[group] * (codes - zeros[group])).to(dtype).t()


def in_another_order(w: Stored, dtype: torch.dtype) -> Tensor:
    """AWQ: columns are put back into their order."""

    def codes(words: Tensor) -> Tensor:
        unpacked = torch.bitwise_right_shift(words.unsqueeze(-1), SHIFTS).to(torch.int8).flatten(1)
        order = torch.arange(unpacked.shape[-1], dtype=torch.int32).view(-1, 8)[:, AWQ_BACK].flatten()
        return torch.bitwise_and(unpacked[:, order], 15)[:, : w.scales.shape[1]]

    scales, zeros = (part.repeat_interleave(GROUP, 0) for part in (w.scales, codes(w.zeros)))
    return ((codes(w.codes) - zeros) * scales).to(dtype).t()


def by_halves(w: Stored, dtype: torch.dtype) -> Tensor:
    return _of_groups(torch.cat((w.codes & 15, w.codes >> 4), 1), w, dtype)


def looked_up(w: Stored, dtype: torch.dtype) -> Tensor:
    return w.zeros.to(dtype)[_unpaired(w.codes).long()] * w.scales


def selected(w: Stored, dtype: torch.dtype) -> Tensor:
    codes = _unpaired(w.codes).to(torch.int32)
    return w.zeros.to(dtype).index_select(0, codes.flatten()).view(codes.shape) * w.scales


def with_exponents(w: Stored, dtype: torch.dtype) -> Tensor:
    """Dequantises MXFP4 like transformers: both codes of a byte are written where they belong."""
    table = torch.tensor(FP4, dtype=dtype)
    weight = torch.empty(len(w.codes), 2 * w.codes.shape[1], dtype=dtype)
    weight[:, 0::2], weight[:, 1::2] = table[(w.codes & 15).long()], table[(w.codes >> 4).long()]
    return torch.ldexp(weight.unflatten(1, (-1, GROUP)), (w.scales.to(torch.int32) - 127).unsqueeze(-1)).flatten(1)


def with_signs(w: Stored, dtype: torch.dtype) -> Tensor:
    """The upper bit of a code is its sign."""
    codes = _unpaired(w.codes)
    numbers = torch.tensor(FP4[:8], dtype=dtype)[(codes & 7).long()] * torch.where((codes & 8) != 0, -1.0, 1.0)
    return (numbers.unflatten(1, (-1, GROUP)) * (w.scales.to(dtype) * w.zeros).unsqueeze(-1)).flatten(1).to(dtype)


def _unpaired(pairs: Tensor) -> Tensor:
    return torch.stack((pairs & 15, pairs >> 4), -1).flatten(1)


def _of_groups(codes: Tensor, w: Stored, dtype: torch.dtype) -> Tensor:
    shifted = codes.unflatten(1, (-1, GROUP)).to(dtype) - w.zeros.unsqueeze(-1).to(dtype)
    return (shifted * w.scales.unsqueeze(-1)).flatten(1)


SPELLINGS = {
    by_shifts: in_words,
    by_writes: in_words,
    by_broadcast_shifts: in_words_of_rows,
    in_another_order: in_words_of_columns,
    by_halves: in_halves,
    looked_up: of_table,
    selected: of_table,
    with_exponents: of_powers,
    with_signs: of_float8_scales,
}


# --- unpacked otherwise: other weights, which stay what they are ------------------------------------------------------


def in_the_wrong_order(w: Stored, dtype: torch.dtype) -> Tensor:
    return torch.stack((w.zeros[(w.codes >> 4).long()], w.zeros[(w.codes & 15).long()]), -1).flatten(1) * w.scales


def with_sign_extension(w: Stored, dtype: torch.dtype) -> Tensor:
    codes = ((w.codes.unsqueeze(-1) << (28 - SHIFTS)) >> 28).flatten(1)
    return _of_groups(codes[:, : w.scales.shape[1] * GROUP], w, dtype)


def without_a_mask(w: Stored, dtype: torch.dtype) -> Tensor:
    """The codes above are in the number, too."""
    codes = (w.codes.unsqueeze(-1) >> SHIFTS).flatten(1) / 2**28
    return _of_groups(codes[:, : w.scales.shape[1] * GROUP], w, dtype)


def with_zero_points_of_the_next_group(w: Stored, dtype: torch.dtype) -> Tensor:
    return by_shifts(replace(w, zeros=w.zeros.roll(1, 1)), dtype)


def with_another_table(w: Stored, dtype: torch.dtype) -> Tensor:
    return looked_up(replace(w, zeros=w.zeros.flip(0)), dtype)


OTHERS = {
    in_the_wrong_order: of_table,
    with_sign_extension: in_words,
    without_a_mask: in_words,
    with_zero_points_of_the_next_group: in_words,
    with_another_table: of_table,
}


def multiplied(unpacked):
    """A spelling as `multiply(x, weight)`."""
    return lambda x, w: linear(x, unpacked(w, x.dtype))
