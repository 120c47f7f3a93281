"""Rotary tables of several position axes: rows of a table whose columns are overwritten by those of other rows."""

import pytest
import torch
from lib.layers import FUSED, QUIET, Complex, Layer, Sizes, arguments, check

pytestmark = [pytest.mark.filterwarnings(line) for line in QUIET]
SIZES = Sizes(rope=16)


def mixed(table, axes=2):
    """The first row, which takes turns with the others along its columns. It is written in place."""
    row = table[0]
    for axis in range(1, axes + 1):
        row[..., axis::3] = table[axis, ..., axis::3]
    return row


def doubled(table):
    return torch.cat((table, table), -1)


class Angles(Layer):
    """The tables are positions [3,S] and frequencies [Dr / 2]."""

    mixed = staticmethod(mixed)

    def __init__(self):
        super().__init__(SIZES)

    def attended(self, x, tables, position, caches):
        return super().attended(x, self.made(*tables), position, caches)

    def angles(self, positions, frequencies):
        return positions.unsqueeze(-1).double() * frequencies

    def made(self, positions, frequencies):
        angles = doubled(self.mixed(self.angles(positions, frequencies)))
        return angles.cos(), angles.sin()


class Tables(Angles):
    """Columns of cosines and sines are written, not those of angles."""

    def made(self, positions, frequencies):
        angles = doubled(self.angles(positions, frequencies))
        return self.mixed(angles.cos()), self.mixed(angles.sin())


class Halves(Tables):
    def made(self, positions, frequencies):
        angles = self.angles(positions, frequencies)
        return doubled(self.mixed(angles.cos())), doubled(self.mixed(angles.sin()))


class FirstHalf(Tables):
    def rotate(self, x, cos, sin):
        one, other = x.chunk(2, -1)
        cos, sin = (table.chunk(2, -1)[0] for table in (cos, sin))
        return torch.cat((one * cos - other * sin, other * cos + one * sin), -1)


class OneWrite(Tables):
    @staticmethod
    def mixed(table):
        return mixed(table, 1)


class InEachRotation(Tables):
    """Once for the query and once for the key."""

    def attended(self, x, tables, position, caches):
        return Layer.attended(self, x, tables, position, caches)

    def rotate(self, x, *tables):
        return Layer.rotate(self, x, *self.made(*tables))


class AnglesInEachRotation(InEachRotation):
    made = Angles.made


class Numbers(Complex, Angles):
    def __init__(self):
        Angles.__init__(self)

    def made(self, positions, frequencies):
        angles = self.mixed(self.angles(positions, frequencies))
        return (torch.polar(torch.ones_like(angles), angles),)


class Unlike(InEachRotation):
    """The key's tables have one write less."""

    def rotate_key(self, x, positions, frequencies):
        angles = doubled(self.angles(positions, frequencies))
        return Layer.rotate(self, x, mixed(angles.cos(), 1), mixed(angles.sin(), 1))


def given():
    x, _, position, caches = arguments(SIZES)
    generator = torch.Generator().manual_seed(3)
    frequencies = torch.rand(SIZES.rope // 2, generator=generator, dtype=torch.float64)
    return x, (torch.stack((position, position * 2, position + 3)), frequencies), position, caches


KINDS = [Angles, Tables, Halves, FirstHalf, OneWrite, InEachRotation, AnglesInEachRotation, Numbers]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_columns_of_a_row_are_written(kind):
    report = check(kind(), given())
    assert report.fused == FUSED, str(report)


def test_tables_with_other_writes_are_two():
    report = check(Unlike(), given())
    assert "mla_prolog" not in report.fused
    assert "cos of the query and cos of the key are different tensors" in str(report)
