"""Which calls on a CUDA device are lowered to the Triton kernel, with the reason for those that are not.

Tensors are fake: their device is known, and nothing runs."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from mla_fx.errors import NoMatch
from mla_fx.ops.emitted import latent_attention, sparse_latent_attention
from mla_fx.target import first_of, modules_of_operators

pytest.importorskip("triton")
from mla_fx.lowering.cuda import split_keys


def modules():
    return {entry.name: module for entry, module in modules_of_operators("mla_fx.lowering.cuda")}


def call(device="cuda", dtype=torch.bfloat16, tokens=1, rank=512):
    with FakeTensorMode():
        queries = (torch.empty(2, tokens, 16, width, dtype=dtype, device=device) for width in (rank, 64))
        caches = (torch.empty(2, 64, width, dtype=dtype, device=device) for width in (rank, 64))
        return latent_attention.Arguments(*queries, *caches, None, scale=0.1)


REFUSED = {
    "the kernel is for CUDA devices": {"device": "cpu"},
    "the kernel is for caches of rows, and at most 32 bits": {"dtype": torch.float64},
    "the kernel is for at most 512 columns of a latent": {"rank": 1024},
    "the kernel is for at most 16 new tokens of a sequence": {"tokens": 17},
}


@pytest.mark.parametrize("name", ["latent_attention", "latent_attention.with_lse"])
def test_decoding_is_lowered_to_the_kernel(name):
    for tokens in (1, 16):
        assert modules()[name].lower(call(tokens=tokens)) is not None
    for sentence, options in REFUSED.items():
        with pytest.raises(NoMatch, match=sentence):
            modules()[name].lower(call(**options))


def test_chosen_keys_are_gathered_by_the_kernel_in_prompts_too():
    a = call(tokens=64)
    with FakeTensorMode():
        indices = torch.empty(2, 64, 1, 32, dtype=torch.int32, device="cuda")
    chosen = sparse_latent_attention.Arguments(a.query, a.query_rope, a.kv_cache, a.kr_cache, indices, scale=0.1)
    assert modules()["sparse_latent_attention"].lower(chosen) is not None


def test_other_calls_have_the_lowering_of_other_devices():
    lower = first_of(modules()["latent_attention"], lambda *given, **options: "other")
    a = call(tokens=32)
    given = a.query, a.query_rope, a.kv_cache, a.kr_cache, None
    assert lower(*given, scale=0.1) == "other"
    assert split_keys.MOST_TOKENS < 32


def test_nothing_is_imported_without_a_device():
    from mla_fx.lowering import cuda

    assert bool(cuda.LOWERINGS) == torch.cuda.is_available()
    others = {torch.ops.mla_fx.latent_attention.default: lambda *given: "other"}
    if not torch.cuda.is_available():
        assert cuda.lowerings(others) == others
