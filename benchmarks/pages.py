"""Whether caches in pages cost what flat caches cost, and never more than stock Inductor takes for the same code.

python benchmarks/pages.py                        about five minutes, on an otherwise idle machine
python benchmarks/pages.py --rounds 5 --large     also one attention layer of DeepSeek-V3's sizes

One MLA layer in bfloat16 writes its new tokens into a cache and attends to the whole context of each sequence. The
cache is a pool of pages that block tables name, or the same rows in one piece. Both are compiled by stock Inductor and
by mla_fx. Variants take turns in one process: medians of the rounds after two to warm up, each with a new input.
Outputs and caches of the first round agree with the layer in float32.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from layer import compiled
from results import Results, Row, Time, console, finish, parser, without_caches
from torch import Tensor, nn

import mla_fx
from mla_fx.commands import demo

PAGE = 16
OURS, STOCK, FLAT, FLAT_STOCK = "mla_fx", "stock", "mla_fx, flat", "stock, flat"
TOLERANCE = 1e-2


@dataclass(frozen=True)
class Sizes:
    hidden: int = 512
    heads: int = 8
    query_rank: int = 256
    rank: int = 128
    nope: int = 64
    rope: int = 32
    value: int = 64


LARGE = Sizes(7168, 128, 1536, 512, 128, 64, 128)


@dataclass(frozen=True)
class Step:
    """`tokens` of each sequence are new. Sequences have contexts of these lengths, rounded up to pages in the table."""

    lengths: tuple[int, ...]
    tokens: int
    dynamic: bool | None = None

    def __str__(self) -> str:
        lengths = sorted(set(self.lengths))
        contexts = " and ".join(map(str, lengths))
        return f"{len(self.lengths)} x {self.tokens} of {contexts}" + (", dynamic" if self.dynamic else "")


STEPS = (
    Step((64,) * 4, 1),
    Step((128,) * 4, 2, dynamic=True),
    Step((1024,) * 2, 128),
    Step((4096,), 1),
    Step((1024,) * 8, 1),
    Step((17, 4096), 1),
    Step((65536,), 1),
)
LARGE_STEPS = (Step((1024,), 1), Step((4096,), 1), Step((4096,) * 8, 1), Step((4096,), 64), Step((17, 4096), 1))


class Layer(nn.Module):
    """vLLM's spelling: rows go to slots; a context is looked up by its table, and masked by its length."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        z = self.sizes = sizes

        def linear(inner: int, out: int) -> nn.Linear:
            made = nn.Linear(inner, out, bias=False)
            nn.init.normal_(made.weight, std=inner**-0.5)
            return made

        def norm(size: int) -> nn.RMSNorm:
            made = nn.RMSNorm(size, eps=1e-6)
            nn.init.uniform_(made.weight, 0.7, 1.3)
            return made

        self.q_a, self.q_norm = linear(z.hidden, z.query_rank), norm(z.query_rank)
        self.q_b = linear(z.query_rank, z.heads * (z.nope + z.rope))
        self.kv_a, self.kv_norm = linear(z.hidden, z.rank + z.rope), norm(z.rank)
        self.kv_b = linear(z.rank, z.heads * (z.nope + z.value))
        self.o = linear(z.heads * z.value, z.hidden)

    def context(self, cache: Tensor, table: Tensor) -> Tensor:
        return cache[table].flatten(1, 2)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, cache: Tensor, slots: Tensor, table: Tensor, lengths: Tensor
    ) -> Tensor:
        z = self.sizes
        q = self.q_b(self.q_norm(self.q_a(x))).unflatten(-1, (z.heads, -1)).transpose(1, 2)
        q_nope, q_rope = q.split([z.nope, z.rope], dim=-1)
        latent, k_rope = self.kv_a(x).split([z.rank, z.rope], dim=-1)
        row = torch.cat((self.kv_norm(latent), rotated(k_rope, cos.squeeze(1), sin.squeeze(1))), dim=-1)
        cache.view(-1, z.rank + z.rope).index_copy_(0, slots.flatten(), row.flatten(0, 1))
        latents, keys = self.context(cache, table).split([z.rank, z.rope], dim=-1)
        expanded = self.kv_b(latents).unflatten(-1, (z.heads, -1)).transpose(1, 2)
        k_nope, value = expanded.split([z.nope, z.value], dim=-1)
        query = torch.cat((q_nope, rotated(q_rope, cos, sin)), dim=-1)
        key = torch.cat((k_nope, keys.unsqueeze(1).expand(-1, z.heads, -1, -1)), dim=-1)
        last = lengths.unsqueeze(1) - x.shape[1] + torch.arange(x.shape[1])
        mask = torch.arange(latents.shape[1]) <= last.unsqueeze(-1)
        scores = (query @ key.mT) * (z.nope + z.rope) ** -0.5
        weights = scores.masked_fill(~mask.unsqueeze(1), -torch.inf).float().softmax(-1).to(value.dtype)
        return self.o((weights @ value).transpose(1, 2).flatten(2))


class FlatLayer(Layer):
    """The same over contexts that lie in one piece, [B, T, width]."""

    def context(self, cache: Tensor, table: Tensor) -> Tensor:
        return cache


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


@dataclass
class Variant:
    name: str
    step: Callable[..., Tensor]
    cache: Tensor
    slots: Tensor
    took: list[float]


def prepared(layer: Layer, step: Step) -> tuple[list[Variant], Variant, Tensor, Tensor]:
    """The variants, the exact one, the table and the lengths."""
    batch, width = len(step.lengths), layer.sizes.rank + layer.sizes.rope
    lengths, columns = torch.tensor(step.lengths), -(-max(step.lengths) // PAGE)
    count = max(1024, batch * columns + 3)
    table = torch.randperm(count)[: batch * columns].view(batch, columns)
    pool = torch.randn(count, PAGE, width).to(torch.bfloat16)
    places = lengths.unsqueeze(1) - step.tokens + torch.arange(step.tokens)
    slots = table.gather(1, places // PAGE) * PAGE + places % PAGE
    flat, flat_slots = pool[table].flatten(1, 2), torch.arange(batch).unsqueeze(1) * (columns * PAGE) + places
    flat_layer = FlatLayer(layer.sizes).to(torch.bfloat16)
    flat_layer.load_state_dict(layer.state_dict())
    exact = copy.deepcopy(layer).float()
    ours = mla_fx.get_backend(target="inductor", strict=True)
    made = []
    for name, module, backend in ((OURS, layer, ours), (STOCK, layer, "inductor"), (FLAT, flat_layer, ours),
                                  (FLAT_STOCK, flat_layer, "inductor")):  # fmt: skip
        is_paged = module is layer
        run = compiled(_function(module), backend=backend, dynamic=step.dynamic)
        made.append(Variant(name, run, (pool if is_paged else flat).clone(), slots if is_paged else flat_slots, []))
    return made, Variant("float32", exact, pool.float(), slots, []), table, lengths


def _function(module: nn.Module) -> Callable[..., Tensor]:
    def call(*inputs: Any) -> Tensor:
        output: Tensor = module(*inputs)
        return output

    return call


@torch.no_grad()
def race(layer: Layer, step: Step, rounds: int) -> dict[str, float]:
    """Median milliseconds of each variant."""
    variants, exact, table, lengths = prepared(layer, step)
    angles = torch.randn(len(step.lengths), 1, step.tokens, layer.sizes.rope // 2).repeat(1, 1, 1, 2)
    for turn in range(2 + rounds):
        x = torch.randn(len(step.lengths), step.tokens, layer.sizes.hidden, dtype=torch.bfloat16)
        for variant in variants:
            tables = (angles.cos().to(x.dtype), angles.sin().to(x.dtype))
            start = time.perf_counter()
            output = variant.step(x, *tables, variant.cache, variant.slots, table, lengths)
            variant.took += [1e3 * (time.perf_counter() - start)] * (turn > 1)
            if turn == 0:
                check(variant, output, exact, (x.float(), angles.cos(), angles.sin()), table, lengths)
    return {variant.name: statistics.median(variant.took) for variant in variants}


def check(
    variant: Variant, output: Tensor, exact: Variant, inputs: tuple[Tensor, ...], table: Tensor, lengths: Tensor
) -> None:
    """Raise SystemExit unless the output and the cache are right."""
    cache = exact.cache.clone()
    wanted = exact.step(*inputs, cache, exact.slots, table, lengths)
    is_paged = variant.cache.shape == cache.shape
    written = cache if is_paged else cache[table].flatten(1, 2)
    for what, found, right in (("output", output, wanted), ("cache", variant.cache, written)):
        if not (error := demo.relative_error(found, right)) <= TOLERANCE:
            raise SystemExit(f"{variant.name}: the {what} is off by {error:.1e}; at most {TOLERANCE:.0e} is allowed.")


def main() -> None:
    options = parser(__doc__, rounds=31)
    options.add_argument("--large", action="store_true", help="also DeepSeek-V3's sizes")
    given = options.parse_args()
    without_caches()
    torch.manual_seed(0)
    rows, times = [], []
    for sizes, steps in ((Sizes(), STEPS), *(((LARGE, LARGE_STEPS),) if given.large else ())):
        layer = Layer(sizes).to(torch.bfloat16)
        for step in steps:
            torch._dynamo.reset()
            took = race(layer, step, given.rounds)
            name = f"{step}, {sizes.heads} heads"
            console.log(name, {variant: round(value, 3) for variant, value in took.items()})
            rows.append(Row(f"pages / stock, {name}", took[OURS] / took[STOCK], 1.0, 0.9))
            rows.append(Row(f"pages / flat, {name}", took[OURS] / took[FLAT], 1.1, 1.0))
            where = {"context": max(step.lengths), "tokens": step.tokens, "batch": len(step.lengths)}
            times += [Time(variant, value, **where) for variant, value in took.items()]
    finish(Results(rows, times), given)


if __name__ == "__main__":
    main()
