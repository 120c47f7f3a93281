"""Caches of codes: what their scales must be."""

import pytest
import torch

from mla_fx.ops.emitted.attention import samples

LATENTS, KEYS = 2, 3  # places of the caches


def codes(place):
    def spoil(args, options):
        args[place] = args[place].char()

    return spoil


def scales(name, *shape):
    def spoil(args, options):
        options[name] = torch.ones(shape)

    return spoil


def without_rope(args, options):
    args[1] = args[KEYS] = None


ONE = scales("kr_scales", 1, 1, 1)
REFUSALS = [
    ([codes(LATENTS)], "kv_cache has dtype torch.int8; it must be torch.float32"),
    ([scales("kv_scales", 1, 1, 1)], "kv_cache has dtype torch.float32; allowed: torch.int8, torch.float8"),
    ([codes(LATENTS), scales("kv_scales", 1, 1)], "kv_scales has shape .1, 1.; it must be .B, T, C. or .BlockNum, "),
    ([codes(LATENTS), scales("kv_scales", 3, 1, 1)], "it must be .2 or 1, 5 or 1, a divisor of 16., for kv_cache"),
    ([codes(LATENTS), scales("kv_scales", 1, 4, 1)], "kv_scales has shape .1, 4, 1."),
    ([codes(LATENTS), scales("kv_scales", 2, 5, 3)], "kv_scales has shape .2, 5, 3."),
    ([codes(LATENTS), scales("kv_scales", 2, 5, 0)], "kv_scales has shape .2, 5, 0."),
    ([codes(LATENTS), scales("kv_scales", 2, 5, 4), ONE], "kr_cache has dtype torch.float32; allowed: torch.int8"),
    ([ONE], "kr_cache has dtype torch.float32; allowed: torch.int8"),
    ([codes(KEYS), ONE], "kr_scales are given; they must be None without kv_scales"),
    ([without_rope, ONE], "kr_scales are given; they must be None without kr_cache"),
]


@pytest.mark.parametrize(("spoils", "message"), REFUSALS)
def test_refused(spoils, message):
    args, options = [*samples.sample(torch.float32, 0, 3)], {"scale": 0.3}
    for spoil in spoils:
        spoil(args, options)
    with pytest.raises(ValueError, match=message):
        torch.ops.mla_fx.attention(*args, **options)
