"""Masks that are causal by position, in any spelling, become lengths; their near twins stay masks."""

import copy

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from lib.families import Recorder, cache_tensors, empty_cache, tiny_model, tokens
from lib.layers import CLOSE, QUIET, Layer, Rewritten, Sizes, arguments
from lib.traced import D, S, T, Traced, dense

from mla_fx.errors import NoMatch
from mla_fx.readings.attention import anchors, attention
from mla_fx.readings.axes import axes_of
from mla_fx.readings.causal import causal_by_position

pytestmark = [pytest.mark.filterwarnings(line) for line in QUIET]

LOWEST = torch.finfo(torch.float64).min
STARTS = torch.tensor([9, 4])


class Masked(Layer):
    """The mask is made from where each sequence begins, and given to the attention in one of several ways."""

    def __init__(self, mask, way, sizes):
        super().__init__(sizes)
        self.make, self.way = mask, way

    def store(self, latent, k_rope, starts, *caches):
        return super().store(latent, k_rope, torch.arange(self.sizes.tokens) + 2, *caches)

    def mask(self, starts):
        z = self.sizes
        return self.make(torch.arange(z.context), starts.view(-1, 1, 1, 1) + torch.arange(z.tokens).view(-1, 1))

    def attend(self, q_nope, q_rope, latent, k_rope, mask):
        key, value = self.keys(latent, k_rope)
        return self.way(self, torch.cat((q_nope, q_rope), dim=-1), key, value, mask)


def by_sdpa(layer, query, key, value, mask):
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)


def by_adding(layer, query, key, value, mask):
    return layer.combine(layer.scores(query, key) + mask, value)


def by_filling(fill):
    return lambda layer, query, key, value, seen: layer.combine(
        layer.scores(query, key).masked_fill(~seen, fill), value
    )


def by_choosing(fill):
    return lambda layer, query, key, value, seen: layer.combine(
        torch.where(seen, layer.scores(query, key), fill), value
    )


def choose(condition, kept, fill):
    """`torch.where` of two numbers, in float64."""
    return torch.where(condition, torch.full((), kept, dtype=torch.float64), fill)


FROM_FIRST = "row s sees the keys up to s"


def lens_of(recorder):
    """The lengths that each attention was given in the last call, or that it is causal from the first key on; None for
    one that was given a mask."""
    calls = [args for name, args in recorder.operators if name == "mla_fx.attention.default"]
    masks = [(*args[4:6], None, None)[:2] for args in calls]
    assert all(None in given for given in masks)
    lengths = (FROM_FIRST if lens is None else lens.tolist() for _, lens in masks)
    return [own if mask is None else None for (mask, _), own in zip(masks, lengths, strict=True)]


def lens(mask, way=by_sdpa, *, sizes=None, starts=STARTS, dynamic=False, **options):
    """Answers and caches are eager's; returns what `lens_of` does of the one attention."""
    sizes = sizes or Sizes()
    module = Masked(mask, way, sizes)
    x, tables, _, caches = arguments(sizes)
    theirs = (x, tables, starts, caches)
    ours, recorder = copy.deepcopy(theirs), Recorder(**options)
    with torch.no_grad():
        expected = module(*theirs)
        traced = None if dynamic or options else Rewritten(module).traced(theirs)
        run = torch.compile(module, backend=recorder, dynamic=dynamic) if traced is None else recorder.around(traced)
        found = run(*ours)
    torch.testing.assert_close((found, ours), (expected, theirs), **CLOSE)
    (given,) = lens_of(recorder) if options.get("target") != "inductor" else (None,)
    return given


# --- spellings --------------------------------------------------------------------------------------------------------

SEEN = {
    "keys up to rows": lambda keys, rows: keys <= rows,
    "rows from keys on": lambda keys, rows: rows >= keys,
    "keys before the next row": lambda keys, rows: keys < rows + 1,
    "rows after the key before": lambda keys, rows: rows > keys - 1,
    "not behind": lambda keys, rows: ~(keys > rows),
    "not before, by logic": lambda keys, rows: torch.logical_not(rows < keys),
    "no distance": lambda keys, rows: keys - rows <= 0,
    "distance the other way": lambda keys, rows: torch.rsub(keys, rows) > -1,
    "as masks are combined by vmap": lambda keys, rows: rows.new_ones((), dtype=torch.bool) & (keys <= rows),
    "and in the cache": lambda keys, rows: (keys <= rows) & (keys < 16) & (keys >= 0),
    "neither behind nor outside": lambda keys, rows: ~((keys > rows) | (keys > 15)),
    "twice": lambda keys, rows: torch.logical_and(keys <= rows, rows >= keys),
    "in two types": lambda keys, rows: torch.arange(16, dtype=torch.int32) <= rows,
    "for each head": lambda keys, rows: (keys <= rows).expand(2, 4, -1, -1),
}
ADDED = {
    "where": lambda keys, rows: choose(keys <= rows, 0.0, -torch.inf),
    "where it is later": lambda keys, rows: choose(keys > rows, LOWEST, 0.0),
    "lowest filled in": lambda keys, rows: torch.zeros(1, 16).double().masked_fill(keys > rows, LOWEST),
    "zero filled in": lambda keys, rows: torch.full((1, 16), LOWEST, dtype=torch.float64).masked_fill(keys <= rows, 0),
    "later times the lowest": lambda keys, rows: (keys > rows).double() * LOWEST,
    "not seen times the lowest": lambda keys, rows: (1 - (keys <= rows).double()) * LOWEST,
}


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [3, 1])
@pytest.mark.parametrize("name", SEEN)
def test_conditions(name, tokens):
    assert lens(SEEN[name], sizes=Sizes(tokens=tokens)) == [9 + tokens, 4 + tokens]


@pytest.mark.parametrize("name", ADDED)
def test_numbers_that_are_added(name):
    assert lens(ADDED[name], by_adding) == [12, 7]


@pytest.mark.parametrize("fill", [-torch.inf, LOWEST])
@pytest.mark.parametrize("way", [by_filling, by_choosing])
def test_scores_that_are_filled(way, fill):
    assert lens(SEEN["keys up to rows"], way(fill)) == [12, 7]


@pytest.mark.parametrize("starts", [torch.tensor(6), torch.tensor([6]), torch.tensor([[6], [3]], dtype=torch.int32)])
def test_one_position_for_all_sequences_or_in_32_bits(starts):
    assert lens(SEEN["keys up to rows"], starts=starts) == (starts.flatten().long() + 3).tolist()


def test_positions_of_single_tokens_may_come_from_anywhere():
    """All that is said of them is what they are: these are read from another sequence, by way of a float."""
    mask = lambda keys, rows: keys <= (rows.float() / 2).long().flip(0)  # noqa: E731
    assert lens(mask, sizes=Sizes(tokens=1)) == [3, 5]


@pytest.mark.slow
def test_free_sizes():
    assert lens(SEEN["keys up to rows"], dynamic=True) == [12, 7]
    assert lens(ADDED["where"], by_adding, dynamic=True) == [12, 7]


NUMBERED = {
    "from the first key on": (lambda keys, rows: keys <= torch.arange(3)[:, None], FROM_FIRST),
    "from a number on": (lambda keys, rows: keys <= torch.arange(5, 8)[:, None], [8]),
    "lower triangle": (lambda keys, rows: torch.ones(3, 16, dtype=torch.bool).tril(), FROM_FIRST),
    "lower triangle from a number on": (lambda keys, rows: torch.ones(3, 16, dtype=torch.bool).tril(4), [7]),
    "not the upper triangle": (lambda keys, rows: ~torch.ones(3, 16, dtype=torch.bool).triu(1), FROM_FIRST),
}


@pytest.mark.parametrize("name", NUMBERED)
def test_positions_that_are_numbers(name):
    mask, expected = NUMBERED[name]
    assert lens(mask) == expected


def test_upper_triangle_of_minus_infinity():
    def triangle(keys, rows):
        return torch.full((3, 16), -torch.inf, dtype=torch.float64).triu(1)

    assert lens(triangle, by_adding) == FROM_FIRST


@pytest.mark.parametrize("way", [by_filling(LOWEST), by_choosing(LOWEST)])
def test_rows_before_the_first_key_see_all_keys_alike(way):
    assert lens(SEEN["keys up to rows"], way, starts=torch.tensor([-2, -7])) == [1, -4]


def test_rows_before_the_first_key_to_which_the_lowest_number_is_added():
    assert lens(ADDED["where it is later"], by_adding, starts=torch.tensor([-2, -7])) == [1, -4]


@pytest.mark.campaign
@pytest.mark.parametrize("dynamic", [False, True])
def test_by_inductor(dynamic):
    lens(SEEN["keys up to rows"], target="inductor", dynamic=dynamic)
    lens(ADDED["where it is later"], by_adding, target="inductor", dynamic=dynamic)


# --- near twins -------------------------------------------------------------------------------------------------------

ROWS = torch.arange(3).view(-1, 1)
TWINS = {
    "strictly before": lambda keys, rows: keys < rows,
    "one further": lambda keys, rows: keys <= rows + 1,
    "one less": lambda keys, rows: keys + 1 <= rows,
    "a window": lambda keys, rows: (keys <= rows) & (keys > rows - 4),
    "a window and nothing else": lambda keys, rows: keys > rows - 4,
    "a sink": lambda keys, rows: (keys <= rows) | (keys == 0),
    "another position for each head": lambda keys, rows: keys <= rows + torch.arange(4).view(-1, 1, 1),
    "another position for each sequence": lambda keys, rows: keys <= rows + torch.arange(2).view(-1, 1, 1, 1),
    "a position twice": lambda keys, rows: keys <= rows + (rows - ROWS),
    "compared as floats": lambda keys, rows: keys.float() <= rows.float(),
    "keys counted in float16": lambda keys, rows: torch.arange(16, dtype=torch.float16) <= rows,
    "rows by way of a float": lambda keys, rows: keys <= rows.float().long(),
    "rows added in 32 bits": lambda keys, rows: keys <= (rows - ROWS).int() + ROWS.int(),
    "padding": lambda keys, rows: (keys <= rows) & (keys != 1),
    "some rows see everything": lambda keys, rows: (keys <= rows) | (ROWS == 1),
    "slots counted from one": lambda keys, rows: torch.arange(1, 17) <= rows,
    "slots counted down": lambda keys, rows: keys.flip(0) <= rows,
    "slots in pairs": lambda keys, rows: keys // 2 <= rows,
    "every other position": lambda keys, rows: keys <= rows + ROWS,
    "every other position, counted": lambda keys, rows: keys <= (rows - ROWS) + torch.arange(0, 6, 2).view(-1, 1),
    "positions in falling order": lambda keys, rows: keys <= rows + (2 - ROWS) - ROWS,
    "one position for all rows": lambda keys, rows: keys <= rows - ROWS,
    "before the first key": lambda keys, rows: keys <= ROWS + torch.arange(-1, 2).view(-1, 1) - ROWS,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TWINS)
def test_near_twins_stay_masks(name):
    assert lens(TWINS[name]) is None


@pytest.mark.parametrize("fill", [-1e4, -1e9, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("way", [by_filling, by_choosing])
def test_scores_that_are_filled_with_another_number_stay_masked(way, fill):
    assert lens(SEEN["keys up to rows"], way(fill)) is None
    assert lens(lambda keys, rows: choose(keys <= rows, 0.0, fill), by_adding) is None


OTHER_NUMBERS = {
    "halved": lambda keys, rows: choose(keys <= rows, 0.0, LOWEST) * 0.5,
    "shifted": lambda keys, rows: choose(keys <= rows, 1.0, LOWEST),
    "three numbers": lambda keys, rows: torch.where(keys <= rows, choose(keys <= rows - 2, -1.0, 0.0), LOWEST),
    "by distance": lambda keys, rows: torch.where(keys <= rows, (keys - rows).double(), LOWEST),
    "seen times a number": lambda keys, rows: (keys <= rows).double() * 1e9,
    "two less a flag": lambda keys, rows: (2 - (keys <= rows).double()) * -1e9,
    "lowest of another type": lambda keys, rows: choose(keys <= rows, 0.0, torch.finfo(torch.float32).min),
    "in half the width": lambda keys, rows: torch.where(keys <= rows, 0.0, -torch.inf).double(),
}


@pytest.mark.parametrize("name", OTHER_NUMBERS)
def test_other_numbers_that_are_added_stay_masks(name):
    assert lens(OTHER_NUMBERS[name], by_adding) is None


def test_a_second_mask_keeps_both():
    def filled_again(layer, query, key, value, seen):
        scores = layer.scores(query, key).masked_fill(~seen, -torch.inf)
        return layer.combine(scores.masked_fill(torch.arange(16) == 1, -torch.inf), value)

    assert lens(SEEN["keys up to rows"], filled_again) is None


def test_the_lowest_number_added_in_float16_is_no_infinity():
    """Scores of a hundred are not lost beside it, and a row that sees nothing still tells them apart."""
    assert read_in(torch.bfloat16).fill == torch.finfo(torch.bfloat16).min
    with pytest.raises(NoMatch, match=r"masked with -65504, which is not the lowest number of torch\.float16"):
        read_in(torch.float16)


def read_in(dtype):
    def attend(q, k, position):
        seen = torch.arange(T) <= position + torch.arange(S)[:, None]
        mask = torch.where(seen, torch.zeros((), dtype=dtype), torch.finfo(dtype).min)
        return (q @ k.mT + mask).softmax(-1) @ k

    traced = Traced(attend, dense(1, S, D, dtype=dtype), dense(1, T, D, dtype=dtype), torch.tensor(1))
    found = attention(next(anchors(traced.graph)))
    return causal_by_position(found, (), axes_of(found.index[1]))


# --- a real model -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "implementation, dynamic",
    [
        ("eager", False),
        ("sdpa", False),
        *(pytest.param(implementation, True, marks=pytest.mark.campaign) for implementation in ("eager", "sdpa")),
    ],
)
@torch.no_grad()
def test_deepseek_v3_with_a_static_cache(implementation, dynamic):
    """A prompt, a token, several tokens, a token: in all of them the model makes the mask from its cache's length."""
    model = tiny_model("deepseek_v3")
    model.config._attn_implementation = implementation
    theirs, ours = empty_cache(model, "static"), empty_cache(model, "static")
    recorder = Recorder()
    compiled = torch.compile(model, backend=recorder, dynamic=dynamic)
    length = 0
    for steps in (6, 1, 4, 1):
        step = tokens(2, steps)
        length += steps
        expected = model(step, past_key_values=theirs).logits
        torch.testing.assert_close(compiled(step, past_key_values=ours).logits, expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(cache_tensors(ours), cache_tensors(theirs), rtol=1e-4, atol=1e-5)
        assert lens_of(recorder) == [FROM_FIRST if length == steps else [length]] * 2


@pytest.mark.slow
@torch.no_grad()
def test_padding_of_a_real_model_stays_a_mask():
    model = tiny_model("deepseek_v3")
    theirs, ours = empty_cache(model, "static"), empty_cache(model, "static")
    recorder = Recorder()
    step, padding = tokens(2, 6), torch.ones(2, 6, dtype=torch.int64)
    padding[0, :2] = 0
    expected = model(step, attention_mask=padding, past_key_values=theirs).logits
    found = torch.compile(model, backend=recorder)(step, attention_mask=padding, past_key_values=ours).logits
    torch.testing.assert_close(found[:, 2:], expected[:, 2:], rtol=1e-4, atol=1e-5)
    assert lens_of(recorder) == [None, None]
