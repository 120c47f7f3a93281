"""Mutated layers give the same results and leave the same caches, fused or not (see fuzz/__init__.py)."""

import ast
from random import Random

import pytest
import torch
from fuzz.bases import LAYERS, captured, may_stay_unfused
from fuzz.campaign import batches, campaign
from fuzz.compare import corrupted
from fuzz.draw import draw_scene, mutate
from fuzz.excused import excuse
from fuzz.found import FOUND
from fuzz.outside import LENIENT
from fuzz.power import fate
from fuzz.power import main as power
from fuzz.program import Seen, plainly
from fuzz.reduce import Mutant
from fuzz.scenes import SCENES

from mla_fx.comparing.verify import Verification

FAST = len(LAYERS)  # mutants of an ordinary test run: one of each layer, in one of its captures


def pytest_generate_tests(metafunc):
    if "numbers" not in metafunc.fixturenames:
        return
    total = metafunc.config.getoption("--fuzz") or FAST
    marks = [pytest.mark.every] if total > FAST else []
    found = (pytest.param(*batch, id=f"{batch[0]}-{batch[1].start}", marks=marks) for batch in batches(total, 200))
    metafunc.parametrize("base, numbers", list(found))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_mutants(base, numbers, request):
    seed = request.config.getoption("--fuzz-seed")
    results = list(campaign(base, seed, numbers))
    untouched = results[0].outcome
    assert untouched.is_failure or untouched.fused or may_stay_unfused(base), untouched
    failures = [
        f"{(result.reduced_outcome or result.outcome).verdict}: {(result.reduced_outcome or result.outcome).detail}\n"
        f"    {result.reduced or result.mutant}"
        for result in results
        if result.outcome.is_failure
    ]
    assert not failures, "\n" + "\n".join(failures)


def first_of_each_kind(found):
    """The others are slow."""
    for mutants in found.values():
        yield mutants[0]
        yield from (pytest.param(mutant, marks=pytest.mark.slow) for mutant in mutants[1:])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mutant", [*first_of_each_kind(FOUND)], ids=str)
def test_found(mutant):
    outcome = mutant.judge()
    assert outcome.verdict in ("fused", "unfused"), f"{outcome.verdict}: {outcome.detail}"


EXCUSED = [
    (Mutant("absorbed causal (float16)", (("nested", "_unsafe_view_3", -1, 1, 0.5, "fill"),)), "is not a number"),
    (Mutant("B=S (float32)", (("garbage", "arg10_1", 2, 9, 10, "3e38"),)), "garbage is not hidden"),
    (
        Mutant("S=N-combined_slots_in_two-split_again-gamma_in_float32 (float32)", (("loud", "arg3_1", -3, False),)),
        "edge",
    ),
]


FLAWED = [
    Mutant("best keys", (("flawed", "aten.topk.default", 3, 2),)),
    Mutant("quantised tokens", (("flawed", "aten.round.default", 5, -1),)),
]


@pytest.mark.refutes  # numbers that are none
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mutant, why", EXCUSED, ids=str)
def test_what_says_nothing_of_the_rewrite_is_no_failure(mutant, why):
    outcome = mutant.judge()
    assert outcome.verdict == "invalid"
    assert why in outcome.detail


def test_a_program_in_range_that_rounding_does_not_move_is_not_excused():
    for base in ("plain level (float16)", "B=S (float32)", "blind row (bfloat16)"):
        assert not excuse(captured(base), [])
    assert not excuse(captured("B=S (float32)"), [("garbage", "arg10_1", 2, 9, 10, "1")])


def test_what_an_error_leaves_may_be_rounded_otherwise_but_is_in_its_row():
    before = torch.zeros(4, 3, dtype=torch.bfloat16)
    row = torch.tensor([1.0, -0.5, 0.125], dtype=torch.bfloat16)
    written, rounded, elsewhere = before.clone(), before.clone(), before.clone()
    written[1], rounded[1], elsewhere[2] = row, row * (1 + 2**-7), row
    assert not corrupted((before,), [written], Seen((), (rounded,)))
    assert corrupted((before,), [written], Seen((), (elsewhere,)))


@pytest.mark.parametrize("scene", SCENES)
def test_a_scene_is_made_again_from_its_line(scene):
    bases = {"ranges": "plain level (float16)", "flaws": "best keys"}
    base = bases.get(scene, "two layers combined in two")
    mutant = Mutant(base, tuple(draw_scene(Random(7), captured(base), scene)))
    name, mutations = ast.literal_eval(str(mutant))
    assert Mutant(name, tuple(mutations)) == mutant
    assert mutant.judge().verdict != "hang"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mutant", FLAWED, ids=str)
def test_a_wrong_choice_that_verify_lets_pass_is_wrong(monkeypatch, mutant):
    assert mutant.judge().verdict == "fused"
    monkeypatch.setattr(Verification, "_check_compiled", lambda *_: "nothing was compared")
    assert mutant.judge().verdict == "wrong"


def test_a_program_that_raises_is_expected_to():
    """And no row is written except those in range."""
    program = mutate(captured("plain"), [("position", "arg9_1", 1, 8)])
    seen = plainly(program)
    assert "out of bounds" in seen.error
    cache, rows = torch.arange(8.0).view(4, 2), -torch.ones(3, 2)
    where = torch.tensor([0, 9, -2])
    for operator, index, kept in (("index_put", [where], [1, 3]), ("index_copy", 0, [1, 2, 3])):
        lenient = LENIENT[getattr(torch.ops.aten, operator).default]
        arguments = (index, rows) if operator == "index_put" else (index, where, rows)
        written = lenient(cache, *arguments)
        assert (written[kept] == cache[kept]).all()
        assert (written[[row for row in range(4) if row not in kept]] == -1).all()


def test_state_is_kept_from_call_to_call():
    program = mutate(captured("plain"), [("counter", 2), ("held", "state"), ("run_by", "reference", 3)])
    seen = plainly(program)
    assert seen.held["state"] == 6
    assert program.held()["state"] == 0, "the next run starts anew"


def removed(reached=1, **verdicts):
    wrong = [{"on": {"verdict": verdict}} for verdict, times in verdicts.items() for _ in range(times)]
    return fate({"reached": reached, "wrong": wrong})


def test_one_wrong_answer_that_the_check_does_not_see_is_a_miss():
    assert removed(reached=0) == "reached by no program"
    assert removed() == "no wrong answer"
    assert removed(refuted=2) == removed(refuted=1, error=1) == "caught"
    assert removed(refuted=2, wrong=1) == "missed"
    assert removed(error=1, hang=1) == "undecided"


@pytest.mark.campaign
def test_the_check_catches_what_a_missing_refusal_lets_through(capsys):
    """Pages of latents and of rotary keys that two tables tell, read by one."""
    assert not power(["--only", "are looked up by different tables", "--number", "0", "--tests"])
    assert "1 of 1 removals that led to wrong answers were caught" in capsys.readouterr().out
