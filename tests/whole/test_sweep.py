"""Unmodified models of transformers, drawn by seed: configurations, caches, shapes, steps; all results are eager's.

`--sweep N` draws this many; `pytest "tests/whole/test_sweep.py::test_draw[17]" --sweep 18` runs one of them again.
"""

from __future__ import annotations

import copy
import random
from dataclasses import asdict, dataclass, replace

import numpy as np
import pytest
import torch
from lib.families import cache_tensors, empty_cache, tiny_model, tokens
from lib.layers import QUIET, Reporting

pytestmark = [pytest.mark.filterwarnings(line) for line in QUIET]
EXACT = {"rtol": 1e-4, "atol": 1e-5}
LENGTH = 29  # of static caches

PLAIN = {"rope_theta": 10000.0}
LONG = {**PLAIN, "original_max_position_embeddings": 16}
ROPES = {
    "default": {"rope_type": "default", **PLAIN},
    "linear": {"rope_type": "linear", "factor": 2.5, **PLAIN},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0, **PLAIN},
    "yarn": {"rope_type": "yarn", "factor": 8.0, **LONG},
    "yarn, mscale": {"rope_type": "yarn", "factor": 8.0, "mscale": 0.7, "mscale_all_dim": 1.2, **LONG},
    "yarn, mscale_all_dim": {"rope_type": "yarn", "factor": 8.0, "mscale_all_dim": 1.0, **LONG},
    "yarn, factor": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 0.6, **LONG},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **LONG},
    "longrope": {"rope_type": "longrope", "factor": 4.0, **LONG},
}
FAMILIES = ["deepseek_v2"] * 4 + ["deepseek_v3"] * 5 + ["youtu", "glm4_moe_lite", "axk1", "minicpm3"]
SIZES = {
    "all different": {},
    "values as wide as nope": {"v_head_dim": 16},
    "values as wide as queries": {"v_head_dim": 24},
    "rank is all heads": {},
    "rank is the batch": {"kv_lora_rank": 4, "qk_rope_head_dim": 6},  # DeepSeek-V2 itself needs an even sum of both
    "rope as wide as nope": {"qk_nope_head_dim": 8, "v_head_dim": 8},
    "ranks and hidden alike": {"kv_lora_rank": 60, "q_lora_rank": 60},
    "heads as many as nope": {"qk_nope_head_dim": 4, "qk_rope_head_dim": 4},
    "hidden is the latent row": {"kv_lora_rank": 52},
}
# Between two steps, as when adapters are merged into weights; all but the first bypass PyTorch's count of writes.
CHANGES = {
    "in place": lambda weight: weight.mul_(1.25),
    "data": lambda weight: weight.data.mul_(1.25),
    "numpy": lambda weight: np.multiply(weight.detach().numpy(), 1.25, out=weight.detach().numpy()),
    "other memory": lambda weight: setattr(weight, "data", weight.data * 1.25),
}
HUGE = 1e30  # in slots that no query sees


@dataclass(frozen=True)
class Draw:
    """A configuration and a way to call it; its repr says everything."""

    seed: int
    family: str
    rope: str
    sizes: str
    attention: str
    cache: str
    dynamic: bool | None
    heads: int = 4
    layers: int = 1
    batch: int = 2
    prompt: int = 7
    chunk: int = 4
    bias: bool = False
    interleave: bool = True
    low_rank: bool = True
    padded: bool = False
    compiles_prefill: bool = False
    dtype: str = "float32"
    target: str = "reference"
    garbage: bool = False
    overrun: bool = False
    change: str = "none"

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in asdict(self).items())

    @property
    def fuses(self) -> bool:
        """The spelling that the compiler was made for, and that must always fuse.

        In float64, transformers rounds its softmax and its norms to float32, which no fused operator does."""
        is_plain = self.family.startswith("deepseek") and not self.bias and self.cache != "none"
        return is_plain and self.dtype == "float32"


def drawn(seed: int) -> Draw:
    rng = random.Random(seed)

    def often(chance: float) -> bool:
        return rng.random() < chance

    rope, dynamic = rng.choice(list(ROPES)), rng.choice([None, None, None, False, False, True])
    is_quick = rope != "dynamic" and dynamic is not True  # the others take long to trace: mostly decode alone
    attention, padded = rng.choice(["sdpa", "eager"]), often(0.3)
    # eager attention uses float64's lowest number for minus infinity, and gives NaN where everything is masked
    dtypes = ["float32"] if padded and attention == "eager" else ["float32", "float64"]
    return Draw(
        seed=seed,
        family=rng.choice(FAMILIES),
        rope=rope,
        sizes=rng.choice(list(SIZES)),
        attention=attention,
        cache=rng.choice(["static"] * 4 + ["dynamic"] * 4 + ["none"]),
        dynamic=dynamic,
        heads=rng.choice([4, 4, 3, 5]),
        layers=rng.choice([1] * 6 + [2]) if is_quick else 1,
        batch=rng.choice([1, 2, 3, 4]),
        prompt=rng.choice([1, 2, 5, 7, 11]),
        chunk=rng.choice([0, 2, 4, 9]) if often(0.7 if is_quick else 0.2) else 0,
        bias=often(0.15),
        interleave=not often(0.25),
        low_rank=not often(0.25),
        padded=padded,
        compiles_prefill=often(0.3 if is_quick else 0.1),
        dtype=rng.choice(dtypes),
        garbage=often(0.4),
        overrun=often(0.3),
        change=rng.choice(["none", "none", *CHANGES]),
    )


def rope_of(draw: Draw, width: int) -> dict[str, object]:
    if draw.rope != "longrope":
        return ROPES[draw.rope]
    factors = [1.0 + 0.5 * place for place in range(width // 2)]
    return {**ROPES["longrope"], "short_factor": factors, "long_factor": [2 * factor for factor in factors]}


def model_of(draw: Draw):
    """Dense layers only: routing would turn roundings into jumps."""
    sizes = dict(SIZES[draw.sizes])
    if draw.sizes == "rank is all heads":
        sizes["kv_lora_rank"] = draw.heads * 16
    rope_width = sizes.setdefault("qk_rope_head_dim", 8)
    overrides = {
        **sizes,
        "hidden_size": 60,  # divisible by 3, 4 and 5 heads
        "head_dim": rope_width,
        "qk_head_dim": sizes.get("qk_nope_head_dim", 16) + rope_width,
        "num_attention_heads": draw.heads,
        "num_key_value_heads": draw.heads,
        "num_hidden_layers": draw.layers,
        "first_k_dense_replace": draw.layers,
        "mlp_layer_types": ["dense"] * draw.layers,
        "attention_bias": draw.bias,
        "rope_interleave": draw.interleave,
        "rope_parameters": rope_of(draw, rope_width),
        "max_position_embeddings": 64,
        **({} if draw.low_rank or not draw.family.startswith("deepseek") else {"q_lora_rank": None}),
    }
    model = tiny_model(draw.family, getattr(torch, draw.dtype), **overrides)
    model.set_attn_implementation(draw.attention)
    return model


class Session:
    """One model, eager and compiled, through the same steps; everything is compared after each."""

    def __init__(self, draw: Draw) -> None:
        torch.manual_seed(draw.seed)
        self.draw, self.model = draw, model_of(draw)
        self.backend = Reporting(target=draw.target)
        other = copy.deepcopy(self.model)  # some ropes change with what they have seen
        self.models = self.model, other
        self.compiled = torch.compile(other, backend=self.backend, dynamic=draw.dynamic)
        self.caches = [empty_cache(self.model, draw.cache, LENGTH) for _ in range(2)]
        self.seen = tokens(draw.batch, 0)

    def step(self, count: int, compiles: bool = True) -> None:
        """`count` tokens more."""
        new = tokens(self.draw.batch, count)
        self.seen = torch.cat((self.seen, new), dim=1)
        ids = self.seen if self.draw.cache == "none" else new
        runs = (self.model, self.compiled if compiles else self.model)
        expected, found = (self.logits(run, ids, cache) for run, cache in zip(runs, self.caches, strict=True))
        torch.testing.assert_close(found, expected, **EXACT)
        if self.draw.cache != "none":
            theirs, ours = map(cache_tensors, self.caches)
            torch.testing.assert_close(ours, theirs, **EXACT)

    def fill_free_slots(self) -> None:
        """Memory that was never written, or belonged to another request."""
        for cache in self.caches:
            for held in cache_tensors(cache):
                if held.dim() == 4:
                    held[:, :, self.seen.shape[1] :] = HUGE

    def change_weights(self) -> None:
        for model in self.models:
            for name, weight in model.named_parameters():
                if "kv_b" in name or "q_b" in name:
                    CHANGES[self.draw.change](weight)

    def overrun(self) -> None:
        """More tokens than a static cache holds are an error, fused or not."""
        new = tokens(self.draw.batch, LENGTH + 1 - self.seen.shape[1])
        self.seen = torch.cat((self.seen, new), dim=1)
        for run, cache in zip((self.model, self.compiled), self.caches, strict=True):
            with pytest.raises(Exception, match=r"out of bounds|out of range|must be below"):
                self.logits(run, new, cache)

    def logits(self, run, ids, cache):
        options = {"attention_mask": self.left_padded()} if self.draw.padded else {}
        return run(ids, past_key_values=cache, use_cache=cache is not None, **options).logits

    def left_padded(self):
        mask = torch.ones(self.seen.shape, dtype=torch.long)
        mask[0, : min(3, self.draw.prompt - 1)] = 0
        return mask

    def run(self) -> None:
        """Prefill, optionally a chunk, three decode steps."""
        self.step(self.draw.prompt, compiles=self.draw.compiles_prefill)
        if self.draw.chunk:
            self.step(self.draw.chunk)
        if self.draw.garbage and self.draw.cache == "static":
            self.fill_free_slots()
        before = len(self.backend.reports)
        for number in range(3):
            if number == 2 and self.draw.change != "none":
                self.change_weights()
            self.step(1)
        decode = self.backend.reports[before:]
        print(f"fused: {self.backend.report.fused}; when decoding: {[report.fused for report in decode]}")
        if self.draw.fuses:
            fused = sum(report.fused.get("latent_attention", 0) for report in decode)
            assert fused >= self.draw.layers, self.backend.report
        if self.draw.overrun and self.draw.cache == "static":
            self.overrun()


def check(draw: Draw) -> None:
    print(draw)
    with torch.no_grad():
        Session(draw).run()


def pytest_generate_tests(metafunc):
    if "seed" in metafunc.fixturenames:
        metafunc.parametrize("seed", range(metafunc.config.getoption("--sweep")))


@pytest.mark.slow
def test_draw(seed):
    check(drawn(seed))


TARGETS = ["reference", pytest.param("inductor", marks=pytest.mark.campaign)]
STEADY = Draw(0, "deepseek_v2", "default", "all different", "sdpa", "static", None)


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
@pytest.mark.parametrize("rope", ["yarn", "longrope"])
def test_scaled_rotation(rope, family, target):
    """The rotation has a factor, which DeepSeek-V2 multiplies into complex tables and V3 into cos and sin."""
    check(replace(STEADY, family=family, rope=rope, target=target))


def test_draws_are_what_they_were():
    """A key stays the same configuration for ever."""
    assert drawn(3) == drawn(3)
    assert len({str(replace(drawn(seed), seed=0)) for seed in range(100)}) == 100
