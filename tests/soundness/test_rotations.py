"""Near twins of rotations: factors on tables and on products, other tables for the key, one table for each sequence."""

import pytest
import torch
from lib.layers import FUSED, QUIET, Complex, Layer, Sizes, angles, arguments, check

pytestmark = [pytest.mark.filterwarnings(line) for line in QUIET]


class Times(Complex):
    def __init__(self, turned):
        super().__init__()
        self.turned = turned


FACTORS = {
    "yarn": lambda freqs: freqs * 1.2079441541679836,
    "smaller": lambda freqs: freqs * 0.9,
    "divided": lambda freqs: freqs / 2,
    "negative": lambda freqs: -freqs,
    "complex number": lambda freqs: freqs * 1j,
    "conjugated": lambda freqs: freqs.conj(),
    "resolved": lambda freqs: freqs.conj().resolve_conj(),
    "conjugated twice": lambda freqs: freqs.conj().conj(),
    "squared": lambda freqs: freqs * freqs,
    "magnitude": lambda freqs: torch.polar(torch.full_like(freqs.real, 1.3), freqs.angle()),
    "negative magnitude": lambda freqs: torch.polar(-torch.ones_like(freqs.real), freqs.angle()),
    "made of parts": lambda freqs: torch.complex(freqs.real * 1.3, freqs.imag * 1.3),
    "parts exchanged": lambda freqs: torch.complex(freqs.imag, freqs.real),
    "factor of one part": lambda freqs: torch.complex(freqs.real, freqs.imag * 0.5),
    "narrowed": lambda freqs: freqs.to(torch.complex64).to(torch.complex128),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FACTORS)
def test_factor_on_complex_tables(name):
    report = check(Times(FACTORS[name]))
    assert report.fused.get("latent_attention")


@pytest.mark.parametrize("factor", [1.3, -1.0])
def test_factor_on_a_complex_product(factor):
    class Scaled(Complex):
        def rotate(self, x, freqs):
            pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
            return torch.view_as_real(pairs * freqs * factor).flatten(-2)

    assert check(Scaled()).fused.get("latent_attention")


@pytest.mark.parametrize("name", ["smaller", "negative", "conjugated"])
def test_other_tables_for_the_key(name):
    class KeyOnly(Complex):
        def rotate_key(self, x, freqs):
            return super().rotate_key(x, FACTORS[name](freqs))

    assert check(KeyOnly()).fused.get("latent_attention")


def test_conjugated_value():
    class Conjugated(Complex):
        def rotate(self, x, freqs):
            pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
            return torch.view_as_real((pairs.conj() * freqs).resolve_conj()).flatten(-2)

    assert check(Conjugated()).fused.get("latent_attention")


REAL_FACTORS = {
    "both": lambda cos, sin: (cos * 1.2, sin * 1.2),
    "negative": lambda cos, sin: (-cos, -sin),
    "sin alone": lambda cos, sin: (cos, sin * 0.5),
    "other way": lambda cos, sin: (cos, -sin),
    "exchanged": lambda cos, sin: (sin, cos),
    "second half": lambda cos, sin: (cos * torch.tensor([1.0, 1, 1, 2, 2, 2]), sin),
    "reversed": lambda cos, sin: (cos.flip(-1), sin.flip(-1)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", REAL_FACTORS)
def test_factor_on_tables(name):
    class Scaled(Layer):
        def rotate(self, x, cos, sin):
            return super().rotate(x, *REAL_FACTORS[name](cos, sin))

    assert check(Scaled()).fused.get("latent_attention")


def test_tables_of_one_sequence_each():
    sizes = Sizes(batch=3, tokens=3, rope=6)
    x, _, position, caches = arguments(sizes)
    angle = torch.cat((angles(sizes), angles(sizes)), -1) * torch.arange(1, 4).view(3, 1, 1, 1)
    assert check(Layer(sizes), (x, (angle.cos(), angle.sin()), position, caches)).fused == FUSED
