"""Attention over every third row of a cache, whose number of rows need not be a multiple of three."""

import pytest
from lib.layers import FUSED, QUIET, Absorbed, Layer, Sizes, arguments, check

pytestmark = [pytest.mark.filterwarnings(mark) for mark in QUIET]


class EveryThird(Layer):
    first = 0

    def attend(self, q_nope, q_rope, latent, k_rope, mask):
        return super().attend(q_nope, q_rope, latent[:, :, self.first :: 3], k_rope[:, :, self.first :: 3], mask)

    def mask(self, position):
        return super().mask(position)[:, self.first :: 3]


class AbsorbedEveryThird(EveryThird, Absorbed):
    pass


class Pairs(EveryThird):
    """Every third pair of rows."""

    def attend(self, q_nope, q_rope, latent, k_rope, mask):
        latent, k_rope = (rows.unflatten(2, (-1, 2))[:, :, ::3].flatten(2, 3) for rows in (latent, k_rope))
        return super(EveryThird, self).attend(q_nope, q_rope, latent, k_rope, mask)

    def mask(self, position):
        return super(EveryThird, self).mask(position).unflatten(1, (-1, 2))[:, ::3].flatten(1)


@pytest.mark.parametrize("layer", [EveryThird, AbsorbedEveryThird])
@pytest.mark.parametrize("context, first", [(10, 0), (10, 2), (11, 0), (6, 1), (5, 0)])
def test_fuses(layer, context, first):
    module = layer(Sizes(context=context))
    module.first = first
    assert check(module, arguments(module.sizes, first=2)).fused == FUSED


@pytest.mark.slow
def test_a_cache_of_any_length():
    module = AbsorbedEveryThird(Sizes(context=10))
    assert check(module, arguments(module.sizes, first=2), dynamic=True).fused == FUSED


def test_pairs_of_rows():
    module = Pairs(Sizes(context=20))
    assert check(module, arguments(module.sizes, first=2)).fused == FUSED


class Apart(AbsorbedEveryThird):
    """Rotary keys are those of the rows behind the latents."""

    def attend(self, q_nope, q_rope, latent, k_rope, mask):
        latent, k_rope = latent[:, :, ::3], k_rope[:, :, 1::3]
        return Absorbed.attend(self, q_nope, q_rope, latent, k_rope, mask)


def test_latents_and_rotary_keys_of_unlike_rows():
    module = Apart(Sizes(context=11))
    assert check(module, arguments(module.sizes, first=2)).fused == FUSED
