"""CPU kernels of torch_npu's operators, as its meta kernels are named: what a graph of them runs without an NPU.

They are the functions that interpret GE graphs, and so take what a device takes and nothing else."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch_npu  # noqa: F401  registers the operators
from torch import Tensor

from npu import formats, ge_releases
from npu.ge_interpreter import NEEDS_NZ
from npu.ge_ops import arithmetic, atb, attention, mla, sparse

# How GE names what npu_fused_infer_attention_score_v2 takes.
GE_NAMES = {
    "actual_seq_qlen": "actual_seq_lengths",
    "actual_seq_kvlen": "actual_seq_lengths_kv",
    "num_query_heads": "num_heads",
    "softmax_scale": "scale",
    "return_softmax_lse": "softmax_lse_flag",
    "dequant_scale_key": "key_antiquant_scale",
    "dequant_scale_value": "value_antiquant_scale",
    "dequant_offset_key": "key_antiquant_offset",
    "dequant_offset_value": "value_antiquant_offset",
    "key_quant_mode": "key_antiquant_mode",
    "value_quant_mode": "value_antiquant_mode",
}
DEFAULTS = {"num_key_value_heads": 0, "input_layout": "BSH", "scale": 1.0, "softmax_lse_flag": False}
DTYPES = {6: torch.float32, 15: torch.bfloat16}  # by torch_npu's number
Results = tuple[Tensor, ...]


def npu_mla_prolog_v3(*args: Any, **options: Any) -> Results:
    """Writes both caches."""
    query, query_rope, _, _, *others = mla.MlaPrologV3(**_prolog_arguments(*args, **options))
    return query, query_rope, *others


def npu_mla_prolog_v3_functional(*args: Any, **options: Any) -> Results:
    """Returns both caches, and writes neither."""
    arguments = _prolog_arguments(*args, **options)
    copies = {name: arguments[name].clone() for name in ("kv_cache", "kr_cache")}
    query, query_rope, kv_cache, kr_cache, *others = mla.MlaPrologV3(**arguments | copies)
    return query, query_rope, *others, kv_cache, kr_cache


def npu_kv_rmsnorm_rope_cache_v2(*args: Any, **options: Any) -> Results:
    """Writes both caches."""
    return mla.KvRmsNormRopeCache(**_key_side_arguments(*args, **options))[2:]


is_in_a_graph = False
"""Whether operators do what they do in graphs of GE."""


def npu_kv_rmsnorm_rope_cache_v2_functional(*args: Any, **options: Any) -> Results:
    """Returns both caches. Follows torch_npu 2.13 outside of graphs: it writes those that it is given, not the copies
    that it returns."""
    arguments = _key_side_arguments(*args, **options)
    copies = {name: arguments[name].clone() for name in ("k_cache", "ckv_cache")}
    _, _, *rows = mla.KvRmsNormRopeCache(**(arguments | copies if is_in_a_graph else arguments))
    return *rows, *copies.values()


def npu_rms_norm(x: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> Results:
    return arithmetic.RmsNorm(x, gamma, epsilon)


def npu_interleave_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return mla.InterleaveRope(x, cos, sin)


def npu_rotary_mul(x: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half") -> Tensor:
    if rotary_mode != "half":
        raise ValueError(f"rotary_mode is {rotary_mode!r}; simulated is 'half'")
    return mla.RotaryMul(x, r1, r2)


def npu_fused_infer_attention_score_v2(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Results:
    call = attention_call(query, key, value, **options)
    lengths = {name: torch.tensor(length) for name, length in call.items() if name.startswith("actual_seq_lengths")}
    ge_releases.check("FusedInferAttentionScore", call)
    return attention.FusedInferAttentionScore(**call | lengths)


def attention_call(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> dict[str, Any]:
    """Names arguments like GE."""
    given = {GE_NAMES.get(name, name): option for name, option in options.items() if option is not None}
    return {"query": query, "key": [key], "value": [value]} | DEFAULTS | given


def out(query: Tensor, key: Tensor, value: Tensor, *, out: list[Tensor], workspace: Tensor, **options: Any) -> Results:
    """npu_fused_infer_attention_score_v2.out, in the workspace that it is given."""
    if not workspace.numel():
        raise ValueError("workspace is empty; it must be what the query for its size returned")
    results = npu_fused_infer_attention_score_v2(query, key, value, **options)
    return tuple(memory.copy_(result) for memory, result in zip(out, results, strict=True))


def get_max_workspace(query: Tensor, *args: Any, **options: Any) -> Tensor:
    """_npu_fused_infer_attention_score_v2_get_max_workspace."""
    return query.new_empty(1, dtype=torch.uint8)


def npu_multi_head_latent_attention(*args: Any, **options: Any) -> Tensor:
    return atb.multi_latent_attention(*args, **{name: value for name, value in options.items() if value is not None})[0]


def lse(*args: Any, **options: Any) -> Results:
    """npu_multi_head_latent_attention.lse. Its logarithms are in 16 bits; in int8 torch_npu has the wrong dtype."""
    *tensors, _ = args
    given = {name: value for name, value in options.items() if value is not None and name != "workspace"}
    out, logarithms = atb.multi_latent_attention(*tensors, **given)
    return out, logarithms.to(out.dtype)


def npu_lightning_indexer(*args: Any, **options: Any) -> Results:
    return sparse.LightningIndexer(**named(torch.ops.npu.npu_lightning_indexer, args, options))


def npu_sparse_flash_attention(*args: Any, **options: Any) -> Results:
    return sparse.SparseFlashAttention(**named(torch.ops.npu.npu_sparse_flash_attention, args, options))


def npu_attention_update(lse: list[Tensor], local_out: list[Tensor], update_type: int) -> Results:
    return attention.AttentionUpdate(lse, local_out, update_type, len(lse))


def npu_dynamic_quant(x: Tensor, *, smooth_scales: Tensor | None = None, **options: Any) -> Results:
    """Codes in int8. A token of zeros has codes of zero."""
    if options not in ({}, {"dst_type": 1}):
        raise ValueError(f"options are {options}; simulated are tokens in int8")
    smooth = x.float() if smooth_scales is None else x.float() * smooth_scales
    largest = smooth.abs().amax(-1, keepdim=True)
    codes = (smooth * (torch.full_like(largest, 127) / largest)).round().nan_to_num(0)
    return codes.to(torch.int8), (largest / 127).squeeze(-1)


def npu_quant_matmul(
    x1: Tensor,
    x2: Tensor,
    scale: Tensor,
    *,
    pertoken_scale: Tensor | None = None,
    bias: Tensor | None = None,
    output_dtype: int,
) -> Tensor:
    product = x1.int() @ x2.int()
    if bias is not None:
        if bias.dtype != torch.int32:
            raise ValueError(f"bias is in {bias.dtype}; simulated is torch.int32")
        product = product + bias
    scaled = product.float() * scale
    if pertoken_scale is not None:
        scaled = scaled * pertoken_scale.unsqueeze(-1)
    return scaled.to(DTYPES[output_dtype])


def _prolog_arguments(*args: Any, **options: Any) -> dict[str, Any]:
    return prolog_arguments(torch.ops.npu.npu_mla_prolog_v3, "MlaPrologV3", args, options)


def prolog_arguments(operator: Any, kernel: str, args: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any]:
    """Names arguments, with weights as matrices. Raises ValueError for weights that are not in FRACTAL_NZ."""
    arguments = named(operator, args, options)
    for name in NEEDS_NZ[kernel]:
        if formats.get_npu_format(arguments[name]) != formats.FRACTAL_NZ:
            raise ValueError(f"{kernel} reads {name} in FRACTAL_NZ (format 29), but it is ND (format 2)")
        arguments[name] = formats.from_nz(arguments[name])
    ge_releases.check(kernel, arguments)
    return arguments


def _key_side_arguments(*args: Any, **options: Any) -> dict[str, Any]:
    arguments = {"is_output_kv": False} | named(torch.ops.npu.npu_kv_rmsnorm_rope_cache_v2, args, options)
    ge_releases.check("KvRmsNormRopeCache", arguments)
    return arguments


def named(operator: Any, args: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any]:
    """The arguments that are given, by name."""
    names = [argument.name for argument in operator.default._schema.arguments]
    given = dict(zip(names, args, strict=False)) | options
    return {name: value for name, value in given.items() if value is not None}


KERNELS = {
    "npu::npu_mla_prolog_v3": npu_mla_prolog_v3,
    "npu::npu_mla_prolog_v3_functional": npu_mla_prolog_v3_functional,
    "npu::npu_kv_rmsnorm_rope_cache_v2": npu_kv_rmsnorm_rope_cache_v2,
    "npu::npu_kv_rmsnorm_rope_cache_v2_functional": npu_kv_rmsnorm_rope_cache_v2_functional,
    "npu::npu_rms_norm": npu_rms_norm,
    "npu::npu_interleave_rope": npu_interleave_rope,
    "npu::npu_rotary_mul": npu_rotary_mul,
    "npu::npu_lightning_indexer": npu_lightning_indexer,
    "npu::npu_sparse_flash_attention": npu_sparse_flash_attention,
    "npu::npu_attention_update": npu_attention_update,
    "npu::npu_dynamic_quant": npu_dynamic_quant,
    "npu::npu_quant_matmul": npu_quant_matmul,
    "npu::npu_fused_infer_attention_score_v2": npu_fused_infer_attention_score_v2,
    "npu::npu_fused_infer_attention_score_v2.out": out,
    "npu::_npu_fused_infer_attention_score_v2_get_max_workspace": get_max_workspace,
    "atb::npu_multi_head_latent_attention": npu_multi_head_latent_attention,
    "atb::npu_multi_head_latent_attention.lse": lse,
}


@functools.cache
def register() -> None:
    for name, kernel in KERNELS.items():
        torch.library.impl(name, "CPU", kernel)
