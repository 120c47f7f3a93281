"""Models of transformers with attention projections quantised by torchao, or stored in DeepSeek's blocks."""

from __future__ import annotations

import copy
import functools
import importlib
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lib.layers import Rewritten
from lib.quantised import Stored, by_blocks, of_blocks
from mla_fx.cases import inputs


@dataclass(frozen=True)
class Config:
    """A configuration class of torchao, and how many columns have one scale, if weights are int4 codes in groups."""

    name: str
    group: int = 0

    def __call__(self) -> Any:
        kind = getattr(torchao(), self.name)
        if self.group:
            return kind(torch.int4, torchao().PerGroup(self.group))
        return kind(set_inductor_config=False)  # it would stay set for every later test


CONFIGS = {
    "int8 weights": Config("Int8WeightOnlyConfig"),
    "int8 weights and tokens": Config("Int8DynamicActivationInt8WeightConfig"),
    "float8 weights": Config("Float8WeightOnlyConfig"),
    "int4 groups": Config("IntxWeightOnlyConfig", 16),
    "int4 groups and int8 tokens": Config("Int8DynamicActivationIntxWeightConfig", 16),
}
OF_TOKENS = ("int8 weights and tokens", "int4 groups and int8 tokens")


@functools.cache
def torchao() -> Any:
    """Imported when a model is quantised: that takes seconds, and warns of kernels that are not for this machine."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module("torchao.quantization")


def quantise(model: nn.Module, name: str, but: tuple[str, ...] = ()) -> None:
    """Quantise the projections of every attention, but those with certain names."""

    def is_quantised(module: nn.Module, path: str) -> bool:
        return isinstance(module, nn.Linear) and "self_attn" in path and not path.endswith(but)

    torchao().quantize_(model, CONFIGS[name](), is_quantised)


class InBlocks(nn.Module):
    """A projection in float8 with a scale for each block, as DeepSeek's checkpoints have it: small blocks here."""

    def __init__(self, projection: nn.Linear) -> None:
        super().__init__()
        stored = by_blocks(projection.weight.detach())
        self.codes, self.scales = nn.Buffer(stored.codes), nn.Buffer(stored.scales)

    def forward(self, x: Tensor) -> Tensor:
        return of_blocks(x, Stored(self.codes, self.scales))


def keys_and_values_in_blocks(model: nn.Module) -> None:
    for module in list(model.modules()):
        if isinstance(getattr(module, "kv_b_proj", None), nn.Linear):
            module.kv_b_proj = InBlocks(module.kv_b_proj)


def in_dtype(layer, dtype):
    """A copy of a layer with its floats in another dtype, but codes in float8 as they are."""
    layer = copy.deepcopy(layer)
    for value in (*layer.parameters(), *layer.buffers()):
        value.data = value.data.to(dtype) if value.dtype == torch.float32 else value.data
    return layer


def check_as_exact(layer, compile=Rewritten):
    """In bfloat16, results and caches are at most twice as far from those in float64 as eager's. The tokens' codes in
    float64 are those of bfloat16 or next to them."""
    layers = [in_dtype(layer, torch.bfloat16) for _ in range(3)]
    for value in (*layers[2].parameters(), *layers[2].buffers()):
        value.data = value.data.double() if value.dtype == torch.bfloat16 else value.data
    *given, position = inputs()
    given = [value.to(torch.bfloat16) for value in given]
    runs = compile(layers[0]), *layers[1:]
    results = []
    for run, one in zip(runs, layers, strict=True):
        results.append(run(*(value.to(one.q_gamma.dtype) for value in given), position))
    caches = [(one.kv_cache, one.kr_cache) for one in layers]
    for own, near, true in zip(*([out, *held] for out, held in zip(results, caches, strict=True)), strict=True):
        assert (own.double() - true).norm() <= 2 * (near.double() - true).norm()
