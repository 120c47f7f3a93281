"""Quantised projections: the prolog refuses and names the cause; the key side and attention still fuse."""

import copy

import pytest
import torch
from torch import nn

import mla_fx
from mla_fx.cases import DR, DV, HCKV, B, D, Layer, N, T, inputs
from mla_fx.graph.torch_private import make_fx
from mla_fx.readings.quantised import quantised_up_projection

pytestmark = pytest.mark.filterwarnings("ignore::mla_fx.MlaWarning")
KEY_SIDE = {"kv_rmsnorm_rope_cache": 1, "latent_attention": 1}
PROJECTED_UP = "latents are projected up by a weight that is stored in {}: leave kv_b_proj in bf16"
SCALES = "a matrix product is multiplied by a parameter, as by the scales of a quantised weight"


def of_columns(x, weight, scales):
    """Like torchao: the product of the stored weight, then its scales."""
    return nn.functional.linear(x, weight.to(x.dtype)) * scales


def before(x, weight, scales):
    return nn.functional.linear(x, weight.to(x.dtype) * scales.unsqueeze(1))


def in_blocks(x, weight, scales):
    """Like DeepSeek's 8-bit weights: one scale per block of columns."""
    blocks = weight.view(weight.shape[0], -1, 4).to(x.dtype) * scales.view(-1, 1, 1)
    return nn.functional.linear(x, blocks.view(weight.shape))


def of_tokens(x, weight, scales):
    """Each token is quantised, too."""
    mine = x.abs().amax(-1, keepdim=True) / 127
    return nn.functional.linear((x / mine).round(), weight.to(x.dtype)) * mine * scales


class Quantised(Layer):
    def __init__(self, multiply, *names):
        super().__init__()
        self.multiply, self.names = multiply, names
        for name in names:
            weight = getattr(self, name).data
            scales = weight.abs().amax(1) / 127
            self.register_buffer(f"{name}_stored", (weight / scales.unsqueeze(1)).round().to(torch.int8))
            self.register_buffer(f"{name}_scales", scales)

    def project(self, x, name):
        if name not in self.names:
            return x @ getattr(self, name).T
        return self.multiply(x, getattr(self, f"{name}_stored"), getattr(self, f"{name}_scales"))

    def query(self, x):
        return self.project(self.norm(self.project(x, "q_a"), self.q_gamma), "q_b")

    def rows(self, x):
        latent, k_rope = torch.split(self.project(x, "kv_a"), [HCKV, DR], dim=-1)
        return self.norm(latent, self.kv_gamma).unsqueeze(1), k_rope.unsqueeze(1)

    def keys(self, latent, k_rope):
        expanded = self.project(latent, "kv_b").view(B, T, N, D + DV).transpose(1, 2)
        k_nope, value = torch.split(expanded, [D, DV], dim=-1)
        return torch.cat((k_nope, k_rope.expand(-1, N, -1, -1)), dim=-1), value


def report_of(layer):
    theirs = copy.deepcopy(layer)
    compiled = torch.compile(layer, backend="mla", options={"target": "reference"})
    with torch.no_grad():
        torch.testing.assert_close(compiled(*inputs()), theirs(*inputs()), rtol=1e-4, atol=1e-5)
    caches = [(one.kv_cache, one.kr_cache) for one in (layer, theirs)]
    torch.testing.assert_close(*caches, rtol=1e-4, atol=1e-5)
    return mla_fx.last_report()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("multiply", "reason"),
    [
        (of_columns, SCALES),
        (before, "weight_dq is dequantised in the graph, from torch.int8; expected a plain parameter"),
        (in_blocks, "weight_dq is dequantised in the graph, from torch.int8; expected a plain parameter"),
        (of_tokens, SCALES),
    ],
)
def test_projections_to_latents(multiply, reason):
    report = report_of(Quantised(multiply, "q_a", "q_b", "kv_a"))
    assert report.fused == KEY_SIDE, str(report)
    assert [miss.reason for miss in report.misses] == [reason]


def of_whole_numbers(x, weight, scales):
    """Like torchao's dynamic quantisation of tokens: integers are multiplied by stored integers."""
    flat = x.reshape(-1, x.shape[-1])
    low, high = (flat.amin(-1, keepdim=True).clamp(max=0), flat.amax(-1, keepdim=True).clamp(min=0))
    step = ((high - low) / 255).clamp(min=1e-7)
    zero = (-128 - (low / step).round()).to(torch.int8)
    mine = ((flat / step).round() + zero).clamp(-128, 127).to(torch.int8)
    product = torch._int_mm(mine, weight.T) - zero.to(torch.int32) * weight.sum(1, dtype=torch.int32)
    return (product.to(x.dtype) * step * scales).view(*x.shape[:-1], -1)


class Stored(Quantised):
    """The weights in the dtype that goes with how they are multiplied."""

    def __init__(self, multiply, *names):
        super().__init__(multiply, *names)
        for name in names if multiply is stored_in_fp8 else ():
            setattr(self, f"{name}_stored", getattr(self, f"{name}_stored").float().to(torch.float8_e4m3fn))


def stored_in_fp8(x, weight, scales):
    return nn.functional.linear(x, weight.to(x.dtype) * scales.unsqueeze(1))


ALL = ("q_a", "q_b", "kv_a", "kv_b")
MULTIPLIES = {
    of_columns: torch.int8,
    before: torch.int8,
    in_blocks: torch.int8,
    of_tokens: torch.int8,
    of_whole_numbers: torch.int8,
    stored_in_fp8: torch.float8_e4m3fn,
}


@pytest.mark.slow
@pytest.mark.parametrize("names", [ALL, ("kv_b",)], ids=["all", "up alone"])
@pytest.mark.parametrize("multiply", MULTIPLIES)
def test_the_projection_from_latents_names_the_cause_and_the_remedy(multiply, names):
    """And the warning says so without being asked."""
    with pytest.warns(mla_fx.MlaWarning, match="leave kv_b_proj in bf16"):
        report = report_of(Stored(multiply, *names))
    assert report.fused == {}, str(report)
    assert [miss.reason for miss in report.misses] == [PROJECTED_UP.format(MULTIPLIES[multiply])]
    assert not any("graph break" in note for note in report.notes), report.notes


@pytest.mark.slow
@pytest.mark.parametrize("multiply", MULTIPLIES)
def test_the_key_side_fuses_where_the_projection_from_latents_alone_is_plain(multiply):
    report = report_of(Stored(multiply, *ALL[:-1]))
    assert report.fused == KEY_SIDE, str(report)
    assert all("expected a matrix product" not in miss.reason for miss in report.misses), str(report)


@pytest.mark.parametrize(
    ("hidden", "rank", "width", "down", "up", "found"),
    [
        (32, 8, 24, torch.float32, torch.int8, torch.int8),
        (32, 8, 24, torch.int8, torch.int8, torch.int8),
        (32, 8, 24, torch.int8, torch.float32, None),  # the remedy was taken
        (32, 8, 24, torch.float32, torch.bool, None),
        (32, 8, 8, torch.float32, torch.int8, None),  # no wider than what it is made of: not projected up
        (8, 8, 24, torch.float32, torch.int8, None),  # made of nothing wider: no latents
    ],
)
def test_near_twins_of_a_quantised_up_projection(hidden, rank, width, down, up, found):
    def value(x, down, up, scales):
        latent = x.view(6, -1) @ down.to(x.dtype).T
        return (latent @ up.to(x.dtype).T * scales).view(2, 3, -1)

    given = torch.ones(2, 3, hidden), torch.ones(rank, hidden).to(down), torch.ones(width, rank).to(up)
    graph = make_fx(value)(*given, torch.ones(width)).graph
    assert quantised_up_projection(graph.output_node().args[0]) == found
