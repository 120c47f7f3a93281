"""Attention over paged keys and values per head that are stored as int8 codes: spellings, precision and near twins."""

from __future__ import annotations

import copy

import pytest
import torch
from coded_heads import Coded, ZeroPoints, coded, given, in_codes
from layers import QUIET
from test_paged_heads import (
    FLOAT32,
    HEADS,
    BlocksEmbedded,
    BlocksSelected,
    Eager,
    Expanded,
    Grouped,
    HeadsFirst,
    Padded,
    PagesOfHeads,
    Scaled,
    SlotOfEachToken,
    Slots,
    Turned,
    Upcast,
    Window,
    arguments,
    check,
    file_of,
    heads_first,
    reasons,
)
from test_paged_heads import Sizes as PlainSizes
from torch import nn

import mla_fx

pytestmark = [pytest.mark.filterwarnings(line) for line in QUIET]
ONE = {"paged_attention": 1}


def Sizes(**others):
    """Keys and values of different widths."""
    return PlainSizes(**{"columns": 6} | others)


def lowered(module, folder, **options):
    """The report, and the text of the lowered graph."""
    report = check(module, **{"given": given(module), "dump": str(folder)} | options)
    assert report.fused == ONE and report.checked and not report.refuted, str(report)
    (dumped,) = folder.iterdir()
    return report, file_of(dumped, "lower")


def call_of(text):
    (line,) = [line for line in text.splitlines() if "= mla_fx.paged_attention." in line]
    return line


# --- spellings -------------------------------------------------------------------------------------------------------


class InFloat32(Coded):
    """Dequantised in float32 at least and rounded once."""

    def numbers(self, codes, scale, zero):
        return (codes.float() * scale.to(torch.promote_types(scale.dtype, torch.float32))).to(scale.dtype)


class Uncast(Coded):
    def numbers(self, codes, scale, zero):
        return scale * codes


class InOneDimension(Coded):
    def numbers(self, codes, scale, zero):
        return (codes.flatten(2).to(scale.dtype) * scale.flatten()).view(codes.shape)


class OfHeads(Coded):
    def numbers(self, codes, scale, zero):
        return codes.to(scale.dtype) * scale[:, :1]


class OfColumns(Coded):
    def numbers(self, codes, scale, zero):
        return codes.to(scale.dtype) * scale[0]


class OfGroups(Coded):
    """Of two columns of a head."""

    def numbers(self, codes, scale, zero):
        return (codes.unflatten(-1, (-1, 2)).to(scale.dtype) * scale[:, ::2].unsqueeze(-1)).flatten(-2)


class OneNumber(Coded):
    def numbers(self, codes, scale, zero):
        return codes.to(scale.dtype) * scale[0, 0]


class Reciprocal(Coded):
    def numbers(self, codes, scale, zero):
        return codes.to(scale.dtype) * (1 / (3 * scale))


class Constant(Coded):
    """A number of the program is a factor of the scores and of the result."""

    def numbers(self, codes, scale, zero):
        return codes.to(scale.dtype) * 0.03


class AfterRepeat(Coded):
    """Each query head reads a copy of codes and scales."""

    def attend(self, query, key, value, positions):
        return Eager.attend(self, query, key, value, positions)

    fill, weights = Eager.fill, Eager.weights

    def keys(self, key):
        return key

    values = keys

    def repeated(self, codes):
        scale = self.key_scale if codes.shape[-1] == self.width else self.value_scale
        codes, scales = (rows.repeat_interleave(HEADS // self.kv_heads, -2) for rows in (codes, scale))
        return codes.to(scale.dtype) * scales


class KeysAlone(Coded):
    """Values are stored as they are."""

    def codes(self, rows, scale):
        return super().codes(rows, scale) if scale is self.key_scale else rows

    def values(self, value):
        return value


class AddedZeros(ZeroPoints):
    def numbers(self, codes, scale, zero):
        return scale * (-zero + codes.to(scale.dtype))


class ZerosOfKeys(ZeroPoints):
    def values(self, value):
        return value.to(self.value_scale.dtype) * self.value_scale


class ZerosAlone(ZeroPoints):
    def numbers(self, codes, scale, zero):
        return codes.to(scale.dtype) - zero


class ScaledQuery(Coded):
    """The scale of keys multiplies the query, that of values the result: keys and values are the codes."""

    def attend(self, query, key, value, positions):
        group = HEADS // self.kv_heads
        scales = (scale.repeat_interleave(group, 0) for scale in (self.key_scale, self.value_scale))
        of_keys, of_values = scales
        return super().attend(query * of_keys, key, value, positions) * of_values

    def numbers(self, codes, scale, zero):
        return codes.to(scale.dtype)


KINDS = [Coded, InFloat32, Uncast, InOneDimension, OfHeads, OfColumns, OfGroups, OneNumber, Reciprocal, Constant]
KINDS += [AfterRepeat, ZeroPoints, AddedZeros, ZerosOfKeys, ZerosAlone, ScaledQuery]
LAYERS = [Eager, Expanded, Turned, Grouped, BlocksSelected, BlocksEmbedded, Slots, SlotOfEachToken, HeadsFirst, Padded]
LAYERS += [Scaled, Window]
PLAIN = (Constant, ScaledQuery)


@pytest.mark.parametrize("tokens", [1, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_spellings(kind, tokens, tmp_path):
    """The operator reads the codes, and nothing else does."""
    _, text = lowered(kind(Sizes(tokens=tokens)), tmp_path)
    assert ", None, ".join(("", "")) in call_of(text) or kind not in PLAIN
    assert "aten.index.Tensor" not in text.split("paged_attention")[0].replace("index_put", ""), text


@pytest.mark.slow
@pytest.mark.parametrize("kind", LAYERS, ids=lambda kind: kind.__name__)
def test_layers(kind, tmp_path):
    lowered(coded(kind)(PlainSizes(tokens=3)), tmp_path)


def test_values_that_are_no_codes(tmp_path):
    module = KeysAlone(Sizes())
    plain, codes = arguments(module.sizes), given(module)
    lowered(module, tmp_path, given=(*codes[:4], plain[4]))
