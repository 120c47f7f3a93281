"""Sizes of one, equal sizes, sizes known only at run time, and other names for one operation: the same fuses."""

import copy
from dataclasses import replace

import pytest
import torch
from lib.families import Recorder
from lib.zoo.entries import DEFAULT, Entry
from lib.zoo.sizes import DECODE, FEW, PREFILL, SMALL, Step
from torch import nn

from mla_fx import cases
from mla_fx.cases import DR, DV, HCKV, D, N

pytestmark = pytest.mark.usefixtures("no_gradients")
CLOSE = {"rtol": 1e-4, "atol": 1e-5}
ALL = {"mla_prolog": 1, "latent_attention": 1}
ALIKE = {"heads": 4, "nope": 4, "rope": 4, "value": 4, "q_rank": 4, "kv_rank": 4, "hidden": 4, "context": 4}
ONES = {"heads": 1, "nope": 1, "rope": 2, "value": 1, "q_rank": 1, "kv_rank": 1, "hidden": 1}
SIZES = {
    "one head": ({"heads": 1}, FEW),
    "one pair to rotate": ({"rope": 2}, FEW),
    "one column that is not rotated": ({"nope": 1}, FEW),
    "one column of values": ({"value": 1}, FEW),
    "a query of rank one": ({"q_rank": 1}, FEW),
    "latents of rank one": ({"kv_rank": 1}, FEW),
    "one column of hidden states": ({"hidden": 1}, FEW),
    "ones": (ONES, Step("one token of one sequence", 1, 6, 1)),
    "as many heads as tokens": ({"heads": 3}, FEW),
    "as many heads as sequences": ({"heads": 2}, DECODE),
    "as many heads as tokens and sequences": ({"heads": 2}, Step("two of each", 2, 6)),
    "as many slots as columns": ({"nope": 32, "kv_rank": 32}, DECODE),
    "as many slots as sequences": ({}, Step("32 sequences", 1, 6, SMALL.context)),
    "latents of the query's rank": ({"q_rank": 20}, FEW),
    "parts of the query alike": ({"nope": 6, "value": 6}, FEW),
    "all alike": (ALIKE, Step("alike", 4, 0, 4)),
}


def check(module, arguments, fused, tolerance=CLOSE, **options):
    """What is returned, the arguments and the module's own caches afterwards, and what fused."""
    theirs, ours, mine, recorder = copy.deepcopy(arguments), copy.deepcopy(arguments), copy.deepcopy(module), Recorder()
    expected = module(*theirs)
    found = torch.compile(mine, backend=recorder, fullgraph=True, **options)(*ours)
    torch.testing.assert_close((found, ours), (expected, theirs), **tolerance)
    torch.testing.assert_close(dict(mine.named_buffers()), dict(module.named_buffers()), **tolerance)
    assert recorder.fused == fused, str(recorder.report)
    return recorder


def sized(sizes, **spelling):
    return Entry(replace(DEFAULT, sizes=replace(SMALL, **sizes), **spelling))


# --- sizes -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", SIZES)
def test_sizes(name):
    sizes, step = SIZES[name]
    entry = sized(sizes)
    check(entry.build(), entry.arguments(step), ALL)


@pytest.mark.slow
@pytest.mark.parametrize("rope", ["rotate_half", "complex", "stack_flatten", "rotate_every_two", "none"])
def test_one_pair_in_every_spelling(rope):
    entry = sized({"rope": 2}, rope=rope)
    check(entry.build(), entry.arguments(FEW), ALL)


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["appended", "batched", "slots", "combined", "combined_in_two"])
def test_ones_in_other_caches(cache):
    entry = sized({"kv_rank": 1, "rope": 2}, cache=cache)
    check(entry.build(), entry.arguments(FEW), ALL)


@pytest.mark.parametrize("part", [{"kv_rank": 1}, {"nope": 1}])
def test_one_column_beside_one_that_is_not_rotated(part):
    entry = sized({"rope": 1, **part}, rope="none")
    check(entry.build(), entry.arguments(FEW), ALL)


@pytest.mark.parametrize("sizes", [{"rope": 2}, {"kv_rank": 1}, {"nope": 1}, ONES])
def test_ones_in_a_prefill(sizes):
    entry = sized(sizes, cache="appended", factor="after_projection")
    check(entry.build(), entry.arguments(replace(PREFILL, start=4)), ALL)


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["index_copy", "appended", "batched", "slice"])
@pytest.mark.parametrize("query", ["low", "direct"])
def test_no_rotary_part(cache, query):
    """It has no columns, in a cache without columns: nothing is projected for them, and nothing is copied."""
    entry = sized({"rope": 0}, rope="none", cache=cache, query=query)
    recorder = check(entry.build(), entry.arguments(FEW), ALL)
    assert recorder.report.notes == []
    names = [name for name, _ in recorder.operators]
    assert names.count("aten.mm.default") == 1, "that of the output"
    assert names.count("mla_fx.mla_prolog_.default") == (cache != "appended")


@pytest.mark.parametrize("cache", ["index_copy", "appended"])
def test_no_rotary_part_in_a_prefill(cache):
    entry = sized({"rope": 0}, rope="none", cache=cache, factor="after_projection")
    check(entry.build(), entry.arguments(replace(PREFILL, start=4)), ALL)


class OverTheToken(nn.Module):
    """The norm of the one token's latent is taken over the tokens."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer
        layer.norm = lambda x, gamma, epsilon: gamma * (x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + epsilon))

    def forward(self, *arguments):
        return self.layer(*arguments)


@pytest.mark.filterwarnings("ignore::mla_fx.MlaWarning")
def test_a_norm_over_a_dimension_of_one_is_none_of_rows():
    entry = Entry(DEFAULT)
    check(OverTheToken(entry.build()), entry.arguments(DECODE), {"latent_attention": 1})


# --- sizes and numbers that are known at run time --------------------------------------------------------------------


class AtRunTime(nn.Module):
    """A number is read from a tensor: the position, or the number of sequences or tokens."""

    def __init__(self, layer, number):
        super().__init__()
        self.layer, self.number = layer, number

    def forward(self, x, tables, positions, mask, caches, place, given):
        count = given.item()
        if self.number == "position":
            torch._check(count >= 0)
            torch._check(count + x.shape[1] <= SMALL.context)
            return self.layer(x, tables, positions, mask, caches, count)
        torch._check(count >= 2)
        torch._check(count <= x.shape[0 if self.number == "sequences" else 1])
        if self.number == "sequences":
            return self.layer(x[:count], tables, positions, mask, tuple(cache[:count] for cache in caches), place)
        tables, positions, place = [table[:, :count] for table in tables], positions[:, :count], place[:count]
        return self.layer(x[:, :count], tables, positions, mask[:, :, :count], caches, place)


@pytest.mark.slow
@pytest.mark.parametrize(
    "number, cache, step, given, fused",
    [
        ("position", "slice_read_whole", DECODE, DECODE.start, ALL),
        ("sequences", "index_copy", Step("five sequences", 3, 6, 5), 3, ALL),
        ("tokens", "index_copy", FEW, 2, ALL),
    ],
)
def test_number_known_at_run_time(number, cache, step, given, fused):
    entry = Entry(replace(DEFAULT, cache=cache))
    arguments = (*entry.arguments(step), torch.tensor(given))
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        check(AtRunTime(entry.build(), number), arguments, fused)


class Numbers(cases.Layer):
    """Numbers of the module, which `dynamic=True` turns into inputs: epsilon, factor, softmax scale, and fill."""

    def __init__(self):
        super().__init__()
        self.epsilon, self.factor, self.scale, self.low = 1e-6, 1.5, 0.31, -1e4

    def norm(self, x, gamma):
        return gamma * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.epsilon))

    def query(self, x):
        torch._check(x.shape[1] <= cases.T)  # few enough tokens to absorb
        return super().query(x) * self.factor

    def attend(self, q_nope, q_rope, latent, k_rope, mask):
        key, value = self.keys(latent, k_rope)
        scores = torch.cat((q_nope, q_rope), dim=-1) @ key.mT * self.scale
        return scores.masked_fill(mask != 0, self.low).softmax(-1) @ value


class FusedNumbers(Numbers):
    def attend(self, q_nope, q_rope, latent, k_rope, mask):
        key, value = self.keys(latent, k_rope)
        query = torch.cat((q_nope, q_rope), dim=-1)
        return nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=self.scale)


@pytest.mark.slow
@pytest.mark.parametrize("layer", [Numbers, FusedNumbers])
def test_numbers_that_were_made_inputs(layer):
    check(layer().eval(), cases.inputs(), ALL, dynamic=True)


# --- other names for one operation -----------------------------------------------------------------------------------

FLOAT, HALF = torch.float32, torch.bfloat16
CASTS = {
    "to": lambda x, dtype: x.to(dtype),
    "to, by name": lambda x, dtype: x.to(device=x.device, dtype=dtype),
    "to a tensor's": lambda x, dtype: x.to(torch.empty((), dtype=dtype)),
    "to, as a copy": lambda x, dtype: x.to(dtype, copy=True),
    "type": lambda x, dtype: x.type(dtype),
    "type by name": lambda x, dtype: x.type("torch.FloatTensor" if dtype is FLOAT else "torch.BFloat16Tensor"),
    "type_as": lambda x, dtype: x.type_as(torch.empty((), dtype=dtype)),
    "float and bfloat16": lambda x, dtype: x.float() if dtype is FLOAT else x.bfloat16(),
    "copied into": lambda x, dtype: torch.empty(x.shape, dtype=dtype).copy_(x),
    "the compiler's own": torch.ops.prims.convert_element_type,
}


class Cast(cases.Layer):
    """Norms, rotations and softmax in float32, in between bfloat16."""

    def __init__(self, cast):
        super().__init__()
        self.cast = cast

    def norm(self, x, gamma):
        wide = self.cast(x, FLOAT)
        return gamma * self.cast(wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6), HALF)

    def rotate(self, x, cos, sin):
        return self.cast(super().rotate(*(self.cast(value, FLOAT) for value in (x, cos, sin))), HALF)

    def attend(self, q_nope, q_rope, latent, k_rope, mask):
        key, value = self.keys(latent, k_rope)
        scores = self.cast(torch.cat((q_nope, q_rope), dim=-1) @ key.mT, FLOAT) * (D + DR) ** -0.5 + mask
        return self.cast(scores.softmax(-1), HALF) @ value


@pytest.mark.slow
@pytest.mark.parametrize("name", CASTS)
def test_casts(name):
    x, cos, sin, position = cases.inputs()
    arguments = x.to(HALF), cos.to(HALF), sin.to(HALF), position
    check(Cast(CASTS[name]).to(HALF).eval(), arguments, ALL, {"rtol": 3e-2, "atol": 3e-2})


class FromTheEnd(cases.Layer):
    """Every dimension is counted from the end."""

    def __init__(self, view):
        super().__init__()
        self.view = view

    def query(self, x):
        q = super().query(x).unflatten(-1, (N, D + DR)).transpose(-3, -2)
        return torch.cat((q.narrow(-1, 0, D), q.narrow(-1, -DR, DR)), dim=-1).transpose(-2, -3)

    def rows(self, x):
        latent, k_rope = self.view(x @ self.kv_a.mT).split([HCKV, DR], dim=-1)
        return self.norm(latent, self.kv_gamma).unsqueeze(-3), k_rope.unsqueeze(-3)

    def store(self, latent, k_rope, position):
        self.kv_cache.index_copy_(-2, position, latent)
        self.kr_cache.index_copy_(-2, position, k_rope)
        return self.kv_cache, self.kr_cache

    def keys(self, latent, k_rope):
        expanded = (self.view(latent).select(-3, -1) @ self.kv_b.mT).unflatten(-1, (N, D + DV)).transpose(-3, -2)
        k_nope, value = self.view(expanded).split([D, DV], dim=-1)
        return torch.cat((k_nope, k_rope.expand(-1, N, -1, -1)), dim=-1), value


VIEWS = {
    "select": lambda x: x.unsqueeze(-2).select(-2, -1),
    "squeeze": lambda x: x.unsqueeze(-1).squeeze(-1),
    "stack": lambda x: torch.stack((x, x + 1), dim=-1).select(-1, -2),
    "unbind": lambda x: torch.stack((x + 1, x), dim=-2).unbind(-2)[-1],
    "cat": lambda x: torch.cat((x, x + 1), dim=-2)[..., : x.shape[-2], :],
    "slice": lambda x: x[..., -x.shape[-1] :],
    "split twice": lambda x: torch.cat([part for half in x.split(6, -1) for part in half.split(4, -1)], dim=-1),
    "swapaxes": lambda x: x.swapaxes(-1, -2).swapaxes(-2, -1),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", VIEWS)
def test_dimensions_from_the_end(name):
    check(FromTheEnd(VIEWS[name]).eval(), cases.inputs(), ALL)
