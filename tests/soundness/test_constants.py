"""Which numbers are compile-time constants: literals, which nothing can change, as their dtype stores them."""

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import mla_fx
from mla_fx.cases import DR, D, Layer, inputs
from mla_fx.graph.torch_private import make_fx
from mla_fx.readings.constant import constant

pytestmark = [pytest.mark.filterwarnings("ignore::mla_fx.MlaWarning"), pytest.mark.usefixtures("no_gradients")]
KEY_SIDE = {"kv_rmsnorm_rope_cache": 1, "mla_attention": 1}
SCALE = (D + DR) ** -0.5


class Scaled(Layer):
    """Scores are scaled by a value of one element, and the model may write it afterwards."""

    def __init__(self):
        super().__init__()
        self.keep()

    def keep(self):
        self.register_buffer("scale", torch.tensor(SCALE))

    def attend(self, q_nope, q_rope, latent, k_rope, mask):
        key, value = self.keys(latent, k_rope)
        scores = torch.cat((q_nope, q_rope), dim=-1) @ key.transpose(-1, -2) * self.read() + mask
        self.write(scores)
        return scores.softmax(-1) @ value

    def read(self):
        return self.scale

    def write(self, scores):
        pass


class Rewritten(Scaled):
    def write(self, scores):
        self.scale.copy_(scores[0, 0, 0, 0].sigmoid())


class Passing(Rewritten):
    """A buffer that no state_dict holds."""

    def keep(self):
        self.register_buffer("scale", torch.tensor(SCALE), persistent=False)


class Misnamed(Rewritten):
    """A buffer with the name that tracing gives to literals."""

    def keep(self):
        self.register_buffer("_tensor_constant0", torch.tensor(SCALE))

    def read(self):
        return self._tensor_constant0

    def write(self, scores):
        self._tensor_constant0.copy_(scores[0, 0, 0, 0].sigmoid())


class Learnt(Scaled):
    def keep(self):
        self.scale = nn.Parameter(torch.tensor(SCALE))


class Literal(Scaled):
    def keep(self):
        pass

    def read(self):
        return torch.tensor(SCALE)


class Copied(Scaled):
    """A copy of the buffer is no literal."""

    def read(self):
        return self.scale.clone()


class TwoNames(Rewritten):
    """The buffer is read under another name, under which it is not registered, so an export treats it as a constant."""

    def __init__(self):
        super().__init__()
        self.alias = self.scale

    def read(self):
        return self.alias


class Named(Scaled):
    """A buffer with the name that tracing gives to literals, and no write."""

    def keep(self):
        self.register_buffer("_tensor_constant0", torch.tensor(SCALE))

    def read(self):
        return self._tensor_constant0


class Lifted(Scaled):
    """The same for the name that an export gives to literals."""

    def keep(self):
        self.register_buffer("lifted_tensor_0", torch.tensor(SCALE))

    def read(self):
        return self.lifted_tensor_0


class SeenError(Exception):
    """Nothing has to be compiled after the pass has seen the graph."""


class Seen(mla_fx.MlaPass):
    """The pass inside Inductor, which stops after it."""

    module = None

    def __call__(self, graph, *rest, **given):
        super().__call__(graph, *rest, **given)
        Seen.module = graph.owning_module
        raise SeenError("seen")

    def uuid(self):
        return None


def packaged(layer, **config):
    """What the pass makes of the graph that AOTInductor packages, and its report."""
    program, graph_pass = torch.export.export(layer, inputs()), Seen(target="inductor")
    patched = torch._inductor.config.patch(post_grad_custom_pre_pass=graph_pass, **config)
    with patched, pytest.raises(Exception, match="seen"):
        torch._inductor.aoti_compile_and_package(program)
    run = torch.fx.Interpreter(Seen.module).run
    return lambda *given: run(*given, enable_io_processing=False)[0], graph_pass.report


def exported(layer):
    """The graph of an exported program, its state held by attributes, as a user may hand it to the pass."""
    module = torch.export.export(layer, inputs()).run_decompositions().module()
    graph_pass = mla_fx.MlaPass(target="reference")
    graph_pass(module)
    return module, graph_pass.report


CHANGING = [Rewritten, Passing, Misnamed, Named, Lifted, Scaled, Copied, Learnt]
NAMES = ("scale", "_tensor_constant0", "lifted_tensor_0")


@pytest.mark.slow
@pytest.mark.parametrize("kind", CHANGING)
def test_what_a_user_can_write_is_no_constant_of_an_exported_program(kind):
    theirs = kind().eval()
    ours, report = exported(copy.deepcopy(theirs))
    for _ in range(2):
        torch.testing.assert_close(ours(*inputs()), theirs(*inputs()), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(dict(ours.named_buffers()), dict(theirs.named_buffers()), rtol=1e-4, atol=1e-5)
        for module in (ours, theirs):
            state = {**dict(module.named_buffers()), **dict(module.named_parameters())}
            next(state[name] for name in NAMES if name in state).mul_(0.5)
    assert report.fused == {}, str(report)
    assert any(f"multiplied by the attribute {name}" in report.misses[0].reason for name in NAMES), str(report)


def test_a_literal_is_a_constant_of_an_exported_program():
    theirs = Literal().eval()
    ours, report = exported(copy.deepcopy(theirs))
    assert report.fused.get("latent_attention"), str(report)
    torch.testing.assert_close(ours(*inputs()), theirs(*inputs()), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Rewritten, Misnamed, TwoNames, Named])
def test_what_may_change_is_no_constant_of_a_package(kind):
    theirs = kind().eval()
    ours, report = packaged(copy.deepcopy(theirs))
    for _ in range(2):
        torch.testing.assert_close(ours(*inputs()), theirs(*inputs()), rtol=1e-4, atol=1e-5)
    assert report.fused == {}, str(report)
    assert "multiplied by the attribute" in report.misses[0].reason, str(report)


def test_a_literal_is_a_constant_of_a_package():
    theirs = Literal().eval()
    ours, report = packaged(copy.deepcopy(theirs))
    assert report.fused.get("latent_attention"), str(report)
    torch.testing.assert_close(ours(*inputs()), theirs(*inputs()), rtol=1e-4, atol=1e-5)


class Numbers(nn.Module):
    """One that is frozen, and one that is written, which cannot be."""

    def __init__(self):
        super().__init__()
        self.register_buffer("still", torch.tensor(0.25))
        self.register_buffer("moving", torch.tensor(0.5))

    def forward(self, x):
        out = x * self.still - self.moving
        self.moving.add_(1)
        return out


def test_what_a_user_had_frozen_is_a_constant():
    found = []

    class Reading(mla_fx.MlaPass):
        def __call__(self, graph, *rest, **options):
            given = (node for node in graph.nodes if node.op in ("get_attr", "placeholder"))
            found.extend(constant(node) for node in given if node.meta["val"].ndim == 0)
            raise SeenError("seen")

        def uuid(self):
            return None

    patched = torch._inductor.config.patch(post_grad_custom_pre_pass=Reading(), freezing=True)
    with patched, pytest.raises(Exception, match="seen"):
        torch.compile(Numbers().eval(), fullgraph=True)(torch.ones(3))
    assert sorted(found, key=str) == [0.25, None]


# --- numbers as their type holds them --------------------------------------------------------------------------------

WHOLE = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
FLOATING = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
EDGES = [edge for bits in (7, 8, 15, 16, 31, 32, 53, 63) for edge in (2**bits - 1, 2**bits, -(2**bits), -(2**bits) - 1)]
WHOLE_NUMBERS = st.one_of(st.integers(-(2**63), 2**63 - 1), st.integers(-300, 300), st.sampled_from(EDGES))
FRACTIONS = st.one_of(st.floats(), st.floats(-300, 300))
SPELLINGS = {
    "full": lambda number, dtype: torch.full((2,), number, dtype=dtype),
    "full_like": lambda number, dtype: torch.full_like(torch.ones(2, dtype=dtype), number),
    "scalar_tensor": lambda number, dtype: torch.scalar_tensor(number, dtype=dtype),
    "literal": lambda number, dtype: torch.tensor(number, dtype=dtype),
    "inferred": lambda number, dtype: torch.full((2,), number).to(dtype),
    "cast": lambda number, dtype: torch.full((2,), number, dtype=torch.float32).to(dtype),
    "there and back": lambda number, dtype: torch.full((2,), number).to(dtype).to(torch.float32).expand(3, 2),
    "whole in between": lambda number, dtype: torch.full((2,), number, dtype=dtype).to(torch.int32).to(torch.float64),
}


def known_and_held(spelling, number, dtype):
    """What is read from a graph that only fills a tensor, and what PyTorch puts into the tensor."""
    try:
        graph = make_fx(lambda: SPELLINGS[spelling](number, dtype))()
    except (RuntimeError, OverflowError, ValueError):  # out of the range of the type
        return None
    return constant(graph.graph.output_node().args[0]), graph().flatten()[0].item()


@pytest.mark.slow
@pytest.mark.parametrize("spelling", SPELLINGS)
@settings(max_examples=150, deadline=None)
@given(number=st.one_of(WHOLE_NUMBERS, FRACTIONS), dtype=st.sampled_from(WHOLE + FLOATING))
def test_a_number_is_what_its_type_holds(spelling, number, dtype):
    found = known_and_held(spelling, number, dtype)
    if found is None or found[0] is None:
        return
    known, held = found
    assert known == held or (math.isnan(known) and math.isnan(held)), (known, held)


@pytest.mark.parametrize("dtype", WHOLE)
@pytest.mark.parametrize("number", [0, 7, 1.9, 100.5, -1.9, -7])
def test_numbers_in_range_are_known(number, dtype):
    if dtype is torch.uint8 and number < 0:
        return
    for spelling in SPELLINGS:
        assert known_and_held(spelling, number, dtype) == (int(number), int(number))


@pytest.mark.parametrize("dtype", [torch.bool, torch.complex64])
def test_flags_and_complex_numbers_are_no_numbers(dtype):
    assert known_and_held("full", 1, dtype)[0] is None
