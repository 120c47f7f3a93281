"""Padding masks by arithmetic: attention fuses as with a plain mask. Near misses are right, or refused."""

import copy
import functools

import pytest
import torch
from lib.layers import QUIET, Reporting, Sizes
from lib.padding_masks import QUICK, SPELLINGS, Padded, given

pytestmark = [
    pytest.mark.interpreted,
    pytest.mark.usefixtures("no_gradients"),
    *(pytest.mark.filterwarnings(line) for line in QUIET),
]
TARGETS = ["reference", pytest.param("inductor", marks=pytest.mark.slow)]
FUSED = {"mla_prolog": 1, "latent_attention": 1}


def check(module, arguments, target, **close):
    """Outputs and caches are eager's; returns the report."""
    theirs, ours = copy.deepcopy(arguments), copy.deepcopy(arguments)
    backend = Reporting(target=target)
    expected = module(*theirs)
    found = torch.compile(module, backend=backend)(*ours)
    torch.testing.assert_close((found, ours), (expected, theirs), equal_nan=True, **close)
    assert not backend.report.refuted, str(backend.report)
    return backend.report


def layer(spelling, tokens=1, grows=False, kind=Padded):
    return kind(spelling, Sizes(tokens=tokens), grows).float()


@functools.cache
def plain(tokens, grows, target):
    """What fuses where padding is hidden by a condition."""
    module = layer(None, tokens, grows)
    return check(module, given(module, torch.float32), target).fused


@pytest.mark.parametrize("grows", [False, True], ids=["static", "growing"])
@pytest.mark.parametrize("tokens", [1, 9], ids=["step", "prompt"])
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    "spelling", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in SPELLINGS]
)
def test_padding_masks_fuse(spelling, target, tokens, grows):
    """Flags are integers in steps, and floating numbers in prompts."""
    module = layer(SPELLINGS[spelling], tokens, grows)
    flags = torch.int64 if tokens == 1 else torch.float32
    report = check(module, given(module, torch.float32, flags), target)
    assert report.fused == plain(tokens, grows, target), str(report)
    assert report.fused.get("latent_attention") == 1, str(report)


class TwoPlanes(Padded):
    """Causal and padding planes of the lowest number, whose sum is minus infinity."""

    def mask(self, position):
        later = (torch.arange(self.sizes.context) > position[:, None]).to(self.o.dtype)
        return later * torch.finfo(self.o.dtype).min


class AfterEachOther(TwoPlanes):
    """Each is added to the scores."""

    def hide(self, scores, position, pad, x):
        return scores + self.mask(position) + self.spelling(pad, x.dtype)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kind", [TwoPlanes, AfterEachOther])
def test_two_planes(kind, target):
    module = layer(SPELLINGS["one minus flags, the lowest number"], 3, kind=kind)
    assert check(module, given(module, torch.float32), target).fused == FUSED


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kind", [Padded, TwoPlanes])
@pytest.mark.parametrize("spelling", ["one minus flags", "one minus flags, the lowest number"])
def test_a_sequence_of_padding(spelling, kind, target):
    """It sees what it would without padding, or averages, as in the program. In float64: large numbers round scores."""
    module = layer(SPELLINGS[spelling], 3, kind=kind).double()
    *others, pad = given(module, torch.float64)
    pad[0] = 0
    report = check(module, (*others, pad), target, rtol=1e-6, atol=1e-6)
    assert report.fused == FUSED, str(report)


@pytest.mark.parametrize("target", TARGETS)
def test_a_sequence_of_minus_infinity_gives_zeros(target):
    """NaN in the program becomes zeros, as README says of scores that are all minus infinity."""

    def program(*arguments):
        return torch.nan_to_num(module(*arguments)[0], 0.0)

    module = layer(SPELLINGS["logarithm"], 3)
    *others, pad = given(module, torch.float32)
    pad[0] = 0
    assert module(*copy.deepcopy(others), pad)[0][0].isnan().all()
    assert check(program, (*others, pad), target).fused == FUSED


@pytest.mark.parametrize("target", TARGETS)
def test_flags_of_all_sequences_or_of_one(target):
    """Shapes [1,1,1,T] and [T]."""
    for shape in ((1, 1, 1, 16), (16,)):
        module = layer(lambda pad, dtype, shape=shape: (1.0 - pad[:1].reshape(shape).to(dtype)) * -10000.0, 3)
        torch._dynamo.reset()
        assert check(module, given(module, torch.float32), target).fused == FUSED


# --- twins -----------------------------------------------------------------------------------------------------------


class OfQueries(Padded):
    """A plane [B,1,S,1] of rows, and not of keys, which changes no weight."""

    def hide(self, scores, position, pad, x):
        rows = pad.mT[:, :, -self.sizes.tokens :]
        return scores + (self.mask(position) + (1.0 - rows.to(x.dtype)) * 3.0)


class OfHiddenStates(Padded):
    """A plane [B,1,S,T], computed from the hidden states of the queries."""

    def hide(self, scores, position, pad, x):
        plane = x.sum(-1)[:, None, :, None] * (1.0 - pad.to(x.dtype))
        return scores + (self.mask(position) + plane)


class Scaled(Padded):
    """The sum of scores and mask is scaled."""

    def hide(self, scores, position, pad, x):
        return (scores + (self.mask(position) + (1.0 - pad.to(x.dtype)) * -0.7)) * 2.0


class OfCodes(Padded):
    """The mask is codes and their scale."""

    def hide(self, scores, position, pad, x):
        codes = (pad * 90 - 100).to(torch.int8)
        return scores + (self.mask(position) + codes.to(x.dtype) * 0.03)


class Late(Padded):
    """The mask is added to probabilities."""

    def hide(self, scores, position, pad, x):
        return scores + self.mask(position)

    def weigh(self, scores, value, pad):
        return (scores.softmax(-1) + (1.0 - pad[:, None, None].to(value.dtype)) * -0.1) @ value


class OfAnotherSequence(Padded):
    """The mask of the other sequence."""

    def hide(self, scores, position, pad, x):
        return super().hide(scores, position, pad.flip(0), x)


RIGHT = OfQueries, OfHiddenStates, OfAnotherSequence
REFUSED = {
    Scaled: "differences of scores are multiplied by 2",
    OfCodes: "scores of codes are multiplied by scales",
    Late: "",  # nothing looks like attention
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("tokens", [1, 9], ids=["step", "prompt"])
@pytest.mark.parametrize("kind", [*RIGHT, *REFUSED])
def test_twins_are_right_or_refused(kind, tokens, target):
    module = layer(SPELLINGS["one minus flags"], tokens, kind=kind)
    report = check(module, given(module, torch.float32), target)
    if kind in RIGHT or (kind, target) == (Scaled, "reference"):
        assert report.fused == FUSED, str(report)
    else:
        assert not report.fused
        assert kind is Late or any(REFUSED[kind] in miss.reason for miss in report.misses), str(report)
