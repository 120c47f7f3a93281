"""A decode step over latents that are kept in 8 bits: FlashMLA's rows of bytes in pages, int8 in pages with a scale for
each token, and float8 in one piece with one scale.

python benchmarks/coded_caches.py                    about three minutes, on an otherwise idle machine
python benchmarks/coded_caches.py --rounds 3         to try the script

Attention alone, absorbed, with 512 + 64 columns, in bfloat16. It is compiled by stock Inductor, by mla_fx without the
rule that reads codes, and by mla_fx. Variants take turns in one process: medians of the rounds after one to warm up.
Outputs agree with eager mode's in float32.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator

import torch
from results import Results, Row, Time, console, finish, parser, without_caches
from torch import Tensor, nn

RANK, ROPE, NOPE, PAGE, TILES = 512, 64, 128, 64, 4
SIZES = ((16, 4096), (128, 4096), (16, 32768), (128, 32768))  # heads, context
STOCK, NUMBERS, CODES = "stock Inductor", "mla_fx, numbers", "mla_fx, codes"
FAR = 2e-2  # from float32, relative

Caches = tuple[Tensor, Tensor]
Step = Callable[[Tensor, Tensor], Tensor]


class Attention(nn.Module):
    """Absorbed attention of one token."""

    table: Tensor

    def __init__(self, heads: int, context: int) -> None:
        super().__init__()
        self.weight = nn.Buffer((torch.randn(heads, 2 * NOPE, RANK) * RANK**-0.5).bfloat16())
        self.lead = context // PAGE, PAGE
        self.table = nn.Buffer(torch.randperm(context // PAGE).unsqueeze(0))

    def forward(self, q_nope: Tensor, q_rope: Tensor) -> Tensor:
        latents, keys = self.caches()
        query = torch.einsum("bsnd,ndc->bsnc", q_nope, self.weight[:, :NOPE])
        scores = torch.einsum("bsnc,btc->bsnt", query, latents) + torch.einsum("bsnr,btr->bsnt", q_rope, keys)
        weights = (scores * (NOPE + ROPE) ** -0.5).softmax(-1, torch.float32).to(query.dtype)
        out = torch.einsum("bsnt,btc->bsnc", weights, latents)
        return torch.einsum("bsnc,nvc->bsnv", out, self.weight[:, NOPE:])

    def caches(self) -> Caches:
        raise NotImplementedError


class RowsOfBytes(Attention):
    """512 codes of float8, a float32 for each of four tiles, and a rotary key: 656 bytes, as FlashMLA lays them out."""

    def __init__(self, heads: int, context: int) -> None:
        super().__init__(heads, context)
        codes = torch.randn(*self.lead, RANK).to(torch.float8_e4m3fn)
        scales, keys = torch.rand(*self.lead, TILES) / 2 + 0.5, torch.randn(*self.lead, ROPE).bfloat16()
        self.rows = nn.Buffer(torch.cat([part.view(torch.uint8) for part in (codes, scales, keys)], -1))

    def caches(self) -> Caches:
        codes, scales, keys = self.rows[self.table].flatten(1, 2).split([RANK, 4 * TILES, 2 * ROPE], -1)
        tiles = codes.view(torch.float8_e4m3fn).float().unflatten(-1, (TILES, -1))
        latents = (tiles * scales.view(torch.float32).unsqueeze(-1)).flatten(-2)
        return latents.to(self.weight.dtype), keys.view(torch.bfloat16).to(self.weight.dtype)


class OfTokens(Attention):
    """int8 in pages, with a scale for each token."""

    def __init__(self, heads: int, context: int) -> None:
        super().__init__(heads, context)
        self.codes = nn.Buffer((torch.randn(*self.lead, RANK) * 30).clamp(-128, 127).to(torch.int8))
        self.scales = nn.Buffer(torch.rand(*self.lead, 1) / 50 + 0.02)
        self.keys = nn.Buffer(torch.randn(*self.lead, ROPE).bfloat16())

    def caches(self) -> Caches:
        latents = self.codes[self.table].float() * self.scales[self.table]
        return tuple(part.flatten(1, 2).to(self.weight.dtype) for part in (latents, self.keys[self.table]))


class OneScale(Attention):
    """Latents and rotary keys in float8, in one piece, as transformers keeps them."""

    def __init__(self, heads: int, context: int) -> None:
        super().__init__(heads, context)
        self.codes, self.keys = (
            nn.Buffer(torch.randn(1, context, width).to(torch.float8_e4m3fn)) for width in (RANK, ROPE)
        )
        self.scale = nn.Buffer(torch.tensor(0.8))

    def caches(self) -> Caches:
        return tuple((part.float() * self.scale).to(self.weight.dtype) for part in (self.codes, self.keys))


FORMS = {"rows of bytes": RowsOfBytes, "int8, a scale for each token": OfTokens, "float8, one scale": OneScale}


def compiled(layer: Attention) -> dict[str, Step]:
    options = {NUMBERS: {"disable": ["coded_latents"]}, CODES: {}}
    ours = {name: torch.compile(layer, backend="mla", options=given) for name, given in options.items()}
    return {STOCK: torch.compile(layer), **ours}


@torch.no_grad()
def race(layer: Attention, heads: int, rounds: int) -> dict[str, float]:
    """Median milliseconds of each variant."""
    torch._dynamo.reset()
    given = [torch.randn(1, 1, heads, width).bfloat16() for width in (NOPE, ROPE)]
    steps = compiled(layer)
    outputs = {name: step(*given) for name, step in steps.items()}
    weight = layer.weight
    layer.weight = weight.float()
    exact = layer(*(value.float() for value in given))
    layer.weight = weight
    for name, output in outputs.items():
        far = float((output.float() - exact).norm() / exact.norm())
        if not far < FAR:
            raise SystemExit(f"{name} is {far:.1e} from float32, relative; at most {FAR:.0e} is allowed")
    took: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(1 + rounds):
        for name, step in steps.items():
            start = time.perf_counter()
            step(*given)
            took[name].append(1000 * (time.perf_counter() - start))
    return {name: statistics.median(times[1:]) for name, times in took.items()}


def rows_of(what: str, took: dict[str, float]) -> Iterator[Row]:
    yield Row(f"{what}, codes / stock Inductor", took[CODES] / took[STOCK], 1.0, 0.5)
    yield Row(f"{what}, codes / numbers", took[CODES] / took[NUMBERS], 1.05, 0.5)


def main() -> None:
    given = parser(__doc__, rounds=15).parse_args()
    without_caches()
    torch.manual_seed(0)
    rows, times = [], []
    for form, build in FORMS.items():
        for heads, context in SIZES:
            took = race(build(heads, context), heads, given.rounds)
            what = f"{form}, {heads} heads, {context}"
            console.log(f"{what}: " + ", ".join(f"{name} {each:.2f} ms" for name, each in took.items()))
            rows += rows_of(what, took)
            times += [Time(f"{name}, {form}, {heads} heads", each, context, 1) for name, each in took.items()]
    finish(Results(rows, times, [f"{given.rounds} rounds"]), given)


if __name__ == "__main__":
    main()
