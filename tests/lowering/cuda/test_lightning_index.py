"""The Triton kernel for the choice of keys, under Triton's interpreter."""

from random import Random

import pytest
import torch
from lib.index_calls import CALLS, call, check, check_not_a_number, check_rows_in_parts
from lib.kernels import draw, interpretable

from mla_fx.errors import NoMatch
from mla_fx.ops.emitted import lightning_index

pytest.importorskip("triton")
from mla_fx.lowering.cuda import lightning_index as lowering

pytestmark = pytest.mark.usefixtures("no_gradients")

DRAWS = 60


def run(a):
    return lowering.run(interpretable(a))


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_chooses_what_the_operator_chooses(name):
    check(run(CALLS[name]), CALLS[name])


@pytest.mark.slow
def test_rows_in_parts(monkeypatch):
    check_rows_in_parts(lowering, run, monkeypatch)


def test_not_a_number_is_chosen_first_unless_it_is_hidden():
    check_not_a_number(run)


@pytest.mark.parametrize("number", [50, -51])
def test_a_number_of_no_page_gives_nan(number):
    """A device cannot raise: nothing is read there, and its keys are chosen first, as all that is no number."""
    a = call(1, is_paged=True)
    assert len(a.key) == 50
    a.block_table[1, 2] = number
    indices, values = run(a)
    assert set(indices[1, 0, 0, :24].tolist()) == set(range(48, 72))
    assert bool(values[1, 0, 0, :24].isnan().all()) and bool(values[0].isfinite().all())


def test_infinity_among_the_keys_of_other_rows():
    """Heads and columns that fill up a tile add nothing."""
    a = call(2)
    a.key[0, 3] = torch.inf
    (_, found), (_, wanted) = run(a), lightning_index.body(a)
    torch.testing.assert_close(found, wanted, equal_nan=True, rtol=1e-3, atol=1e-3)


def test_other_devices_and_dtypes_are_refused():
    with pytest.raises(NoMatch, match="the kernel is for CUDA devices, and at most 32 bits"):
        lowering.lower(call(1))


@pytest.mark.slow
def test_drawn_calls():
    for seed in range(DRAWS):
        a = drawn(Random(seed))
        try:
            check(run(a), a)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}") from error


def drawn(random):
    batch, tokens, heads = random.randint(1, 3), random.randint(1, 5), random.choice((1, 3, 16, 70))
    width, page, columns = random.choice((8, 16, 20, 128)), random.choice((1, 4, 16)), random.randint(1, 40)
    context, seed = page * columns, random.randint(0, 2**20)
    is_paged = random.random() < 0.5
    rows = (batch * columns + 1, page) if is_paged else (batch, context)
    options = {"block_table": torch.randperm(batch * columns).view(batch, columns)} if is_paged else {}
    kind = random.choice(("nothing", "lengths", "bool", "added"))
    if kind == "lengths":
        options["context_lens"] = torch.tensor([random.randint(-3, context + 5) for _ in range(batch)])
    if kind == "bool":
        options["mask"] = draw(tokens, context, seed=seed) > 0
    if kind == "added":
        options["mask"] = draw(batch, 1, random.choice((1, tokens)), context, seed=seed)
    shapes = (batch, tokens, heads, width), (*rows, width), (batch, tokens, heads)
    query, key, weights = (draw(*shape, seed=seed + place) for place, shape in enumerate(shapes))
    return lightning_index.Arguments(query, key, weights, **options, sparse_count=random.randint(1, context + 2))
