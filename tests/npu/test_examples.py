"""The vendor's documents as examples, calling torch_npu: by itself through CPU kernels, in a graph through torchair.

On a device the examples move their tensors there; here these stay, so that the very calls are made."""

import pytest
import torch
import torch_npu
from lib.sources import example

from npu import cpu_kernels
from npu.converted import types
from npu.ge_ops import mla

paged_attention_ = torch.ops.mla_fx.paged_attention_


def npu_mla_prolog(*args, **options):
    named = cpu_kernels.prolog_arguments(torch.ops.npu.npu_mla_prolog, "MlaProlog", args, options)
    copies = {name: named[name].clone() for name in ("kv_cache", "kr_cache")}
    return mla.MlaProlog(**named | copies)


def npu_kv_rmsnorm_rope_cache(*args, **options):
    named = cpu_kernels.named(torch.ops.npu.npu_kv_rmsnorm_rope_cache, args, options)
    return mla.KvRmsNormRopeCache(**{"is_output_kv": False} | named)


def paged(query, keys, values, kv_heads, heads, scale, tables, lengths, out):
    paged_attention_(query, keys, values, tables, lengths, out, head_num=heads, kv_head_num=kv_heads, qk_scale=scale)


def paged_mla(query, keys, kv_heads, heads, scale, tables, lengths, width, out):
    options = {"head_num": heads, "kv_head_num": kv_heads, "qk_scale": scale, "mla_v_head_size": width}
    paged_attention_(query, keys, None, tables, lengths, out, **options)


def paged_splitfuse(query, keys, values, tables, lengths, mask, steps, kv_heads, heads, scale, out):
    options = {"head_num": heads, "kv_head_num": kv_heads, "qk_scale": scale, "q_seq_lens": steps}
    options |= {"mask_type": "mask_type_spec", "calc_type": "calc_type_spec"}
    paged_attention_(query, keys, values, tables, lengths, out, mask, **options)


KERNELS = {
    "npu_mla_prolog": npu_mla_prolog,
    "npu_kv_rmsnorm_rope_cache": npu_kv_rmsnorm_rope_cache,
    "_npu_paged_attention": paged,
    "_npu_paged_attention_mla": paged_mla,
    "_npu_paged_attention_splitfuse": paged_splitfuse,
}


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    """What the examples call by itself; inside of graphs it is the operators that torchair converts."""
    cpu_kernels.register()
    for name, kernel in KERNELS.items():
        real = getattr(torch_npu, name)

        def call(*args, kernel=kernel, real=real, **options):
            return (real if torch.compiler.is_compiling() else kernel)(*args, **options)

        monkeypatch.setattr(torch_npu, name, call)


GRAPHS = {
    "npu_mla_prolog": ["MlaProlog"],
    "npu_kv_rmsnorm_rope_cache": ["KvRmsNormRopeCache"],
    "npu_multi_latent_attention": [],
    "npu_paged_attention": [],
}


@pytest.mark.parametrize("name", GRAPHS)
def test_example(converted, name, capsys):
    example(name).main()
    first, *rest = capsys.readouterr().out.splitlines()
    assert first == "torch_npu on the NPU" and rest and all(line.endswith("right") for line in rest)
    assert {kind for graph in converted.graphs for kind in types(graph)} >= set(GRAPHS[name])
