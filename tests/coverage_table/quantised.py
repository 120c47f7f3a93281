"""The table of quantised models: DeepSeek-V3 with its projections or its cache in 8 bits or less."""

from __future__ import annotations

from typing import Any

from lib.families import tiny_model
from lib.quantised_models import CONFIGS, keys_and_values_in_blocks, quantise
from transformers import QuantizedCache

from .rows import FamilyCell, layers
from .tables import Notes, Results, Table, Tables, alike, fixed_and_dynamic, in_place, reasons, row

FAMILY = "deepseek_v3"
BLOCKS, SMALL_BLOCKS, CACHE = "float8 blocks", "float8 blocks, several per head", "float8 cache"
# As in DeepSeek-V3, a block has as many rows as a head has columns of keys, and of values.
BLOCK_PER_HEAD = {"qk_nope_head_dim": 4, "qk_head_dim": 12, "v_head_dim": 4}
LINES = {
    **{name: f"torchao, `{config.name}`" for name, config in CONFIGS.items()},
    BLOCKS: "DeepSeek, `kv_b_proj` alone",
    SMALL_BLOCKS: "DeepSeek, `kv_b_proj` alone",
    CACHE: 'transformers, `QuantizedCache(backend="fp8")`',
}
COLUMNS = ("prompt", "static cache")
HEAD = ("quantised", "by", "prompt", "dynamic", "one token", "dynamic", "in place", "notes")


class QuantisedCell(FamilyCell):
    def _model(self) -> Any:
        sizes = BLOCK_PER_HEAD if self.line == BLOCKS else {}
        model = tiny_model(FAMILY, **layers(FAMILY), **sizes)
        if self.line in CONFIGS:
            quantise(model, self.line)
        if self.line in (BLOCKS, SMALL_BLOCKS):
            keys_and_values_in_blocks(model)
        return model

    def _cache(self, model: Any, kind: str) -> Any:
        if self.line == CACHE:
            return QuantizedCache(backend="fp8", config=model.config)
        return super()._cache(model, kind)

    def _functions(self, model: Any) -> tuple[str, ...]:
        return super()._functions(model)[:1]


def _line(name: str, steps: Results, notes: Notes) -> str:
    every = [one for found in steps.values() for one in found]
    columns = (alike(part) for found in steps.values() for part in fixed_and_dynamic(found))
    return row((name, LINES[name], *columns, in_place(steps, notes), notes.numbers(reasons(every))))


CELLS = [QuantisedCell(line, column) for line in LINES for column in COLUMNS]
QUANTISED = Tables("coverage of quantised models", (Table(HEAD, CELLS, _line),))
