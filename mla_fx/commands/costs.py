"""What one step of Multi-head Latent Attention costs: bytes, FLOPs, and the time that they take at least.

Sizes, per layer: H hidden, N heads, Q and C low ranks of the query and of the latents, D, R and V the sizes of a head
(without position, rotary, value). A step has `batch` B sequences with `tokens` S new tokens each, so that the cache has
`context` T tokens of each. So B S rows are computed, and T keys are read per sequence. Values are in 16 bits.

    weights   query     H Q + Q N (D + R), or H N (D + R) without a low rank
              key side  H (C + R), and C N (D + V) for keys and values per head
              output    N V H
    cache     C + R per token; all B T tokens are read, and B S are written

A product of [m, k] and [k, n] has 2 m k n FLOPs; nothing else is counted, and masked scores are counted like others.

    absorbed  query and output go through the weights of keys and values, attention reads latents as they are:
              2 B S N (D C + C V) + 2 B S N T (C + R + C)
    expanded  all latents become keys and values per head, which are written once and read once:
              2 B T C N (D + V) + 2 B S N T (D + R + V), and 2 B T N (D + R + V) values more to move

Both also have 2 B S FLOPs for each weight of the projections. The time is that of a roofline: the longer of moving all
bytes and of computing all FLOPs, without an overhead. Feed-forward parts, norms and rotations are left out, and so is
an indexer that chooses keys: all keys count as read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from mla_fx.debug.work import amount

ITEM = 2  # bytes of a value
NAMES = {
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "query_rank": "q_lora_rank",
    "rank": "kv_lora_rank",
    "nope": "qk_nope_head_dim",
    "rope": "qk_rope_head_dim",
    "value": "v_head_dim",
}
"""The sizes under their names in configurations of transformers."""


@dataclass(frozen=True)
class Step:
    batch: int = 1
    tokens: int = 1
    context: int = 4096

    @property
    def rows(self) -> int:
        return self.batch * self.tokens


@dataclass(frozen=True)
class Machine:
    """The defaults are round numbers, and those of no device."""

    bandwidth: float = 1000.0
    flops: float = 100.0

    def seconds(self, cost: Cost) -> float:
        return max(cost.bytes / (self.bandwidth * 1e9), cost.flops / (self.flops * 1e12))

    def is_bound_by_memory(self, cost: Cost) -> bool:
        return cost.bytes / (self.bandwidth * 1e9) >= cost.flops / (self.flops * 1e12)


@dataclass(frozen=True)
class Cost:
    """What one layer reads and computes."""

    bytes: int
    flops: int


@dataclass(frozen=True)
class LayerSizes:
    """The sizes of one layer of attention; `query_rank` is 0 without a low rank."""

    hidden: int
    heads: int
    query_rank: int
    rank: int
    nope: int
    rope: int
    value: int
    chosen: int = 0
    """Keys that an indexer chooses per query, 0 without one."""

    @classmethod
    def of(cls, config: Any) -> LayerSizes:
        names = {**NAMES, "chosen": "index_topk"}
        return cls(**{name: getattr(config, theirs, None) or 0 for name, theirs in names.items()})

    @property
    def _projections(self) -> int:
        query = self.heads * (self.nope + self.rope)
        queries = self.query_rank * (self.hidden + query) if self.query_rank else self.hidden * query
        return queries + self.hidden * (self.rank + self.rope) + self.heads * self.value * self.hidden

    @property
    def _per_head(self) -> int:
        return self.rank * self.heads * (self.nope + self.value)

    @property
    def weights(self) -> int:
        return ITEM * (self._projections + self._per_head)

    @property
    def cache_per_token(self) -> int:
        return ITEM * (self.rank + self.rope)

    def caches_read(self, step: Step) -> int:
        return step.batch * step.context * self.cache_per_token

    def absorbed(self, step: Step) -> Cost:
        scores = step.rows * self.heads * step.context
        flops = 2 * step.rows * (self._projections + self._per_head) + 2 * scores * (2 * self.rank + self.rope)
        return Cost(self._moved(step), flops)

    def expanded(self, step: Step) -> Cost:
        scores, head = step.rows * self.heads * step.context, self.nope + self.rope + self.value
        expansion = 2 * step.batch * step.context * self._per_head
        flops = 2 * step.rows * self._projections + expansion + 2 * scores * head
        return Cost(self._moved(step) + 2 * ITEM * step.batch * step.context * self.heads * head, flops)

    def _moved(self, step: Step) -> int:
        return self.weights + self.caches_read(step) + step.rows * self.cache_per_token


def to_dict(sizes: LayerSizes, layers: int, step: Step, machine: Machine) -> dict[str, Any]:
    """The costs of a layer as JSON values; bytes, FLOPs, and seconds."""
    forms: Mapping[str, Cost] = {"absorbed": sizes.absorbed(step), "expanded": sizes.expanded(step)}
    return {
        "layers": layers,
        "step": asdict(step),
        "machine": asdict(machine),
        "weights": sizes.weights,
        "cache_per_token": sizes.cache_per_token,
        "keys_chosen": sizes.chosen,
        "caches_read": sizes.caches_read(step),
        "forms": {name: {**asdict(cost), "seconds": machine.seconds(cost)} for name, cost in forms.items()},
    }


def told(sizes: LayerSizes, layers: int, step: Step, machine: Machine) -> str:
    lines = [
        f"attention of {layers} layers, new tokens {step.batch} x {step.tokens}, {step.context} tokens in the cache",
        f"  per layer: weights {amount(sizes.weights, 'B')}, cache {sizes.cache_per_token} B per token, "
        f"caches read {amount(sizes.caches_read(step), 'B')}",
    ]
    for name, cost in (("absorbed", sizes.absorbed(step)), ("expanded", sizes.expanded(step))):
        bound = "memory" if machine.is_bound_by_memory(cost) else "arithmetic"
        seconds = machine.seconds(cost)
        lines.append(
            f"  {name}: {amount(cost.bytes, 'B')} moved, {amount(cost.flops, 'FLOP')} per layer; at least "
            f"{seconds * 1e6:.1f} us, {seconds * layers * 1e3:.2f} ms for all layers, bound by {bound}"
        )
    if sizes.chosen:
        lines.append(
            f"  the indexer, which chooses {sizes.chosen} keys for each query, is not counted, and all "
            f"{step.context} keys count as read; sparse attention reads the chosen ones alone"
        )
    return "\n".join([*lines, f"  at {machine.bandwidth:g} GB/s and {machine.flops:g} TFLOP/s"])
