"""ATB's MultiLatentAttentionOperation through torch_npu, in the three calculations of its document: one token per
sequence, a few speculated ones with the document's mask, and ring attention. Results are compared with float64.

On an Ascend NPU this runs the vendor's kernel; without torch_npu it runs `torch.ops.mla_fx.multi_latent_attention`
on the CPU, with the same arguments:  python examples/npu_multi_latent_attention.py"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import mla_fx  # noqa: F401  registers torch.ops.mla_fx

try:
    import torch_npu  # type: ignore[import-not-found]
except ImportError:
    torch_npu = None
DEVICE = "cpu" if torch_npu is None else "npu"

HEADS, RANK, ROPE, BLOCK_SIZE, SCALE = 32, 512, 64, 128, 576**-0.5
CONTEXT_LENS = [130, 257, 64]
BLOCKS = [-(-length // BLOCK_SIZE) for length in CONTEXT_LENS]


def attend(*tensors: Tensor, steps: list[int] | None = None, mask: Tensor | None = None, ring: bool = False) -> Any:
    """The attention; with `ring` also the logarithms of the sums in its softmax. Lengths are host lists."""
    options: dict[str, Any] = {"calc_type": "calc_type_ring" if ring else "calc_type_undefined"}
    if mask is not None:
        options = {"calc_type": "calc_type_spec", "mask_type": "mask_type_free", "mask": mask.to(DEVICE)}
    given = [tensor.to(DEVICE) for tensor in tensors]
    if torch_npu is None:
        options |= {"q_seqlen": steps, "head_num": HEADS, "qk_scale": SCALE}
        out, lse = torch.ops.mla_fx.multi_latent_attention.host(*given, CONTEXT_LENS, **options)
        return (out, lse) if ring else out
    attention = torch.ops.atb.npu_multi_head_latent_attention
    if ring:
        return attention.lse(*given, CONTEXT_LENS, HEADS, SCALE, 1, True, **options)
    return attention(*given, CONTEXT_LENS, HEADS, SCALE, 1, qseqlen=steps, **options)


def arguments(steps: list[int]) -> list[Tensor]:
    """q_nope, q_rope, ctkv, k_rope and block_tables, for this many query rows per sequence."""
    torch.manual_seed(0)
    rows = sum(steps)
    order = torch.split(torch.randperm(sum(BLOCKS)).int(), BLOCKS)
    tables = torch.nn.utils.rnn.pad_sequence(list(order), batch_first=True)
    shapes = (
        (rows, HEADS, RANK),
        (rows, HEADS, ROPE),
        (sum(BLOCKS), BLOCK_SIZE, 1, RANK),
        (sum(BLOCKS), BLOCK_SIZE, 1, ROPE),
    )
    return [*(torch.randn(shape).bfloat16() for shape in shapes), tables]


def mask_free(steps: int) -> Tensor:
    """The document's mask for this many query rows; the kernel uses the part for the end of a context."""
    return torch.full((125 + 2 * steps, BLOCK_SIZE), -10000.0).triu(2 - steps).bfloat16()


# --- the same in float64 ------------------------------------------------------------------------------------------


def expected(tensors: list[Tensor], steps: list[int]) -> tuple[Tensor, Tensor]:
    """Row r of a sequence with q rows and L keys sees the first L - q + r + 1 of them."""
    q_nope, q_rope, ctkv, k_rope = (tensor.double() for tensor in tensors[:4])
    queries = torch.split(torch.cat((q_nope, q_rope), -1), steps)
    outs, sums = [], []
    for query, table, length, count in zip(queries, tensors[4], CONTEXT_LENS, steps, strict=True):
        latent, rope = (cache[table.long()].flatten(0, 2)[:length] for cache in (ctkv, k_rope))
        scores = torch.einsum("rhd,kd->rhk", query, torch.cat((latent, rope), -1)) * SCALE
        last = length - count + torch.arange(count)
        scores = scores.masked_fill(torch.arange(length) > last.view(-1, 1, 1), -torch.inf)
        outs.append(scores.softmax(-1) @ latent)
        sums.append(scores.logsumexp(-1, keepdim=True))
    return torch.cat(outs), torch.cat(sums)


def check(name: str, actual: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(actual.cpu().double(), wanted, rtol=0.02, atol=0.02)
    print(f"{name}: {list(actual.shape)} is right")


def main() -> None:
    print("torch.ops.mla_fx on the CPU" if torch_npu is None else "torch_npu on the NPU")
    one = [1] * len(CONTEXT_LENS)
    tensors = arguments(one)
    wanted, sums = expected(tensors, one)
    check("one token", attend(*tensors), wanted)
    out, lse = attend(*tensors, ring=True)
    check("ring attention", out, wanted)
    check("its lse", lse, sums)
    several = [3] * len(CONTEXT_LENS)
    tensors = arguments(several)
    out = attend(*tensors, steps=several, mask=mask_free(max(several)))
    check("speculated tokens", out, expected(tensors, several)[0])


if __name__ == "__main__":
    main()
