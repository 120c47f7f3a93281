"""Keys of every head that are normalised and rotated in front, and values, written by slots: spellings and near twins.

Results and caches are compared with eager mode."""

import copy

import pytest
import torch
from lib.key_value_caches import ByBlocks, Interleaved, Keys, Sizes, ValuesFirst, arguments
from lib.layers import QUIET, Rewritten
from torch import nn

from mla_fx.driver import discovery

pytestmark = [pytest.mark.filterwarnings(line) for line in QUIET]

RULE = next(type(rule) for rule in discovery.rules() if rule.name == "key_value_caches")


def check(module, given, target="reference", close=1e-10):
    """Results and caches are eager's."""
    torch._dynamo.reset()
    eager = copy.deepcopy(given)
    with torch.no_grad():
        run = Rewritten(module, target=target)
        found = run(*given)
        wanted = module(*eager)
    for one, other in zip((*found, *given), (*wanted, *eager), strict=True):
        torch.testing.assert_close(one, other, rtol=close, atol=close)
    return run.report


KINDS = [Keys, Interleaved, ByBlocks, ValuesFirst]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("heads", [1, 2])
def test_spellings(kind, heads):
    module = kind(Sizes(heads=heads))
    report = check(module, arguments(module.sizes))
    assert report.fused == {"kv_rmsnorm_rope_cache": 1}, str(report)


@pytest.mark.slow
def test_inductor():
    module = Keys().float()
    report = check(module, arguments(dtype=torch.float32), "inductor", 1e-5)
    assert report.fused == {"kv_rmsnorm_rope_cache": 1}, str(report)


def test_two_layers_write_beside_their_own_values():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.other = Keys(), Interleaved()

        def forward(self, x, angle, slots, *caches):
            first = self.one(x, angle, slots, *caches[:2])
            return *first, *self.other(x + first[1].mean(), angle, slots, *caches[2:])

    given = *arguments(), *(cache + 1 for cache in arguments()[3:])
    assert check(Two(), given).fused == {"kv_rmsnorm_rope_cache": 2}


# --- near twins ------------------------------------------------------------------------------------------------------


class OtherSlots(Keys):
    def others(self, slots):
        return slots.flip(1)


class NormOfSome(Keys):
    def norm(self, key):
        kept, rest = key[..., : self.sizes.rotary], key[..., self.sizes.rotary :]
        scale = torch.rsqrt(rest.square().mean(-1, keepdim=True) + 1e-5)
        return torch.cat((kept, rest * scale * self.gamma[self.sizes.rotary :]), -1)


class NormOfAllHeads(Keys):
    def norm(self, key):
        return key * torch.rsqrt(key.square().mean((-1, -2), keepdim=True) + 1e-5) * self.gamma


def rotated(name, function, **parts):
    return type(name, (Keys,), {"rotated": function, **parts})


RotatedBehind = rotated("RotatedBehind", lambda my, key, *angle: Keys.rotated(my, key.flip(-1), *angle).flip(-1))
Unrotated = rotated("Unrotated", lambda my, key, *angle: key)
Weighed = rotated("Weighed", lambda my, *given: Keys.rotated(my, *given) * my.gamma)
# The norm of what is rotated already.
RotatedFirst = rotated(
    "RotatedFirst", lambda my, *given: Keys.norm(my, Keys.rotated(my, *given)), norm=lambda my, key: key
)
TWINS = {
    OtherSlots: "are written to different positions",
    NormOfSome: "do not follow those that are",
    NormOfAllHeads: "the normalised value is not the value whose mean square is computed",
    RotatedBehind: "expected rows whose first columns are rotated",
    RotatedFirst: "expected rows whose first columns are rotated",
    Unrotated: "expected rows whose first columns are rotated",
    Weighed: "expected rows whose first columns are rotated",
}


@pytest.mark.parametrize("kind", TWINS, ids=lambda kind: kind.__name__)
def test_near_twins(kind, monkeypatch):
    monkeypatch.setattr(RULE, "tells_misses", True)
    report = check(kind(), arguments())
    reasons = [miss.reason for miss in report.misses if miss.pattern == "key_value_caches"]
    assert not report.fused and any(TWINS[kind] in reason for reason in reasons), reasons
