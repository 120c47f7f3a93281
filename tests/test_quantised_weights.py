"""Quantised projections: the prolog refuses and names the cause, the key side and attention fuse all the same."""

import copy

import pytest
import torch
from torch import nn

import mla_fx
from mla_fx.cases import DR, DV, HCKV, B, D, Layer, N, T, inputs

pytestmark = pytest.mark.filterwarnings("ignore::mla_fx.MlaWarning")
KEY_SIDE = {"kv_rmsnorm_rope_cache": 1, "latent_attention": 1}
SCALES = "a matrix product is multiplied by a parameter, as by the scales of a quantised weight"


def of_columns(x, weight, scales):
    """As torchao does: the product of what is stored, and then its scales."""
    return nn.functional.linear(x, weight.to(x.dtype)) * scales


def before(x, weight, scales):
    return nn.functional.linear(x, weight.to(x.dtype) * scales.unsqueeze(1))


def in_blocks(x, weight, scales):
    """As DeepSeek's weights in 8 bits: one scale for a block of columns."""
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
    torch.testing.assert_close([*layer.buffers()], [*theirs.buffers()], rtol=1e-4, atol=1e-5)
    return mla_fx.last_report()


@pytest.mark.parametrize(
    ("multiply", "reason"),
    [
        (of_columns, SCALES),
        (before, "weight_dq is dequantised by the graph, from torch.int8, expected a plain parameter"),
        (in_blocks, "weight_dq is dequantised by the graph, from torch.int8, expected a plain parameter"),
        (of_tokens, SCALES),
    ],
)
def test_projections_to_latents(multiply, reason):
    report = report_of(Quantised(multiply, "q_a", "q_b", "kv_a"))
    assert report.fused == KEY_SIDE, str(report)
    assert [miss.reason for miss in report.misses] == [reason]


@pytest.mark.parametrize(
    ("multiply", "reason"),
    [(of_columns, SCALES), (before, "weight_uk is dequantised by the graph, from torch.int8")],
)
def test_the_projection_from_latents(multiply, reason):
    report = report_of(Quantised(multiply, "kv_b"))
    assert report.fused == {}, str(report)
    assert report.misses[0].reason.startswith(reason)
