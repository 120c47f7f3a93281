"""A process that compiles one step of a tiny model, for `driver/test_compile_caches.py`.

`python -m lib.start_anew SEED [FOLDER]`: SEED draws the weights; a FOLDER holds the user's own rules. It prints as JSON
what fused, what PyTorch's caches counted, and what the report says."""

from __future__ import annotations

import json
import sys

import mla_fx.patterns
import torch
from torch._dynamo.utils import counters

import mla_fx
from lib.comparing import check_same
from lib.families import randomise
from lib.zoo.entries import DEFAULT, Entry
from lib.zoo.sizes import DECODE

COUNTED = ("autograd_cache_hit", "autograd_cache_miss", "autograd_cache_bypass", "fxgraph_cache_hit")


def counted():
    """The hits and misses of each cache since the last call."""
    together = counters["aot_autograd"] + counters["inductor"]
    counters.clear()
    return {name: together[name] for name in COUNTED if together[name]}


@torch.no_grad()
def main(seed: str, *folders: str) -> None:
    mla_fx.patterns.__path__ += folders
    module, arguments = Entry(DEFAULT).build(), Entry(DEFAULT).arguments(DECODE)
    torch.manual_seed(int(seed))
    randomise(module)
    check_same(module, arguments, torch.compile(module, backend="mla"))
    report = mla_fx.last_report()
    print(json.dumps({"fused": report.fused, "counted": counted(), "told": str(report)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
