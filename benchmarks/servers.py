"""How fast are layers as servers write them, with fixed and with symbolic sizes, beside stock Inductor?

python benchmarks/servers.py             twenty minutes, on an otherwise idle machine
python benchmarks/servers.py --only Drafts SharedPrefix

The spellings are those that the tests compare with eager mode, here with real widths.
"""

from __future__ import annotations

import copy
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from layer import compiled
from results import Results, Row, console, finish, parser, without_caches
from torch.utils._pytree import tree_leaves

import mla_fx

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from lib.layers import in_type
from lib.zoo import parts, servers
from lib.zoo.sizes import Sizes

SIZES = Sizes(2048, 16, 128, 64, 128, 768, 512, context=1024, block=64)
BATCHED, TWICE = (4, 3, 16), ((8, 40), (0, 64), (100, 24))
STYLES: dict[str, Callable[[], tuple[Any, ...]]] = {
    "Drafts": lambda: servers.drafts(*BATCHED[:2]),
    "DraftsScattered": lambda: servers.drafts(*BATCHED[:2]),
    "DraftsFlat": lambda: servers.drafts(*BATCHED[:2]),
    "DraftsExpanded": lambda: servers.drafts(*BATCHED[:2]),
    "Window": lambda: servers.drafts(*BATCHED[:2]),
    "PagedDrafts": lambda: servers.paged_drafts(*BATCHED),
    "PagedDraftsBatched": lambda: servers.paged_drafts_batched(*BATCHED),
    "PagedDraftsDivided": lambda: servers.paged_drafts(*BATCHED),
    "TokensOfPositions": lambda: servers.tokens_of_positions(*BATCHED),
    "VarlenPrefill": lambda: servers.prefill(20, 33, 27),
    "VarlenSliced": lambda: servers.prefill(20, 33, 27),
    "VarlenExpanded": lambda: servers.prefill(20, 33, 27),
    "VarlenPaged": lambda: servers.paged(8, *TWICE),
    "OneSequence": lambda: servers.one_sequence(5),
    "ChunkedPrompt": lambda: parts.chunked_prompt(3, 64, 8),
    "SharedPrefix": lambda: parts.shared_prefix(*BATCHED),
    "MixedBatch": lambda: parts.mixed_batch(3, 64, 8),
    "Shards": lambda: servers.drafts(*BATCHED[:2]),
}
TOLERANCE = 0.03  # of the largest number, in bfloat16


@torch.no_grad()
def race(name: str, dynamic: bool, rounds: int) -> tuple[float, float]:
    """Median milliseconds of mla_fx and of stock Inductor."""
    torch._dynamo.reset()
    layer = (getattr(servers, name, None) or getattr(parts, name))(SIZES).bfloat16()

    def run(*inputs: Any) -> Any:
        return layer(*inputs)

    given, took = STYLES[name](), ([], [])
    backends = mla_fx.get_backend(target="inductor"), "inductor"
    steps = [compiled(run, backend=backend, dynamic=dynamic) for backend in backends]
    kept = [in_type(given, torch.bfloat16) for _ in steps]
    exact = copy.deepcopy(layer).float()(*in_type(kept[0], torch.float32))
    for turn in range(rounds + 2):
        for step, arguments, times in zip(steps, kept, took, strict=True):
            start = time.perf_counter()
            output = step(*arguments)
            times += [1e3 * (time.perf_counter() - start)] * (turn > 1)
            if turn == 0:
                check(name, output, exact)
    ours, stock = map(statistics.median, took)
    return ours, stock


def check(name: str, output: Any, exact: Any) -> None:
    """Raise SystemExit unless the output is right."""
    for found, right in zip(tree_leaves(output), tree_leaves(exact), strict=True):
        if not (off := float((found.float() - right).abs().max() / right.abs().max())) <= TOLERANCE:
            raise SystemExit(f"{name}: the output is off by {off:.1e}; at most {TOLERANCE:.0e} is allowed.")


def main() -> None:
    options = parser(__doc__, rounds=15)
    options.add_argument("--only", nargs="+", choices=STYLES, default=list(STYLES))
    given = options.parse_args()
    without_caches()
    for module in (servers, parts):
        module.SMALL = SIZES  # type: ignore[attr-defined]  # what their arguments are made of
    rows = []
    for name in given.only:
        for dynamic in (False, True):
            ours, stock = race(name, dynamic, given.rounds)
            what = f"{name}, symbolic sizes" if dynamic else name
            console.log(f"{what}: {ours:.2f} ms, stock Inductor {stock:.2f} ms")
            rows.append(Row(f"time / stock Inductor, {what}", ours / stock, 1.0, 0.9))
    finish(Results(rows), given)


if __name__ == "__main__":
    main()
