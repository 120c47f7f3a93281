"""Products of 16-bit matrices on the CPU, in float32 and rounded once: PyTorch's own loops for processors without such
instructions take up to twenty times as long. Importing this replaces them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

HALVES = (torch.bfloat16, torch.float16)


def _wide(product: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The product in float32. The operator that writes its result is not replaced."""

    def compute(*operands: Tensor, **options: Any) -> Tensor:
        dtype = operands[-1].dtype
        wide = [x.float() for x in operands] if dtype in HALVES else operands
        return product(*wide, **options, out=wide[-1].new_empty(0)).to(dtype)

    return compute


for _name in ("mm", "bmm", "addmm", "baddbmm"):
    torch.library.impl(f"aten::{_name}", "CPU", _wide(getattr(torch, _name)))
