"""A layer with a cache of packed int8 rows: MlaPrologV3 in kv_cache_quant_mode 3."""

import pytest
import torch
from lib import packed_prologs as plain
from mla_fx.lowering.ascend.operators import mla_prolog_v3

import mla_fx
from npu import ge_graph, planted
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


def test_a_planted_fault(monkeypatch):
    """alpha is dropped. test_planted_faults.py has others."""
    plant = planted.arguments(
        mla_prolog_v3, lambda a: {"k_nope_clip_alpha": torch.full_like(a.k_nope_clip_alpha, 1.0)}
    )
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        check(plain.ClippedByParameter)
