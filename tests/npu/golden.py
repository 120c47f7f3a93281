"""A GE graph as the dump writes it, but the same for each release of torchair: an operator is named by its type and a
running number, an input by its place, and types of results, which torchair only notes, are left out.

MlaPrologV3_0(token_x=Data_0, weight_dq=Data_1, ...) weight_quant_mode=1
NetOutput_0(input0=MlaPrologV3_0:4)
"""

from __future__ import annotations

import collections
import re
from typing import Any

from mla_fx.lowering import ge as printed


def ge_text(graph: Any) -> str:
    numbers: dict[str, Any] = collections.defaultdict(lambda: iter(range(len(graph.op))))
    named = {op.name: f"{op.type}_{_number(op, numbers)}" for op in graph.op}
    renamed = type(graph)()
    renamed.CopyFrom(graph)
    for op in renamed.op:
        op.name = named[op.name]
        for place, source in enumerate(op.input):
            name, _, output = source.rpartition(":")
            op.input[place] = f"{named[name]}:{output}" if source else ""
    lines = (line.partition("  # ")[0] for line in printed.ge_text(renamed, {}))
    return "\n".join(re.sub(r" = \w+\(", "(", line, count=1) for line in lines)


def _number(op: Any, numbers: dict[str, Any]) -> int:
    return op.attr["index"].i if op.type == "Data" else next(numbers[op.type])
