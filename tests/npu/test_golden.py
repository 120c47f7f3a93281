"""The GE graphs of a layer of DeepSeek-V3, operator by operator: one prolog, one attention, no copy of a cache.

`EXPECTTEST_ACCEPT=1 python -m tests.npu tests/npu/test_golden.py` regenerates the texts."""

import expecttest
import torch

import mla_fx
from npu import converted, models
from npu.golden import ge_text
from npu.models import Layer


def text(tokens: int, *, dynamic: bool) -> str:
    converted.graphs.clear()
    torch._dynamo.reset()
    layer = Layer()
    cache = models.static_cache(models.model())
    cos, sin = torch.randn(2, 1, tokens, 64).bfloat16()
    x = torch.randn(1, tokens, models.SMALL["hidden_size"]).bfloat16()
    run = torch.compile(layer, backend=mla_fx.get_backend(target="ge"), dynamic=dynamic)
    with torch.no_grad():
        run(x, cos, sin, torch.tensor(0), cache)
    (graph,) = converted.graphs
    return ge_text(graph)


class TestGolden(expecttest.TestCase):
    maxDiff = None

    def test_decode(self) -> None:
        self.assertExpectedInline(
            text(1, dynamic=False),
            """\
Data_0: bfloat16[1, 1, 1024]
Data_1: bfloat16[1536]
Data_2: bfloat16[512]
Data_3: bfloat16[1, 1, 64]
Data_4: bfloat16[1, 1, 64]
Data_5: int64[]
Data_6: bfloat16[2, 128, 1, 512]
Data_7: bfloat16[2, 128, 1, 64]
Data_8: bfloat16[1024, 512]
Data_9: int64[]
Data_10: bfloat16[1024, 1536] NZ
Data_11: bfloat16[1536, 768] NZ
Data_12: bfloat16[4, 128, 512]
Data_13: bfloat16[1024, 576] NZ
Data_14: int32[1, 2]
Data_15: bfloat16[4, 512, 128]
Data_16: int64[1]
Range_0(start=0, limit=1, delta=1)
Cast_0(x=Range_0) dst_type=9
Add_0(x1=Cast_0, x2=Data_5)
Add_1(x1=Data_5, x2=1)
Reshape_0(x=Data_4, shape=[64])
StridedSliceV2_0(x=Reshape_0, begin=0, end=32, axes=0, strides=1)
Reshape_1(x=StridedSliceV2_0, shape=[1, 1, 32])
ConcatV2_0(x0=Reshape_1, x1=Reshape_1, concat_dim=-1) N=2
Reshape_2(x=Data_3, shape=[64])
StridedSliceV2_1(x=Reshape_2, begin=0, end=32, axes=0, strides=1)
Reshape_3(x=StridedSliceV2_1, shape=[1, 1, 32])
ConcatV2_1(x0=Reshape_3, x1=Reshape_3, concat_dim=-1) N=2
Reshape_4(x=Add_0, shape=[1, 1])
Cast_1(x=256) dst_type=9
Less_0(x1=Reshape_4, x2=Cast_1)
SelectV2_0(condition=Less_0, then=Reshape_4, else=Data_9)
MlaPrologV3_0(token_x=Data_0, weight_dq=Data_10, weight_uq_qr=Data_11, weight_uk=Data_12, weight_dkv_kr=Data_13, rmsnorm_gamma_cq=Data_1, rmsnorm_gamma_ckv=Data_2, rope_sin=ConcatV2_0, rope_cos=ConcatV2_1, kv_cache=Data_6, kr_cache=Data_7, cache_index=SelectV2_0) rmsnorm_epsilon_ckv=0.3 rmsnorm_epsilon_cq=0.1
Reshape_5(x=MlaPrologV3_0:2, shape=[1, 1, 256, 512])
Reshape_6(x=MlaPrologV3_0:3, shape=[1, 1, 256, 64])
Reshape_7(x=Reshape_5, shape=[1, 256, 512])
Reshape_8(x=Reshape_6, shape=[1, 256, 64])
Reshape_9(x=Reshape_7, shape=[-1, 128, 512])
Reshape_10(x=Reshape_8, shape=[-1, 128, 64])
FusedInferAttentionScore_0(query=MlaPrologV3_0, key0=Reshape_9, value0=Reshape_9, actual_seq_lengths_kv=Data_16, block_table=Data_14, query_rope=MlaPrologV3_0:1, key_rope=Reshape_10) block_size=128 input_layout='BSND' num_heads=4 num_key_value_heads=1 scale=0.0721688
Squeeze_0(x=FusedInferAttentionScore_0)
Unsqueeze_0(x=Squeeze_0) axes=[1, 2]
Reshape_11(x=Unsqueeze_0, shape=[4, 1, 512])
BatchMatMul_0(x1=Reshape_11, x2=Data_15)
Reshape_12(x=BatchMatMul_0, shape=[4, 1, 1, 128])
Squeeze_1(x=Reshape_12)
Unsqueeze_1(x=Squeeze_1) axes=[0, 1]
Reshape_13(x=Unsqueeze_1, shape=[4, 1, 128])
Reshape_14(x=Reshape_13, shape=[1, 4, 1, 128])
Reshape_15(x=Reshape_14, shape=[1, -1, 1, 128])
Transpose_0(x=Reshape_15, perm=[0, 2, 1, 3])
Reshape_16(x=Transpose_0, shape=[1, 1, -1])
Transpose_1(x=Data_8, perm=[1, 0])
Reshape_17(x=Reshape_16, shape=[1, 512])
MatMul_0(x1=Reshape_17, x2=Transpose_1)
Reshape_18(x=MatMul_0, shape=[1, 1, 1024])
NetOutput_0(input0=Reshape_18, input1=Add_1)""",
        )

    def test_prefill(self) -> None:
        self.assertExpectedInline(
            text(20, dynamic=False),
            """\
Data_0: bfloat16[1, 20, 1024]
Data_1: bfloat16[1536, 1024]
Data_2: bfloat16[1536]
Data_3: bfloat16[768, 1536]
Data_4: bfloat16[576, 1024]
Data_5: bfloat16[512]
Data_6: bfloat16[1, 20, 64]
Data_7: bfloat16[1, 20, 64]
Data_8: int64[]
Data_9: bfloat16[1, 1, 256, 512]
Data_10: bfloat16[1, 1, 256, 64]
Data_11: bfloat16[1024, 512]
Data_12: int64[]
Data_13: bfloat16[512, 512]
Data_14: bfloat16[512, 512]
Data_15: bool[2048, 2048]
Data_16: int64[2]
Transpose_0(x=Data_1, perm=[1, 0])
Reshape_0(x=Data_0, shape=[20, 1024])
MatMul_0(x1=Reshape_0, x2=Transpose_0)
Reshape_1(x=MatMul_0, shape=[1, 20, 1536])
RmsNorm_0(x=Reshape_1, gamma=Data_2) epsilon=0.1
Transpose_1(x=Data_3, perm=[1, 0])
Reshape_2(x=RmsNorm_0, shape=[20, 1536])
MatMul_1(x1=Reshape_2, x2=Transpose_1)
Transpose_2(x=Data_4, perm=[1, 0])
Reshape_3(x=Data_0, shape=[20, 1024])
MatMul_2(x1=Reshape_3, x2=Transpose_2)
Range_0(start=0, limit=20, delta=1)
Cast_0(x=Range_0) dst_type=9
Add_0(x1=Cast_0, x2=Data_8)
Add_1(x1=Data_8, x2=20)
Reshape_4(x=MatMul_2, shape=[1, 1, 20, 576])
Reshape_5(x=Data_6, shape=[20, 64])
StridedSliceV2_0(x=Reshape_5, begin=0, end=32, axes=1, strides=1)
Reshape_6(x=StridedSliceV2_0, shape=[1, 1, 20, 32])
ConcatV2_0(x0=Reshape_6, x1=Reshape_6, concat_dim=-1) N=2
Reshape_7(x=Data_7, shape=[20, 64])
StridedSliceV2_1(x=Reshape_7, begin=0, end=32, axes=1, strides=1)
Reshape_8(x=StridedSliceV2_1, shape=[1, 1, 20, 32])
ConcatV2_1(x0=Reshape_8, x1=Reshape_8, concat_dim=-1) N=2
Reshape_9(x=Add_0, shape=[1, 20])
Cast_1(x=256) dst_type=9
Less_0(x1=Reshape_9, x2=Cast_1)
SelectV2_0(condition=Less_0, then=Reshape_9, else=Data_12)
KvRmsNormRopeCache_0(kv=Reshape_4, gamma=Data_5, cos=ConcatV2_0, sin=ConcatV2_1, index=SelectV2_0, k_cache=Data_10, ckv_cache=Data_9) epsilon=0.3
Reshape_10(x=MatMul_1, shape=[20, 4, 192])
StridedSliceV2_2(x=Reshape_10, begin=0, end=128, axes=2, strides=1)
Reshape_11(x=StridedSliceV2_2, shape=[1, 20, 4, 128])
StridedSliceV2_3(x=Reshape_10, begin=128, end=192, axes=2, strides=1)
Reshape_12(x=StridedSliceV2_3, shape=[1, 20, 4, 64])
Reshape_13(x=StridedSliceV2_0, shape=[1, 20, 32])
ConcatV2_2(x0=Reshape_13, x1=Reshape_13, concat_dim=-1) N=2
Reshape_14(x=StridedSliceV2_1, shape=[1, 20, 32])
ConcatV2_3(x0=Reshape_14, x1=Reshape_14, concat_dim=-1) N=2
Reshape_15(x=Reshape_12, shape=[20, 4, 1, 64])
Unsqueeze_0(x=ConcatV2_2) axes=[2]
Reshape_16(x=Unsqueeze_0, shape=[20, -1, 1, 64])
Unsqueeze_1(x=ConcatV2_3) axes=[2]
Reshape_17(x=Unsqueeze_1, shape=[20, -1, 1, 64])
InterleaveRope_0(x=Reshape_15, cos=Reshape_16, sin=Reshape_17)
Reshape_18(x=InterleaveRope_0, shape=[1, 20, 4, 64])
Reshape_19(x=KvRmsNormRopeCache_0:1, shape=[1, 256, 512])
Reshape_20(x=KvRmsNormRopeCache_0, shape=[1, 256, 64])
Reshape_21(x=Reshape_11, shape=[20, 4, 128])
Reshape_22(x=Reshape_19, shape=[256, -1])
MatMul_3(x1=Reshape_22, x2=Data_13)
Reshape_23(x=MatMul_3, shape=[-1, 4, 128])
MatMul_4(x1=Reshape_22, x2=Data_14)
Reshape_24(x=MatMul_4, shape=[-1, 4, 128])
Reshape_25(x=Reshape_18, shape=[20, 4, -1])
Reshape_26(x=Reshape_20, shape=[256, 1, -1])
BroadcastTo_0(x=Reshape_26, shape=[-1, 4, -1])
Identity_0(x=BroadcastTo_0)
FusedInferAttentionScore_0(query=Reshape_21, key0=Reshape_23, value0=Reshape_24, atten_mask=Data_15, actual_seq_lengths=[20, 20], actual_seq_lengths_kv=Data_16, query_rope=Reshape_25, key_rope=Identity_0) input_layout='TND' num_heads=4 num_key_value_heads=4 scale=0.0721688 sparse_mode=3
Reshape_27(x=FusedInferAttentionScore_0, shape=[1, 20, 4, -1])
Reshape_28(x=Reshape_27, shape=[20, 4, 128])
Transpose_3(x=Reshape_28, perm=[1, 0, 2])
Identity_1(x=Transpose_3)
Reshape_29(x=Identity_1, shape=[1, 4, 20, 128])
Reshape_30(x=Reshape_29, shape=[1, -1, 20, 128])
Transpose_4(x=Reshape_30, perm=[0, 2, 1, 3])
Identity_2(x=Transpose_4)
Reshape_31(x=Identity_2, shape=[1, 20, -1])
Transpose_5(x=Data_11, perm=[1, 0])
Reshape_32(x=Reshape_31, shape=[20, 512])
MatMul_5(x1=Reshape_32, x2=Transpose_5)
Reshape_33(x=MatMul_5, shape=[1, 20, 1024])
NetOutput_0(input0=Reshape_33, input1=Add_1)""",
        )

    def test_decode_dynamic(self) -> None:
        self.assertEqual(text(1, dynamic=True), text(1, dynamic=False))
