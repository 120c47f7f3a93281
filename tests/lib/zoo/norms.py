"""RMSNorm, `gamma * x / sqrt(mean(x^2) + epsilon)`, by those who wrote it."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor


def hf(x: Tensor, gamma: Tensor, epsilon: float) -> Tensor:
    dtype = x.dtype
    x = x.to(torch.float32)
    variance = x.pow(2).mean(-1, keepdim=True)
    x = x * torch.rsqrt(variance + epsilon)
    return gamma * x.to(dtype)


def gamma_in_float32(x: Tensor, gamma: Tensor, epsilon: float) -> Tensor:
    """litgpt: the weight is multiplied before the downcast."""
    x32 = x.float()
    norm = torch.mean(x32 * x32, dim=-1, keepdim=True)
    return (x32 * torch.rsqrt(norm + epsilon) * gamma.float()).to(dtype=x.dtype)


def fused(x: Tensor, gamma: Tensor, epsilon: float) -> Tensor:
    """DeepSeek's model.py, torchtitan."""
    return F.rms_norm(x, (x.shape[-1],), gamma, epsilon)


def divided_by_sqrt(x: Tensor, gamma: Tensor, epsilon: float) -> Tensor:
    x32 = x.float()
    return gamma * (x32 / torch.sqrt(x32.pow(2).mean(dim=-1, keepdim=True) + epsilon)).to(x.dtype)


def one_over_sqrt(x: Tensor, gamma: Tensor, epsilon: float) -> Tensor:
    x32 = x.float()
    return gamma * (x32 * (1.0 / torch.sqrt(torch.square(x32).mean(-1, True) + epsilon))).type_as(x)


def to_minus_half(x: Tensor, gamma: Tensor, epsilon: float) -> Tensor:
    x32 = x.float()
    return (x32 * ((x32**2).mean(-1, keepdim=True) + epsilon).pow(-0.5)).type_as(x) * gamma


def sum_over_n(x: Tensor, gamma: Tensor, epsilon: float) -> Tensor:
    x32 = x.float()
    mean = torch.sum(x32 * x32, dim=-1, keepdim=True) / x.shape[-1]
    return x32.mul(torch.rsqrt(mean + epsilon)).to(x.dtype) * gamma


def vector_norm(x: Tensor, gamma: Tensor, epsilon: float) -> Tensor:
    x32 = x.float()
    length = torch.linalg.vector_norm(x32, dim=-1, keepdim=True)
    return gamma * (x32 * torch.rsqrt(length * length / x.shape[-1] + epsilon)).to(x.dtype)


def unit_offset(x: Tensor, gamma: Tensor, epsilon: float) -> Tensor:
    """Gemma, litgpt: what is stored is the weight less one."""
    x32 = x.float()
    return (x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + epsilon) * (1.0 + gamma.float())).to(x.dtype)


def tensor_epsilon(x: Tensor, gamma: Tensor, epsilon: float) -> Tensor:
    x32 = x.float()
    variance = x32.pow(2).mean(-1, keepdim=True)
    return gamma * (x32 * torch.rsqrt(variance + torch.tensor(epsilon))).to(x.dtype)


NORMS = {
    "hf": hf,
    "gamma_in_float32": gamma_in_float32,
    "fused": fused,
    "divided_by_sqrt": divided_by_sqrt,
    "one_over_sqrt": one_over_sqrt,
    "to_minus_half": to_minus_half,
    "sum_over_n": sum_over_n,
    "vector_norm": vector_norm,
    "unit_offset": unit_offset,
    "tensor_epsilon": tensor_epsilon,
}
