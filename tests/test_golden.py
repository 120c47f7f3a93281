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
def graph(
    arg0_1,  # f32[24, 32]
    arg1_1,  # f32[2, 3, 32]
    arg2_1,  # f32[24]
    arg3_1,  # f32[56, 24]
    arg4_1,  # f32[26, 32]
    arg5_1,  # f32[20]
    arg6_1,  # f32[3, 6]
    arg7_1,  # f32[3, 6]
    arg8_1,  # f32[2, 1, 16, 20]
    arg9_1,  # i64[3]
    arg10_1,  # f32[2, 1, 16, 6]
    arg11_1,  # f32[72, 20]
    arg12_1,  # f32[32, 40]
):
    reshape_default_3 = aten.reshape(arg11_1, [4, 18, 20])  # f32[4, 18, 20]
    slice_tensor_1 = aten.slice.Tensor(reshape_default_3, 1, 0, 8)  # f32[4, 8, 20]
    permute_default_2 = aten.permute(arg0_1, [1, 0])  # f32[32, 24]
    permute_default_3 = aten.permute(arg3_1, [1, 0])  # f32[24, 56]
    permute_default_4 = aten.permute(arg4_1, [1, 0])  # f32[32, 26]
    reshape_default_6 = aten.reshape(arg7_1, [1, 3, 6])  # f32[1, 3, 6]
    reshape_default_7 = aten.reshape(arg6_1, [1, 3, 6])  # f32[1, 3, 6]
    reshape_default_8 = aten.reshape(arg9_1, [1, 3])  # i64[1, 3]
    ge_scalar = aten.ge.Scalar(reshape_default_8, 0)  # b8[1, 3]
    full_default = aten.full([], 16, dtype=torch.int64, device=device(type='cpu'), pin_memory=False)  # i64[]
    where_self = aten.where.self(ge_scalar, reshape_default_8, full_default)  # i64[1, 3]
    # mla_fx.mla_prolog, by rule mla_prolog, replaces 59 nodes
    #   cases.py: permute x2, view x2, mm x2, _unsafe_view x2
    #   cases.py: pow x2, mean x2, add x2, rsqrt x2, mul x4
    #   cases.py: view, transpose, split_with_sizes, getitem
    #   cases.py: permute, view, mm, _unsafe_view, split_with_sizes, getitem x2
    #   cases.py: unsqueeze x2
    #   cases.py: split x2, getitem x4
    #   cases.py: mul x4, neg x2, cat x2, add x2
    #   cases.py: index_copy
    #   cases.py: index_copy
    #   cases.py: reshape, slice, permute x3, view x2, bmm
    mla_prolog_default = mla_fx.mla_prolog(arg1_1, permute_default_2, permute_default_3, slice_tensor_1, permute_default_4, arg2_1, arg5_1, reshape_default_6, reshape_default_7, where_self, arg8_1, arg10_1, rmsnorm_epsilon_ckv=1e-06, gamma_after_cast=False, rmsnorm_epsilon_cq=1e-06, rope_layout='half_half', cache_mode='Norm')  # (f32[2, 3, 4, 20], f32[2, 3, 4, 6], f32[2, 1, 16, 20], f32[2, 1, 16, 6])
    getitem_10 = mla_prolog_default[0]  # f32[2, 3, 4, 20]
    getitem_11 = mla_prolog_default[1]  # f32[2, 3, 4, 6]
    getitem_12 = mla_prolog_default[2]  # f32[2, 1, 16, 20]
    getitem_13 = mla_prolog_default[3]  # f32[2, 1, 16, 6]
    zeros = aten.zeros([3, 16], device=device(type='cpu'), pin_memory=False)  # f32[3, 16]
    arange = aten.arange(16, device=device(type='cpu'), pin_memory=False)  # i64[16]
    unsqueeze_2 = aten.unsqueeze(arg9_1, 1)  # i64[3, 1]
    gt = aten.gt.Tensor(arange, unsqueeze_2)  # b8[3, 16]
    masked_fill = aten.masked_fill.Scalar(zeros, gt, -inf)  # f32[3, 16]
    reshape_default_1 = aten.reshape(getitem_12, [2, 16, 20])  # f32[2, 16, 20]
    reshape_default_2 = aten.reshape(getitem_13, [2, 16, 6])  # f32[2, 16, 6]
    slice_tensor_2 = aten.slice.Tensor(reshape_default_3, 1, 8, 18)  # f32[4, 10, 20]
    reshape_default_4 = aten.reshape(masked_fill, [1, 1, 3, 16])  # f32[1, 1, 3, 16]
    # mla_fx.latent_attention, by rule absorb, replaces 29 nodes
    #   cases.py: getitem
    #   cases.py: permute, view x2, mm, _unsafe_view, transpose
    #   cases.py: split_with_sizes, getitem x2
    #   cases.py: expand, cat
    #   cases.py: cat, transpose, expand x2, view x3, bmm, mul, add
    #   cases.py: _softmax, expand x2, view, clone, _unsafe_view, bmm
    latent_attention_default = mla_fx.latent_attention(getitem_10, getitem_11, reshape_default_1, reshape_default_2, reshape_default_4, scale=0.2672612419124244, is_causal=False)  # f32[2, 3, 4, 20]
    permute_7 = aten.permute(latent_attention_default, [2, 0, 1, 3])  # f32[4, 2, 3, 20]
    view_15 = aten.view(permute_7, [4, 6, 20])  # f32[4, 6, 20]
    permute_8 = aten.permute(slice_tensor_2, [0, 2, 1])  # f32[4, 20, 10]
    bmm_3 = aten.bmm(view_15, permute_8)  # f32[4, 6, 10]
    view_16 = aten.view(bmm_3, [4, 2, 3, 10])  # f32[4, 2, 3, 10]
    permute_9 = aten.permute(view_16, [1, 2, 0, 3])  # f32[2, 3, 4, 10]
    clone_2 = aten.clone(permute_9, memory_format=torch.contiguous_format)  # f32[2, 3, 4, 10]
    permute_default_1 = aten.permute(clone_2, [0, 2, 1, 3])  # f32[2, 4, 3, 10]
    reshape_default_5 = aten.reshape(permute_default_1, [8, 3, 10])  # f32[8, 3, 10]
    view_11 = aten.view(reshape_default_5, [2, 4, 3, 10])  # f32[2, 4, 3, 10]
    transpose_3 = aten.transpose.int(view_11, 1, 2)  # f32[2, 3, 4, 10]
    clone_1 = aten.clone(transpose_3, memory_format=torch.contiguous_format)  # f32[2, 3, 4, 10]
    _unsafe_view_5 = aten._unsafe_view(clone_1, [2, 3, 40])  # f32[2, 3, 40]
    permute_4 = aten.permute(arg12_1, [1, 0])  # f32[40, 32]
    view_12 = aten.view(_unsafe_view_5, [6, 40])  # f32[6, 40]
    mm_4 = aten.mm(view_12, permute_4)  # f32[6, 32]
    _unsafe_view_6 = aten._unsafe_view(mm_4, [2, 3, 32])  # f32[2, 3, 32]
    copy_ = aten.copy_(arg8_1, getitem_12)  # f32[2, 1, 16, 20]
    copy__1 = aten.copy_(arg10_1, getitem_13)  # f32[2, 1, 16, 6]
    return (_unsafe_view_6,)
""",
        )
