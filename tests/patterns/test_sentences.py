"""Sentences on layers that do not fuse say what the program does, on each target, also after Inductor's rewriting."""

import pytest
import torch
from lib.layers import FUSED, QUIET, Layer, Reporting, Sizes, arguments, in_type
from torch import nn

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("no_gradients"),
    *(pytest.mark.filterwarnings(line) for line in QUIET),
]
SECOND_PRODUCT = "a second product is added to the projection (a LoRA branch, or columns that are not quantised?)"
NO_SINK = (
    "the softmax has one column beside the keys of the context, and its score is no attention sink, one number per head"
)


class Lora(Layer):
    """An adapter of kv_b_proj that was not merged, on keys, on values or on both."""

    def __init__(self, on_keys=True, on_values=True):
        super().__init__()
        draw = torch.Generator().manual_seed(1)
        z, rank = self.sizes, 4
        self.down = nn.Parameter(torch.randn(rank, z.rank, generator=draw) * z.rank**-0.5)
        up = torch.randn(z.heads, z.nope + z.value, rank, generator=draw) * rank**-0.5
        up[:, : z.nope] *= on_keys
        up[:, z.nope :] *= on_values
        self.up, self.which = nn.Parameter(up), (on_keys, on_values)

    def keys(self, latent, k_rope):
        z, latent = self.sizes, latent.squeeze(1)
        weights = self.kv_b.unflatten(0, (z.heads, -1)).split([z.nope, z.value], 1)
        ups = self.up.split([z.nope, z.value], 1)
        k_nope, value = (
            self.expanded(latent, weight, up if has_branch else None)
            for weight, up, has_branch in zip(weights, ups, self.which, strict=True)
        )
        return torch.cat((k_nope, k_rope.expand(-1, z.heads, -1, -1)), dim=-1), value

    def expanded(self, latent, weight, up):
        out = latent @ weight.flatten(0, 1).T
        if up is not None:
            out = out + (latent @ self.down.T) @ up.flatten(0, 1).T * 0.7
        return out.unflatten(-1, (self.sizes.heads, -1)).transpose(1, 2)


class Draft(Layer):
    """A later step of an EAGLE draft: each token has one more key and value, its own from the step before."""

    def combine(self, scores, value):
        own = scores.masked_fill(scores == -torch.inf, 0).sin().sum(-1, keepdim=True)
        shares = torch.cat((scores, own), -1).softmax(-1)
        return shares[..., :-1] @ value + shares[..., -1:] * value.sum(2, keepdim=True).sin()


class DividedByNumber(Layer):
    """Exponentials, divided by a number and not by their sum."""

    def combine(self, scores, value):
        return (scores - scores.amax(-1, keepdim=True)).exp() / 3.0 @ value


ONE_KEY = Sizes(tokens=1, context=1)
LAYERS = {
    "LoRA on keys and values": (Lora, SECOND_PRODUCT),
    "LoRA on keys": (lambda: Lora(on_values=False), SECOND_PRODUCT),
    "LoRA on values": (lambda: Lora(on_keys=False), SECOND_PRODUCT),
    "a later step of a draft": (Draft, NO_SINK),
    "exponentials divided by a number": (DividedByNumber, "the exponentials of scores are not divided by their sum"),
    "one key": (lambda: Layer(ONE_KEY), "attention over a single key"),
}


def report_of(layer, target, **options):
    layer = layer.float()
    x, tables, position, caches = in_type(arguments(layer.sizes), torch.float32)
    given = x, tables, position % layer.sizes.context, caches
    backend = Reporting(target=target, **options)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(layer, backend=backend)(*given), layer(*given), rtol=1e-4, atol=1e-5)
    return backend.report


@pytest.mark.parametrize("target", ["reference", "inductor"])
@pytest.mark.parametrize("name", LAYERS)
def test_the_reason(name, target):
    build, reason = LAYERS[name]
    report = report_of(build(), target)
    assert [miss.reason for miss in report.misses if miss.pattern == "mla_attention"] == [reason], str(report)


@pytest.mark.parametrize("target", ["reference", "inductor"])
def test_a_batch_without_sequences_is_no_miss(target):
    report = report_of(Layer(Sizes(batch=0)), target, strict=True)
    assert (report.fused, report.misses) == ({}, []), str(report)
    assert report.notes == ["all results are empty: there is nothing to compute"]


@pytest.mark.parametrize("target", ["reference", "inductor"])
def test_the_layer_itself_fuses(target):
    assert report_of(Layer(), target).fused == FUSED
