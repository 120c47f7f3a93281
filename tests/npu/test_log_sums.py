"""Attention over latents beside the logarithm of its sum: the vendor's kernel returns both.

The layers are plain PyTorch, as in lib/log_sums.py."""

import pytest
import torch
from lib.log_sums import (
    Added,
    Attention,
    Base2,
    Divided,
    Expanded,
    Kept,
    Merged,
    Summed,
    Unmasked,
    arguments,
    in_parts,
    nearly_blind,
)

import mla_fx
from npu.converted import types

BF16, KERNEL = torch.bfloat16, "FusedInferAttentionScore"
CALL = "npu.npu_fused_infer_attention_score_v2.out"
REAL = {"sizes": (512, 64), "block": 128}


def compiled(module, target, **options):
    torch._dynamo.reset()
    backend = mla_fx.get_backend(target=target, soc="Ascend910B3", **options)
    return torch.compile(module, backend=backend, dynamic=False)


def as_exact_as_eager(found, module, given):
    """Each result is as exact as eager's against float64. A row that sees no key is NaN in both."""
    exact = module(*[part.double() if part.is_floating_point() else part for part in given])
    for one, near, wanted in zip(found, module(*given), exact, strict=True):
        assert one.shape == wanted.shape and one.isneginf().equal(near.isneginf()) and one.isnan().equal(near.isnan())
        one, near, wanted = (part.double().masked_fill(~part.isfinite(), 0) for part in (one, near, wanted))
        error, allowed = ((part - wanted).norm() for part in (one, near))
        assert error <= 2 * allowed + 1e-6 * wanted.norm(), (error, allowed)


def kernels(target, converted, captured):
    if target == "ge":
        return types(converted.graphs[-1]).count(KERNEL)
    return captured.graphs[-1].calls(CALL)[0]


def merges(target, converted, captured):
    if target == "ge":
        return types(converted.graphs[-1]).count("AttentionUpdate")
    return captured.graphs[-1].calls("npu.npu_attention_update.default")[0]


@pytest.mark.parametrize("target", ["ge", "aclgraph"])
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("kind", [Attention, *(pytest.param(k, marks=pytest.mark.campaign) for k in (Kept, Added))])
@torch.no_grad()
def test_a_layer(converted, captured, kind, tokens, target):
    module, given = kind(), arguments(BF16, **REAL, tokens=tokens)
    as_exact_as_eager(compiled(module, target)(*given), module, given)
    assert kernels(target, converted, captured) == 1, str(mla_fx.last_report())
    if target == "ge":
        found = set(types(converted.graphs[0]))
        assert found.isdisjoint({"ReduceLogSumExp", "SoftmaxV2", "BatchMatMul", "BatchMatMulV2", "Log"}), found


@pytest.mark.parametrize("target", ["ge", "aclgraph"])
@torch.no_grad()
def test_rows_that_see_no_key(converted, captured, target):
    """The kernel marks them by plus infinity and zeros, the program by minus infinity and NaN."""
    given = nearly_blind(*arguments(BF16, **REAL))
    out, lse = compiled(Attention(), target)(*given)
    as_exact_as_eager((out, lse), Attention(), given)
    assert (lse[1] == -torch.inf).all() and out[1].isnan().all()
    assert kernels(target, converted, captured) == 1


@torch.no_grad()
def test_expanded_keys(converted):
    """A prompt, whose keys lie in one piece."""
    module, given = Expanded(512, 128, 128), arguments(BF16, **REAL, tokens=9)
    as_exact_as_eager(compiled(module, "ge", absorb="never")(*given), module, given)
    assert types(converted.graphs[0]).count(KERNEL) == 1, str(mla_fx.last_report())


@pytest.mark.parametrize("target", ["ge", "aclgraph"])
@pytest.mark.parametrize("kind", [Merged, Summed])
@torch.no_grad()
def test_merged_parts(converted, captured, kind, target):
    """Attention over the whole context, in float64."""
    given = arguments(BF16, **REAL)
    found = compiled(kind(), target)(*in_parts(*given))
    exact = [part.double() if part.is_floating_point() else part for part in given]
    wanted, near = Attention()(*exact)[0], kind()(*in_parts(*given))
    assert (found - wanted).norm() <= 2 * (near - wanted).norm()
    assert kernels(target, converted, captured) == 2, str(mla_fx.last_report())
    assert merges(target, converted, captured) == 1, str(mla_fx.last_report())


@torch.no_grad()
def test_a_fill_that_is_a_number(converted):
    """A row of hidden scores has the logarithm of as many of them."""

    class Filled(Divided):
        def masked(self, scores, positions):
            seen = torch.arange(scores.shape[-1]) <= positions.unsqueeze(-1)
            return scores.masked_fill(~seen.unsqueeze(1), torch.finfo(torch.float32).min)

        def scores(self, *given):
            return super().scores(*given).float()

    given = nearly_blind(*arguments(BF16, **REAL))
    _, lse = compiled(Filled(), "ge")(*given)
    _, wanted = Filled()(*given)
    torch.testing.assert_close(lse, wanted, rtol=2e-2, atol=2e-2)
    assert types(converted.graphs[0]).count(KERNEL) == 1


@pytest.mark.parametrize("kind", [Unmasked, Base2])
@torch.no_grad()
def test_what_is_computed_from_other_scores_or_later(converted, kind):
    module, given = kind(), arguments(BF16, **REAL)
    as_exact_as_eager(compiled(module, "ge")(*given), module, given)
    assert types(converted.graphs[0]).count(KERNEL) == 1
