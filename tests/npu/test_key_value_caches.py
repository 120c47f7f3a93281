"""Keys of heads that are normalised and rotated in front, and their values: one operator of the vendor writes both.

The layers are plain PyTorch, as in lib/key_value_caches.py."""

import copy

import pytest
import torch
from lib.key_value_caches import ByBlocks, Interleaved, Keys, Sizes, ValuesFirst, arguments
from mla_fx.lowering.ascend.limits import RELEASES

import mla_fx
from npu import ge_releases, models
from npu.converted import types

BF16, KERNEL, CALL = torch.bfloat16, "KvRmsNormRopeCache", "npu.npu_kv_rmsnorm_rope_cache_v2.default"
KINDS = [Keys, Interleaved, *(pytest.param(kind, marks=pytest.mark.campaign) for kind in (ByBlocks, ValuesFirst))]
REAL = Sizes(heads=4, width=192, rotary=64, columns=128, block=128, hidden=256)


def compiled(module, target, cann):
    torch._dynamo.reset()
    backend = mla_fx.get_backend(target=target, soc="Ascend910B3", cann=cann)
    return torch.compile(module, backend=backend, dynamic=False)


@pytest.fixture
def release(monkeypatch):
    """The first that takes values."""
    monkeypatch.setattr(ge_releases, "RELEASE", RELEASES[2])
    return RELEASES[2]


@pytest.mark.parametrize("target", ["ge", "aclgraph"])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_layer(converted, captured, release, kind, target):
    """Caches are as exact as eager's against float64; what no token is written to is unchanged."""
    module, given = kind(REAL).to(BF16), arguments(REAL, BF16)
    exact, eager = copy.deepcopy(given), copy.deepcopy(given)
    exact = [part.double() if part.is_floating_point() else part for part in exact]
    compiled(module, target, release)(*given)
    module(*eager)
    copy.deepcopy(module).double()(*exact)
    errors, allowed = models.errors(given[3:], exact[3:]), models.errors(eager[3:], exact[3:])
    assert all(mine <= 2 * theirs for mine, theirs in zip(errors, allowed, strict=True)), (errors, allowed)
    free = torch.ones(7 * REAL.block, dtype=torch.bool).index_fill(0, given[2].flatten(), False)
    for one, other in zip(given[3:], arguments(REAL, BF16)[3:], strict=True):
        assert torch.equal(one.flatten(0, 1)[free], other.flatten(0, 1)[free])
    assert torch.equal(given[4], eager[4]), "values are written as they are"
    if target == "ge":
        counts = [types(converted.graphs[0]).count(name) for name in (KERNEL, "TensorMove", "ScatterNdUpdate")]
        assert counts == [1, 0, 0], str(mla_fx.last_report())
    else:
        assert captured.graphs[0].calls(CALL) == [1]


@torch.no_grad()
def test_releases_that_take_no_values(converted):
    module, given = Keys(REAL).to(BF16), arguments(REAL, BF16)
    compiled(module, "ge", RELEASES[1])(*given)
    assert KERNEL not in types(converted.graphs[0])
