"""The speed of a decode step with quantised projections, compared with eager mode, Inductor, and the machine's floor.

python benchmarks/quantised.py                         a quarter of an hour, on an otherwise idle machine
python benchmarks/quantised.py --rounds 3 --heads 8    to try the script

The layer of decode.py, quantised by torchao or stored in DeepSeek's blocks, and as it is in bfloat16. The floor is the
time to read the stored bytes and the cache once, and to do the arithmetic of attention. Outputs are compared with those
of the same layer in eager mode.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from decode import CONTEXT, WARM_UPS
from floor import Floor
from layer import EAGER, OURS, STOCK, Layer, Variant
from results import Results, Row, Time, console, finish, parser, without_caches
from torch import Tensor, nn
from torch.nn.functional import linear

from mla_fx.commands import demo

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torchao import quantization as torchao
    from torchao.quantization.granularity import PerGroup

TOLERANCE, BLOCK, LARGEST = 3e-2, 128, 448  # of outputs in bfloat16; rows and columns of a block; in float8


class InBlocks(nn.Module):
    """A projection in float8, with a scale for each block of 128 x 128, as in DeepSeek's checkpoints."""

    def __init__(self, projection: nn.Linear) -> None:
        super().__init__()
        self.sizes = projection.weight.shape
        rows, columns = (-(-size // BLOCK) for size in self.sizes)
        wide = torch.zeros(rows * BLOCK, columns * BLOCK)
        wide[: self.sizes[0], : self.sizes[1]] = projection.weight.float()
        blocks = wide.view(rows, BLOCK, columns, BLOCK)
        scales = blocks.abs().amax((1, 3), keepdim=True) / LARGEST
        self.scales = nn.Buffer(scales)
        self.codes = nn.Buffer((blocks / scales).to(torch.float8_e4m3fn))

    def forward(self, x: Tensor) -> Tensor:
        weight = (self.codes.float() * self.scales).to(x.dtype).flatten(0, 1).flatten(1, 2)
        return linear(x, weight[: self.sizes[0], : self.sizes[1]])


def in_blocks(attention: nn.Module) -> None:
    for name, part in list(attention.named_children()):
        if isinstance(part, nn.Linear):
            setattr(attention, name, InBlocks(part))


def by(config: object) -> Callable[[nn.Module], None]:
    return lambda attention: torchao.quantize_(attention, config)  # type: ignore[arg-type]  # one of its configurations


PLAIN = "bfloat16"
KINDS: dict[str, Callable[[nn.Module], None]] = {
    PLAIN: lambda attention: None,
    "int8 weights": by(torchao.Int8WeightOnlyConfig()),
    "int8 weights and tokens": by(torchao.Int8DynamicActivationInt8WeightConfig()),
    "int4 groups": by(torchao.IntxWeightOnlyConfig(torch.int4, PerGroup(32))),
    "float8 weights": by(torchao.Float8WeightOnlyConfig()),
    "float8 blocks": in_blocks,
}


@dataclass(frozen=True)
class Race:
    """Median milliseconds of the variants, and the floor of the same rounds."""

    variants: dict[str, float]
    floor: Floor

    def __getitem__(self, name: str) -> float:
        return self.variants[name]


def stored_bytes(module: nn.Module) -> int:
    """The bytes of weights, of quantised ones as they are stored."""
    parts = [value for value in (*module.parameters(), *module.buffers()) if value.ndim > 1]
    return sum(_bytes(part) for part in parts)


def _bytes(value: Tensor) -> int:
    if not hasattr(value, "__tensor_flatten__"):
        return value.nbytes
    names, _ = value.__tensor_flatten__()
    return sum(_bytes(getattr(value, name)) for name in names)


@torch.no_grad()
def race(layer: Layer, rounds: int) -> Race:
    torch._dynamo.reset()
    latents = demo.random_latents(layer.config, CONTEXT)
    variants = [
        Variant(name, layer.way(name), demo.filled_cache(layer.config, latents, torch.bfloat16))
        for name in (EAGER, STOCK, OURS)
    ]
    mask = torch.ones(1, 1, 1, CONTEXT, dtype=torch.bool)
    tables = layer.tables(torch.tensor([[CONTEXT - 1]]), torch.bfloat16)
    cached = CONTEXT * (layer.config.kv_lora_rank + layer.config.qk_rope_head_dim) * 2
    floor = Floor(stored_bytes(layer.attention) + cached, layer.attention_flops(CONTEXT))
    for turn in range(WARM_UPS + rounds):
        x, keep = layer.hidden(1), turn >= WARM_UPS
        outputs = []
        for variant in variants:
            demo.rewind(variant.cache)
            elapsed, output = variant.timed(x, *tables, mask)
            outputs.append(output)
            variant.milliseconds += [elapsed] * keep
        for variant, output in zip(variants, outputs, strict=True):
            if not demo.relative_error(output, outputs[0].float()) <= TOLERANCE:
                raise SystemExit(f"{variant.name}: the output is off by more than {TOLERANCE:.0e}.")
        if keep:
            floor.measure()
    return Race({variant.name: variant.median for variant in variants}, floor)


SHARES = {"int8 weights": 0.65, "float8 weights": 0.75, "float8 blocks": 0.75}
"""Bars for the time of a kind, as a share of that of the same layer in bfloat16."""


def rows_of(races: dict[str, Race]) -> Iterator[Row]:
    for kind, share in SHARES.items():
        yield Row(f"{kind}: time / that in bfloat16", races[kind][OURS] / races[PLAIN][OURS], 1, share)
    for kind, result in races.items():
        if kind == PLAIN:
            continue
        yield Row(f"{kind}: speed-up over stock Inductor", result[STOCK] / result[OURS], 10, 30, at_least=True)
        yield Row(f"{kind}: speed-up over eager", result[EAGER] / result[OURS], 20, 60, at_least=True)
        yield Row(f"{kind}: time / floor of the stored bytes", result[OURS] / result.floor.milliseconds, 1.6, 1.25)


def main() -> None:
    options = parser(__doc__, rounds=7)
    options.add_argument("--heads", type=int, default=demo.ATTENTION["num_attention_heads"], help="(%(default)s)")
    given = options.parse_args()
    without_caches()
    races = {}
    for kind, quantise in KINDS.items():
        layer = Layer.build(given.heads)
        quantise(layer.attention)
        races[kind] = race(layer, given.rounds)
        console.log(f"{kind}: {races[kind].variants}, {races[kind].floor}")
    times = [
        Time(f"{kind}, {name}", value, CONTEXT)
        for kind, result in races.items()
        for name, value in result.variants.items()
    ]
    finish(Results([*rows_of(races)], times, [f"{given.heads} heads, {given.rounds} rounds"]), given)


if __name__ == "__main__":
    main()
