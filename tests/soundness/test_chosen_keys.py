"""Attention to chosen keys, where two rows see nothing at all: results and caches stay eager's, whatever hides keys."""

import pytest
import torch
from lib.layers import QUIET, LeftPadded, arguments, check, check_no_further, in_type
from torch import nn
from torch.nn.functional import one_hot

pytestmark = [pytest.mark.filterwarnings(line) for line in QUIET]

CHOSEN = 4
SPARSE = "sparse_latent_attention"
BLIND = "a row that sees no key averages over all keys, and not over chosen ones"


class Chosen(LeftPadded):
    """Scores of keys that are not seen, or not chosen, are filled."""

    def __init__(self, fill=None):
        super().__init__()
        self.fill = fill
        self.sinks = nn.Parameter(torch.linspace(-1, 1, self.sizes.heads, dtype=torch.float64))

    def attend(self, q_nope, q_rope, latent, k_rope, unseen):
        wishes = torch.sin(latent.squeeze(1).sum(-1, keepdim=True).mT * torch.arange(1, self.sizes.tokens + 1)[:, None])
        hidden = ~self.shown(wishes.masked_fill(unseen.squeeze(1), -torch.inf)).unsqueeze(1)
        key, value = self.keys(latent, k_rope)
        scores = self.scores(torch.cat((q_nope, q_rope), dim=-1), key)
        return self.combine(self.masked(scores, hidden, unseen, self.fill or torch.finfo(scores.dtype).min), value)

    def shown(self, wishes):
        return torch.zeros_like(wishes, dtype=torch.bool).scatter(-1, wishes.topk(CHOSEN).indices, True)

    def masked(self, scores, hidden, unseen, fill):
        return scores.masked_fill(hidden | unseen, fill)

    def combine(self, scores, value):
        column = self.sinks.view(-1, 1, 1).expand(*scores.shape[:-1], 1)
        return torch.cat((scores, column), dim=-1).softmax(-1)[..., :-1].to(value.dtype) @ value


class Added(Chosen):
    """Hunyuan 4: numbers are filled, and added to the scores."""

    def masked(self, scores, hidden, unseen, fill):
        return scores + torch.zeros_like(scores[:, :1]).masked_fill(unseen, fill).masked_fill(hidden, fill)


class AddedTwice(Chosen):
    """The choice hides by the lowest number, and another mask by minus infinity."""

    def masked(self, scores, hidden, unseen, fill):
        zeros = torch.zeros_like(scores[:, :1])
        return scores + zeros.masked_fill(hidden, fill) + zeros.masked_fill(unseen, -torch.inf)


class NoSinks:
    def combine(self, scores, value):
        return scores.softmax(-1) @ value


class ChosenWithoutSinks(NoSinks, Chosen):
    pass


class AddedWithoutSinks(NoSinks, Added):
    pass


class NothingElse(ChosenWithoutSinks):
    """A row without keys before its position chooses among all that are equal."""

    def masked(self, scores, hidden, unseen, fill):
        return scores.masked_fill(hidden, fill)


class HiddenLater(ChosenWithoutSinks):
    """Keys are chosen by minus infinity, and then hidden by the lowest number."""

    def masked(self, scores, hidden, unseen, fill):
        return scores + torch.zeros_like(scores[:, :1]).masked_fill(hidden, -torch.inf).masked_fill(unseen, fill)


class AfterAll(AddedWithoutSinks):
    """The first token comes after all keys but `more`."""

    def __init__(self, more):
        super().__init__()
        self.more = more

    def mask(self, position):
        last = self.sizes.context - 1 - self.more + torch.arange(self.sizes.tokens)
        return (torch.arange(self.sizes.context) > last.unsqueeze(-1)).view(1, 1, *last.shape, -1)


def reasons(report):
    return [miss.reason for miss in report.misses]


@pytest.mark.parametrize("kind", [Chosen, Added, AddedTwice, NothingElse])
def test_the_lowest_number_hides(kind):
    report = check(kind())
    assert report.fused[SPARSE] == 1 and (report.unchecked, report.refuted) == ([], [])


@pytest.mark.parametrize("kind", [ChosenWithoutSinks, AddedWithoutSinks, HiddenLater])
def test_rows_without_keys_and_sinks(kind):
    report = check(kind())
    assert SPARSE not in report.fused and BLIND in reasons(report), str(report)


def test_a_mask_that_hides_nothing():
    assert check(AfterAll(0)).fused[SPARSE] == 1
    report = check(AfterAll(1))
    assert SPARSE not in report.fused and BLIND in reasons(report), str(report)


@pytest.mark.parametrize("fill", [-1.5, -1e4, -1e30])
@pytest.mark.parametrize("kind", [Chosen, Added])
def test_other_numbers_do_not_hide(kind, fill):
    report = check(kind(fill))
    why = f"hidden scores are {fill:.6g}, expected" if kind is Chosen else "provably hides all keys but chosen ones"
    assert SPARSE not in report.fused and any(why in reason for reason in reasons(report)), str(report)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", [Chosen, Added])
def test_the_lowest_number_of_each_type(kind, dtype):
    assert check_no_further(kind().to(dtype), in_type(arguments(), dtype)).fused[SPARSE] == 1


@pytest.mark.parametrize("kind", [Chosen, Added])
def test_the_lowest_number_of_float16(kind):
    """A score may be as low."""
    report = check_no_further(kind().to(torch.float16), in_type(arguments(), torch.float16))
    assert SPARSE not in report.fused


# --- how the choice becomes a mask --------------------------------------------------------------------------------


def counted(wishes):
    indices = wishes.topk(CHOSEN).indices
    return torch.zeros_like(wishes, dtype=torch.int32).scatter_add(-1, indices, torch.ones_like(indices).int()) > 0


def padded(wishes):
    """What is hidden is -1. Key 0 is named again and again, and counts if it is chosen."""
    found = wishes.topk(CHOSEN)
    indices = found.indices.masked_fill(found.values < 0, -1)
    counts = torch.zeros_like(wishes, dtype=torch.int32)
    return counts.scatter_add_(-1, indices.clamp(0, wishes.shape[-1] - 1), (indices >= 0).int()).ne(0)


def by_one_hot(wishes):
    return one_hot(wishes.topk(CHOSEN).indices, wishes.shape[-1]).sum(-2) > 0


def by_comparison(wishes):
    return (wishes.topk(CHOSEN).indices.unsqueeze(-1) == torch.arange(wishes.shape[-1])).any(-2)


def for_all(wishes):
    """All sequences and tokens choose together."""
    indices = wishes.clamp(min=-9).sum((0, 1)).topk(CHOSEN).indices
    return torch.zeros_like(wishes, dtype=torch.bool).index_fill(-1, indices, True)


def put_for_all(wishes):
    mask = torch.zeros_like(wishes, dtype=torch.bool)
    mask[..., wishes.clamp(min=-9).sum((0, 1)).topk(CHOSEN).indices] = True
    return mask


def padded_and_counted(wishes):
    """Whatever is named is counted, key 0 even where it is not chosen."""
    found = wishes.topk(CHOSEN)
    indices = found.indices.masked_fill(found.values < 0, -1).clamp(min=0)
    return torch.zeros_like(wishes, dtype=torch.int32).scatter_add(-1, indices, torch.ones_like(indices).int()) > 0


def named_twice(wishes):
    indices = wishes.topk(CHOSEN).indices // 2
    return torch.zeros_like(wishes, dtype=torch.int32).scatter_add(-1, indices, torch.ones_like(indices).int()) > 0


def at_least_the_last(wishes):
    """Equal scores show more keys."""
    wishes = (wishes * 2).round()
    return wishes >= wishes.topk(CHOSEN).values[..., -1:]


def of(shown, base=Chosen):
    return type(shown.__name__, (base,), {"shown": staticmethod(shown)})


@pytest.mark.parametrize("base", [Chosen, Added], ids=["filled", "added"])
@pytest.mark.parametrize("shown", [counted, padded, by_one_hot, by_comparison, for_all, put_for_all])
def test_masks_of_the_choice(shown, base):
    report = check(of(shown, base)())
    assert report.fused.get(SPARSE) == 1 and (report.unchecked, report.refuted) == ([], []), str(report)


@pytest.mark.parametrize("shown", [padded_and_counted, named_twice, at_least_the_last])
def test_twins_of_masks_of_the_choice(shown, outcome):
    outcome(check(of(shown)()))
