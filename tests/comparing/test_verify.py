"""The option verify: which faults it finds and how it names them, what it accepts, and that it leaves no trace."""

import copy
import math
import re

import pytest
import torch
from lib.comparing import check_same, compiled
from lib.plants import FAULTS, plant, plant_in_lowering
from lib.zoo.entries import DEFAULT, Entry
from lib.zoo.sizes import DECODE, PREFILL
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_map

import mla_fx
from mla_fx import cases
from mla_fx.comparing.closeness import closeness, distance
from mla_fx.comparing.verify import Verification
from mla_fx.debug.report import Report

pytestmark = pytest.mark.usefixtures("no_gradients", "own_temporary_folder")
aten = torch.ops.aten
HALVES = torch.bfloat16, torch.float16


def of_dtype(dtype, value):
    def cast(leaf):
        return leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf

    return tree_map(cast, value)


class Model(nn.Module):
    """A layer with its own path."""

    def __init__(self):
        super().__init__()
        self.attention = cases.Layer()

    def forward(self, *given):
        return self.attention(*given)


@pytest.mark.slow
@pytest.mark.parametrize("verify", ["first", "always"])
@pytest.mark.parametrize("step", [PREFILL, DECODE], ids=lambda step: step.name)
def test_verify_takes_a_good_graph(verify, step):
    entry = Entry(DEFAULT)
    module = entry.build()
    run = compiled(module, verify=verify)
    for _ in range(2):
        check_same(module, entry.arguments(step), run)
    report = mla_fx.last_report()
    assert report.fused
    assert len(report.verified) == (1 if verify == "first" else 2)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["reference", "inductor"])
@pytest.mark.parametrize("dtype", HALVES)
def test_the_report_says_what_was_measured(dtype, target):
    entry = Entry(DEFAULT)
    arguments = of_dtype(dtype, entry.arguments(DECODE))
    compiled(entry.build().to(dtype), verify="first", target=target)(*arguments)
    number = r"\d\.\de[-+]\d+"
    (line,) = mla_fx.last_report().verified
    assert re.fullmatch(
        rf"call 1: rules agree in float64 to {number}; input caches\[0\] error {number} \(unfused {number}\), "
        rf"output 0 error {number} \(unfused {number}\)",
        line,
    )
    assert f"verify: {line}" in str(mla_fx.last_report())


def test_zeros_are_as_close_as_can_be():
    """A result may be zero everywhere, as numbers that a model keeps."""
    zeros, ones = torch.zeros(3), torch.ones(3)
    assert distance(zeros.double(), zeros.double()) == 0.0
    assert distance(ones.double(), zeros.double()) == math.inf
    assert closeness("zeros", zeros.clone(), zeros, zeros.double()) == ("zeros", 0.0, 0.0, 0.0)
    assert closeness("zeros", ones, zeros, zeros.double()).share == math.inf


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("fault", FAULTS)
def test_verify_finds_a_wrong_rule(monkeypatch, fault, dtype):
    module, arguments = Entry(DEFAULT).build().to(dtype), of_dtype(dtype, Entry(DEFAULT).arguments(DECODE))
    before = copy.deepcopy(arguments)
    plant(monkeypatch, fault)
    with pytest.raises(mla_fx.VerificationError, match=r"call 1: in float64, .* of the fused graph is"):
        compiled(module, verify="first")(*arguments)
    torch.testing.assert_close(arguments, before, rtol=0, atol=0)  # nothing was run that writes


@pytest.mark.parametrize("fault, named", [("scale 1 % off", "mla_attention"), ("rotation the other way", "mla_prolog")])
def test_a_wrong_rule_is_named_with_its_layer(monkeypatch, fault, named):
    plant(monkeypatch, fault)
    with pytest.raises(mla_fx.VerificationError, match=rf"in attention, added by (\w+, )*{named}"):
        compiled(Model(), verify="first")(*cases.inputs())


@pytest.mark.slow
def test_verify_finds_a_wrong_lowering(monkeypatch):
    plant_in_lowering(monkeypatch)
    with pytest.raises(mla_fx.VerificationError, match=r"output 0 of the compiled graph is .* away from the exact one"):
        compiled(Model(), verify="first", target="inductor")(*cases.inputs())


# --- nothing is run twice --------------------------------------------------------------------------------------------


class Counting(cases.Layer):
    """Calls are counted in a parameter, and what each has seen in another, two parts of one memory."""

    def __init__(self):
        super().__init__()
        self.count = nn.Parameter(torch.zeros((), dtype=torch.int64), requires_grad=False)
        self.seen = nn.Parameter(torch.zeros(2, 8), requires_grad=False)

    def forward(self, x, *rest):
        self.count.add_(1)
        self.seen[0].add_(x.flatten()[:8])
        return super().forward(x, *rest) + self.seen.sum(), self.count


@pytest.mark.parametrize("verify", ["first", "always"])
def test_state_in_parameters_is_written_once(verify):
    model, plain = Counting(), Counting()
    run = compiled(model, verify=verify)
    for calls in (1, 2, 3):
        torch.testing.assert_close(run(*cases.inputs()), plain(*cases.inputs()), rtol=1e-4, atol=1e-5)
        assert model.count == calls
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[name], rtol=1e-4, atol=1e-5)
    assert mla_fx.last_report().fused


class Halves(cases.Layer):
    """Both caches are views of one memory, and what is written to one is read through the whole."""

    def __init__(self):
        super().__init__()
        self.whole = torch.cat((self.kv_cache, self.kr_cache), -1)

    def forward(self, x, cos, sin, position, whole, latents, keys):
        self.views = latents, keys
        return super().forward(x, cos, sin, position) + whole.sum()

    def store(self, latent, k_rope, position):
        latents, keys = self.views
        latents.index_copy_(2, position, latent)
        keys.index_copy_(2, position, k_rope)
        return latents, keys


def test_inputs_that_share_memory_share_it_for_the_unfused_graph():
    model, results = Halves(), []
    for run in (compiled(model, verify="always"), model):
        whole = model.whole.clone()
        views = whole[..., : cases.HCKV], whole[..., cases.HCKV :]
        results.append(([run(*cases.inputs(), whole, *views) for _ in range(2)], whole))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


class Pages(cases.Layer):
    """Rows are written by slot through a view of the pages, and read through a table."""

    def __init__(self):
        super().__init__()
        self.pool = nn.Buffer(torch.randn(8, 4, cases.HCKV + cases.DR))

    def forward(self, x, cos, sin, position, slots, table):
        self.slots, self.table = slots, table
        return super().forward(x, cos, sin, position)

    def store(self, latent, k_rope, position):
        rows = torch.cat((latent, k_rope), -1).flatten(0, 2)
        self.pool.view(-1, rows.shape[-1])[self.slots] = rows
        held = self.pool[self.table].flatten(1, 2).unsqueeze(1)
        return held[..., : cases.HCKV], held[..., cases.HCKV :]


@pytest.mark.parametrize("target", ["reference", pytest.param("inductor", marks=pytest.mark.slow)])
def test_rows_written_through_a_view(target):
    model = Pages()
    plain, run = copy.deepcopy(model), compiled(model, verify="always", target=target)
    table = torch.arange(8).view(2, 4)
    for slots in (torch.tensor([3, 4, 5, 19, 20, 21]), torch.tensor([6, 7, 8, 22, 23, 24])):
        given = *cases.inputs(), slots, table
        torch.testing.assert_close(run(*given), plain(*given), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model.pool, plain.pool, rtol=1e-4, atol=1e-5)
    assert len(mla_fx.last_report().verified) == 2, str(mla_fx.last_report())


def test_a_part_of_an_input_may_be_written():
    """And what is written to it is compared."""

    def function(value):
        value[1:].mul_(2)
        return (value.sum(),)

    def wrong(value):
        value[1:].mul_(2)
        total = value.sum()
        value[0] += 1
        return (total,)

    def traced(value):
        aten.mul_.Tensor(aten.slice.Tensor(value, 0, 1, 9), 2)
        return (value.sum(),)

    around, _ = held(traced, torch.ones(5))
    around(function)(torch.ones(5))
    with pytest.raises(mla_fx.VerificationError, match="input value_1 of the compiled graph"):
        around(wrong)(torch.ones(5))


class Noisy(cases.Layer):
    def forward(self, x, *rest):
        return super().forward(x, *rest) + torch.rand_like(x)


def test_random_numbers_are_those_that_come_without_verify():
    drawn = []
    for verify in ("off", "always"):
        torch._dynamo.reset()
        torch.manual_seed(0)
        run = compiled(Noisy(), verify=verify)
        drawn.append([run(*cases.inputs()) for _ in range(2)] + [torch.rand(3)])
    torch.testing.assert_close(*drawn, rtol=0, atol=0)
    assert mla_fx.last_report().fused


# --- what was compiled, for itself -----------------------------------------------------------------------------------


def graph_of(function, *inputs):
    return make_fx(function)(*copy.deepcopy(inputs))


def held(function, *inputs, once=False):
    """`around` of a graph in which nothing fused, and the report that it writes to."""
    report, gm = Report(), graph_of(function, *inputs)
    return Verification(gm, gm, report.verified, once).around, report


def doubled(value):
    new = value * 2
    value.copy_(new)
    return (new + 1,)


def test_verify_finds_a_wrong_cache():
    def wrong(value):
        value.mul_(2).view(-1)[3] += 1e-4
        return (torch.ones(5) * 2 + 1,)

    around, _ = held(doubled, torch.ones(5))
    with pytest.raises(
        mla_fx.VerificationError, match=r"call 1: input value_1 of the compiled graph is 4\.99e-05 away"
    ):
        around(wrong)(torch.ones(5))


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_verify_finds_nan_and_infinity(wrong):
    around, _ = held(lambda value: (value * 2,), torch.ones(5))
    with pytest.raises(mla_fx.VerificationError, match="output 0 of the compiled graph is inf away"):
        around(lambda value: (value * wrong,))(torch.ones(5))


def test_nan_and_infinity_of_the_program_are_let_pass():
    given = torch.tensor([1.0, torch.nan, torch.inf, -torch.inf, 70000.0])
    around, report = held(lambda value: (value.half() * 2,), given)
    around(lambda value: (value.half() * 2,))(given)
    assert report.verified == ["call 1: rules agree in float64 to 0.0e+00; output 0 error 0.0e+00 (unfused 0.0e+00)"]


def test_a_row_that_attends_to_nothing_is_let_pass_and_said():
    """NaN by a plain softmax, zeros by fused attention, as the documentation says."""

    class Blind(cases.Layer):
        def attend(self, q_nope, q_rope, latent, k_rope, mask):
            key, value = self.keys(latent, k_rope)
            scores = torch.cat((q_nope, q_rope), dim=-1) @ key.transpose(-1, -2)
            hidden = torch.arange(q_nope.shape[2]).unsqueeze(-1) == 0
            return scores.masked_fill(hidden, -torch.inf).softmax(-1) @ value

    out = compiled(Blind(), verify="always")(*cases.inputs())
    report = mla_fx.last_report()
    assert report.fused and out.isfinite().all()
    assert f"{cases.B * cases.HE} numbers in rows that attend to nothing: NaN unfused" in report.verified[0]


def test_whole_numbers_and_flags_must_be_the_same():
    around, _ = held(lambda value: (value + 1, value > 2), torch.arange(4))
    around(lambda value: (value + 1, value > 2))(torch.arange(4))
    with pytest.raises(mla_fx.VerificationError, match="output 1 "):
        around(lambda value: (value + 1, value > 1))(torch.arange(4))


@pytest.mark.parametrize("gap, is_held", [(1e-8, False), (0.1, True)])
def test_a_choice_that_rounding_may_turn_over_is_left_out(gap, is_held):
    """Two experts; which one is better shows in float64, and in float32 only if it is better by far."""
    scores, experts = torch.tensor([[0.7 - gap], [0.7]], dtype=torch.float64), torch.randn(2, 3)

    def route(x):
        best = ((scores.float() * 3.3) @ x).topk(1, 0).indices
        return (experts[best.flatten()],)

    x = torch.full((1, 1), 0.3)
    around, report = held(route, x)
    other = around(lambda x: (experts.flip(0)[((scores.float() * 3.3) @ x).topk(1, 0).indices.flatten()],))
    if is_held:
        with pytest.raises(mla_fx.VerificationError, match="output 0"):
            other(x)
    else:
        other(x)
        assert "1 results differ by no more than choices that rounding may flip" in report.verified[0]


@pytest.mark.parametrize("once, runs", [(True, 1), (False, 3)])
def test_how_often_verify_compares(once, runs):
    around, report = held(lambda value: (value + 1,), torch.ones(5), once=once)
    run = around(lambda value: (value + 1,))
    for _ in range(3):
        run(torch.ones(5))
    assert [line.split(":")[0] for line in report.verified] == [f"call {number + 1}" for number in range(runs)]
