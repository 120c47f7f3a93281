"""torch_npu.npu_mla_prolog as its document calls it: directly, and in a graph. Results are compared with float64.

On an Ascend NPU this runs the vendor's kernel; without torch_npu it runs `torch.ops.mla_fx.mla_prolog` on the CPU,
with the same arguments:  python examples/npu_mla_prolog.py"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import mla_fx

try:
    import torch_npu  # type: ignore[import-not-found]
except ImportError:
    torch_npu = None
DEVICE = "cpu" if torch_npu is None else "npu"

B, S, HE, HCQ, HCKV, N, D, DR = 8, 2, 7168, 1536, 512, 32, 128, 64
BLOCK_NUM, BLOCK_SIZE, EPSILON = 64, 128, 1e-5
FRACTAL_NZ = 29

Results = tuple[Tensor, Tensor, Tensor, Tensor]


def arguments() -> list[Tensor]:
    """One decode step of B sequences with S tokens each, at random places in the caches."""
    torch.manual_seed(0)

    def weight(*shape: int, fan_in: int) -> Tensor:
        return (torch.randn(*shape) / math.sqrt(fan_in)).bfloat16()

    angle = 6 * torch.rand(B, S, DR)
    return [
        torch.randn(B, S, HE).bfloat16(),
        weight(HE, HCQ, fan_in=HE),
        weight(HCQ, N * (D + DR), fan_in=HCQ),
        weight(N, D, HCKV, fan_in=D),
        weight(HE, HCKV + DR, fan_in=HE),
        (0.7 + 0.6 * torch.rand(HCQ)).bfloat16(),
        (0.7 + 0.6 * torch.rand(HCKV)).bfloat16(),
        angle.sin().bfloat16(),
        angle.cos().bfloat16(),
        torch.randperm(BLOCK_NUM * BLOCK_SIZE)[: B * S].view(B, S),
        torch.randn(BLOCK_NUM, BLOCK_SIZE, 1, HCKV).bfloat16(),
        torch.randn(BLOCK_NUM, BLOCK_SIZE, 1, DR).bfloat16(),
    ]


def on_device(given: list[Tensor]) -> list[Tensor]:
    """On the NPU; the three weights that multiply the tokens or the compressed query are laid out in FRACTAL_NZ."""
    moved = [tensor.to(DEVICE) for tensor in given]
    if torch_npu is not None:
        for place in (1, 2, 4):
            moved[place] = torch_npu.npu_format_cast(moved[place].contiguous(), FRACTAL_NZ)
    return moved


def prolog(*given: Tensor) -> Results:
    operator = torch.ops.mla_fx.mla_prolog if torch_npu is None else torch_npu.npu_mla_prolog
    options = {"rmsnorm_epsilon_cq": EPSILON, "rmsnorm_epsilon_ckv": EPSILON, "cache_mode": "PA_BSND"}
    results: Results = operator(*given, **options)
    return results


def in_a_graph() -> Callable[..., Results]:
    """With torchair on the NPU, with mla_fx elsewhere."""
    if torch_npu is None:
        return torch.compile(prolog, backend=mla_fx.mla_backend, dynamic=False, fullgraph=True)
    import torchair  # type: ignore[import-not-found]

    backend: Any = torchair.get_npu_backend(compiler_config=torchair.CompilerConfig())
    return torch.compile(prolog, backend=backend, dynamic=False, fullgraph=True)


# --- the same in float64 ------------------------------------------------------------------------------------------


def expected(given: list[Tensor]) -> Results:
    x, w_dq, w_uq_qr, w_uk, w_dkv_kr, gamma_cq, gamma_ckv, sin, cos, index, kv_cache, kr_cache = (
        tensor.double() if tensor.is_floating_point() else tensor for tensor in given
    )
    up = (rms_norm(x @ w_dq, gamma_cq) @ w_uq_qr).view(B, S, N, D + DR)
    query = torch.einsum("bsnd,ndc->bsnc", up[..., :D], w_uk)
    query_rope = rope(up[..., D:], sin.unsqueeze(2), cos.unsqueeze(2))
    keys = x @ w_dkv_kr
    kv_cache.view(-1, HCKV)[index] = rms_norm(keys[..., :HCKV], gamma_ckv)
    kr_cache.view(-1, DR)[index] = rope(keys[..., HCKV:], sin, cos)
    return query, query_rope, kv_cache, kr_cache


def rms_norm(x: Tensor, gamma: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPSILON).sqrt() * gamma


def rope(x: Tensor, sin: Tensor, cos: Tensor) -> Tensor:
    """Pairs are adjacent in x, and half the width apart in the result."""
    first, second = x[..., 0::2], x[..., 1::2]
    (cos1, cos2), (sin1, sin2) = cos.chunk(2, -1), sin.chunk(2, -1)
    return torch.cat((first * cos1 - second * sin1, second * cos2 + first * sin2), -1)


@torch.no_grad()
def main() -> None:
    print("torch.ops.mla_fx on the CPU" if torch_npu is None else "torch_npu on the NPU")
    given = arguments()
    wanted = expected(given)
    for name, call in (("by itself", prolog), ("in a graph", in_a_graph())):
        results = call(*on_device(given))
        actual = [result.cpu().double() for result in results]
        torch.testing.assert_close(actual, list(wanted), rtol=0.02, atol=0.05)
        print(f"{name}: query {list(results[0].shape)} and both caches are right")


if __name__ == "__main__":
    main()
