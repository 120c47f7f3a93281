"""The entries: what each is composed of, and what it must fuse to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from . import classics
from .caches import CACHES, Combined, Paged
from .factors import FACTORS
from .mla import LatentAttention, Spelling, name_of
from .ropes import ROPES, angles
from .scores import ATTEND
from .sizes import PREFILL, SMALL, STEPS, Sizes, Step, hidden_states, weights

SURELY_ABSORBED = 8  # query tokens up to which attention is absorbed whatever the context


@dataclass(frozen=True)
class Entry:
    """A module, its arguments at each step, and what it becomes.

    `partial` says why no mla_prolog can be had; the key side may then still be one kv_rmsnorm_rope_cache.
    `partial_with_symbols` says why there is neither where sizes are symbols, `unfused` why nothing can be fused, and
    `unfused_with_symbols` why nothing can where they are."""

    spelling: Spelling
    make: Callable[..., nn.Module] = LatentAttention
    partial: str = ""
    partial_with_symbols: str = ""
    unfused: str = ""
    unfused_with_symbols: str = ""
    only: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return name_of(self.spelling) if self.make is LatentAttention else self.make.__name__

    @property
    def steps(self) -> tuple[Step, ...]:
        names = self.only or CACHES[self.spelling.cache].steps
        return tuple(step for step in STEPS if step.name in names)

    def build(self) -> nn.Module:
        low_rank = self.spelling.query != "direct"
        return self.make(self.spelling, weights(self.spelling.sizes, low_rank=low_rank)).eval()

    def arguments(self, step: Step) -> tuple[Any, ...]:
        return arguments(self.spelling, step)

    def fused(self, step: Step, *, dynamic: bool = False, dtype: torch.dtype = torch.float32) -> dict[str, int]:
        """How often each fused operator must appear. With `dynamic` sizes the number of tokens, if it is more than one,
        is known at run time only; in float16 an absorbed query may leave the range, and none is made."""
        if self.unfused or (dynamic and self.unfused_with_symbols):
            return {}
        cache = CACHES[self.spelling.cache]
        is_cold = step.tokens == cache.length(self.spelling.sizes, step) and step.tokens > SURELY_ABSORBED
        is_unknown = dynamic and step.tokens > 1
        is_partial = bool(self.partial or (dynamic and self.partial_with_symbols))
        if (is_cold or is_unknown or dtype == torch.float16) and not self.is_absorbed:
            is_cached = cache.is_read_from_memory or step.tokens < cache.length(self.spelling.sizes, step)
            rows = {"kv_rmsnorm_rope_cache": 1} if is_cached and not is_partial else {}
            return {**rows, "mla_attention": 1}
        return {"latent_attention": 1} if is_partial else {"mla_prolog": 1, "latent_attention": 1}

    @property
    def is_absorbed(self) -> bool:
        """The user wrote the absorbed form."""
        return self.spelling.keys.startswith("absorbed")


def arguments(spelling: Spelling, step: Step) -> tuple[Any, ...]:
    """x, tables, positions, mask, caches, place."""
    sizes, cache, rope = spelling.sizes, CACHES[spelling.cache], ROPES[spelling.rope]
    x = hidden_states(sizes, step)
    positions = step.positions(cache.is_ragged)
    counted = torch.arange(sizes.context) if spelling.tables.startswith("indexed") else positions
    tables = rope.tables(angles(counted, sizes.rope))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        caches = cache.caches(sizes, step)
    length = cache.length(sizes, step)
    first = step.start if length == step.tokens else 0  # without a cache the context begins with the new tokens
    mask = mask_of(ATTEND[spelling.attend].mask, positions - first, length)
    x = x.transpose(0, 1) if spelling.layout == "sbhd" else x
    return x, tables, positions, mask, caches, cache.place(sizes, step)


def mask_of(kind: str, positions: Tensor, length: int) -> Tensor | None:
    """[B or 1, 1, S, T]: causal."""
    allowed = (torch.arange(length) <= positions.unsqueeze(-1)).unsqueeze(1)
    if kind == "allowed":
        return allowed
    return torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min) if kind == "added" else None


# --- composed entries ------------------------------------------------------------------------------------------------

DEFAULT = Spelling()
PAIRED = replace(DEFAULT, attend="eager")  # the rest of an axis whose keys come as two pairs


def along(base: Spelling, axis: str, *values: str, **entry: Any) -> list[Entry]:
    """One entry for each value of an axis. A prefill of a cache read whole differs from three tokens in nothing."""
    if axis != "cache":
        entry = {"only": ("decode", "few"), **entry}
    return [Entry(replace(base, **{axis: value}), **entry) for value in values]


TWO_WEIGHTS = "latent and rotary key are projected by two parameters, the operator takes one matrix"
NO_SIGN = {"slice_scatter": "PyTorch does not ask for the sign of the first position, as where a slice is assigned"}
OF_SERVERS = tuple(name for name, cache in CACHES.items() if isinstance(cache, (Combined, Paged)) and name[:2] != "nz")
WHOLE_FRACTALS = replace(SMALL, nope=6, rope=32, kv_rank=64, context=96, block=48)
EVEN = replace(SMALL, nope=8, rope=8, value=8)

COMPOSED = [
    Entry(DEFAULT),
    *along(DEFAULT, "query", "direct", "low_returned"),
    *along(DEFAULT, "down", "fused", "fused_once", "in_first"),
    *along(DEFAULT, "down", "separate", partial=TWO_WEIGHTS),
    *along(DEFAULT, "multiply", "transposed", "on_tokens", "einsum", "weight_first"),
    *along(DEFAULT, "part", "slices", "from_the_end", "narrow", "tensor_split", "split_again"),
    *along(DEFAULT, "part", "split_of_split"),
    Entry(replace(DEFAULT, part="chunk", sizes=EVEN)),
    *along(
        DEFAULT,
        "norm",
        *("gamma_in_float32", "fused", "divided_by_sqrt", "one_over_sqrt", "to_minus_half"),
        *("sum_over_n", "vector_norm", "unit_offset", "tensor_epsilon"),
    ),
    *along(DEFAULT, "rope", *(rope for rope in ROPES if rope != "stride_two")),
    *along(DEFAULT, "tables", "indexed", "indexed_twice"),
    *(
        Entry(replace(DEFAULT, cache=cache), partial_with_symbols=NO_SIGN.get(cache, ""))
        for cache in CACHES
        if cache not in ("none", "index_copy", *OF_SERVERS) and cache[:2] != "nz"
    ),
    *along(DEFAULT, "cache", *OF_SERVERS, only=("few",)),
    *along(
        replace(DEFAULT, sizes=WHOLE_FRACTALS),
        *("cache", "nz", "nz_transposed", "nz_one_head"),
        only=("few",),
        unfused_with_symbols="PyTorch expresses the bands of a gathered page by nested quotients",
    ),
    Entry(replace(DEFAULT, cache="none", attend="sdpa_causal")),
    Entry(replace(DEFAULT, cache="none", attend="eager")),
    *along(DEFAULT, "keys", *("cat_repeat", "rope_first", "new_empty", "broadcast_assign", "pad_add")),
    *along(DEFAULT, "keys", *("two_projections", "absorbed_cat")),
    Entry(replace(DEFAULT, keys="padded_value")),
    *along(PAIRED, "keys", "two_products", "absorbed_einsum", "absorbed_bmm", "absorbed_matmul"),
    *along(DEFAULT, "attend", "sdpa_bool", "eager", "masked_fill", "filled", "where", "einsum", "by_hand"),
    *along(PAIRED, "scale", "divided", "tensor", "in_place", "query", "baddbmm"),
    *along(DEFAULT, "scale", "query"),
    *along(DEFAULT, "factor", *(factor for factor in FACTORS if factor != "none")),
    *along(DEFAULT, "layout", "bshd", "tokens", "sbhd"),
    *along(DEFAULT, "noise", "views", "contiguous", "clone", "detach", "dropout", "casts", "transposes"),
    *along(DEFAULT, "noise", "flatten", "times_one"),
]

MIXED = [
    Entry(Spelling(query="direct", rope="complex", norm="fused", layout="bshd", cache="slice", attend="masked_fill")),
    Entry(Spelling(down="fused", part="slices", rope="chunks", layout="tokens", cache="slots", keys="absorbed_bmm",
                   attend="eager", norm="gamma_in_float32", tables="indexed")),
    Entry(Spelling(rope="rotate_half", norm="unit_offset", cache="batched", keys="new_empty", attend="where",
                   part="narrow", scale="divided")),
    Entry(Spelling(query="direct", rope="none", cache="appended", keys="pad_add", attend="einsum", noise="clone",
                   factor="after_projection")),
    Entry(Spelling(layout="sbhd", rope="cat_of_strides", cache="appended", keys="absorbed_einsum", attend="einsum",
                   scale="query", multiply="transposed")),
    Entry(Spelling(query="low_returned", multiply="on_tokens", cache="scattered", rope="view_transpose",
                   keys="broadcast_assign", attend="sdpa_bool", tables="indexed")),
    Entry(Spelling(query="direct", cache="batched_one", rope="stack_flatten", layout="tokens", keys="absorbed_matmul",
                   attend="masked_fill", norm="to_minus_half")),
    Entry(Spelling(down="in_first", cache="none", rope="rotate_every_two", keys="cat_repeat", attend="sdpa_causal",
                   layout="bshd", norm="vector_norm")),
    Entry(Spelling(cache="roomy_slice", rope="complex", norm="fused", layout="bshd", keys="two_products",
                   attend="eager", query="direct")),
]  # fmt: skip

# --- classics --------------------------------------------------------------------------------------------------------

CLASSICS = [
    Entry(Spelling(rope="complex", cache="roomy_slice", attend="eager"), make=classics.DeepSeekNaive),
    Entry(Spelling(rope="complex", cache="roomy_slice", attend="eager", query="direct", keys="absorbed"),
          make=classics.DeepSeekAbsorb),
    Entry(Spelling(cache="none", rope="view_transpose"), make=classics.Transformers4),
    Entry(Spelling(cache="appended", layout="sbhd", rope="cat_of_strides"), make=classics.Megatron),
    Entry(Spelling(cache="none", rope="complex", attend="sdpa_causal", query="direct"), make=classics.TorchTitan),
    Entry(Spelling(cache="none", rope="view_transpose"), make=classics.LitGpt),
    Entry(Spelling(cache="slots", rope="stack_flatten", keys="absorbed"), make=classics.SgLang),
    Entry(Spelling(cache="slots", rope="chunks", tables="indexed"), make=classics.Vllm),
]  # fmt: skip

ENTRIES = [*COMPOSED, *MIXED, *CLASSICS]


def expanded_cache_arguments(sizes: Sizes, step: Step) -> tuple[Any, ...]:
    """The caches of `classics.ExpandedCache`."""
    x, tables, positions, mask, _, place = arguments(Spelling(rope="view_transpose", cache="appended"), step)
    shapes = ((step.batch, sizes.heads, step.start, width) for width in (sizes.query, sizes.value))
    return x, tables, positions, mask, tuple(torch.ones(shape) for shape in shapes), place


assert PREFILL.tokens > SURELY_ABSORBED


class TwoGraphs(nn.Module):
    """Two layers with a graph break between them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Entry(DEFAULT).build() for _ in range(2))

    def forward(self, arguments: Any) -> Any:
        first = self.layers[0](*arguments)
        torch._dynamo.graph_break()
        return first, self.layers[1](*arguments)
