"""What of an Ascend machine a lowering may use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# Names of chips as CANN gives them, `torch.npu.get_device_name()`, begin with these.
A2, A3, A5 = "Ascend910B", "Ascend910_93", "Ascend950"

Prolog = Literal["v1", "v2", "v3"]


@dataclass(frozen=True)
class Surface:
    """One chip, and the kind of graph that is made for it."""

    chip: str
    mode: Literal["ge", "aclgraph"]
    hoists: bool
    """Whether what depends on weights alone is computed once: then weights may be laid out anew at no cost."""
    trusts_masks: bool = False
    """Whether the user has given word that every mask is causal."""
    prolog: Prolog = "v3"
    """Which interface of the vendor's prolog."""
