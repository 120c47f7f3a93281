"""A kernel refuses an argument of attention that it does not know, such as one that is added later."""

import dataclasses

import pytest
import torch
from lib.ascend_calls import A2
from mla_fx.lowering.ascend.operators import attention as ascend
from mla_fx.lowering.cpu import attention as cpu
from mla_fx.lowering.cuda import libraries

from mla_fx.errors import NoMatch
from mla_fx.ops.emitted.attention.arguments import Arguments


@dataclasses.dataclass(frozen=True)
class Later(Arguments):
    cap: float | None = None


BF16 = {"dtype": torch.bfloat16}
CACHES = torch.empty(2, 256, 512, **BF16), torch.empty(2, 256, 64, **BF16)
LATENTS = torch.empty(2, 3, 32, 512, **BF16), torch.empty(2, 3, 32, 64, **BF16), *CACHES
HEADS = torch.empty(2, 3, 32, 128, **BF16), *LATENTS[1:]
WEIGHTS = {"weight_uk": torch.empty(32, 128, 512, **BF16), "weight_uv": torch.empty(32, 128, 512, **BF16)}
CHOSEN = {"indices": torch.zeros(2, 3, 1, 64, dtype=torch.int64)}
CALLS = {
    "latents": lambda cap: Later(*LATENTS, scale=0.1, is_causal=True, cap=cap),
    "heads": lambda cap: Later(*HEADS, scale=0.1, is_causal=True, **WEIGHTS, cap=cap),
    "chosen rows": lambda cap: Later(*LATENTS, scale=0.1, **CHOSEN, cap=cap),
}
KERNELS = {
    "the kernel": cpu.lower,
    "FusedInferAttentionScore": lambda a: ascend.lower(A2, a),
    "SparseFlashAttention": lambda a: ascend.lower(A2, a),
    "flash_mla": lambda a: libraries.check_operands(a, "flash_mla"),
}


@pytest.mark.parametrize(
    ("kernel", "call"),
    [
        *(("the kernel", call) for call in CALLS),
        ("FusedInferAttentionScore", "latents"),
        ("FusedInferAttentionScore", "heads"),
        ("SparseFlashAttention", "chosen rows"),
        ("flash_mla", "latents"),
    ],
)
def test_an_argument_that_a_kernel_does_not_know(kernel, call):
    with pytest.raises(NoMatch, match=f"^cap is given; {kernel} takes none$"):
        KERNELS[kernel](CALLS[call](30.0))


@pytest.mark.parametrize("call", ["latents", "heads", "chosen rows"])
def test_what_it_knows_is_taken(call):
    assert callable(ascend.lower(A2, CALLS[call](None)))


def test_a_choice_of_form_without_heads_is_taken():
    """It has no effect."""
    assert callable(ascend.lower(A2, dataclasses.replace(CALLS["latents"](None), max_absorbed_tokens=128)))
