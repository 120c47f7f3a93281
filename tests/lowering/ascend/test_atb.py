"""Lowerings to ATB's operator follow its schema, and compute the same as `mla_fx.multi_latent_attention`.

The operator itself replaces ATB's, under ATB's name and with ATB's arguments."""

import pytest
import torch
from mla_fx.lowering.ascend.limits import Surface
from mla_fx.lowering.ascend.operators import multi_latent_attention

from mla_fx.ops import catalogue

# As torch_npu 2.13 declares it.
TENSORS = "Tensor q_nope, Tensor q_rope, Tensor ctkv, Tensor k_rope, Tensor block_tables, SymInt[] context_lens"
NUMBERS = "int q_headnum, float qk_scale, int kv_headnum"
OPTIONS = (
    "Tensor? mask=None, SymInt[]? qseqlen=None, Tensor? qk_descale=None, Tensor? pv_descale=None, "
    "str? mask_type=None, str? calc_type=None, str? cache_mode=None"
)
NAME = "npu_multi_head_latent_attention"
SCHEMA = f"{NAME}({TENSORS}, {NUMBERS}, *, {OPTIONS}) -> Tensor"
SCHEMA_LSE = f"{NAME}.lse({TENSORS}, {NUMBERS}, bool return_lse, *, {OPTIONS}) -> (Tensor, Tensor)"

OPERATOR = catalogue()["multi_latent_attention"]
ACLGRAPH = Surface("Ascend910B3", "aclgraph", hoists=True, cann="8.5.0")


def attend(*args, mask=None, qseqlen=None, qk_descale=None, pv_descale=None, **options):
    *tensors, heads, scale, kv_heads = args
    assert tensors[4].dtype == torch.int32
    optional = mask, qseqlen, qk_descale, pv_descale
    return OPERATOR.host(*tensors, *optional, head_num=heads, qk_scale=scale, kv_head_num=kv_heads, **options)


@pytest.fixture(scope="module", autouse=True)
def atb():
    with torch.library._scoped_library("atb", "FRAGMENT") as library:
        library.define(SCHEMA)
        library.define(SCHEMA_LSE)
        library.impl(NAME, lambda *args, **options: attend(*args, **options)[0], "CPU")
        library.impl(f"{NAME}.lse", lambda *args, **options: attend(*args[:-1], **options), "CPU")
        yield


def with_lists(sample):
    """A sample's arguments with lengths as lists, and without sequences that have no context."""
    names = [argument.name for argument in OPERATOR.host._schema.arguments]
    given = dict(zip(names, sample.args, strict=False))
    given["context_lens"] = [max(length, 1) for length in given["context_lens"].tolist()]
    if given["q_seqlen"] is not None:
        given["q_seqlen"] = given["q_seqlen"].tolist()
    given["block_tables"] = given["block_tables"].long().clamp(min=0)
    return list(given.values())


SAMPLES = [
    pytest.param(sample, id=f"{number}-{sample.mode}")
    for number, sample in enumerate(OPERATOR.samples(torch.bfloat16))
    if "KVCACHE" not in sample.mode and sample.mode != "INT8_NZCACHE, RING"
]


@pytest.mark.parametrize("sample", SAMPLES)
def test_every_mode_that_atb_has(sample):
    args = with_lists(sample)
    given = multi_latent_attention.Arguments(*args, **sample.kwargs)
    multi_latent_attention.refuse_for_atb(ACLGRAPH, given)
    wanted = OPERATOR.host(*args, **sample.kwargs)
    torch.testing.assert_close(multi_latent_attention.as_atb(ACLGRAPH, given), wanted, rtol=0, atol=0)
