"""The last stage of a dump: what torchair makes of a graph, as GE has it or as it is captured."""

import ast

import pytest
import torch
import torchair

import mla_fx
from npu.calls import kv_call

FILES = {"ge": "compiled_for_ge.txt", "aclgraph": "compiled_for_aclgraph.py"}


def step(kv, gamma, cos, sin, index, k_cache, ckv_cache):
    """It writes its caches, and has a number and a constant."""
    keys, values, *_ = torch.ops.mla_fx.kv_rmsnorm_rope_cache(
        kv, gamma, cos, sin, index, k_cache, ckv_cache, cache_mode="PA"
    )
    k_cache.copy_(keys)
    ckv_cache.copy_(values)
    return ckv_cache.view(-1, 256, 2) * 0.5 + torch.tensor([0.125, 0.25])


def compiled(target, folder=None, **options):
    torch._dynamo.reset()
    run = torch.compile(step, backend=mla_fx.get_backend(target=target, dump=folder, **options), dynamic=False)
    run(*(tensor for tensor in kv_call("PA") if tensor is not None))


def last_stage(folder, target):
    (file,) = folder.glob(f"graph_000/*_{FILES[target]}")
    return file


def test_the_ge_graph(tmp_path):
    compiled("ge", tmp_path)
    assert (
        last_stage(tmp_path, "ge").read_text()
        == """\
# compiled for ge: 16 nodes.
kv: bfloat16[2, 1, 3, 576]
gamma: bfloat16[512]
cos: bfloat16[2, 1, 3, 64]
sin: bfloat16[2, 1, 3, 64]
index: int64[6]
k_cache: bfloat16[4, 128, 1, 64]
ckv_cache: bfloat16[4, 128, 1, 512]
Identity = Identity(x=kv)  # bfloat16[2, 1, 3, 576]
KvRmsNormRopeCache = KvRmsNormRopeCache(kv=Identity, gamma=gamma, cos=cos, sin=sin, index=index, k_cache=k_cache, ckv_cache=ckv_cache) cache_mode='PA' is_output_kv=True  # bfloat16[4, 128, 1, 64], bfloat16[4, 128, 1, 512], bfloat16[2, 1, 3, 64], bfloat16[2, 1, 3, 512]
Reshape = Reshape(x=KvRmsNormRopeCache:1, shape=[-1, 256, 2])  # bfloat16[512, 256, 2]
Muls = Muls(x=Reshape) value=0.5
Cast = Cast(x=Muls) dst_type=27  # bfloat16[512, 256, 2]
Identity_1 = Identity(x=float32[2])  # float32[2]
Cast_1 = Cast(x=Cast) dst_type=0
Add = Add(x1=Cast_1, x2=Identity_1)  # float32[512, 256, 2]
NetOutput = NetOutput(input0=Add, input1=KvRmsNormRopeCache)
"""
    )


def test_the_captured_graph_is_python(tmp_path, captured):
    compiled("aclgraph", tmp_path)
    text = last_stage(tmp_path, "aclgraph").read_text()
    ast.parse(text)
    assert "npu.npu_kv_rmsnorm_rope_cache_v2(" in text and "_functional(" not in text


@pytest.mark.parametrize("target", FILES)
def test_the_index_and_the_page_link_to_it(tmp_path, captured, target):
    compiled(target, tmp_path)
    file = last_stage(tmp_path, target).name
    *_, row = [line for line in (tmp_path / "graph_000/index.md").read_text().splitlines() if line.startswith("| ")]
    assert row.startswith(f"| compiled for {target} |") and row.endswith(f"| [{file}]({file}) |")
    assert f'"file": "{file}"' in (tmp_path / "graph_000/page.html").read_text()


@pytest.mark.parametrize("target", FILES)
def test_nothing_is_written_unless_there_is_a_dump(monkeypatch, captured, target):
    monkeypatch.setattr(type(mla_fx.driver.discovery.targets()[target]), "shown", None)
    compiled(target, strict=True)
    assert mla_fx.last_report().notes == []


def test_the_users_configuration_stays(tmp_path):
    config = torchair.CompilerConfig()
    before = repr(config.as_dict()), config.debug.graph_dump.enabled
    compiled("ge", tmp_path, compiler_config=config)
    assert (repr(config.as_dict()), config.debug.graph_dump.enabled) == before


def test_a_graph_that_torchair_does_not_convert_is_not_shown(tmp_path):
    """Its options for debugging ask for that."""
    config = torchair.CompilerConfig()
    config.debug.run_eagerly = True
    compiled("ge", tmp_path, compiler_config=config)
    assert mla_fx.last_report().notes == []
    assert not [*tmp_path.glob("graph_000/*compiled*")]
