"""Caches: how rows are written and gathered, and what an operator that writes or reads them takes."""

from mla_fx.readings.behind import caches_behind, check_int8_cache, has_new_rows, is_new, packed_cache
from mla_fx.readings.cache_places import At, CacheUpdate, InBlocks
from mla_fx.readings.cache_update import POSITIONED, WRITES, cache_update, cache_updates
from mla_fx.readings.codes.tiles import packed_rows
from mla_fx.readings.paged import GATHERS, is_looked_up, paged
from mla_fx.rewriting.caches import (
    CacheRoles,
    batch_of_positions,
    block_table,
    cache_roles,
    check_memory,
    check_same_write,
    new_cache,
    old_cache,
    positions,
    positions_and_caches,
    replacing_cache,
    slots_by_target,
)

__all__ = [
    "GATHERS", "POSITIONED", "WRITES", "At", "CacheRoles", "CacheUpdate", "InBlocks", "batch_of_positions",
    "block_table", "cache_roles", "cache_update", "cache_updates", "caches_behind", "check_int8_cache",
    "check_memory", "check_same_write", "has_new_rows", "is_looked_up", "is_new", "new_cache", "old_cache",
    "packed_cache", "packed_rows", "paged", "positions", "positions_and_caches", "replacing_cache", "slots_by_target",
]  # fmt: skip
