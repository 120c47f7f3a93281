"""`python -m mla_fx bisect`: which rewrite it finds, and that runs do not see each other."""

import json
import math

import pytest
import torch
from lib.plants import plant, unproved
from torch import nn

from mla_fx import cases
from mla_fx.__main__ import main
from mla_fx.commands import bisect as command
from mla_fx.commands.bisect import Answers, bisect
from mla_fx.passes import absorb

STACK = """
from mla_fx import cases
from torch import nn

class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(cases.Layer() for _ in range({count}))

    def forward(self, x, *rest):
        for layer in self.layers:
            x = x + layer(x, *rest)
        return x

def build():
    return Stack(), cases.inputs()
"""


@pytest.fixture
def stack(tmp_path):
    def script(count):
        (path := tmp_path / "script.py").write_text(STACK.format(count=count))
        return str(path)

    return script


def test_a_right_program_takes_one_compilation(stack, capsys):
    assert main(["bisect", stack(1)]) == 0
    first, last = capsys.readouterr().out.splitlines()
    assert first.startswith("4 rewrites: right, ")
    assert last.startswith("Nothing is wrong: with all 4 rewrites, ")


def test_a_program_in_which_nothing_fuses_was_not_rewritten(tmp_path, capsys):
    (path := tmp_path / "script.py").write_text(
        "import torch\ndef build(): return torch.nn.Linear(3, 3), (torch.ones(1, 3),)"
    )
    assert main(["bisect", str(path)]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("Nothing was rewritten. ")


def test_the_guilty_rewrite_is_found(monkeypatch, stack, capsys):
    plant(monkeypatch, "scale 1 % off", ".layers.1.")
    assert main(["bisect", stack(2), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    guilty = found["guilty"]
    assert (guilty["pattern"], guilty["module"], guilty["number"]) == ("mla_attention", "layers.1", 2)
    assert guilty["source"].startswith(cases.__file__) and guilty["calls"] == ["mla_attention"]
    assert guilty["before"] < 1e-5 < 1e-4 < guilty["after"]
    assert [step["rewrites"] for step in found["steps"]] == [6, 0, 3, 1, 2]
    assert [step["wrong"] for step in found["steps"]] == [True, False, True, False, True]


def test_a_wrong_cache_is_found_by_its_name(monkeypatch, stack, capsys):
    plant(monkeypatch, "rows written one slot further")
    assert main(["bisect", stack(1)]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("Rewrite 3 of 4 is the first that changes an answer: mla_prolog in layers.0 (")
    assert "which adds mla_prolog. layers.0.k" in last
    assert last.endswith("MLA_FX_FUEL=2 stops before it.")


def test_a_wrong_pass_is_found_by_its_name(monkeypatch, stack, capsys):
    unproved(monkeypatch)
    right = absorb.absorb_query
    monkeypatch.setattr(absorb, "absorb_query", lambda query, weight: right(query, weight) * 1.05)
    assert main(["bisect", stack(1)]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert "is the first that changes an answer: choose absorbed or expanded, which adds no fused operator" in last


class Unlike(nn.Module):
    """A program that knows whether it is compiled."""

    def forward(self, x):
        return x * 2 if torch.compiler.is_compiling() else x * 1


def test_a_difference_without_rewrites_is_no_rewrites_fault():
    found = bisect((Unlike(), (torch.ones(3),), {}), "reference")
    assert [step.fuel for step in found.steps] == [0, 0]
    assert (found.wrong, found.right, found.guilty) == (found.steps[1], None, None)
    assert str(found) == "No rewrite is guilty: without any, output already has error 1.0e+00."


def test_a_rewrite_that_makes_the_program_fail_is_guilty(monkeypatch):
    attempt = command._attempt

    def failing(answers, judge, target, limit):
        step = attempt(answers, judge, target, limit)
        return step if step.fuel < 3 else command.Step(step.fuel, {}, step.rewrites, "the run raises ValueError: no;")

    monkeypatch.setattr(command, "_attempt", failing)
    found = bisect((cases.Layer(), cases.inputs(), {}), "reference")
    assert (found.guilty.pattern, found.wrong.worst.error) == ("mla_prolog", math.inf)
    assert "the run raises ValueError: no; error" in str(found.wrong)


# --- runs ------------------------------------------------------------------------------------------------------------


class Counting(nn.Module):
    """What a run leaves behind: in a buffer, in a plain attribute, in nested arguments, and in two views of one
    memory."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.kept = [torch.zeros(2)]

    def forward(self, x, views, *, cache):
        self.count += 1
        self.kept[0] += x
        views[0].add_(1)
        cache["rows"][1].mul_(2)
        return {"sum": x + views[1] + self.count, "cache": cache}


def counting():
    whole, generator = torch.zeros(2), torch.Generator().manual_seed(0)
    x = torch.randn(2, generator=generator)
    return Counting(), (x, (whole, whole[:])), {"cache": {"rows": [torch.ones(2), torch.ones(2)]}}


def test_runs_start_alike_and_leave_the_program_as_it_was():
    answers = Answers(counting())
    first, second = answers.of(), answers.of()
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    assert {"output.sum", "argument cache.rows[1]", "count", "kept[0]", "argument 1[0]"} <= set(first)
    torch.testing.assert_close(first["output.sum"], counting()[1][0] + 2)
    torch.testing.assert_close(dict(answers.of(lambda f: f)), dict(first), rtol=0, atol=0)
    assert answers.call[0].count == 0 and answers.call[2]["cache"]["rows"][1].eq(1).all()


def test_exact_answers_are_in_float64_and_views_share_memory():
    judge = Answers(counting()).judge()
    assert judge.exact["output.sum"].dtype == torch.float64
    torch.testing.assert_close(judge.exact["output.sum"].float(), judge.plain["output.sum"])
    assert all(one.share <= 1 for one in judge.of(judge.plain).values())


def test_each_result_is_judged():
    judge = Answers(counting()).judge()
    for name, value in judge.plain.items():
        wrong = {**judge.plain, name: value + 1}
        assert [one.what for one in judge.of(wrong).values() if not one.share <= 1] == [name]


class Half(nn.Module):
    """Runs in bfloat16 only."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 2, dtype=torch.bfloat16))

    def forward(self, x):
        return x.bfloat16() @ self.weight


def test_eager_mode_is_exact_where_float64_fails():
    judge = Answers((Half(), (torch.ones(1, 2),), {})).judge()
    assert judge.exact is None
    off = {"output": judge.plain["output"] * 1.01}, {"output": judge.plain["output"] * 1.1}
    assert [judge.of({**judge.plain, **one})["output"].share <= 1 for one in off] == [True, False]


# --- complaints ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, complaint",
    [
        ("", "defines no build()"),
        ("def build(): return (lambda: 1 / 0), ()", "the program fails in eager mode: ZeroDivisionError"),
    ],
)
def test_a_script_that_does_not_run_is_a_sentence(tmp_path, capsys, text, complaint):
    (script := tmp_path / "script.py").write_text(text)
    assert main(["bisect", str(script)]) == 2
    message = capsys.readouterr().err
    assert complaint in message and message.count("\n") == 1


def test_an_unknown_target_is_a_sentence(stack, capsys):
    assert main(["bisect", stack(1), "--target", "abacus"]) == 2
    assert "unknown target 'abacus'" in capsys.readouterr().err
