"""The first two interfaces of the vendor's prolog, chosen by option `prolog`: where they come, and what they write."""

from __future__ import annotations

import pytest
import torch

import mla_fx
from npu import models
from npu.calls import prolog_call
from npu.converted import types

HEADS = 32  # the fewest that version 1 takes
KERNELS = {"v1": "MlaProlog", "v2": "MlaPrologV2", "v3": "MlaPrologV3"}


def backend(version):
    return mla_fx.get_backend(target="ge", soc="Ascend910B3", prolog=version)


class Prolog(torch.nn.Module):
    """A call, and the old content of its cache."""

    def __init__(self, reads_old):
        super().__init__()
        weights = prolog_call("PA_BSND")[1:7]
        weights[1:3] = weights[1][:, : HEADS * 192].contiguous(), weights[2][:HEADS]
        self.weights = torch.nn.ParameterList([torch.nn.Parameter(w, requires_grad=False) for w in weights])
        self.reads_old = reads_old

    def forward(self, token_x, sin, cos, index, kv_cache, kr_cache):
        before = kv_cache[0] * 2 if self.reads_old else None
        query, query_rope = torch.ops.mla_fx.mla_prolog_(
            token_x, *self.weights, sin, cos, index, kv_cache, kr_cache, cache_mode="PA_NZ"
        )
        return query, query_rope, before


@pytest.mark.parametrize("reads_old", [False, True], ids=["written alone", "read before it is written"])
@pytest.mark.parametrize("version, copies", [("v1", [2, 2]), ("v2", [2, 2]), ("v3", [0, 1])])
def test_a_cache_that_is_read_keeps_what_it_was(converted, version, copies, reads_old):
    """torchair takes out the copy of a cache that nobody else reads, but knows of version 3 alone."""
    token_x, *_, sin, cos, index, kv_cache, kr_cache = prolog_call("PA_NZ")
    layer = Prolog(reads_old)
    given = [token_x, sin, cos, index, kv_cache, kr_cache]
    mine, theirs = ([tensor.clone() for tensor in given] for _ in range(2))
    with torch.no_grad():
        found = torch.compile(layer, backend=backend(version), dynamic=False)(*mine)
        torch.testing.assert_close(found, layer(*theirs), rtol=0, atol=0)
    torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
    names = types(converted.graphs[0])
    assert [names.count(KERNELS[version]), names.count("TensorMove")] == [1, copies[reads_old]]


def test_a_model(converted):
    model = models.model(hidden_size=7168, num_attention_heads=HEADS)
    run = torch.compile(model, backend=backend("v1"), dynamic=False)
    models.check_as_exact_as_eager(model, run, models.static_cache, [models.prompt(1)])
    (graph,) = converted.graphs
    assert [types(graph).count(name) for name in ("MlaProlog", "FusedInferAttentionScore")] == [1, 1]


def test_a_version_that_does_not_exist():
    with pytest.raises(mla_fx.OptionError, match="option prolog is 'v4'; this torch_npu has 'v3', 'v2', 'v1'"):
        torch.compile(torch.sin, backend=backend("v4"))(torch.ones(2))


def test_the_newest_version_that_torch_npu_has(monkeypatch):
    from mla_fx.lowering.ascend import toolchain

    assert toolchain.prolog({}) == "v3"
    monkeypatch.setattr(toolchain, "PROLOGS", {"v3": "npu_mla_prolog_of_another_torch_npu", "v2": "npu_mla_prolog_v2"})
    assert toolchain.prolog({}) == "v2"
