"""Rotary embedding in every spelling against an independent oracle."""

import pytest
import torch
from lib.traced import B, D, N, S, Traced, agree, dense, refused

from mla_fx.errors import NoMatch
from mla_fx.readings.element import resolve
from mla_fx.readings.rope import rope
from mla_fx.readings.views import fresh_index


def half_tables(seed=0):
    """cos and sin [S, D/2] of no particular angles, so that every entry shows."""
    return dense(S, D // 2), dense(S + seed + 1, D // 2)[:S]


def doubled(table):
    return torch.cat([table, table], -1)


def rotate_half(x):
    return torch.cat([-x[..., D // 2 :], x[..., : D // 2]], -1)


def evens_first(x):
    return x.view(*x.shape[:-1], D // 2, 2).transpose(-1, -2).reshape(x.shape)


def rotate_every_two(x):
    return torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)


def pairs(x, y, cos, sin):
    return x * cos - y * sin, y * cos + x * sin


def complex_product(x, cos, sin):
    number = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2)) * torch.complex(cos, sin)
    return torch.view_as_real(number).flatten(-2)


ROPES = {
    "rotate_half": ("half_half", lambda x, c, s: x * doubled(c) + rotate_half(x) * doubled(s)),
    "halves of a chunk": ("half_half", lambda x, c, s: torch.cat(pairs(*x.chunk(2, -1), c, s), -1)),
    "evens first, then rotate_half": (
        "interleave_half",
        lambda x, c, s: evens_first(x) * doubled(c) + rotate_half(evens_first(x)) * doubled(s),
    ),
    "evens and odds joined": ("interleave_half", lambda x, c, s: torch.cat(pairs(x[..., ::2], x[..., 1::2], c, s), -1)),
    "complex product": ("interleave_interleave", complex_product),
    "stacked": (
        "interleave_interleave",
        lambda x, c, s: torch.stack(pairs(x[..., ::2], x[..., 1::2], c, s), -1).flatten(-2),
    ),
    "rotate_every_two": (
        "interleave_interleave",
        lambda x, c, s: x * c.repeat_interleave(2, -1) + rotate_every_two(x) * s.repeat_interleave(2, -1),
    ),
    "unbound pairs": (
        "interleave_interleave",
        lambda x, c, s: torch.stack(pairs(*x.view(*x.shape[:-1], -1, 2).unbind(-1), c, s), -1).flatten(-2),
    ),
    "addcmul": ("half_half", lambda x, c, s: torch.addcmul(x * doubled(c), rotate_half(x), doubled(s))),
    "addcmul of a number": (
        "half_half",
        lambda x, c, s: torch.addcmul(x * doubled(c), rotate_half(x), doubled(s), value=-1.5),
    ),
    "halves to pairs": ("half_interleave", lambda x, c, s: torch.stack(pairs(*x.chunk(2, -1), c, s), -1).flatten(-2)),
}


def rotations(traced):
    index = fresh_index(traced.out)
    return index, list(rope(resolve(traced.out, index), index[-1].axis))


def assert_rotation_reads_right(traced, index, found):
    read, written = found.layout.split("_")
    value = traced.read(found.value, *index[:-1], found.along)
    (x, y), (at_x, at_y) = (split_pairs(value, read), split_pairs(traced.values[traced.out], written))

    def table(half):
        return traced.read(half, *index[:-1], found.pair)

    agree(x * table(found.cos.first) - y * table(found.sin.first), at_x)
    agree(y * table(found.cos.second) + x * table(found.sin.second), at_y)


def split_pairs(value, layout):
    return value.chunk(2, -1) if layout == "half" else (value[..., ::2], value[..., 1::2])


@pytest.mark.parametrize("name", ROPES)
def test_a_rotation_is_read(name):
    layout, function = ROPES[name]
    traced = Traced(lambda x, c, s: function(x, c, s), dense(B, N, S, D), *half_tables())
    index, found = rotations(traced)
    ours = [rotation for rotation in found if rotation.value.node.name == "x"]
    assert [rotation.layout for rotation in ours] == [layout]
    for rotation in found:
        assert_rotation_reads_right(traced, index, rotation)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, c, s: torch.cat(pairs(*x.chunk(2, -1), c, s), -1),
        lambda x, c, s: torch.stack(pairs(x[..., ::2], x[..., 1::2], c, s), -1).flatten(-2),
        lambda x, c, s: torch.cat(pairs(x[..., 1:], x[..., :1], c, s)[::-1], -1),
        complex_product,
    ],
)
def test_one_pair_lies_alike_in_both_layouts(function):
    traced = Traced(lambda x, c, s: function(x, c, s), dense(B, N, S, 2), dense(S, 1), dense(S + 1, 1)[1:])
    index, found = rotations(traced)
    ours = [rotation for rotation in found if rotation.value.node.name == "x"]
    assert [rotation.layout for rotation in ours] == ["half_half"]
    assert_rotation_reads_right(traced, index, ours[0])


def test_two_columns_that_are_no_neighbours_are_no_pair():
    traced = Traced(lambda x, c, s: torch.cat(pairs(x[..., :1], x[..., 2:], c, s), -1), dense(S, 3), *half_tables())
    with pytest.raises(NoMatch, match="expected a rotary embedding"):
        rotations(traced)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rotation_of_the_last_columns_is_read(dtype):
    def function(x, cos, sin):
        part = x[..., 5:].to(torch.float32)
        return (part * doubled(cos) + rotate_half(part) * doubled(sin)).to(x.dtype)

    traced = Traced(function, dense(B, N, S, D + 5, dtype=torch.float32).to(dtype), *half_tables())
    _, (found, *_) = rotations(traced)
    assert found.value.index[-1].offset == 5


def test_tables_that_differ_in_their_halves_are_kept_apart():
    def function(x, cos, sin, cos2, sin2):
        x1, x2 = x.chunk(2, -1)
        return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin2], -1)

    traced = Traced(function, dense(B, N, S, D), *half_tables(), *half_tables(4))
    index, found = rotations(traced)
    for rotation in found:
        assert_rotation_reads_right(traced, index, rotation)


ODD_ROPES = {
    "both signs plus": lambda x, y, c, s: torch.cat([x * c + y * s, y * c + x * s], -1),
    "turned back": lambda x, y, c, s: torch.cat([x * c + y * s, y * c - x * s], -1),
    "twice as long": lambda x, y, c, s: torch.cat([2 * a for a in pairs(x, y, c, s)], -1),
    "half of it three times as long": lambda x, y, c, s: torch.cat([x * c - 3 * y * s, y * c + x * s], -1),
    "two cosines": lambda x, y, c, s: torch.cat([x * c - y * s, y * s + x * s], -1),
    "a negative value": lambda x, y, c, s: torch.cat(pairs(-x, y, c, s), -1),
    "a conjugate": lambda x, y, c, s: torch.view_as_real(
        torch.complex(x, y) * torch.complex(c, s).conj() * 1.5
    ).transpose(-1, -2).flatten(-2),
}  # fmt: skip


@pytest.mark.parametrize("name", ODD_ROPES)
def test_every_factor_of_a_rotation_is_in_its_tables(name):
    function = ODD_ROPES[name]
    traced = Traced(lambda x, c, s: function(*x.chunk(2, -1), c, s), dense(B, N, S, D), *half_tables())
    index, found = rotations(traced)
    assert [rotation.layout for rotation in found if rotation.value.node.name == "x"] == ["half_half"]
    for rotation in found:
        assert_rotation_reads_right(traced, index, rotation)


NO_ROPES = {
    "no rotation": (lambda x, y, c, s: x + 1.0, "expected a rotary embedding"),
    "only cosines": (lambda x, y, c, s: torch.cat([x * c, y * c], -1), "expected a rotary embedding"),
    "three terms": (lambda x, y, c, s: torch.cat(pairs(x, y, c, s), -1) + torch.cat([c, c], -1), "expected"),
    "two values": (lambda x, y, c, s: torch.cat(pairs(x, (y * y).sin(), c, s), -1), "expected a rotary"),
    "divided by cosines": (
        lambda x, y, c, s: torch.cat([x / c - y * s, y / c + x * s], -1),
        "expected a rotary embedding, found cat",
    ),
}


@pytest.mark.parametrize("name", NO_ROPES)
def test_what_is_no_rotation_is_refused_with_a_reason(name):
    function, reason = NO_ROPES[name]
    traced = Traced(lambda x, c, s: function(*x.chunk(2, -1), c, s), dense(B, N, S, D), *half_tables())
    with pytest.raises(NoMatch, match=reason):
        rotations(traced)


def test_an_odd_dimension_is_no_rotary_dimension():
    traced = Traced(lambda x: x.clone(), dense(S, 7))
    with pytest.raises(NoMatch, match="the rotary dimension must be even and known, this one is 7"):
        rotations(traced)


def turned(x):
    return x.transpose(-1, -2)


def tokens(x, first):
    return x[..., first : first + 2, :]


ROTATIONS = {
    "another token": lambda x, c, s: pairs(tokens(x[..., :4], 0), tokens(x[..., 4:], 1), c[:2], s[:2]),
    "every other and neighbours": lambda x, c, s: pairs(x[..., ::2], x[..., 1:5], c, s),
}


@pytest.mark.parametrize("name", ROTATIONS)
def test_near_twins_of_a_rotation(name):
    traced = Traced(lambda x, c, s: torch.cat(ROTATIONS[name](turned(x), c, s), -1), dense(B, N, D, S), *half_tables())
    with refused("expected a rotary embedding"):
        rotations(traced)


def test_a_complex_sum_is_no_rotation():
    def function(x, c, s):
        return torch.view_as_real(torch.complex(x[..., :4], x[..., 4:]) + torch.complex(c, s)).flatten(-2)

    with refused("expected a rotary embedding"):
        rotations(Traced(function, dense(S, D), *half_tables()))
