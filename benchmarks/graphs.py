"""The number of graphs that are compiled as sizes change.

python benchmarks/graphs.py                    a few minutes

DeepseekV3ForCausalLM of small sizes, one layer, with mla_fx on the reference target. Graphs are counted as Dynamo
passes them to the backend.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import small_models
import torch
from results import Results, Row, console, finish, parser
from transformers import DynamicCache

import mla_fx


class Counting:
    """A backend that counts its graphs."""

    def __init__(self) -> None:
        self.graphs, self.backend = 0, mla_fx.get_backend(target="reference")

    def __call__(self, gm: Any, example_inputs: Any) -> Any:
        self.graphs += 1
        return self.backend(gm, example_inputs)


def static_cache(model: Any, step: Callable[..., Any]) -> None:
    cache = small_models.prefilled(model, length=516)
    for _ in range(512):
        step(input_ids=small_models.tokens(), past_key_values=cache)


def batches(model: Any, step: Callable[..., Any]) -> None:
    for batch in (1, 4, 8):
        cache = small_models.prefilled(model, batch=batch, length=64)
        step(input_ids=small_models.tokens(batch=batch), past_key_values=cache)


def growing_cache(model: Any, step: Callable[..., Any]) -> None:
    """From 64 to 1024 tokens, the prompt first."""
    cache = DynamicCache(config=model.config)
    step(input_ids=small_models.tokens(64), past_key_values=cache)
    for _ in range(960):
        step(input_ids=small_models.tokens(), past_key_values=cache)


def prompts(model: Any, step: Callable[..., Any]) -> None:
    """Prompts of any length, marked as such, and some steps after each."""
    for length in (64, 5, 17, 1021):
        cache, prompt = DynamicCache(config=model.config), small_models.tokens(length)
        torch._dynamo.mark_dynamic(prompt, 1)
        for ids in (prompt, small_models.tokens(), small_models.tokens()):
            step(input_ids=ids, past_key_values=cache)


def new_tokens(model: Any, step: Callable[..., Any]) -> None:
    """Drafts of up to 16 tokens, marked as such, and single steps."""
    cache = small_models.prefilled(model, length=128)
    for count in (16, 3, 1, 8, 2, 1):
        ids = small_models.tokens(count)
        if count > 1:
            torch._dynamo.mark_dynamic(ids, 1, min=2, max=16)
        step(input_ids=ids, past_key_values=cache)


# The scenario, the most graphs allowed, and the goal.
USES: dict[str, tuple[Callable[..., None], int, int]] = {
    "StaticCache, 512 steps": (static_cache, 1, 1),
    "StaticCache, batches of 1, 4 and 8": (batches, 2, 2),
    "StaticCache, up to 16 new tokens, marked dynamic": (new_tokens, 2, 2),
    "DynamicCache, 64 to 1024 tokens, a prompt first": (growing_cache, 3, 2),
    "DynamicCache, four prompts of other lengths, marked dynamic": (prompts, 3, 2),
}


@torch.no_grad()
def counted(use: Callable[..., None]) -> int:
    model, backend = small_models.deepseek(1), Counting()
    torch._dynamo.reset()
    use(model, torch.compile(model, fullgraph=True, backend=backend))
    return backend.graphs


def main() -> None:
    given = parser(__doc__).parse_args()
    rows = []
    for name, (use, must, goal) in USES.items():
        console.log(name)
        rows.append(Row(name, counted(use), must, goal, "graphs"))
    finish(Results(rows), given)


if __name__ == "__main__":
    main()
