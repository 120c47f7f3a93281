"""Attention over paged keys and values per head in int8 codes becomes the vendor's, with a scale for each column.

The layers are plain PyTorch, as in lib/coded_heads.py."""

import pytest
import torch
from lib.coded_heads import (
    Coded,
    InFloat32,
    KeysAlone,
    OfHeads,
    ScaledQuery,
    ZeroPoints,
    ZerosOfKeys,
    coded,
    given,
    in_codes,
)
from lib.paged_heads import Eager, Grouped, PagesOfHeads, arguments, heads_first
from torch import nn

import mla_fx
from npu.converted import types
from npu.paged_heads import BF16, KERNEL, compared, compiled, sized
from npu.planted import options

CALL = "npu.npu_fused_infer_attention_score_v2.out"
WRITTEN = [1, 2, 0, 0, 0]
TARGETS = pytest.mark.parametrize("target", ["ge", "aclgraph"])
KINDS = [Coded, ZeroPoints, OfHeads, InFloat32, ScaledQuery, ZerosOfKeys, coded(Eager), coded(Grouped)]


def becomes_the_kernel(converted, captured, target):
    if target == "aclgraph":
        assert [graph.calls(CALL) for graph in captured.graphs] == [[1]], str(mla_fx.last_report())
        return
    graph = types(converted.graphs[0])
    counts = [graph.count(name) for name in (KERNEL, "ScatterNdUpdate", "TensorMove", "Assign", "IndexByTensor")]
    assert counts == WRITTEN, str(mla_fx.last_report())


@TARGETS
@pytest.mark.parametrize("block", [32, pytest.param(384, marks=pytest.mark.campaign)])
@pytest.mark.parametrize("kind", [*KINDS[:2], *(pytest.param(kind, marks=pytest.mark.campaign) for kind in KINDS[2:])])
def test_a_layer(converted, captured, kind, block, target):
    module = kind(sized(1, block)).to(BF16)
    compared(compiled(module, target=target), module, given(module, BF16))
    becomes_the_kernel(converted, captured, target)


@TARGETS
@pytest.mark.parametrize("block", [64, 128])
def test_heads_first_in_a_page(converted, captured, block, target):
    module = coded(PagesOfHeads)(sized(1, block)).to(BF16)
    pages = in_codes(heads_first(arguments(module.sizes, BF16)))
    compared(compiled(module, target=target), module, pages)
    becomes_the_kernel(converted, captured, target)


@pytest.mark.parametrize("kv_heads, dtype", [(1, BF16), (4, BF16), (2, torch.float16)])
def test_heads_and_dtypes(converted, captured, kv_heads, dtype):
    module = ZeroPoints(sized(1, 128, kv_heads=kv_heads)).to(dtype)
    compared(compiled(module), module, given(module, dtype))
    becomes_the_kernel(converted, captured, "ge")


@pytest.mark.parametrize("name", ["dequant_scale_key", "dequant_scale_value", "dequant_offset_value"])
def test_another_number_is_noticed(converted, monkeypatch, name):
    """The number is that of the next head. (An offset of keys moves all scores of a row alike.)"""
    options(**{name: lambda numbers: numbers.roll(1, 1)})(monkeypatch)
    module = ZeroPoints(sized(1, 32)).to(BF16)
    with pytest.raises(AssertionError):
        compared(compiled(module), module, given(module, BF16))


WRONG = {
    "scales in float32": ("dequant_scale_key", torch.Tensor.float, "key_antiquant_scale is torch.float32"),
    "one scale for each head": ("dequant_scale_value", lambda scales: scales[..., :1], "value_antiquant_scale is"),
    "no offset of keys": ("dequant_offset_key", lambda _: None, "offsets are given for both of keys and values"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_a_device_would_refuse(converted, monkeypatch, name):
    option, change, sentence = WRONG[name]
    options(**{option: change})(monkeypatch)
    module = ZeroPoints(sized(1, 32)).to(BF16)
    with pytest.raises(ValueError, match=sentence):
        compared(compiled(module), module, given(module, BF16))


def test_batches_of_any_size(converted):
    """From the second size on, the batch is a symbol; the caches keep their sizes."""
    module = Coded(sized(1, 128, batch=4)).to(BF16)
    run, (x, table, starts, *caches) = compiled(module, dynamic=None), given(module, BF16)
    for batch in (4, 3, 2):
        compared(run, module, [x[:batch], table[:batch], starts[:batch], *caches])
    assert [[types(graph).count(name) for name in (KERNEL, "TensorMove")] for graph in converted.graphs] == [[1, 0]] * 2


# --- what stays in plain operators -----------------------------------------------------------------------------------


class Float32(Coded):
    """Scales are float32, which the kernel does not take."""

    def _apply(self, fn):
        super()._apply(fn)
        self.key_scale, self.value_scale = (nn.Buffer(scale.float()) for scale in (self.key_scale, self.value_scale))
        return self

    def numbers(self, codes, scale, zero):
        return (codes.float() * scale).to(self.qkv[0].dtype)


class Rounded(Float32):
    """The program rounds its scales."""

    def numbers(self, codes, scale, zero):
        return codes.to(self.qkv[0].dtype) * scale.to(BF16)


def test_scales_that_the_program_rounds(converted, captured):
    module = Rounded(sized(1, 32)).to(BF16)
    compared(compiled(module), module, given(module, BF16))
    becomes_the_kernel(converted, captured, "ge")


REFUSED = {
    "scales": (Float32, sized(1, 32), f"key_scale has dtype torch.float32; {KERNEL} takes torch.bfloat16"),
    "tokens": (Coded, sized(3, 128), f"key_cache has codes and query S = 3; {KERNEL} takes codes with a single token"),
    "pages": (Coded, sized(1, 16), f"with codes, key_cache has BlockSize = 16; {KERNEL} takes multiples of 32"),
    "columns": (Coded, sized(1, 32, width=48, columns=48), f"with codes, query has D = 48; {KERNEL} takes 32"),
    "values": (KeysAlone, sized(1, 32), f"value_cache has dtype torch.bfloat16; {KERNEL} takes torch.int8"),
}


@TARGETS
@pytest.mark.parametrize("name", REFUSED)
def test_what_stays_in_plain_operators(converted, captured, name, target):
    kind, sizes, sentence = REFUSED[name]
    module = kind(sizes).to(BF16)
    codes, plain = given(module, BF16), arguments(sizes, BF16)
    compared(compiled(module, target=target), module, (*codes[:4], plain[4]) if kind is KeysAlone else codes)
    (miss,) = [miss for miss in mla_fx.last_report().misses if miss.pattern == "paged_attention"]
    assert miss.reason.startswith(f"target {target!r}: {sentence}"), miss.reason
    assert not mla_fx.last_report().fused
