"""The option verify and choices that rounding may flip: a flip is right, and whatever is further away is found."""

import copy

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import mla_fx
from mla_fx.comparing.verify import Verification
from mla_fx.debug.report import Report

pytestmark = pytest.mark.usefixtures("no_gradients")
SEEDS = [*range(10), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(10, 50))]
TOKENS, INNER, WIDTH, EXPERTS, TAKEN = 3, 48, 64, 32, 4
FLIPPED = "1 results differ by no more than choices that rounding may flip"


def verified(function, wrong, *inputs):
    """What the report says of a graph in which nothing fused, compiled to something else."""
    report, gm = Report(), make_fx(function)(*copy.deepcopy(inputs))
    Verification(gm, gm, report.verified, once=True).around(wrong)(*inputs)
    return report.verified[0]


def is_found(function, wrong, *inputs):
    try:
        assert FLIPPED in verified(function, wrong, *inputs)
    except mla_fx.VerificationError as error:
        assert "output 0 of the compiled graph" in str(error)
        return True
    return False


# --- codes -----------------------------------------------------------------------------------------------------------


class Quantised:
    """A projection of int8 tokens; the first token has a code that rounding may flip, at `open`."""

    def __init__(self, seed):
        torch.manual_seed(seed)
        self.weight = torch.randint(-127, 128, (INNER, WIDTH), dtype=torch.int8)
        self.scales = torch.rand(WIDTH) / 100 + 0.01
        self.x = torch.randn(TOKENS, INNER)
        self.open = seed % INNER
        self.x[0, (self.open + 1) % INNER] = 4.0
        step = self.steps(self.x.double())[0].item()
        self.x[0, self.open] = (seed + 0.5) * step / 3.3
        self.up = 1 if self.whole(self.x)[0, self.open] == seed else -1
        self.still = (self.open + 2) % INNER

    def steps(self, x):
        return (x * 3.3).abs().amax(-1, keepdim=True) / 127

    def whole(self, x):
        return (x * 3.3 / self.steps(x)).round()

    def codes(self, x, place=0, by=0):
        whole = self.whole(x)
        if by:
            whole[0, place] += by
        return whole.clamp(-128, 127).to(torch.int8)

    def __call__(self, x, place=0, by=0):
        product = torch._int_mm(self.codes(x, place, by), self.weight)
        return (product.float() * self.steps(x) * self.scales,)

    def is_found(self, place, by):
        return is_found(self, lambda x: self(x, place, by), self.x)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_code_may_flip(seed):
    model = Quantised(seed)
    assert not model.is_found(model.open, model.up)


@pytest.mark.parametrize("seed", SEEDS)
def test_two_steps_of_a_code_are_found(seed):
    model = Quantised(seed)
    assert model.is_found(model.open, 2 * model.up)
    assert model.is_found(model.open, -2 * model.up)
    assert model.is_found(model.still, 1 if seed % 2 else -2)


class Unclamped(Quantised):
    """In bfloat16 all codes are open. Nothing keeps them in their range, whose end is the largest."""

    def __init__(self, seed):
        super().__init__(seed)
        self.x = self.x.bfloat16()

    def codes(self, x, place=0, by=0):
        whole = self.whole(x)
        whole[0, place] += by
        return whole.to(torch.int8)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_largest_code_does_not_wrap_around(seed):
    """Else a draw with 128 in place of 127 would excuse any other code."""
    model = Unclamped(seed)
    assert model.is_found(model.still, -60 if model.whole(model.x)[0, model.still] > 0 else 60)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_number_beside_a_code_that_may_flip_is_found(seed):
    """It is off by half of what the code may change there: no choice makes this row."""
    model = Quantised(seed)

    def wrong(x):
        (result,), (flipped,) = model(x), model(x, model.open, model.up)
        result[0, seed] += (flipped - result)[0, seed] / 2
        return (result,)

    assert is_found(model, wrong, model.x)


@pytest.mark.parametrize("seed", SEEDS)
def test_two_codes_may_flip(seed):
    """Both, one or the other: most draws show other rows."""
    model = Quantised(seed)
    other = (model.open + 9) % INNER
    model.x[0, other] = -(seed + 0.5) * model.steps(model.x.double())[0].item() / 3.3
    up = -1 if model.whole(model.x)[0, other] == -seed else 1
    flipped = {model.open: model.up, other: up}

    def wrong(x):
        whole = model.whole(x)
        for place, by in flipped.items():
            whole[0, place] += by
        product = torch._int_mm(whole.to(torch.int8), model.weight)
        return (product.float() * model.steps(x) * model.scales,)

    assert not is_found(model, wrong, model.x)


@pytest.mark.parametrize("by, found", [(1, False), (2, True)])
def test_codes_that_are_returned(by, found):
    model = Quantised(3)

    def wrong(x):
        return (model.codes(x, model.open, by * model.up),)

    assert is_found(lambda x: (model.codes(x),), wrong, model.x) == found


# --- the best --------------------------------------------------------------------------------------------------------


class Routed:
    """The sum of the values with the best scores; in each row, the last one taken and the first one left nearly tie."""

    def __init__(self, seed):
        torch.manual_seed(seed)
        self.values = torch.randn(EXPERTS, WIDTH)
        self.router = torch.eye(EXPERTS) * 3.3
        self.x = torch.stack([torch.randperm(EXPERTS) / EXPERTS + 0.1 for _ in range(TOKENS)])
        places = self.x.argsort(-1, descending=True)
        self.last, self.first, self.far = places[0, TAKEN - 1], places[0, TAKEN], places[0, TAKEN + 2]
        self.x[0, self.first] = self.x[0, self.last]
        self.best = (self.x @ self.router).topk(TAKEN).indices
        self.tied = self.first if self.last in self.best[0] else self.last

    def __call__(self, x):
        scores, best = (x @ self.router + x.sin() * 1e-7).topk(TAKEN)
        return ((scores.softmax(-1).unsqueeze(-1) * self.values[best]).sum(1), best)

    def instead(self, x, place, other):
        best = self.best.clone()
        best[0, place] = other
        scores = (x @ self.router).gather(-1, best)
        return ((scores.softmax(-1).unsqueeze(-1) * self.values[best]).sum(1), best)


@pytest.mark.parametrize("seed", SEEDS)
def test_experts_that_nearly_tie_may_be_exchanged(seed):
    model = Routed(seed)
    line = verified(model, lambda x: model.instead(x, TAKEN - 1, model.tied), model.x)
    assert "2 results differ by no more than choices that rounding may flip" in line


@pytest.mark.parametrize("seed", SEEDS)
def test_an_expert_beyond_a_tie_is_found(seed):
    model = Routed(seed)
    with pytest.raises(mla_fx.VerificationError, match=r"output [01] of the compiled graph"):
        verified(model, lambda x: model.instead(x, TAKEN - 1, model.far), model.x)
    with pytest.raises(mla_fx.VerificationError, match="output 0 of the compiled graph"):
        verified(lambda x: model(x)[:1], lambda x: model.instead(x, TAKEN - 1, model.far)[:1], model.x)
