"""A layer with a cache of packed int8 rows: MlaPrologV3 in kv_cache_quant_mode 3."""

from dataclasses import replace

import pytest
import torch
from lib import packed_prologs as plain
from mla_fx.lowering.ascend.operators import mla_prolog_v3

import mla_fx
from npu import ge_graph
from npu.sizes import PACKED

pytestmark = pytest.mark.usefixtures("converted")
MODES = {"kv_cache_quant_mode": 3, "ckvkr_repo_mode": 1, "quant_scale_repo_mode": 1, "tile_size": 128}


@pytest.fixture(autouse=True)
def real_sizes(monkeypatch):
    for name, size in PACKED.items():
        monkeypatch.setattr(plain, name, size)


def check(kind):
    """The output is near that of eager mode, and rows are equal but for last bits of float32 and ties."""
    ours, theirs = kind(), kind()
    run = torch.compile(ours, backend=mla_fx.get_backend(target="ge", strict=True), dynamic=False)
    with torch.no_grad():
        found, wanted = run(*plain.given()), theirs(*plain.given())
        (mine, my_keys), (others, keys) = ours.unpacked(), theirs.unpacked()
    assert (found - wanted).norm() <= 2e-2 * wanted.norm()
    torch.testing.assert_close(mine, others, rtol=0, atol=0.05)
    assert (mine - others).norm() <= 1e-3 * others.norm()
    torch.testing.assert_close(my_keys, keys, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(("kind", "mode"), [(plain.Packed, 1), (plain.AllInt8, 2), (plain.ClippedByParameter, 1)])
def test_modes(converted, kind, mode):
    check(kind)
    (op,) = [op for graph in converted.graphs for op in graph.op if op.type == "MlaPrologV3"]
    attributes = ge_graph.attributes(op)
    assert {name: attributes[name] for name in MODES} == MODES
    assert attributes["weight_quant_mode"] == mode


def scales_from(dim, distance):
    """The bytes of scales come from further along a dimension: of the next tile, or of the next row."""

    def fault(kernel):
        def call(surface, a):
            *others, kv_cache, kr_cache = kernel(surface, a)
            codes, scales = kv_cache.split([kv_cache.shape[-1] - 16, 16], -1)
            size = scales.shape[dim]
            scales = torch.cat((scales.narrow(dim, distance, size - distance), scales.narrow(dim, 0, distance)), dim)
            return *others, torch.cat((codes, scales), -1), kr_cache

        return call

    return fault


def without_alpha(kernel):
    return lambda surface, a: kernel(surface, replace(a, k_nope_clip_alpha=torch.full([1], 1.0, device="cpu")))


@pytest.mark.parametrize(
    "fault",
    [scales_from(-1, 4), scales_from(1, 1), without_alpha],
    ids=["scales of the next tile", "scales of the next row", "alpha dropped"],
)
def test_planted_faults(monkeypatch, fault):
    monkeypatch.setattr(mla_prolog_v3, "vendor_call", fault(mla_prolog_v3.vendor_call))
    with pytest.raises(AssertionError):
        check(plain.ClippedByParameter)
