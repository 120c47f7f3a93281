"""Dequantised numbers, in every spelling, against what the program computes."""

import pytest
import torch
from lib.traced import Traced, agree, dense

from mla_fx.errors import NoMatch
from mla_fx.readings.codes.dequantised import dequantised
from mla_fx.readings.element import resolve
from mla_fx.readings.views import fresh_index

CODES = torch.randint(-128, 128, (3, 2, 4), dtype=torch.int8, generator=torch.Generator().manual_seed(0))

# codes [3, 2, 4], with a scale and an offset [2, 4]
SPELLINGS = {
    "scale": lambda codes, scale, offset: codes.float() * scale,
    "promoted": lambda codes, scale, offset: scale * codes,
    "no scale": lambda codes, scale, offset: codes.bfloat16().float(),
    "offset": lambda codes, scale, offset: (codes.float() + offset) * scale,
    "offset first": lambda codes, scale, offset: (-offset + codes.float()) * scale,
    "subtracted": lambda codes, scale, offset: scale * (codes - offset),
    "offset alone": lambda codes, scale, offset: codes - offset,
    "a scale that is computed": lambda codes, scale, offset: codes.float() * (1 / scale),
    "a scale with a factor": lambda codes, scale, offset: codes.float() * (scale * -0.5),
    "one head's scale": lambda codes, scale, offset: codes.float() * scale[:1],
    "turned": lambda codes, scale, offset: (codes.mT.float() * scale.mT).flatten(1),
    "rounded": lambda codes, scale, offset: (codes.float() * scale).bfloat16().float(),
}

ROUNDED = ("no scale", "rounded")


@pytest.mark.parametrize("name", SPELLINGS)
def test_codes_scale_and_offset(name):
    traced = Traced(SPELLINGS[name], CODES, dense(2, 4) + 2, dense(2, 4) * 9)
    index = fresh_index(traced.out)
    found = dequantised(resolve(traced.out, index))
    one, none = torch.ones(()), torch.zeros(())
    scale = one if found.scale is None else traced.read(found.scale, *index)
    offset = none if found.offset is None else traced.read(found.offset, *index)
    numbers = (traced.read(found.codes, *index).double() + offset) * scale
    agree(numbers.to(found.dtype).float(), traced.values[traced.out])
    assert traced.values[found.codes.node].dtype == torch.int8
    assert found.dtype == (torch.bfloat16 if name in ROUNDED else torch.float32)


NO_CODES = "expected codes in torch.int8"
REFUSED = {
    "values": (NO_CODES, lambda codes, scale, offset: offset * scale),
    "codes of 16 bits": (NO_CODES, lambda codes, scale, offset: codes.short().float() * scale),
    "codes without a sign": (NO_CODES, lambda codes, scale, offset: codes.view(torch.uint8).float() * scale),
    "by way of 8 bits": (NO_CODES, lambda codes, scale, offset: codes.to(torch.float8_e4m3fn).float() * scale),
    "a sum of codes": (NO_CODES, lambda codes, scale, offset: (codes.float() + codes.float()) * scale + offset),
    "shifted by a number": (NO_CODES, lambda codes, scale, offset: (codes.float() + 3) * scale),
    "shifted twice": (NO_CODES, lambda codes, scale, offset: (codes.float() + offset) * scale + offset),
    "negated": (NO_CODES, lambda codes, scale, offset: (offset - codes.float()) * scale),
    "with alpha": (NO_CODES, lambda codes, scale, offset: torch.add(codes.float(), offset, alpha=2) * scale),
    "scaled first": (NO_CODES, lambda codes, scale, offset: (codes.float() * 2 + offset) * scale),
    "scaled twice": (NO_CODES, lambda codes, scale, offset: codes.float() * scale * offset),
    "divided": ("codes are divided", lambda codes, scale, offset: codes.float() / scale),
    "by a number": ("is multiplied by a number", lambda codes, scale, offset: codes.float() * scale * 0.5),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_dequantised_is_refused_with_a_reason(name):
    reason, function = REFUSED[name]
    traced = Traced(function, CODES, dense(2, 4) + 2, dense(2, 4) * 9)
    with pytest.raises(NoMatch, match=reason):
        dequantised(resolve(traced.out, fresh_index(traced.out)))
