"""torch_npu.npu_kv_rmsnorm_rope_cache as its document calls it: directly, and in a graph. Results are compared with
float64.

On an Ascend NPU this runs the vendor's kernel; without torch_npu it runs `torch.ops.mla_fx.kv_rmsnorm_rope_cache`
on the CPU, with the same arguments:  python examples/npu_kv_rmsnorm_rope_cache.py"""

from __future__ import annotations

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

B, S, RANK, ROPE, EPSILON = 4, 3, 512, 64, 1e-5
BLOCK_NUM, BLOCK_SIZE = 16, 128
SLOTS = BLOCK_NUM * BLOCK_SIZE

Results = tuple[Tensor, ...]


def arguments(cache_mode: str) -> list[Tensor]:
    """"Norm": a cache of SLOTS positions per sequence; "PA": BLOCK_NUM pages for all of them."""
    torch.manual_seed(0)
    angle = 6 * torch.rand(B, 1, S, ROPE)
    index = torch.randperm(SLOTS)[: B * S]
    lead = (B, 1, SLOTS) if cache_mode == "Norm" else (BLOCK_NUM, BLOCK_SIZE, 1)
    return [
        torch.randn(B, 1, S, RANK + ROPE).bfloat16(),
        (0.7 + 0.6 * torch.rand(RANK)).bfloat16(),
        angle.cos().bfloat16(),
        angle.sin().bfloat16(),
        index.view(B, S) if cache_mode == "Norm" else index,
        torch.randn(*lead, ROPE).bfloat16(),
        torch.randn(*lead, RANK).bfloat16(),
    ]


class Model(torch.nn.Module):
    """With pages it also returns the new rows; with "Norm" the kernel returns only the caches."""

    def __init__(self, cache_mode: str) -> None:
        super().__init__()
        self.cache_mode = cache_mode

    def forward(self, *given: Tensor) -> Results:
        name = "kv_rmsnorm_rope_cache"
        operator = getattr(torch.ops.mla_fx, name) if torch_npu is None else getattr(torch_npu, f"npu_{name}")
        paged = self.cache_mode != "Norm"
        results: Results = operator(*given, epsilon=EPSILON, cache_mode=self.cache_mode, is_output_kv=paged)
        return results if paged else results[:2]


def in_a_graph(model: Model) -> Callable[..., Results]:
    """With torchair on the NPU, with mla_fx elsewhere."""
    if torch_npu is None:
        return torch.compile(model, backend=mla_fx.mla_backend, dynamic=False)
    import torchair  # type: ignore[import-not-found]

    config: Any = torchair.CompilerConfig()
    config.experimental_config.keep_inference_input_mutations = True
    return torch.compile(model, backend=torchair.get_npu_backend(compiler_config=config), dynamic=False)


# --- the same in float64 ------------------------------------------------------------------------------------------


def expected(cache_mode: str, given: list[Tensor]) -> Results:
    kv, gamma, cos, sin, index, k_cache, ckv_cache = (
        tensor.double() if tensor.is_floating_point() else tensor for tensor in given
    )
    latent = kv[..., :RANK]
    c_kv = latent / (latent.square().mean(-1, keepdim=True) + EPSILON).sqrt() * gamma
    first, second = kv[..., RANK::2], kv[..., RANK + 1 :: 2]
    (cos1, cos2), (sin1, sin2) = cos.chunk(2, -1), sin.chunk(2, -1)
    k_rope = torch.cat((first * cos1 - second * sin1, second * cos2 + first * sin2), -1)
    slots = index + SLOTS * torch.arange(B).unsqueeze(1) if cache_mode == "Norm" else index
    k_cache.view(-1, ROPE)[slots.flatten()] = k_rope.view(-1, ROPE)
    ckv_cache.view(-1, RANK)[slots.flatten()] = c_kv.view(-1, RANK)
    return (k_cache, ckv_cache) if cache_mode == "Norm" else (k_cache, ckv_cache, k_rope, c_kv)


@torch.no_grad()
def main() -> None:
    print("torch.ops.mla_fx on the CPU" if torch_npu is None else "torch_npu on the NPU")
    for cache_mode in ("Norm", "PA"):
        model, given = Model(cache_mode), arguments(cache_mode)
        wanted = expected(cache_mode, given)
        for name, call in (("by itself", model), ("in a graph", in_a_graph(model))):
            results = [result.cpu().double() for result in call(*(tensor.to(DEVICE) for tensor in given))]
            torch.testing.assert_close(results, list(wanted), rtol=0.01, atol=0.01)
            print(f"{cache_mode}, {name}: {len(results)} results are right")


if __name__ == "__main__":
    main()
