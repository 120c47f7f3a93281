"""Near twins of masks, softmax, norms and roundings: exactly what the program says enters the scores."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from lib.layers import CLOSE, QUIET, Layer, LeftPadded, Sizes, arguments, check, check_no_further, in_type

pytestmark = [pytest.mark.filterwarnings(line) for line in QUIET]

ATTENTION = "latent_attention"


class Filled(LeftPadded):
    def __init__(self, fill):
        super().__init__()
        self.fill = fill

    def attend(self, q_nope, q_rope, latent, k_rope, mask):
        key, value = self.keys(latent, k_rope)
        scores = self.scores(torch.cat((q_nope, q_rope), dim=-1), key)
        return self.combine(self.filled(scores, mask), value)

    def filled(self, scores, mask):
        return scores.masked_fill(mask, self.fill)


class Chosen(Filled):
    def filled(self, scores, mask):
        return torch.where(~mask, scores, self.fill)


class Added(Filled):
    def filled(self, scores, mask):
        return scores + torch.zeros(mask.shape, dtype=scores.dtype).masked_fill(mask, self.fill)


class Narrowed(Filled):
    """Filled twice, the second time with less."""

    def filled(self, scores, mask):
        return scores.masked_fill(mask, self.fill).masked_fill(torch.arange(mask.shape[-1]) < 3, self.fill / 2)


FILLS = {"1e4": -1e4, "1e9": -1e9, "2e4": -2e4, "1e30": -1e30}
EXTREMES = {str(dtype)[6:]: torch.finfo(dtype).min for dtype in (torch.float64, torch.float32, torch.bfloat16)}


@pytest.mark.slow
@pytest.mark.parametrize("fill", [*FILLS, *EXTREMES])
@pytest.mark.parametrize("kind", [Filled, Chosen, Added])
def test_rows_wholly_filled(kind, fill, outcome):
    """If a whole row is one number, or is shifted by it, its softmax is still the program's."""
    outcome(check(kind({**FILLS, **EXTREMES}[fill])))


def test_filled_twice(outcome):
    outcome(check(Narrowed(-1e4)))


@pytest.mark.slow
@pytest.mark.parametrize("dtype, fill", [(torch.float32, "float32"), (torch.bfloat16, "bfloat16")], ids=str)
@pytest.mark.parametrize("kind", [Filled, Chosen, Added])
def test_rows_wholly_filled_in_the_type_of_the_model(kind, dtype, fill, outcome):
    outcome(check_no_further(kind(EXTREMES[fill]).to(dtype), in_type(arguments(), dtype)))


class Attended(Filled):
    def forward(self, *given):
        return self.attended(*given)


class AttendedAdded(Added, Attended):
    pass


@pytest.mark.parametrize("kind", [Attended, AttendedAdded])
def test_rows_that_see_nothing_are_zeros(kind):
    """scaled_dot_product_attention does that, too: eager's NaN in such a row is zeros, and no other row changes."""
    module, given = kind(-torch.inf), arguments()
    with torch.no_grad():
        expected = module(*arguments())
    blind = expected.isnan()
    assert blind.any() and not blind.all()
    found = torch.compile(module, backend="mla", options={"target": "reference", "strict": True})
    with torch.no_grad():
        torch.testing.assert_close(found(*given), expected.nan_to_num(0.0), **CLOSE)


SIGNS = {
    "minus": lambda filled: -filled,
    "small": lambda filled: 1e-3 * filled,
    "divided": lambda filled: filled / 5000,
    "plus a number": lambda filled: filled + 1.5,
    "plus itself": lambda filled: filled + filled,
    "minus a half": lambda filled: filled - 0.5 * filled,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SIGNS)
@pytest.mark.parametrize("kind", [Filled, Chosen, Added])
def test_factor_on_filled_scores(kind, name, outcome):
    class Twin(kind):
        def filled(self, scores, mask):
            return SIGNS[name](super().filled(scores, mask))

    outcome(check(Twin(-1e4)))


@pytest.mark.slow
@pytest.mark.parametrize("name", SIGNS)
def test_factor_on_a_filled_mask(name, outcome):
    class Twin(Filled):
        def filled(self, scores, mask):
            bias = torch.arange(16.0, dtype=scores.dtype).cos()
            return scores + SIGNS[name](torch.where(mask, -1e4, bias))

    outcome(check(Twin(-1e4)))


def assigned(mask):
    bias = torch.zeros(mask.shape, dtype=torch.float64)
    bias[:] = mask
    return bias


NUMBERS = {
    "bool added": lambda scores, mask: scores + mask,
    "bool subtracted": lambda scores, mask: scores - mask.double(),
    "bool assigned": lambda scores, mask: scores + assigned(mask),
    "bool scaled": lambda scores, mask: scores + mask * 2.5,
    "bool copied": lambda scores, mask: scores + torch.empty_like(scores).copy_(mask),
    "integers": lambda scores, mask: scores + mask.long(),
    "multiplied": lambda scores, mask: scores * mask,
    "filled with the small": lambda scores, mask: scores.masked_fill(mask, -100.0),
    "filled with the large": lambda scores, mask: scores.masked_fill(mask, 1e4),
    "filled with zero": lambda scores, mask: scores.masked_fill(mask, 0.0),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", NUMBERS)
def test_flags_as_numbers(name, outcome):
    class Twin(Filled):
        def filled(self, scores, mask):
            return NUMBERS[name](scores, mask)

    outcome(check(Twin(0.0)))


class BoolBias(Layer):
    """A float mask in which flags were assigned, given to PyTorch's own attention."""

    def attend(self, q_nope, q_rope, latent, k_rope, mask):
        key, value = self.keys(latent, k_rope)
        bias = assigned(mask == 0)
        return F.scaled_dot_product_attention(torch.cat((q_nope, q_rope), -1), key, value, attn_mask=bias)


@pytest.mark.slow
def test_flags_in_a_bias(outcome):
    outcome(check(BoolBias()))


# --- softmax written out ---------------------------------------------------------------------------------------------


def total(e, dim=-1):
    return e.sum(dim, keepdim=True)


WRITTEN_OUT = {
    "as it is": lambda e: e / total(e),
    "over twice the sum": lambda e: e / (2 * total(e)),
    "over minus the sum": lambda e: e / -total(e),
    "twice": lambda e: (2 * e) / total(e),
    "minus": lambda e: -e / total(e),
    "over the sum turned": lambda e: e / total(e).transpose(1, 2),
    "over the sum of batches turned": lambda e: e / total(e).transpose(0, 2),
    "over the sum of columns": lambda e: e / total(e, -2),
    "over the sum turned to columns": lambda e: e / total(e).transpose(-1, -2),
    "over the sum and one": lambda e: e / (total(e) + 1),
    "over the sum of squares": lambda e: e / total(e * e),
    "squared over the sum": lambda e: e * e / total(e),
    "over the mean": lambda e: e / e.mean(-1, keepdim=True),
    "over the sum of half": lambda e: e / total(e[..., ::2]),
    "over the root": lambda e: e / total(e).sqrt(),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WRITTEN_OUT)
def test_softmax_written_out(name):
    sizes = Sizes(batch=5, tokens=5, heads=5, context=5)

    class Twin(Layer):
        def combine(self, scores, value):
            return WRITTEN_OUT[name](torch.exp(scores - scores.amax(-1, keepdim=True))) @ value

    report = check(Twin(sizes), arguments(sizes, first=0))
    assert name != "as it is" or report.fused.get(ATTENTION)


PEAKS = {
    "sum": lambda scores: torch.exp(scores - scores.nan_to_num(neginf=0.0).sum(-1, keepdim=True)),
    "plus": lambda scores: torch.exp(scores + scores.amax(-1, keepdim=True)),
    "other axis": lambda scores: torch.exp(scores - scores.amax(-2, keepdim=True)),
    "minus": lambda scores: torch.exp(scores.amax(-1, keepdim=True) - scores.nan_to_num(neginf=-30.0)),
    "twice": lambda scores: torch.exp(2 * (scores - scores.amax(-1, keepdim=True))),
    "base two": lambda scores: torch.exp2(scores - scores.amax(-1, keepdim=True)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PEAKS)
def test_exponential_written_out(name, outcome):
    sizes = Sizes(tokens=5, context=5)

    class Twin(Layer):
        def combine(self, scores, value):
            e = PEAKS[name](scores)
            return e / total(e) @ value

    outcome(check(Twin(sizes), arguments(sizes, first=0)))


PROBABILITIES = {
    "doubled": lambda p: 2 * p,
    "minus": lambda p: -p,
    "masked": lambda p: p.masked_fill(torch.arange(16) < 4, 0.0),
    "shifted": lambda p: p + 0.01,
    "squared": lambda p: p * p,
    "dropped": lambda p: F.pad(p[..., 1:], (1, 0)),
    "rolled": lambda p: p.roll(1, -1),
    "flipped": lambda p: p.flip(-1),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PROBABILITIES)
def test_probabilities_changed(name, outcome):
    class Twin(Layer):
        def combine(self, scores, value):
            return PROBABILITIES[name](scores.softmax(-1)) @ value

    outcome(check(Twin()))
