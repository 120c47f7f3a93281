"""What a GE graph says: its text, and what the interpreter does not run because a device may do something else."""

import pytest
import torch
import torch_npu

from npu import formats
from npu.ge_ops import arithmetic
from npu.golden import ge_text


def step(x, gamma, cos, sin, index, k_cache, ckv_cache):
    operator = torch.ops.npu.npu_kv_rmsnorm_rope_cache_v2_functional
    *_, k, ckv = operator(x, gamma, cos, sin, index, k_cache, ckv_cache, epsilon=1e-6, cache_mode="PA")
    k_cache.copy_(k)
    ckv_cache.copy_(ckv)
    return ckv_cache.flatten(0, 2) * 0.5


def key_side():
    tables = [torch.randn(2, 1, 3, 64).bfloat16() for _ in range(2)]
    caches = [torch.zeros(4, 16, 1, width).bfloat16() for width in (64, 512)]
    return torch.randn(2, 1, 3, 576).bfloat16(), torch.ones(512).bfloat16(), *tables, torch.arange(6), *caches


def test_the_text_of_a_graph(converted):
    converted.compiled(step)(*key_side())
    assert (
        ge_text(converted.graphs[0])
        == """\
Data_0: bfloat16[2, 1, 3, 576]
Data_1: bfloat16[512]
Data_2: bfloat16[2, 1, 3, 64]
Data_3: bfloat16[2, 1, 3, 64]
Data_4: int64[6]
Data_5: bfloat16[4, 16, 1, 64]
Data_6: bfloat16[4, 16, 1, 512]
KvRmsNormRopeCache_0(kv=Data_0, gamma=Data_1, cos=Data_2, sin=Data_3, index=Data_4, k_cache=Data_5, ckv_cache=Data_6) \
cache_mode='PA' epsilon=1e-06
Reshape_0(x=KvRmsNormRopeCache_0:1, shape=[64, 512])
Muls_0(x=Reshape_0) value=0.5
Cast_0(x=Muls_0) dst_type=27
NetOutput_0(input0=Cast_0, input1=KvRmsNormRopeCache_0)"""
    )


def test_the_text_names_formats_and_free_sizes(converted):
    weight = torch_npu.npu_format_cast(torch.randn(20, 8).bfloat16(), 29)
    converted.compiled(lambda x, weight: x @ weight, dynamic=True)(torch.randn(3, 20).bfloat16(), weight)
    assert ge_text(converted.graphs[0]).splitlines()[:2] == [
        "Data_0: bfloat16[-1, -1]",
        "Data_1: bfloat16[20, 8] NZ",
    ]


def test_an_unknown_operator_fails_by_its_name(converted):
    with pytest.raises(NotImplementedError, match="no file in tests/npu/ge_ops has the GE operator Tan"):
        converted.compiled(torch.tan)(torch.randn(3))


def test_operands_have_one_dtype():
    with pytest.raises(ValueError, match=r"operands are torch.float32 and torch.bfloat16; GE operators take one dtype"):
        arithmetic.Add(torch.ones(2), torch.ones(2).bfloat16())


def test_a_read_beside_a_write_has_no_order(converted):
    """Version 1 writes the caches, though its schema is functional, so nothing orders it and a read of the cache."""

    def hidden_write(x, gamma, cos, sin, index, k_cache, ckv_cache):
        operator = torch.ops.npu.npu_kv_rmsnorm_rope_cache
        k, *_ = operator(x, gamma, cos, sin, index, k_cache, ckv_cache, cache_mode="PA")
        return k + 1, k_cache + 1

    with pytest.raises(ValueError, match=r"reads .*, which KvRmsNormRopeCache writes, in no order"):
        converted.compiled(hidden_write)(*key_side())


def test_a_write_into_a_result_is_undefined(converted):
    def write_elsewhere(x, gamma, cos, sin, index, k_cache, ckv_cache):
        operator = torch.ops.npu.npu_kv_rmsnorm_rope_cache
        return operator(x, gamma, cos, sin, index, k_cache * 2, ckv_cache, cache_mode="PA")[0]

    with pytest.raises(ValueError, match=r"KvRmsNormRopeCache writes k_cache in place, which is the result of"):
        converted.compiled(write_elsewhere)(*key_side())


def test_formats_come_back():
    for dtype, n0 in ((torch.bfloat16, 16), (torch.int8, 32), (torch.float32, 8)):
        matrix = torch.arange(3 * 20 * 40).remainder(127).to(dtype).view(3, 20, 40)
        cast = torch_npu.npu_format_cast(matrix, 29)
        assert torch_npu.get_npu_format(cast) == 29 and cast.shape == matrix.shape
        memory = torch.empty(0, dtype=dtype).set_(cast.untyped_storage())
        row, column = 19, 37
        assert (
            memory[32 * (-(-40 // n0) * n0) * 1 + column // n0 * 32 * n0 + row * n0 + column % n0]
            == matrix[1, row, column]
        )
        assert torch.equal(formats.from_nz(cast), matrix)
        assert torch.equal(torch_npu.npu_format_cast(cast, 2), matrix)
