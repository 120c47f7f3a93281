"""One layer after the passes, as text. EXPECTTEST_ACCEPT=1 regenerates it."""

from __future__ import annotations

import re

import torch
from expecttest import TestCase

import mla_fx
from mla_fx import cases


class TestOneLayer(TestCase):
    def graph(self, stage: str) -> str:
        with torch.no_grad():
            graphs = mla_fx.explain(cases.Layer().eval(), target="reference")(*cases.inputs()).graphs
        return re.sub(r"#   \S*/(\w+\.py):\d+", r"#   \1", graphs[stage])

    def test_fused(self) -> None:
        self.assertExpectedInline(
            self.graph("clean up"),
            """\
# a graph: 60 nodes. Run this file to compute it on random inputs.


import torch

from mla_fx.debug.stage import run


aten = torch.ops.aten
mla_fx = torch.ops.mla_fx

INPUTS = {
    "q_a": "f32[24, 32]",
    "x": "f32[2, 3, 32]",
    "q_gamma": "f32[24]",
    "q_b": "f32[56, 24]",
    "kv_a": "f32[26, 32]",
    "kv_gamma": "f32[20]",
    "cos": "f32[3, 6]",
    "sin": "f32[3, 6]",
    "kv_cache": "f32[2, 1, 16, 20]",
    "position": "i64[3]",
    "kr_cache": "f32[2, 1, 16, 6]",
    "kv_b": "f32[72, 20]",
    "o": "f32[32, 40]",
}


def graph(inputs):
    reshape_default_4 = aten.reshape(inputs["kv_b"], [4, 18, 20])  # f32[4, 18, 20]
    slice_tensor_1 = aten.slice.Tensor(reshape_default_4, 1, 0, 8)  # f32[4, 8, 20] strides (360, 20, 1)
    permute_default_2 = aten.permute(inputs["q_a"], [1, 0])  # f32[32, 24] strides (1, 32)
    permute_default_3 = aten.permute(inputs["q_b"], [1, 0])  # f32[24, 56] strides (1, 24)
    permute_default_4 = aten.permute(inputs["kv_a"], [1, 0])  # f32[32, 26] strides (1, 32)
    reshape_default_6 = aten.reshape(inputs["sin"], [1, 3, 6])  # f32[1, 3, 6]
    reshape_default_7 = aten.reshape(inputs["cos"], [1, 3, 6])  # f32[1, 3, 6]
    reshape_default_8 = aten.reshape(inputs["position"], [1, 3])  # i64[1, 3]
    ge_scalar = aten.ge.Scalar(reshape_default_8, 0)  # b8[1, 3]
    full_default = aten.full([], 16, dtype=torch.int64, device='cpu', pin_memory=False)  # i64[]
    where_self = aten.where.self(ge_scalar, reshape_default_8, full_default)  # i64[1, 3]
    # mla_prolog, by rule mla_prolog, replaces 59 nodes
    #   cases.py: permute view mm _unsafe_view permute_1 view_1 mm_1 _unsafe_view_1
    #   cases.py: pow_1 mean add rsqrt mul mul_1 pow_2 mean_1 add_1 rsqrt_1 mul_2 mul_3
    #   cases.py: view_2 transpose split_with_sizes getitem_1
    #   cases.py: permute_2 view_3 mm_2 _unsafe_view_2 split_with_sizes_1 getitem_2 getitem_3
    #   cases.py: unsqueeze unsqueeze_1
    #   cases.py: split getitem_4 getitem_5 split_1 getitem_6 getitem_7
    #   cases.py: mul_4 neg cat mul_5 add_2 mul_6 neg_1 cat_1 mul_7 add_3
    #   cases.py: index_copy
    #   cases.py: index_copy_1
    #   cases.py: reshape_default slice_tensor permute_default permute_5 view_13 bmm_2 view_14 permute_6
    mla_prolog_default = mla_fx.mla_prolog(inputs["x"], permute_default_2, permute_default_3, slice_tensor_1, permute_default_4, inputs["q_gamma"], inputs["kv_gamma"], reshape_default_6, reshape_default_7, where_self, inputs["kv_cache"], inputs["kr_cache"], rmsnorm_epsilon_ckv=1e-06, gamma_after_cast=False, rmsnorm_epsilon_cq=1e-06, rope_layout='half_half', cache_mode='Norm')  # (f32[2, 3, 4, 20], f32[2, 3, 4, 6], f32[2, 1, 16, 20], f32[2, 1, 16, 6])
    getitem_12 = mla_prolog_default[0]  # f32[2, 3, 4, 20]
    getitem_13 = mla_prolog_default[1]  # f32[2, 3, 4, 6]
    getitem_14 = mla_prolog_default[2]  # f32[2, 1, 16, 20]
    getitem_15 = mla_prolog_default[3]  # f32[2, 1, 16, 6]
    zeros = aten.zeros([3, 16], device='cpu', pin_memory=False)  # f32[3, 16]
    arange = aten.arange(16, device='cpu', pin_memory=False)  # i64[16]
    unsqueeze_2 = aten.unsqueeze(inputs["position"], 1)  # i64[3, 1]
    gt = aten.gt.Tensor(arange, unsqueeze_2)  # b8[3, 16]
    masked_fill = aten.masked_fill.Scalar(zeros, gt, float('-inf'))  # f32[3, 16]
    reshape_default_1 = aten.reshape(getitem_14, [2, 16, 20])  # f32[2, 16, 20]
    reshape_default_2 = aten.reshape(getitem_15, [2, 16, 6])  # f32[2, 16, 6]
    reshape_default_3 = aten.reshape(masked_fill, [1, 1, 3, 16])  # f32[1, 1, 3, 16]
    slice_tensor_2 = aten.slice.Tensor(reshape_default_4, 1, 8, 18)  # f32[4, 10, 20] strides (360, 20, 1)
    # latent_attention, by rule absorb, replaces 29 nodes
    #   cases.py: getitem
    #   cases.py: permute_3 view_5 mm_3 _unsafe_view_3 view_6 transpose_1
    #   cases.py: split_with_sizes_2 getitem_8 getitem_9
    #   cases.py: expand_1 cat_2
    #   cases.py: cat_3 transpose_2 expand_2 view_7 expand_3 view_8 bmm view_9 mul_8 add_4
    #   cases.py: _softmax expand_4 view_10 expand_5 clone _unsafe_view_4 bmm_1
    attention_default_1 = mla_fx.attention(getitem_12, getitem_13, reshape_default_1, reshape_default_2, reshape_default_3, scale=0.2672612419124244)  # (f32[2, 3, 4, 20], f32[0])
    getitem_11 = attention_default_1[0]  # f32[2, 3, 4, 20]
    permute_7 = aten.permute(getitem_11, [2, 0, 1, 3])  # f32[4, 2, 3, 20] strides (20, 240, 80, 1)
    view_15 = aten.view(permute_7, [4, 6, 20])  # f32[4, 6, 20] strides (20, 80, 1)
    permute_8 = aten.permute(slice_tensor_2, [0, 2, 1])  # f32[4, 20, 10] strides (360, 1, 20)
    bmm_3 = aten.bmm(view_15, permute_8)  # f32[4, 6, 10]
    view_16 = aten.view(bmm_3, [4, 2, 3, 10])  # f32[4, 2, 3, 10]
    permute_9 = aten.permute(view_16, [1, 2, 0, 3])  # f32[2, 3, 4, 10] strides (30, 10, 60, 1)
    clone_2 = aten.clone(permute_9, memory_format=torch.contiguous_format)  # f32[2, 3, 4, 10]
    permute_default_1 = aten.permute(clone_2, [0, 2, 1, 3])  # f32[2, 4, 3, 10] strides (120, 10, 40, 1)
    reshape_default_5 = aten.reshape(permute_default_1, [8, 3, 10])  # f32[8, 3, 10]
    view_11 = aten.view(reshape_default_5, [2, 4, 3, 10])  # f32[2, 4, 3, 10]
    transpose_3 = aten.transpose.int(view_11, 1, 2)  # f32[2, 3, 4, 10] strides (120, 10, 30, 1)
    clone_1 = aten.clone(transpose_3, memory_format=torch.contiguous_format)  # f32[2, 3, 4, 10]
    _unsafe_view_5 = aten._unsafe_view(clone_1, [2, 3, 40])  # f32[2, 3, 40]
    permute_4 = aten.permute(inputs["o"], [1, 0])  # f32[40, 32] strides (1, 40)
    view_12 = aten.view(_unsafe_view_5, [6, 40])  # f32[6, 40]
    mm_4 = aten.mm(view_12, permute_4)  # f32[6, 32]
    _unsafe_view_6 = aten._unsafe_view(mm_4, [2, 3, 32])  # f32[2, 3, 32]
    copy_ = aten.copy_(inputs["kv_cache"], getitem_14)  # f32[2, 1, 16, 20]
    copy__1 = aten.copy_(inputs["kr_cache"], getitem_15)  # f32[2, 1, 16, 6]
    return (_unsafe_view_6,)


if __name__ == "__main__":
    run(graph, INPUTS)
""",
        )
