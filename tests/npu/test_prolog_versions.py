"""The interfaces of the vendor's prolog, chosen by option `prolog`, and releases of CANN, by option `cann`: where they
come, and what they write."""

import importlib

import pytest
import torch
from mla_fx.lowering.ascend import toolchain
from mla_fx.lowering.ascend.limits import RELEASES
from mla_fx.lowering.ascend.operators import mla_prolog, mla_prolog_v3

import mla_fx
from npu import ge_releases, models
from npu.calls import Sizes, prolog_call, weights
from npu.converted import types

HEADS = 32  # the fewest that version 1 takes
KERNELS = {"v1": "MlaProlog", "v2": "MlaPrologV2", "v3": "MlaPrologV3"}


def backend(version):
    return mla_fx.get_backend(target="ge", soc="Ascend910B3", prolog=version)


class Prolog(torch.nn.Module):
    """A call, and the old content of its cache."""

    def __init__(self, reads_old):
        super().__init__()
        drawn = weights(z=Sizes(7168, HEADS))
        self.weights = torch.nn.ParameterList([torch.nn.Parameter(w, requires_grad=False) for w in drawn])
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
    assert toolchain.prolog({}) == "v3"
    monkeypatch.setattr(toolchain, "PROLOGS", {"v3": "npu_mla_prolog_of_another_torch_npu", "v2": "npu_mla_prolog_v2"})
    assert toolchain.prolog({}) == "v2"


# --- releases --------------------------------------------------------------------------------------------------------

OLDEST, _, _, NEWEST = RELEASES
WIDE = {"q_lora_rank": 2048, "qk_nope_head_dim": 192}
KERNELS_OF_A_STEP = ("MlaPrologV3", "KvRmsNormRopeCache", "FusedInferAttentionScore")


def check_step(converted, model, make_cache, tokens, **options):
    """Each kernel of a step, and why others are not there."""
    run = torch.compile(model, backend=mla_fx.get_backend(target="ge", soc="Ascend910B3", **options), dynamic=False)
    models.check_as_exact_as_eager(model, run, make_cache, [models.prompt(tokens)])
    names = types(converted.graphs[-1])
    return [names.count(kernel) for kernel in KERNELS_OF_A_STEP], [miss.reason for miss in mla_fx.last_report().misses]


def check_call(converted, tokens, batch=1, **options):
    """Checks that a user's call of so many tokens became one kernel, and wrote what it should."""
    token_x, *_, sin, cos, index, kv_cache, kr_cache = prolog_call("PA_NZ", (batch, tokens))
    layer = Prolog(False)
    given = [token_x, sin, cos, index, kv_cache, kr_cache]
    mine, theirs = ([tensor.clone() for tensor in given] for _ in range(2))
    run = torch.compile(layer, backend=mla_fx.get_backend(target="ge", soc="Ascend910B3", **options), dynamic=False)
    with torch.no_grad():
        torch.testing.assert_close(run(*mine), layer(*theirs), rtol=0, atol=0)
    torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
    return [name for name in types(converted.graphs[-1]) if name.startswith("MlaProlog")]


def test_16_tokens(converted, monkeypatch):
    monkeypatch.setattr(ge_releases, "RELEASE", OLDEST)
    for options, kernel in (({"prolog": "v1"}, "MlaProlog"), ({"cann": OLDEST}, "MlaPrologV3")):
        assert check_call(converted, 16, **options) == [kernel]


@pytest.mark.parametrize("batch", [1, 2])
def test_17_tokens(converted, monkeypatch, batch):
    """The oldest release takes so many in [T, He] alone."""
    monkeypatch.setattr(ge_releases, "RELEASE", OLDEST)
    assert check_call(converted, 17, batch, cann=OLDEST) == ["MlaPrologV3"]


def test_planted_fault_17_tokens_of_one_sequence(converted, monkeypatch):
    monkeypatch.setattr(ge_releases, "RELEASE", OLDEST)
    monkeypatch.setattr(mla_prolog_v3, "is_long", lambda surface, call: False)
    with pytest.raises(ValueError, match=r"MlaPrologV3: S is 17; CANN 8\.5\.0\.alpha001 takes"):
        check_call(converted, 17, cann=OLDEST)


def test_a_growing_cache_on_the_oldest_release(converted, monkeypatch):
    monkeypatch.setattr(ge_releases, "RELEASE", OLDEST)
    kernels, (reason,) = check_step(converted, models.model(hidden_size=7168), models.grown, 1, cann=OLDEST)
    sentence = "cache_mode is 'BSND'; MlaPrologV3 of CANN 8.5.0.alpha001 takes PA_BSND or PA_NZ"
    assert (kernels, reason) == ([0, 1, 1], f"target 'ge': {sentence}")


def test_the_newest_release(converted, monkeypatch):
    monkeypatch.setattr(ge_releases, "RELEASE", NEWEST)
    found = check_step(converted, models.model(**WIDE), models.static_cache, 1, cann=NEWEST)
    assert found == ([1, 0, 1], [])


@pytest.mark.parametrize("sizes, complaint", [(WIDE, "Hcq is 2048"), ({"qk_nope_head_dim": 192}, "D is 192")])
def test_planted_fault_limits_of_another_release(converted, monkeypatch, sizes, complaint):
    monkeypatch.setattr(mla_prolog_v3, "RULES", mla_prolog_v3.RULES | {"8.5.0": mla_prolog_v3.RULES[NEWEST]})
    with pytest.raises(ValueError, match=rf"MlaPrologV3: {complaint}; CANN 8\.5\.0 takes"):
        check_step(converted, models.model(**sizes), models.static_cache, 1)


def test_planted_fault_no_limit_of_tokens(converted, monkeypatch):
    monkeypatch.setattr(mla_prolog, "TOKENS", 17)
    with pytest.raises(ValueError, match=r"MlaProlog: S is 17; CANN 8\.5\.0 takes"):
        check_call(converted, 17, prolog="v1")


def test_the_release_that_is_installed(monkeypatch):
    assert toolchain.release({}) == "8.5.0", "the stub's"
    assert toolchain.release({"cann": NEWEST}) == NEWEST
    for answer, release in ((lambda version: version != NEWEST, "9.0.0"), (lambda version: False, OLDEST)):
        monkeypatch.setattr(importlib.import_module("torch_npu.npu.utils"), "_is_gte_cann_version", answer)
        assert toolchain.release({}) == release


def test_an_installation_that_does_not_say_which_it_is(monkeypatch):
    def fail(version):
        raise RuntimeError("no version")

    monkeypatch.setattr(importlib.import_module("torch_npu.npu.utils"), "_is_gte_cann_version", fail)
    assert toolchain.release({}) == OLDEST


def test_a_release_that_is_not_known():
    names = "'8.5.0.alpha001', '8.5.0', '9.0.0', '9.1.0'"
    with pytest.raises(mla_fx.OptionError, match=f"option cann is '8.4'; it takes {names}"):
        torch.compile(torch.sin, backend=mla_fx.get_backend(target="ge", soc="Ascend910B3", cann="8.4"))(torch.ones(2))
