"""Lowers sparse_latent_attention to split_keys, which gathers the chosen rows: each query is a sequence of its own."""

from collections.abc import Callable

from torch import Tensor

from mla_fx.ops.emitted.sparse_latent_attention import Arguments, over_rows

from .split_keys import attend, check_served

OPERATOR = "sparse_latent_attention"


def lower(a: Arguments) -> Callable[[Arguments], Tensor]:
    check_served(a.kv_cache, 1)
    return attend_chosen


def attend_chosen(a: Arguments) -> Tensor:
    return attend(over_rows(a)).view(a.query.shape)
