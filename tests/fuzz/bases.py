"""The layers that mutants start from: the zoo's along its axes, with coinciding sizes, and those of layers/."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from zlib import crc32

import torch
from lib.zoo.entries import Entry
from lib.zoo.mla import Spelling
from lib.zoo.scores import ATTEND
from lib.zoo.sizes import Sizes, Step
from torch import Tensor

from . import layers
from .capture import Captured, capture

# --- sizes -----------------------------------------------------------------------------------------------------------

APART = Sizes(hidden=11, heads=3, nope=5, rope=4, value=7, q_rank=9, kv_rank=6, context=10, block=5)

SIZES = {
    "apart": (APART, Step("apart", 2, 3, batch=4)),
    "B=S": (replace(APART, nope=4), Step("B=S", 2, 3, batch=2)),
    "S=N": (APART, Step("S=N", 3, 4, batch=2)),
    "N=B": (APART, Step("N=B", 2, 3, batch=3)),
    "T=D": (replace(APART, nope=8, context=8, block=4), Step("T=D", 2, 3)),
    "S=R": (APART, Step("S=R", 6, 3)),
    "R=ND": (replace(APART, heads=2, nope=4, value=4, kv_rank=8), Step("R=ND", 3, 2)),
    "He=Hcq=R": (replace(APART, hidden=6, q_rank=6), Step("He=Hcq=R", 2, 3, batch=3)),
    "equal": (Sizes(4, 4, 4, 4, 4, 4, 4, 4, 2), Step("equal", 4, 0, batch=4)),
    "level": (Sizes(4, 4, 4, 4, 4, 4, 4, 8, 4), Step("level", 4, 0, batch=4)),
    "twos": (Sizes(2, 2, 2, 2, 2, 2, 2, 4, 2), Step("twos", 2, 1, batch=2)),
    "one token": (replace(APART, heads=4, nope=4), Step("one token", 1, 4, batch=3)),
    "one head": (replace(APART, heads=1), Step("one head", 3, 2, batch=2)),
    "bands": (replace(APART, rope=16, kv_rank=48, context=32, block=16), Step("bands", 2, 13, batch=3)),
    "bands=page": (replace(APART, rope=16, kv_rank=64, context=32, block=16), Step("bands=page", 3, 15, batch=2)),
    "one page": (replace(APART, rope=16, kv_rank=32, context=16, block=16), Step("one page", 1, 12, batch=3)),
    "one of all": (replace(APART, heads=1), Step("one of all", 1, 3, batch=1)),
    "one sequence": (APART, Step("one sequence", 4, 3, batch=1)),
    "cold": (APART, Step("cold", 9, 0, batch=2)),
    "cold S=T=D": (replace(APART, nope=9, heads=4), Step("cold S=T=D", 9, 0, batch=4)),
}


@dataclass(frozen=True)
class Base:
    """A layer and its arguments, captured as AOTAutograd traces it or as Inductor decomposes it."""

    name: str
    build: Callable[[], torch.nn.Module]
    arguments: Callable[[], tuple[Any, ...]]
    decomposed: bool = False
    dtype: torch.dtype = torch.float64

    @property
    def ending(self) -> str:
        """What its name says of the capture."""
        return DECOMPOSED if self.decomposed else _in_words(self.dtype)

    @property
    def twin(self) -> Base:
        return replace(self, name=f"{self.name}{DECOMPOSED}", decomposed=True)

    def rounded(self, dtype: torch.dtype) -> Base:
        """In fewer digits, judged by its distance from float64."""
        return replace(self, name=f"{self.name}{_in_words(dtype)}", dtype=dtype)


DECOMPOSED = " (decomposed)"


def _in_words(dtype: torch.dtype) -> str:
    return "" if dtype == torch.float64 else f" ({str(dtype).removeprefix('torch.')})"


# --- from the zoo ----------------------------------------------------------------------------------------------------

SPELLINGS = (
    ("apart", {}),
    ("B=S", {}),
    ("S=N", {"attend": "eager"}),
    ("N=B", {"attend": "by_hand"}),
    ("T=D", {"cache": "index_put", "rope": "rotate_half"}),
    ("S=R", {"attend": "masked_fill", "norm": "sum_over_n"}),
    ("R=ND", {"keys": "new_empty", "attend": "where"}),
    ("He=Hcq=R", {"norm": "vector_norm", "query": "low_returned"}),
    ("equal", {"attend": "eager"}),
    ("twos", {"attend": "by_hand", "cache": "batched"}),
    ("one token", {"cache": "batched_one", "rope": "stack_flatten", "attend": "masked_fill"}),
    ("one head", {"attend": "eager", "rope": "view_transpose"}),
    ("one of all", {"attend": "sdpa_bool"}),
    ("one sequence", {"cache": "slots", "layout": "tokens", "keys": "absorbed_bmm", "attend": "eager"}),
    ("cold", {"cache": "none", "attend": "sdpa_causal"}),
    ("cold S=T=D", {"cache": "none", "attend": "eager", "scale": "query"}),
    ("S=N", {"cache": "none", "attend": "by_hand", "keys": "absorbed_einsum"}),
    ("B=S", {"cache": "batched", "rope": "complex", "layout": "bshd", "attend": "einsum", "keys": "two_products"}),
    ("N=B", {"cache": "scattered", "rope": "complex", "norm": "fused", "attend": "sdpa_bool"}),
    ("apart", {"cache": "slice", "rope": "complex", "norm": "fused", "layout": "bshd", "query": "direct"}),
    ("N=B", {"cache": "roomy_slice", "rope": "chunks", "keys": "absorbed_matmul", "attend": "masked_fill"}),
    ("B=S", {"cache": "appended", "layout": "sbhd", "rope": "cat_of_strides", "keys": "absorbed_einsum",
             "attend": "einsum", "multiply": "transposed"}),
    ("He=Hcq=R", {"cache": "slots", "down": "fused_once", "rope": "rotate_every_two", "keys": "pad_add"}),
    ("one token", {"cache": "slice_read_whole", "query": "direct", "rope": "none", "keys": "absorbed_cat"}),
    ("apart", {"cache": "narrow_copy", "rope": "slice_assigned", "norm": "unit_offset", "keys": "two_projections"}),
    ("R=ND", {"cache": "appended", "norm": "one_over_sqrt", "multiply": "weight_first", "attend": "sdpa_bool"}),
    ("S=N", {"tables": "indexed", "part": "narrow", "down": "in_first", "keys": "rope_first", "scale": "divided",
            "attend": "where"}),
    ("apart", {"cache": "paged", "part": "tensor_split"}),
    ("B=S", {"cache": "paged", "layout": "tokens", "keys": "absorbed_einsum", "attend": "eager"}),
    ("N=B", {"cache": "blocks_selected", "keys": "absorbed_bmm", "attend": "by_hand", "norm": "to_minus_half"}),
    ("T=D", {"cache": "blocks_embedded", "part": "slices", "attend": "filled"}),
    ("S=N", {"cache": "slots_of_table", "down": "fused", "norm": "divided_by_sqrt"}),
    ("level", {"cache": "offsets_in_blocks", "keys": "two_products", "attend": "eager", "scale": "tensor"}),
    ("He=Hcq=R", {"cache": "slots_given", "attend": "masked_fill", "query": "direct"}),
    ("bands", {"cache": "nz"}),
    ("bands", {"cache": "nz_transposed", "layout": "tokens", "keys": "absorbed_einsum", "attend": "eager"}),
    ("bands=page", {"cache": "nz", "keys": "two_products", "attend": "eager", "query": "direct"}),
    ("bands=page", {"cache": "nz_transposed", "norm": "to_minus_half", "scale": "query"}),
    ("one page", {"cache": "nz_one_head", "keys": "absorbed_bmm", "attend": "by_hand", "rope": "rotate_half"}),
    ("R=ND", {"cache": "combined_in_two", "keys": "absorbed_matmul", "attend": "eager"}),
    ("equal", {"cache": "combined_in_two", "factor": "by_head"}),
    ("S=N", {"cache": "combined_slots_in_two", "part": "split_again", "norm": "gamma_in_float32"}),
    ("one token", {"cache": "combined_blocks", "part": "from_the_end", "attend": "sdpa_bool", "scale": "query"}),
    ("B=S", {"cache": "combined_slice", "rope": "complex", "layout": "bshd"}),
    ("one head", {"cache": "combined_appended", "keys": "broadcast_assign"}),
    ("N=B", {"cache": "combined_paged", "keys": "absorbed_einsum", "attend": "eager", "layout": "bshd"}),
    ("apart", {"factor": "after_projection", "keys": "cat_repeat"}),
    ("S=N", {"factor": "before_projection", "cache": "counted", "down": "separate"}),
    ("B=S", {"factor": "by_position", "cache": "slice_scatter", "keys": "padded_value"}),
    ("N=B", {"factor": "by_head", "keys": "absorbed_einsum", "attend": "eager", "scale": "in_place"}),
    ("S=R", {"rope": "none", "part": "split_of_split", "norm": "tensor_epsilon"}),
    ("one token", {"cache": "one_row", "factor": "by_head", "attend": "masked_fill"}),
)  # fmt: skip


def _in(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, tuple):
        return tuple(_in(item, dtype) for item in value)
    if not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex()):
        return value
    return value.to(torch.complex128 if value.is_complex() else dtype)


def zoo_arguments(spelling: Spelling, step: Step) -> tuple[Any, ...]:
    """The zoo's, with tables of any numbers and, where something is seen, a mask of any numbers."""
    x, tables, positions, mask, caches, place = _in(Entry(spelling).arguments(step), torch.float64)
    draw = torch.Generator().manual_seed(3)
    tables = tuple(torch.randn(table.shape, generator=draw, dtype=table.dtype) for table in tables)
    if ATTEND[spelling.attend].mask == "added":
        mask = mask + torch.randn(mask.shape, generator=draw, dtype=mask.dtype)
    return x, tables, positions, mask, caches, place


def _from_zoo(sizes: str, axes: dict[str, str]) -> Base:
    dimensions, step = SIZES[sizes]
    spelling = replace(Spelling(), sizes=dimensions, **axes)
    name = "-".join([sizes, *axes.values()])
    return Base(name, lambda: Entry(spelling).build().double(), lambda: zoo_arguments(spelling, step))


def _own(name: str, layer: type[layers.Layer], sizes: layers.Sizes) -> Base:
    return Base(name, lambda: layer(sizes), lambda: layer(sizes).arguments())


LAYERS = (
    *(_from_zoo(sizes, axes) for sizes, axes in SPELLINGS),
    *(_own(name, layer, sizes) for name, (layer, sizes) in layers.LAYERS.items()),
)
DTYPES = (torch.float16, torch.float16, torch.bfloat16, torch.float16, torch.float32)


def is_rounded(name: str) -> bool:
    """Whether a base is also one of fewer digits: not of complex numbers or of the bytes of numbers, nor if they decide
    which keys are chosen."""
    return not name.startswith(("indexed", "rows of bytes")) and "complex" not in name and "conjugated" not in name


PAIRS = tuple((base, base.twin)[:: 1 if place % 2 else -1] for place, base in enumerate(LAYERS))
# by the name, so that a base stays the same when others are added
ROUNDABLE = [base for base in LAYERS if is_rounded(base.name)]
ROUNDED = tuple(base.rounded(DTYPES[crc32(base.name.encode()) % len(DTYPES)]) for base in ROUNDABLE)
# every layer once, then in its other capture, then in fewer digits
ALL = (*(first for first, _ in PAIRS), *(second for _, second in PAIRS), *ROUNDED)
BASES = {base.name: base for base in ALL}
assert len(BASES) == len(ALL)


# A graph in which nothing fuses tests nothing: only these bases may have none.
MAY_STAY_UNFUSED = frozenset(
    {
        *("bool added", "flags written", "bool and flags", "minus ten thousand", "smallest number"),
        *("heads as rows", "one context", "one context causal", "complex factor", "conjugated table"),
        *("order of keys", "two orders", "order of values", "riffled query"),
        *("read from the end", "cloned and copied", "at index from the end"),
        *("one buffer", "one buffer by layer", "two steps"),
        *("exp over sum", "exp over sum unsqueezed", "bounded sums"),
    }
)


@functools.cache
def captured(name: str) -> Captured:
    base = BASES[name]
    arguments = _in(base.arguments(), base.dtype)
    return capture(base.build().to(base.dtype), arguments, decomposed=base.decomposed, dtype=base.dtype)


def may_stay_unfused(name: str) -> bool:
    return BASES[name].dtype != torch.float64 or name.removesuffix(DECOMPOSED) in MAY_STAY_UNFUSED
