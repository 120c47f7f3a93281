"""Products with quantised weights as libraries and checkpoints write them, and a toy layer that uses them.

A spelling is `multiply(x [.., K], weight)`: the product with a weight [Out, K] that is stored in 8 bits or less.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._higher_order_ops.out_dtype import out_dtype
from torch.ao.quantization.fx import _decomposed  # noqa: F401  # registers quantized_decomposed
from torch.nn.functional import linear

import mla_fx
from lib.comparing import EXACT
from lib.layers import Rewritten
from mla_fx.cases import DR, DV, HCKV, B, D, Layer, N, T, inputs

GROUP = 4  # columns with one scale and zero point


@dataclass(frozen=True)
class Stored:
    """A weight [Out, K] as codes, with a scale per row or per group of columns, and zero points of groups."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None = None


def by_rows(weight: Tensor) -> Stored:
    scales = weight.abs().amax(1) / 127
    return Stored((weight / scales.unsqueeze(1)).round().to(torch.int8), scales)


def by_rows_in_float8(weight: Tensor) -> Stored:
    scales = weight.abs().amax(1) / 448
    return Stored((weight / scales.unsqueeze(1)).to(torch.float8_e4m3fn), scales)


def by_tensor(weight: Tensor) -> Stored:
    scale = weight.abs().amax() / 127
    return Stored((weight / scale).round().to(torch.int8), scale)


def by_groups(weight: Tensor) -> Stored:
    """Codes of 4 bits, [Out, K/GROUP] scales and zero points."""
    groups = weight.unflatten(1, (-1, GROUP))
    low, high = groups.amin(-1), groups.amax(-1)
    scales = (high - low) / 15
    zeros = (-8 - low / scales).round()
    codes = (groups / scales.unsqueeze(-1) + zeros.unsqueeze(-1)).round().clamp(-8, 7)
    return Stored(codes.flatten(1).to(torch.int8), scales, zeros.to(torch.int8))


def by_blocks(weight: Tensor) -> Stored:
    """DeepSeek: codes in float8, and a scale for each block of 4 x 4."""
    blocks = weight.view(weight.shape[0] // 4, 4, -1, 4)
    scales = blocks.abs().amax((1, 3), keepdim=True) / 448
    return Stored((blocks / scales).view(weight.shape).to(torch.float8_e4m3fn), scales.squeeze((1, 3)))


def as_floats(weight: Tensor) -> Stored:
    """The weight itself, and the scales by which it is quantised in the graph."""
    return Stored(weight.clone(), weight.abs().amax(1, keepdim=True) / 127.5)


def in_nibbles(weight: Tensor) -> Stored:
    """Two codes of 4 bits in each byte."""
    scales = weight.abs().amax(1) / 7
    codes = (weight / scales.unsqueeze(1)).round().to(torch.int8) + 8
    return Stored((codes[:, ::2] | codes[:, 1::2] << 4).view(torch.uint8), scales)


# --- the weight alone is quantised -----------------------------------------------------------------------------------


def scaled_behind(x, w):
    """torchao: the product with the codes, then the scales."""
    return linear(x, w.codes.to(x.dtype)) * w.scales.to(x.dtype)


def scaled_behind_in_one_dimension(x, w):
    flat = torch.mm(x.reshape(-1, x.shape[-1]), w.codes.t().to(x.dtype))
    return (flat * w.scales.view(1, -1)).view(*x.shape[:-1], -1)


def scaled_in_front(x, w):
    return linear(x, w.codes.to(x.dtype) * w.scales.unsqueeze(1))


def scaled_in_float32(x, w):
    """torchao's float8: the transposed weight is dequantised."""
    weight = (w.codes.t().to(torch.float32) * w.scales.view(1, -1)).to(x.dtype)
    return (x.reshape(-1, x.shape[-1]) @ weight).view(*x.shape[:-1], -1)


def of_groups(x, w):
    """torchao's int4: each group has a scale and a zero point."""
    codes = w.codes.view(w.codes.shape[0], -1, GROUP).to(x.dtype) - w.zeros.unsqueeze(-1).to(x.dtype)
    return linear(x, (codes * w.scales.unsqueeze(-1)).view(w.codes.shape))


def of_blocks(x, w):
    """DeepSeek-V3.2: blocks side by side, times their scales, and back."""
    rows, columns = w.codes.shape
    blocks = w.codes.view(rows // 4, 4, columns // 4, 4).transpose(1, 2).contiguous().view(-1, 16)
    blocks = (blocks.float() * w.scales.view(-1, 1)).to(x.dtype).view(rows // 4, columns // 4, 4, 4)
    return linear(x, blocks.transpose(1, 2).contiguous().view(rows, columns))


def of_repeated_scales(x, w):
    scales = w.scales.repeat_interleave(4, 0).repeat_interleave(4, 1)
    return linear(x, w.codes.to(x.dtype) * scales)


def of_a_library(x, w):
    """PT2E: one operator dequantises a weight by rows."""
    zeros = torch.zeros(len(w.scales), dtype=torch.int64)
    weight = torch.ops.quantized_decomposed.dequantize_per_channel(w.codes, w.scales, zeros, 0, -128, 127, torch.int8)
    return linear(x, weight.to(x.dtype))


def of_nibbles(x, w):
    low, high = (w.codes & 15).to(torch.int8) - 8, (w.codes >> 4).to(torch.int8) - 8
    codes = torch.stack((low, high), -1).flatten(1)
    return linear(x, codes.to(x.dtype)) * w.scales


# --- tokens are quantised, too ---------------------------------------------------------------------------------------


def tokens(x):
    """Codes [.., K] and scales [.., 1] of tokens."""
    scales = x.abs().amax(-1, keepdim=True) / 127
    return (x / scales).round().clamp(-128, 127), scales


def of_tokens(x, w):
    codes, scales = tokens(x)
    return linear(codes, w.codes.to(x.dtype)) * scales * w.scales


def of_integers(x, w):
    """torchao's dynamic quantisation."""
    codes, scales = tokens(x.reshape(-1, x.shape[-1]))
    product = torch._int_mm(codes.to(torch.int8), w.codes.t()).float() * scales
    return (product.to(x.dtype) * w.scales).view(*x.shape[:-1], -1)


def of_unsigned(x, w):
    """The same with a kernel for unsigned codes: 128 is added to them, and its share is subtracted."""
    codes, scales = tokens(x.reshape(-1, x.shape[-1]))
    unsigned = (codes.to(torch.int8).to(torch.int32) + 128).to(torch.uint8)
    product = torch._int_mm(unsigned, w.codes.t()) - w.codes.t().sum(0, keepdim=True, dtype=torch.int32) * 128
    return (product.float() * scales * w.scales).to(x.dtype).view(*x.shape[:-1], -1)


def of_wide_integers(x, w):
    codes, scales = tokens(x.reshape(-1, x.shape[-1]))
    product = codes.to(torch.int8).to(torch.int32) @ w.codes.to(torch.int32).t()
    return (product * scales * w.scales).view(*x.shape[:-1], -1)


def of_wider_results(x, w):
    """torchao on a GPU: PyTorch's product of int8 with a result in int32."""
    codes, scales = tokens(x.reshape(-1, x.shape[-1]))
    product = out_dtype(torch.ops.aten.mm.default, torch.int32, codes.to(torch.int8), w.codes.t())
    return (product.to(x.dtype) * scales.expand(product.shape) * w.scales).view(*x.shape[:-1], -1)


def of_sums_cast_back(x, w):
    """bitsandbytes: the product is computed in float32 and cast to int32; both scales are multiplied first."""
    flat = x.reshape(-1, x.shape[-1])
    largest = flat.abs().amax(-1, keepdim=True)
    codes = (flat * (127 / largest)).round().to(torch.int8)
    product = (codes.float() @ w.codes.t().float()).to(torch.int32)
    return (product * (largest * w.scales / 127)).to(x.dtype).view(*x.shape[:-1], -1)


def of_tokens_without_scales(x, w):
    """Whole numbers are multiplied as they are."""
    codes = (x * 30).round().clamp(-128, 127).to(torch.int8)
    product = codes.to(torch.int32) @ w.codes.to(torch.int32).t()
    return product.to(x.dtype) * (w.scales / 30)


def of_float8(x, w):
    """torchao's dynamic float8: tokens and weights in float8, multiplied by one operator."""
    flat = x.reshape(-1, x.shape[-1])
    scales = flat.abs().amax(-1, keepdim=True).float() / 448
    codes = (flat.float() / scales).clamp(-448, 448).to(torch.float8_e4m3fn)
    product = torch._scaled_mm(codes, w.codes.t(), scales, w.scales.view(1, -1).float(), out_dtype=x.dtype)
    return product.view(*x.shape[:-1], -1)


def of_dequantised_tokens(x, w):
    """torchao's dynamic int4: tokens are quantised with a zero point, and dequantised at once."""
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    scales = (high - low) / 255
    zeros = -128 - (low / scales).round()
    codes = ((x / scales).round() + zeros).clamp(-128, 127).to(torch.int8)
    return of_groups((codes.to(x.dtype) - zeros) * scales, w)


def of_a_library_with_tokens(x, w):
    """PT2E: operators dequantise weights and tokens to float32. The result is rounded to the dtype of the model."""
    library = torch.ops.quantized_decomposed
    zeros = torch.zeros(len(w.scales), dtype=torch.int64)
    weight = library.dequantize_per_channel(w.codes, w.scales.float(), zeros, 0, -128, 127, torch.int8)
    codes = library.quantize_per_tensor(x.float(), 0.03, 0, -128, 127, torch.int8)
    return linear(library.dequantize_per_tensor(codes, 0.03, 0, -128, 127, torch.int8), weight).to(x.dtype)


def in_float32(x, w):
    """The weight is dequantised to float32, and so is the product."""
    return linear(x.float(), w.codes.float() * w.scales.float().unsqueeze(1)).to(x.dtype)


def of_fake_quantisation(x, w):
    """compressed-tensors: tokens and weights are quantised and dequantised in the model's dtype; no integer appears."""
    low, high = (x.amin(-1, keepdim=True).clamp(max=0), x.amax(-1, keepdim=True).clamp(min=0))
    scales = torch.maximum(low.abs(), high.abs()) / 127.5
    scales = torch.where(scales == 0, torch.finfo(x.dtype).eps, scales)
    values, weight = (torch.clamp(part / by, -128, 127).round() * by for part, by in ((x, scales), (w.codes, w.scales)))
    return linear(values, weight)


SPELLINGS = {
    scaled_behind: by_rows,
    scaled_behind_in_one_dimension: by_tensor,
    scaled_in_front: by_rows,
    scaled_in_float32: by_rows_in_float8,
    of_groups: by_groups,
    of_blocks: by_blocks,
    of_repeated_scales: by_blocks,
    of_a_library: by_rows,
    of_nibbles: in_nibbles,
    of_tokens: by_rows,
    of_integers: by_rows,
    of_unsigned: by_rows,
    of_wide_integers: by_rows,
    of_wider_results: by_rows,
    of_sums_cast_back: by_rows,
    of_tokens_without_scales: by_rows,
    of_float8: by_rows_in_float8,
    of_dequantised_tokens: by_groups,
    of_a_library_with_tokens: by_rows,
    in_float32: by_rows,
    of_fake_quantisation: as_floats,
}
OF_TOKENS = (
    of_tokens, of_integers, of_unsigned, of_wide_integers, of_wider_results, of_sums_cast_back,
    of_tokens_without_scales, of_float8, of_dequantised_tokens,
)  # fmt: skip
INT8_TOKENS = (of_tokens, of_integers, of_unsigned, of_wide_integers, of_wider_results, of_sums_cast_back)


# --- a layer ---------------------------------------------------------------------------------------------------------

ALL = ("q_a", "q_b", "kv_a", "kv_b")


class Quantised(Layer):
    """A layer with some projections quantised in one spelling."""

    def __init__(self, multiply, store, *names):
        super().__init__()
        self.multiply, self.names = multiply, names
        for name in names:
            stored = store(getattr(self, name).data)
            for part, value in vars(stored).items():
                self.register_buffer(f"{name}_{part}", value)
            delattr(self, name)

    def project(self, x, name):
        if name not in self.names:
            return linear(x, getattr(self, name))
        parts = (getattr(self, f"{name}_{part}") for part in ("codes", "scales", "zeros"))
        return self.multiply(x, Stored(*parts))

    def query(self, x):
        return self.project(self.norm(self.project(x, "q_a"), self.q_gamma), "q_b")

    def rows(self, x):
        latent, k_rope = torch.split(self.project(x, "kv_a"), [HCKV, DR], dim=-1)
        return self.norm(latent, self.kv_gamma).unsqueeze(1), k_rope.unsqueeze(1)

    def attend(self, q_nope, q_rope, latent, k_rope, mask):
        return super().attend(q_nope, q_rope, latent, k_rope, mask.to(q_nope.dtype))

    def keys(self, latent, k_rope):
        expanded = self.project(latent, "kv_b").view(B, T, N, D + DV).transpose(1, 2)
        k_nope, value = torch.split(expanded, [D, DV], dim=-1)
        return torch.cat((k_nope, k_rope.expand(-1, N, -1, -1)), dim=-1), value


def report_of(layer: Layer, *given: Any, **options: Any) -> mla_fx.Report:
    return run_of(layer, *given, **options).report


def run_of(layer: Layer, *given: Any, **options: Any) -> Rewritten:
    """The rewritten layer, after its output and caches were compared with eager mode."""
    given, theirs = given or inputs(), copy.deepcopy(layer)
    run = Rewritten(layer, **options)
    torch.testing.assert_close(run(*given), theirs(*given), **EXACT)
    caches = [(one.kv_cache, one.kr_cache) for one in (layer, theirs)]
    torch.testing.assert_close(*caches, **EXACT)
    return run
