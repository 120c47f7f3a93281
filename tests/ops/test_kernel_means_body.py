"""A kernel, of calls or of compilers of loops, means what its operator's body means on every input that a model may
hold: NaN, infinities, the largest and the smallest numbers of a type, where they are seen and where they are hidden.

The oracle is the body in float64 over the same numbers, and the body in the type itself: where that is finite so is the
kernel, and as near. Where that is NaN the kernel may be finite for values of hidden keys, since weights of zero are not
multiplied by all of them, and where PyTorch's own attention is taken: of 16 bits it gives zeros for rows of NaN."""

import dataclasses
import itertools
import math

import pytest
import torch
from lib.kernels import doubled
from mla_fx.lowering.cpu import attention as over_rows
from mla_fx.lowering.cpu import attention_over_rows, prompts
from mla_fx.lowering.loops import attention as loops

from mla_fx.ops.emitted import paged_attention
from mla_fx.ops.emitted.attention import heads, pages, tiles
from mla_fx.ops.emitted.attention import operator as attention
from mla_fx.ops.emitted.attention.arguments import Scoring

pytestmark = pytest.mark.usefixtures("no_gradients")

B, S, T, N, R, D, DR, DV = 4, 6, 24, 2, 8, 4, 4, 5
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LENS = torch.tensor([T, T - 5, 3, 0])
ROWS, SLOTS = torch.arange(S).unsqueeze(-1), torch.arange(T)
SEEN = (SLOTS <= ROWS + 12) & (SLOTS != 5) & (ROWS != 2)
HIDING = {
    "none": {},
    "causal": {"is_causal": True},
    "bool": {"mask": SEEN},
    "bool of heads": {"mask": SEEN & (torch.arange(N).view(-1, 1, 1) + SLOTS % 3 > 0)},
    "added": {"mask": torch.where(SEEN, 0.25, -math.inf)},
    "lengths": {"context_lens": LENS},
    "fill": {"mask": SEEN, "fill": -1.5},
    "lowest fill": {"context_lens": LENS, "fill": torch.finfo(torch.float32).min},
    "sinks": {"context_lens": LENS, "sinks": torch.tensor([0.5, -2.0])},
}

ADDED = torch.where(SEEN, 0.25, -math.inf)
INFINITE = {
    "sinks": {"sinks": torch.tensor([math.inf, -math.inf])},
    "sinks beside lengths": {"context_lens": LENS, "sinks": torch.tensor([math.inf, -math.inf])},
    "sinks beside a mask": {"mask": SEEN, "sinks": torch.tensor([-math.inf, math.inf])},
    "sinks and scores": {
        "mask": ADDED.masked_fill((SLOTS == 2) & (ROWS > 3), math.inf),
        "sinks": torch.tensor([0.5, -math.inf]),
    },
    "scores": {"mask": ADDED.masked_fill((SLOTS == 3) & (ROWS % 2 == 1), math.inf)},
    "all scores": {"mask": ADDED.masked_fill(ROWS == 1, math.inf)},
    "scores of a head": {"mask": torch.stack([ADDED, ADDED.masked_fill(SLOTS == 8, math.inf)])},
}


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def largest(dtype):
    return torch.finfo(dtype).max


VALUES = {
    "ordinary": lambda dtype: 0.5,
    "NaN": lambda dtype: math.nan,
    "infinity": lambda dtype: math.inf,
    "minus infinity": lambda dtype: -math.inf,
    "huge": lambda dtype: largest(dtype) / 64,
    "minus zero": lambda dtype: -0.0,
    "subnormal": lambda dtype: torch.finfo(dtype).tiny / 4,
}
PLACES = {"hidden": T - 2, "seen by some": 8, "seen": 0}  # which slots hold the value
HELD = ("kr_cache", "kv_cache")


def operands(dtype, name, value, place, hiding, cut=slice(None)):
    """Dense operands with one value in a slot of a cache: those of heads."""
    caches = {"kv_cache": normal(B, T, R), "kr_cache": normal(B, T, DR)}
    caches = {key: cache.to(dtype) for key, cache in caches.items()}
    caches[name][:, PLACES[place], cut] = VALUES[value](dtype)
    up = (normal(N, D + DV, R) * R**-0.5).to(dtype)
    given = {"query": normal(B, S, N, D).to(dtype), "query_rope": normal(B, S, N, DR).to(dtype), **caches}
    given |= {"weight_uk": up[:, :D], "weight_uv": up[:, D:], "mask": None, "scale": 0.3, **HIDING[hiding]}
    return attention.Arguments(**given)


def latent_arguments(a):
    query = normal(B, S, N, R).to(a.kv_cache.dtype)
    return dataclasses.replace(a, query=query, weight_uk=None, weight_uv=None)


def in_pages(a):
    """The same context in pages of four slots, which lie in another order."""
    size = 4
    table = torch.randperm(B * T // size, generator=torch.Generator().manual_seed(0)).view(B, -1)

    def spread(cache):
        held = torch.empty(B * T // size, size, cache.shape[-1], dtype=cache.dtype)
        held[table.flatten()] = cache.reshape(-1, size, cache.shape[-1])
        return held

    return dataclasses.replace(a, block_table=table, kv_cache=spread(a.kv_cache), kr_cache=spread(a.kr_cache))


def batched(a):
    """Attention over pages of keys and values per head: the values are the latents."""
    given = in_pages(a)
    keys, values = (cache.unsqueeze(2) for cache in (given.kr_cache, given.kv_cache))
    mask = torch.where(SLOTS <= ROWS, 0.0, -math.inf) if a.is_causal else a.mask
    options = {"scale": a.scale, "fill": a.fill}
    return paged_attention.Arguments(a.query_rope, keys, values, given.block_table, a.context_lens, mask, **options)


def plain(a):
    """What paged_attention.batched means, in the dtype of its query."""
    keys, values = (pages.gathered(cache, a.block_table).transpose(1, 2) for cache in (a.key_cache, a.value_cache))
    keys, values = (part.expand(-1, a.query.shape[2], -1, -1) for part in (keys, values))
    mask = tiles.as_mask(a.mask, a.context_lens, False, a.query, keys.shape[2])
    scores = tiles.wide_product(a.query.transpose(1, 2), keys.mT)
    weights, _ = tiles.probabilities(scores, None, mask, Scoring(a.scale, a.fill))
    return (weights.to(values.dtype) @ values).transpose(1, 2)


TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def answers_as(body, kernel, a, dtype):
    meant, found = body(a), kernel(a)
    assert found.shape == meant.shape and found.dtype == meant.dtype
    wild = meant.isfinite() & ~found.isfinite()
    assert not wild.any(), f"{int(wild.sum())} of {wild.numel()} are not finite"
    exact = body(doubled(a))
    known = meant.isfinite() & exact.isfinite()
    error = (found.double() - exact).abs()[known]
    allowed = 2 * (meant.double() - exact).abs()[known] + TOLERANCE[dtype] * (1 + exact.abs()[known])
    assert bool((error <= allowed).all()), f"off by {float((error - allowed).max())}"
    return meant, found


def always(a):
    return dataclasses.replace(a, max_absorbed_tokens=S)


def paged_latents(a):
    return in_pages(latent_arguments(a))


def paged_and_always(a):
    return in_pages(always(a))


OWN = ("own", "own, pages", "parts", "parts, pages", "batched, copies")
PATHS = {
    "own": (lambda a: a, heads.expanded, heads.tiled, {}),
    "own, pages": (in_pages, heads.expanded, heads.tiled, {}),
    "parts": (lambda a: a, heads.expanded, prompts.in_parts, {"ROWS": 4, "KEYS": 1}),
    "parts, pages": (in_pages, heads.expanded, prompts.in_parts, {"ROWS": 4, "KEYS": 1}),
    "tiles": (lambda a: a, heads.expanded, heads.tiled, {"SHORT": 2**20, "TILE": 2, "FEW": 1}),
    "short": (lambda a: a, heads.expanded, loops.short, {}),
    "absorbed": (always, attention.body, loops.compiled, {}),
    "latent, undivided": (latent_arguments, attention.body, loops.in_parts, {}),
    "latent, parts": (latent_arguments, attention.body, loops.in_parts, {"PART": 1}),
    "latent, tiles": (latent_arguments, attention.body, attention.kernel, {"TILE": 2, "FEW": 1}),
    "latent, pages": (paged_latents, attention.body, attention.kernel, {"TILE": 2, "FEW": 1}),
    "latent, copies": (paged_latents, attention.body, loops.from_copies, {}),
    "latent, rows": (paged_latents, attention.body, attention_over_rows.attend, {}),
    "absorbed, rows": (paged_and_always, attention.body, over_rows.absorbed_over_rows, {}),
    "chosen, rows": (paged_and_always, attention.body, over_rows.chosen_by_call, {}),
    "batched, tiles": (batched, plain, paged_attention.body, {}),
    "batched, copies": (batched, plain, paged_attention.body, {"MANY": 1}),
}


def path_of(name):
    form, body, kernel, limits = PATHS[name]
    return form, alone(body), alone(kernel), limits


def alone(compute):
    """Attention without the logarithms that most ways return beside it."""

    def call(a):
        found = compute(a)
        return found[0] if isinstance(found, tuple) else found

    return call


@pytest.fixture
def narrowed(monkeypatch):
    """Sizes at which each way begins, so small that every way is gone."""

    def narrow(limits):
        for name, limit in limits.items():
            for module in (tiles, loops, paged_attention, prompts):
                if hasattr(module, name):
                    monkeypatch.setattr(module, name, limit)

    monkeypatch.setattr(pages, "TILE", 8)
    return narrow


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("path", PATHS)
def test_kernel_means_body(narrowed, path, dtype):
    """All values, in all places of both caches, with all that hides."""
    form, body, kernel, limits = path_of(path)
    narrowed(limits)
    tried = 0
    for hiding, name, value, place in itertools.product(HIDING, HELD, VALUES, PLACES):
        if path.startswith("batched") and hiding == "sinks":
            continue
        a = form(operands(dtype, name, value, place, hiding))
        meant, found = answers_as(body, kernel, a, dtype)
        is_own = path in OWN and dtype != torch.float32
        if name == "kr_cache" and place != "hidden" and not is_own:
            assert bool((found.isnan() >= meant.isnan()).all()), f"{hiding}, {name}, {value}, {place}"
        tried += 1
    assert tried == (len(HIDING) - path.startswith("batched")) * len(HELD) * len(VALUES) * len(PLACES)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("path", PATHS)
def test_infinite_sinks_and_scores(narrowed, path, dtype):
    """A softmax of plus infinity is NaN, one of a sink of minus infinity is that without it, and rows that see nothing
    are zeros."""
    form, body, kernel, limits = path_of(path)
    narrowed(limits)
    for name in [name for name in INFINITE if not (path.startswith("batched") and "sinks" in name)]:
        a = operands(dtype, "kv_cache", "ordinary", "seen", "none")
        a = form(dataclasses.replace(a, **INFINITE[name]))
        meant, found = answers_as(body, kernel, a, dtype)
        assert bool(meant.isnan().any()) and bool(meant.isfinite().any()), name
        assert torch.equal(found.isnan(), meant.isnan()), f"{name}: {int(found.isnan().sum())} are NaN"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("path", PATHS)
def test_sums_of_large_values_stay_in_range(narrowed, path, dtype):
    """Equal scores over values of 1e38 in all slots."""
    form, body, kernel, limits = path_of(path)
    narrowed(limits)
    a = operands(dtype, "kv_cache", "ordinary", "hidden", "none")
    a = dataclasses.replace(a, kv_cache=torch.full_like(a.kv_cache, 1e38), scale=0.0, weight_uk=0 * a.weight_uk)
    a = dataclasses.replace(a, weight_uv=torch.full_like(a.weight_uv, 1 / R))
    a = form(a)
    if getattr(a, "weight_uk", None) is None:
        a = dataclasses.replace(a, query=a.query * 1e-3)
    assert bool(body(a).isfinite().all())
    torch.testing.assert_close(kernel(a) / 1e38, body(a) / 1e38, rtol=1e-2, atol=0)


@pytest.mark.parametrize("path", PATHS)
def test_scores_of_float16_stay_in_range(narrowed, path):
    """Unscaled they are beyond 65504, and so is an absorbed query."""
    form, body, kernel, limits = path_of(path)
    narrowed(limits)
    a = operands(torch.float16, "kv_cache", "ordinary", "hidden", "causal")
    large = {"query": a.query * 8000, "query_rope": a.query_rope * 8000, "weight_uk": a.weight_uk * 16}
    a = dataclasses.replace(a, **large, scale=1e-5)
    a = form(dataclasses.replace(a, kr_cache=a.kr_cache * 16))
    if path.startswith("latent"):
        a = dataclasses.replace(a, query=a.query * 16000)
    exact = body(doubled(a))
    assert bool(kernel(a).isfinite().all())
    torch.testing.assert_close(kernel(a).double(), exact, rtol=2e-2, atol=2e-2)
