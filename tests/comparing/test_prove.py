"""The option prove: plans with a planted fault are refused before they are made, right ones are not."""

import functools
import re
import subprocess
import sys
import warnings
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from lib.comparing import ALL, check_same, with_backend
from lib.faults import FAULTS, aten, changed, with_fault
from lib.layers import Rewritten
from lib.own_rules import EXAMPLE, forget
from lib.zoo.entries import Entry
from lib.zoo.mla import Spelling
from lib.zoo.sizes import FEW
from torch.fx.experimental.proxy_tensor import make_fx

import mla_fx
from mla_fx.cases import D, Layer, inputs
from mla_fx.comparing import plans
from mla_fx.comparing.region import UncheckedError
from mla_fx.comparing.small_sizes import of_cuts, of_views, small_sizes
from mla_fx.debug.report import Report
from mla_fx.driver import discovery
from mla_fx.graph.provenance import RULE
from mla_fx.options import Options
from mla_fx.passes import hoist, lower, prove

ABSORBED = Spelling(keys="absorbed_einsum", attend="eager")


@pytest.mark.refutes
@pytest.mark.parametrize(("operator", "fault"), FAULTS, ids=map(": ".join, FAULTS))
def test_a_plan_with_a_fault_is_refused(monkeypatch, operator, fault):
    """The model runs as it was; the report, a warning and `strict` tell which result would have changed."""
    monkeypatch.setattr(
        prove, "difference", lambda plan: plans.difference(with_fault(plan, operator, FAULTS[operator, fault]))
    )
    entry = Entry(ABSORBED)
    with pytest.warns(mla_fx.MlaWarning, match="a rewrite was wrong and was not made"), torch.no_grad():
        check_same(entry.build(), entry.arguments(FEW), Rewritten(entry.build()))
    report = mla_fx.last_report()
    assert operator not in report.fused
    assert any(" would change " in reason and ": at [" in reason for reason in report.refuted), report


@pytest.mark.refutes
def test_pages_of_another_sequence_are_refused(monkeypatch):
    """The first page alone is seen by all rows if positions are small, and may be the same one."""
    fault = changed("block_table", aten.flip.default, [0])
    monkeypatch.setattr(
        prove, "difference", lambda plan: plans.difference(with_fault(plan, "latent_attention", fault))
    )
    entry = Entry(replace(ABSORBED, cache="paged"))
    with pytest.warns(mla_fx.MlaWarning, match="a rewrite was wrong and was not made"), torch.no_grad():
        check_same(entry.build(), entry.arguments(FEW), Rewritten(entry.build()))
    assert any(" would change " in reason for reason in mla_fx.last_report().refuted)


@pytest.mark.slow
@pytest.mark.refutes
@pytest.mark.parametrize("fault", [("mla_prolog", "a sign"), ("latent_attention", "no mask")], ids=": ".join)
def test_a_dump_holds_a_program_that_shows_the_fault(monkeypatch, tmp_path, fault):
    monkeypatch.setattr(prove, "difference", lambda plan: plans.difference(with_fault(plan, fault[0], FAULTS[fault])))
    entry = Entry(ABSORBED)
    with pytest.warns(mla_fx.MlaWarning, match="a rewrite was wrong"), torch.no_grad():
        with_backend(entry.build(), dump=str(tmp_path))(*entry.arguments(FEW))
    reason = mla_fx.last_report().refuted[0]
    program = tmp_path / "reproducer_000" / "reproduce.py"
    assert reason.endswith(f". `python {program}` shows the difference with random inputs")
    ran = subprocess.run([sys.executable, program], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (1, "")
    assert re.match(r"\w+: fused and unfused are [\d.e+-]+ apart in float64, ", ran.stdout), ran.stdout


def test_the_same_plan_without_a_fault_is_made(monkeypatch):
    """Building the plan anew changes nothing."""
    monkeypatch.setattr(
        prove, "difference", lambda plan: plans.difference(with_fault(plan, "mla_prolog", lambda given: given))
    )
    entry = Entry(ABSORBED)
    with torch.no_grad():
        check_same(entry.build(), entry.arguments(FEW), with_backend(entry.build()))
    assert mla_fx.last_report().fused == ALL
    assert (mla_fx.last_report().checked, mla_fx.last_report().unchecked) == (3, [])  # two rules, and writes in place


@pytest.mark.refutes
@pytest.mark.slow
def test_a_lowering_with_a_fault_leaves_the_call(monkeypatch):
    """Inductor then compiles the operator itself."""
    lowered = lower.lowered

    def wrong(node, *given):
        function = lowered(node, *given)
        is_attention = node.target is torch.ops.mla_fx.attention.default

        def spoiled(*operands, **options):
            out, lse = function(*operands, **options)
            return out * 1.001, lse

        return spoiled if is_attention else function

    monkeypatch.setattr(lower, "lowered", wrong)
    entry = Entry(ABSORBED)
    with pytest.warns(mla_fx.MlaWarning, match="a rewrite was wrong and was not made"), torch.no_grad():
        check_same(entry.build(), entry.arguments(FEW), with_backend(entry.build(), target="inductor"))
    report = mla_fx.last_report()
    assert report.fused == ALL
    [reason] = report.refuted
    assert reason.startswith("the lowering of latent_attention would change getitem_4")
    assert f"latent_attention stays a call: {reason}" in report.notes


def scaled_twice(x, one, other):
    return x * (one + 1), x * (other + 1)


def hoisted():
    """The report, and what was taken out of a graph whose products were added by a rule."""
    run = SimpleNamespace(options=Options(), report=Report(), proved={})
    given = (torch.randn(3), torch.randn(3), torch.randn(3))
    graph = make_fx(scaled_twice, tracing_mode="fake")(*given).graph
    for product in graph.find_nodes(op="call_function", target=aten.mul.Tensor):
        product.meta[RULE] = "a test"
    _, *weights = graph.find_nodes(op="placeholder")
    return run.report, hoist.hoist(graph, {*weights}, functools.partial(prove.apply, run)).laid_out


@pytest.mark.refutes
def test_a_weight_in_place_of_another_one_stays_in_the_graph(monkeypatch):
    report, laid_out = hoisted()
    assert (report.checked, report.refuted, len(laid_out)) == (1, [], 2)  # of one kind
    monkeypatch.setattr(hoist, "key_of", lambda value, keys, calls: 0)
    report, laid_out = hoisted()
    assert (report.checked, len(laid_out)) == (1, 1)
    [reason] = report.refuted
    assert re.match(r"hoisting would change add_1: at \[\d\] it would be ", reason)


# --- a user's own rule -----------------------------------------------------------------------------------------------

UNNAMED = {
    'over="c")': 'over="c", name="up")',
    '"n v e", is_parameter=True))': '"n v e", is_parameter=True), name="out")',
}


@pytest.fixture
def careless(tmp_path, monkeypatch):
    """The rule of the example, with names for its products, so that it accounts for their factors: it forgets them."""
    monkeypatch.setattr(discovery, "_registered", [])
    text = EXAMPLE.read_text()
    for product, named in UNNAMED.items():
        assert product in text
        text = text.replace(product, named)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "own_output.py").write_text(text.replace('"latent_output"', '"careless"'))
    mla_fx.register_patterns(tmp_path / "mine")
    yield
    forget()


class Doubled(Layer):
    def attend(self, *operands):
        return super().attend(*operands) * 2.0


def run(case, **options):
    """A layer, eager and compiled; the report."""
    layer = case().eval()
    with torch.no_grad():
        check_same(layer, inputs(), with_backend(layer, **options))
    return mla_fx.last_report()


@pytest.mark.refutes
@pytest.mark.usefixtures("careless")
def test_a_rule_that_forgets_a_factor_is_refused():
    """Report and warning name the result that would change. Without the factor, the rule is applied."""
    with pytest.warns(mla_fx.MlaWarning) as caught:
        report = run(Doubled)
    assert report.fused == ALL
    (reason,) = report.refuted
    assert re.sub(r"-?\d+(\.\d+)?(?=\D|$)", "#", reason.partition(": ")[2]) == "at [#, #] it would be # for #"
    assert reason.startswith("own_output would change mm_4: ")
    assert [str(warning.message) for warning in caught] == [f"mla_fx: a rewrite was wrong and was not made: {reason}"]
    torch._dynamo.reset()
    with pytest.raises(mla_fx.FusionError, match="a rewrite was wrong and was not made: own_output would change"):
        run(Doubled, strict=True)
    torch._dynamo.reset()
    assert run(Layer).fused == {**ALL, "careless": 1}


@pytest.mark.usefixtures("careless")
def test_without_the_check_the_answer_is_wrong():
    with pytest.raises(AssertionError):
        run(Doubled, prove="off")


class TwiceTheKeys(Layer):
    """A layer that differs from DeepSeek's only in what it makes of the latents."""

    def keys(self, latent, k_rope):
        key, value = super().keys(latent, k_rope)
        return torch.cat((2 * key[..., :D], key[..., D:]), dim=-1), -value


def test_a_layer_with_other_keys_and_values_is_fused_rightly_or_not_at_all():
    report = run(TwiceTheKeys)
    assert report.refuted == [] and report.checked, report


# --- what cannot be checked ------------------------------------------------------------------------------------------


def unchecked(plan):
    raise UncheckedError("its tensors are too large to be computed")


@pytest.mark.parametrize(("prove_", "fused"), [("on", ALL), ("off", ALL), ("required", {})])
def test_what_cannot_be_checked_is_made_unless_that_is_required(monkeypatch, prove_, fused):
    monkeypatch.setattr(prove, "difference", unchecked)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", mla_fx.MlaWarning)
        report = run(Layer, prove=prove_)
    told = "mla_attention could not be checked: its tensors are too large to be computed"
    assert report.fused == fused
    assert (told in report.unchecked) == (prove_ == "on")
    assert any(miss.reason == told for miss in report.misses) == (prove_ == "required")


# --- small sizes -----------------------------------------------------------------------------------------------------


def test_sizes_become_small_and_keep_their_sums_and_products():
    """The sizes are those of a decode step of DeepSeek-V3."""
    equations = [
        *of_views((1, 1, 24576), (1, 1, 128, 192)),
        *of_views((512, 32768), (512, 128, 256)),
        *of_cuts(128, 192),
        *of_cuts(512, 576),
        *of_cuts(128, 256),
        *of_cuts(32, 64),
    ]
    small = small_sizes([1, 7168, 1536, 576, 4096], equations)
    # fmt: off
    assert dict(small) == {
        1: 1, 32: 5, 64: 10, 128: 6, 192: 16, 256: 12, 512: 7, 576: 17,
        1536: 8, 4096: 9, 7168: 10, 24576: 96, 32768: 72,
    }
    # fmt: on


def test_sizes_that_contradict_each_other_stay():
    """12 is 3 times 4, and 5 plus 7."""
    small = small_sizes([100], [*of_views((36,), (6, 6)), *of_cuts(6, 36)])
    assert small[36] == small[6] ** 2 == small[6] + small[30]
