"""One attention layer of DeepSeek-V3's sizes, and the ways to run it that the benchmarks compare."""

from __future__ import annotations

import copy
import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import torch
from hand_absorbed import HandAbsorbed
from torch import Tensor
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

import mla_fx
from mla_fx.commands import demo

EAGER, STOCK, HAND, OURS = "HF eager", "HF compiled", "by hand", "mla_fx"
ATTENTION = "mla_fx, fusions alone"  # weights and rows are multiplied as in stock Inductor
TOLERANCE = 1e-2
_NUMBERS = itertools.count()

Step = Callable[[Tensor, Tensor, Tensor, Tensor | None, Any], Tensor]
"""(hidden states, cos, sin, mask, cache) -> output of the layer."""


@dataclass
class Variant:
    """One way to compute the layer, with its own cache."""

    name: str
    step: Step
    cache: Any = None
    milliseconds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.milliseconds)

    def timed(self, *arguments: Any) -> tuple[float, Tensor]:
        """Milliseconds and the output."""
        start = time.perf_counter()
        output = self.step(*arguments, self.cache)
        return (time.perf_counter() - start) * 1e3, output


@dataclass(frozen=True)
class Layer:
    """The layer in bfloat16, and in float32 as the reference: absorbed, which is fast for every context length."""

    attention: Any
    exact: HandAbsorbed
    config: DeepseekV3Config

    @classmethod
    def build(cls, heads: int = demo.ATTENTION["num_attention_heads"]) -> Layer:
        """DeepSeek-V3's sizes, except for the number of heads."""
        sizes = {**demo.ATTENTION, "num_attention_heads": heads, "num_key_value_heads": heads}
        config = DeepseekV3Config(**sizes, num_hidden_layers=1)
        config._attn_implementation = "sdpa"
        attention = DeepseekV3Attention(config, 0).to(torch.bfloat16).eval()
        demo.randomise(attention)
        return cls(attention, HandAbsorbed(copy.deepcopy(attention).float()), config)

    def tables(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The rotation at positions [1, S]."""
        return DeepseekV3RotaryEmbedding(self.config)(torch.empty(0, dtype=dtype), positions)

    def hidden(self, tokens: int, batch: int = 1) -> Tensor:
        return torch.randn(batch, tokens, self.config.hidden_size, dtype=torch.bfloat16)

    def bytes_read(self, context: int, batch: int = 1) -> int:
        weights = sum(weight.numel() * weight.element_size() for weight in self.attention.parameters())
        return weights + batch * context * (self.config.kv_lora_rank + self.config.qk_rope_head_dim) * 2

    def attention_flops(self, context: int, batch: int = 1) -> int:
        config = self.config
        return 2 * batch * config.num_attention_heads * context * (2 * config.kv_lora_rank + config.qk_rope_head_dim)

    def by_hand(self) -> Step:
        absorbed = HandAbsorbed(self.attention)

        def step(x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, cache: Any) -> Tensor:
            output: Tensor = absorbed(x, cos, sin, mask, cache)
            return output

        return step

    def way(self, name: str, **options: Any) -> Step:
        """A variant compiled by torch.compile with these options."""
        if name == EAGER:
            return hugging_face(self.attention)
        if name == HAND:
            return compiled(self.by_hand(), **options)
        if name in (OURS, ATTENTION):
            options = {"backend": mla_fx.get_backend(target="inductor", dot_products=name != ATTENTION), **options}
        return compiled(hugging_face(self.attention), **options)


def hugging_face(attention: Any) -> Step:
    """A layer of transformers as a step."""

    def step(x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, cache: Any) -> Tensor:
        output: Tensor = attention(x, (cos, sin), mask, past_key_values=cache)[0]
        return output

    return step


def compiled(step: Step, **options: Any) -> Step:
    """Compile a copy of a function that shares no code object with any other: Dynamo would otherwise use the first
    compiled code for all."""
    code = step.__code__.replace(co_name=f"step_{next(_NUMBERS)}")
    function = FunctionType(code, step.__globals__, code.co_name, None, step.__closure__)
    return torch.compile(function, fullgraph=True, **options)


def check(variant: Variant, output: Tensor, exact: Variant, wanted: Tensor, new: int = 1) -> None:
    """Checks the output and the cache."""
    for what, error in (
        ("output", demo.relative_error(output, wanted)),
        ("cache", demo.cache_error(variant.cache, exact.cache, new)),
    ):
        if not error <= TOLERANCE:
            raise SystemExit(f"{variant.name}: the {what} is off by {error:.1e}; at most {TOLERANCE:.0e} is allowed.")
