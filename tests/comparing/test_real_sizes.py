"""Layers of real sizes, on the meta device, with whole numbers among their factors: the option prove refuses none.

`--real-sizes N` draws this many; `pytest "tests/comparing/test_real_sizes.py::test_draw[17]" --real-sizes 18` runs one
again."""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass, replace

import pytest
import torch
from lib.faults import FAULTS, with_fault
from lib.layers import QUIET, Absorbed, Layer, Sizes
from torch import Tensor, nn
from torch.func import functional_call, functionalize
from torch.fx.experimental.proxy_tensor import make_fx

from mla_fx.comparing import plans
from mla_fx.debug.report import Report
from mla_fx.driver.compilation import Compilation
from mla_fx.passes import prove

pytestmark = [pytest.mark.filterwarnings(line) for line in QUIET]

MODELS = {
    "DeepSeek-V2-Lite": Sizes(heads=16, hidden=2048, query_rank=1536, rank=512, nope=128, rope=64, value=128),
    "DeepSeek-V3": Sizes(heads=128, hidden=7168, query_rank=1536, rank=512, nope=128, rope=64, value=128),
    "GLM-4.7-Flash": Sizes(heads=20, hidden=2048, query_rank=768, rank=512, nope=192, rope=64, value=256),
    "MiniCPM3": Sizes(heads=40, hidden=2560, query_rank=768, rank=256, nope=64, rope=32, value=64),
    "Kimi-K2": Sizes(heads=64, hidden=7168, query_rank=1536, rank=512, nope=128, rope=64, value=128),
}
MULTIPLIED = {
    "x * n": lambda x, n: x * n,
    "n * x": lambda x, n: n * x,
    "x / n": lambda x, n: x / n,
    "mul": torch.mul,
    "div": torch.div,
    "x * (1 / n)": lambda x, n: x * (1 / n),
    "x / n ** 0.5": lambda x, n: x / n**0.5,
    "x * n ** -0.5 * n": lambda x, n: x * n**-0.5 * n,
}
PLACES = ("scores", "compressed", "query", "q_rope", "latent", "k_rope", "key", "value", "output", "gamma")
NORMS = {
    "mean": lambda x: x.pow(2).mean(-1, keepdim=True),
    "sum / size": lambda x: x.pow(2).sum(-1, keepdim=True) / x.shape[-1],
    "sum * (1 / size)": lambda x: x.pow(2).sum(-1, keepdim=True) * (1 / x.shape[-1]),
    "norm": lambda x: torch.linalg.vector_norm(x, dim=-1, keepdim=True).square() / x.shape[-1],
}


@dataclass(frozen=True)
class Draw:
    """Its repr says everything. A factor is where it is, how it is written, and a number."""

    seed: int
    model: str
    sizes: Sizes
    is_absorbed: bool
    norm: str
    dtype: torch.dtype
    factors: tuple[tuple[str, str, int], ...]


def drawn(seed: int) -> Draw:
    choose = random.Random(seed)
    model = choose.choice([*MODELS])
    tokens = choose.choice([1, 1, 2, 16, 64, 128])
    context = max(choose.choice([64, 128, 512, 1536, 4096, 32768]), tokens)
    sizes = replace(MODELS[model], batch=choose.choice([1, 1, 4, 16, 64, 128]), tokens=tokens, context=context)
    own = [size for size in (*vars(sizes).values(), sizes.query, sizes.rank + sizes.rope) if size > 1]
    numbers = {
        "a size": lambda: choose.choice(own),
        "a power of two": lambda: 2 ** choose.randint(1, 12),
        "whole": lambda: choose.randint(2, 1000),
        "a multiple of a size": lambda: choose.choice(own) * choose.randint(2, 5),
    }
    factors = []
    for place in choose.sample(PLACES, choose.randint(1, 3)):
        number = numbers[choose.choice(["a size", *numbers])]()
        factors.append((place, choose.choice([*MULTIPLIED]), number))
    norm = choose.choice(["mean", *NORMS])
    dtype = choose.choice([torch.bfloat16, torch.float32])
    return Draw(seed, model, sizes, choose.random() < 0.5, norm, dtype, tuple(factors))


class Multiplied(Layer):
    """A layer without numbers in its weights."""

    def __init__(self, draw: Draw) -> None:
        nn.Module.__init__(self)
        z, self.draw = draw.sizes, draw
        self.sizes = z

        def weight(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, dtype=draw.dtype, device="meta"))

        self.q_a, self.q_b = weight(z.query_rank, z.hidden), weight(z.heads * z.query, z.query_rank)
        self.kv_a = weight(z.rank + z.rope, z.hidden)
        self.kv_b = weight(z.heads * (z.nope + z.value), z.rank)
        self.o = weight(z.hidden, z.heads * z.value)
        self.q_gamma, self.kv_gamma = weight(z.query_rank), weight(z.rank)

    def at(self, place: str, x: Tensor) -> Tensor:
        for where, how, number in self.draw.factors:
            if where == place:
                x = MULTIPLIED[how](x, number)
        return x

    def query(self, x: Tensor) -> Tensor:
        q = self.at("compressed", self.norm(x @ self.q_a.T, self.q_gamma)) @ self.q_b.T
        return self.at("query", q.unflatten(-1, (self.sizes.heads, self.sizes.query)).transpose(1, 2))

    def rows(self, x: Tensor) -> tuple[Tensor, Tensor]:
        latent, k_rope = super().rows(x)
        return self.at("latent", latent), self.at("k_rope", k_rope)

    def norm(self, x: Tensor, gamma: Tensor) -> Tensor:
        return self.at("gamma", gamma) * (x * torch.rsqrt(NORMS[self.draw.norm](x) + 1e-6))

    def rotate(self, x: Tensor, *tables: Tensor) -> Tensor:
        return self.at("q_rope", super().rotate(x, *tables))

    def rotate_key(self, x: Tensor, *tables: Tensor) -> Tensor:
        return Layer.rotate(self, x, *tables)

    def mask(self, position: Tensor) -> Tensor:
        later = torch.arange(self.sizes.context, device=position.device) > position[:, None]
        return torch.zeros_like(later, dtype=self.o.dtype).masked_fill(later, -torch.inf)

    def scores(self, query: Tensor, key: Tensor) -> Tensor:
        return self.at("scores", query @ self.at("key", key).transpose(-1, -2)) * self.sizes.query**-0.5

    def combine(self, scores: Tensor, value: Tensor) -> Tensor:
        return self.at("output", scores.softmax(-1) @ self.at("value", value))


class MultipliedLatents(Multiplied, Absorbed):
    """The same with one key and one value for all heads."""


def report_of(draw: Draw) -> Report:
    """What the passes report of a traced graph. Nothing has numbers, and Dynamo, which takes longer, is left out."""
    z = draw.sizes

    def empty(*shape, dtype=draw.dtype):
        return torch.empty(shape, dtype=dtype, device="meta")

    layer = MultipliedLatents(draw) if draw.is_absorbed else Multiplied(draw)
    tables = empty(z.tokens, z.rope), empty(z.tokens, z.rope)
    caches = empty(z.batch, 1, z.context, z.rank), empty(z.batch, 1, z.context, z.rope)
    given = empty(z.batch, z.tokens, z.hidden), tables, empty(z.tokens, dtype=torch.int64), caches
    weights = dict(layer.named_parameters())
    step = functionalize(functools.partial(functional_call, layer))
    with torch.no_grad():
        graph = make_fx(step, tracing_mode="fake")(weights, given)
        compilation = Compilation.prepare((), {"target": "reference"})
        compilation.rewrite(graph)
    return compilation.report


def pytest_generate_tests(metafunc):
    if "seed" in metafunc.fixturenames:
        metafunc.parametrize("seed", range(metafunc.config.getoption("real_sizes")))


def test_draw(seed):
    """What is not fused is refused by a rule. If unlike sizes are equal, as 16 * 16 and 128 + 128 are, a rewrite may be
    unchecked."""
    draw = drawn(seed)
    report = report_of(draw)
    assert report.refuted == [], draw
    assert report.fused and report.checked, f"{draw}\n{report}"


V3 = Draw(0, "DeepSeek-V3", replace(MODELS["DeepSeek-V3"], tokens=2, context=32768), True, "mean", torch.bfloat16, ())
SEEN = {
    "scores / 64": (("scores", "x / n", 64),),
    "q * 128": (("query", "x * n", 128),),
    "k * 512": (("key", "n * x", 512),),
    "all three": (("scores", "div", 64), ("query", "mul", 128), ("key", "x * n", 512)),
}


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("factors", SEEN.values(), ids=SEEN)
def test_a_factor_may_be_as_large_as_a_size(factors, norm):
    report = report_of(replace(V3, norm=norm, factors=factors))
    assert (report.refuted, report.unchecked) == ([], [])
    assert report.fused["latent_attention"] == 1 and report.checked > 1


def with_planted(monkeypatch, operator, fault):
    planted = functools.partial(with_fault, operator=operator, fault=FAULTS[operator, fault])
    monkeypatch.setattr(prove, "difference", lambda plan: plans.difference(planted(plan)))
    return report_of(V3)


PLANTED = [
    ("mla_prolog", "a factor"),
    ("mla_prolog", "the epsilon of the other norm"),
    ("mla_prolog", "gamma plus one"),
    ("latent_attention", "the scale of scores"),
    ("latent_attention", "another head's rotary query"),
    ("latent_attention", "the cache of one token ago"),
]


@pytest.mark.slow
@pytest.mark.refutes
@pytest.mark.parametrize(("operator", "fault"), PLANTED, ids=map(": ".join, PLANTED))
def test_a_fault_is_found_though_no_machine_can_compute_these_tensors(monkeypatch, operator, fault):
    report = with_planted(monkeypatch, operator, fault)
    assert any(" would change " in reason for reason in report.refuted), report


def test_a_difference_at_small_sizes_alone_refutes_nothing(monkeypatch):
    monkeypatch.setattr(plans, "LARGEST", 2**20)
    report = with_planted(monkeypatch, "latent_attention", "the scale of scores")
    why = "it differs at small sizes; at its own, its tensors are too large to be computed"
    assert (report.refuted, report.unchecked) == ([], [f"mla_attention could not be checked: {why}"])
