"""Whatever is less than whole has its sentence: the query and the rows of each fused attention are computed by a fused
operator, or the report says why not. tests/whole/test_zoo.py asks that of its layers."""

import itertools
import re

import pytest
import torch
from lib.families import COUNTS_FLAGS, FAMILIES, Recorder, empty_cache, tiny_model, tokens
from lib.layers import FUSED, QUIET, Layer, Reporting, Sizes, arguments, arguments_of, check
from lib.whole import Watched
from mla_fx.lowering.cpu import costs
from torch.utils._pytree import tree_map_only

pytestmark = [pytest.mark.filterwarnings(line) for line in QUIET]


def watched(module, args, kwargs=None, *, dynamic=None, backend=None):
    backend = backend or Reporting()
    with Watched() as seen, torch.no_grad():
        torch.compile(module, backend=backend, dynamic=dynamic)(*args, **(kwargs or {}))
    return seen, backend.report


def check_told(module, args, kwargs=None, *, dynamic=None, backend=None):
    """Returns the report, and how many roles are left."""
    seen, report = watched(module, args, kwargs, dynamic=dynamic, backend=backend)
    return report, seen.check(report)


# --- families --------------------------------------------------------------------------------------------------------

QUICK = ("youtu",)
STEPS = {  # the kind of cache, tokens before, tokens, and whether sizes are symbols
    "prompt": ("static", 0, 12, None),
    "prompt, empty cache": ("dynamic", 0, 12, None),
    "prompt, no cache": (None, 0, 12, None),
    "decode": ("dynamic", 12, 1, None),
    "drafts, dynamic": ("static", 12, 3, True),
}
UNABSORBED = "the query is not absorbed, and prologs compute absorbed ones only: "
COLD = UNABSORBED + "a prompt of 12 tokens without earlier ones costs less like this"
ONLY_NEW = "attention reads only the rows computed here; if they are written into a cache, too, that stays as it is"


def of_family(family, step):
    kind, before, count, dynamic = STEPS[step]
    model = tiny_model(family)
    cache = empty_cache(model, kind)
    with torch.no_grad(), torch._dynamo.config.patch(capture_dynamic_output_shape_ops=family in COUNTS_FLAGS):
        if before:
            model(tokens(2, before), past_key_values=cache)
        kwargs = {"past_key_values": cache} if kind else {"use_cache": False}
        return check_told(model, (tokens(2, count),), kwargs, dynamic=dynamic, backend=Recorder())


def each_step():
    """Each step of each family; `test_drafts_of_dynamic_size` has the dynamic drafts of the quick ones."""
    for family, step in itertools.product(FAMILIES, STEPS):
        is_quick = family in QUICK and step != "drafts, dynamic"
        yield pytest.param(family, step, marks=() if is_quick else pytest.mark.campaign)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "step"), list(each_step()))
def test_families(family, step):
    report, _ = of_family(family, step)
    assert report.fused, str(report)


def test_a_prompt_into_an_empty_cache():
    report, left = of_family("youtu", "prompt, empty cache")
    assert report.fused == {"mla_attention": 2} and left == 4
    assert [miss.reason for miss in report.misses] == [COLD, COLD, ONLY_NEW, ONLY_NEW]
    assert all(miss.by_design for miss in report.misses)


@pytest.mark.slow
def test_drafts_of_dynamic_size():
    report, left = of_family("youtu", "drafts, dynamic")
    assert report.fused == {"kv_rmsnorm_rope_cache": 2, "mla_attention": 2} and left == 2
    assert {miss.pattern for miss in report.misses} == {"absorb"}
    for miss in report.misses:
        assert re.fullmatch(UNABSORBED + r"the number of its tokens, s\d+, is known at run time only", miss.reason)


# --- each reason -----------------------------------------------------------------------------------------------------


class Direct(Layer):
    """A prompt: attention over the rows that it computes."""

    def store(self, latent, k_rope, position, kv_cache, kr_cache):
        return latent, k_rope

    def mask(self, position):
        return torch.zeros((), dtype=self.o.dtype)


class Doubled(Direct):
    """Some rows are changed before attention reads them: no cache is written."""

    def rows(self, x):
        latent, k_rope = super().rows(x)
        latent = latent.clone()
        latent[:, :, ::2] *= 2
        return latent, k_rope


class Written(Layer):
    """The cache is written, and attention reads a changed copy of it."""

    def store(self, latent, k_rope, position, kv_cache, kr_cache):
        latents, keys = super().store(latent, k_rope, position, kv_cache, kr_cache)
        latents = latents.clone()
        latents[:, :, 12:] = 0
        return latents, keys


class InSteps(Layer):
    def store(self, latent, k_rope, position, kv_cache, kr_cache):
        for cache, rows in ((kv_cache, latent), (kr_cache, k_rope)):
            cache[:, :, : 2 * rows.shape[2] : 2] = rows
        return kv_cache, kr_cache


class InParts(Layer):
    """A row is written column by column."""

    def store(self, latent, k_rope, position, kv_cache, kr_cache):
        kr_cache.index_copy_(2, position, k_rope)
        for part in (slice(0, 5), slice(5, None)):
            kv_cache[:, :, 2 : 2 + latent.shape[2]][..., part] = latent[..., part]
        return kv_cache, kr_cache


class AddedTo(Layer):
    """No update, but attention reads a cache."""

    def store(self, latent, k_rope, position, kv_cache, kr_cache):
        kv_cache.index_add_(2, position, latent)
        return kv_cache, kr_cache.index_copy_(2, position, k_rope)


class NormedLater(Layer):
    """The caches hold what is normalised and rotated only when attention reads it."""

    def rows(self, x):
        latent, k_rope = (x @ self.kv_a.T).split([self.sizes.rank, self.sizes.rope], dim=-1)
        return latent.unsqueeze(1), k_rope.unsqueeze(1)

    def rotate_key(self, x, *tables):
        return x

    def store(self, latent, k_rope, position, kv_cache, kr_cache):
        latents, keys = super().store(latent, k_rope, position, kv_cache, kr_cache)
        return self.norm(latents, self.kv_gamma), keys * keys[:1].cos()


class Mean(Layer):
    def rows(self, x):
        latent, k_rope = super().rows(x)
        return latent - latent.mean(-1, keepdim=True), k_rope


NEVER = UNABSORBED + "option absorb is 'never'"
IN_PARTS = "expected an RMSNorm, found a value that slice_scatter writes in parts"
REASONS = {
    Layer: [NEVER],
    Direct: [NEVER, ONLY_NEW],
    Doubled: [NEVER, IN_PARTS],
    AddedTo: [NEVER, "expected an RMSNorm, found index_add"],
    NormedLater: [NEVER, "latent and rotary key are not both cached as attention reads them"],
    Written: [NEVER],
    InSteps: [NEVER, "the cache is written in steps of 2, expected consecutive rows"],
    InParts: [NEVER, IN_PARTS],
    Mean: [NEVER, "expected an RMSNorm, found sub"],
}


@pytest.mark.parametrize("kind", REASONS, ids=lambda kind: kind.__name__)
def test_the_key_side(kind):
    """Attention stays expanded, so that no prolog is tried."""
    module = kind()
    watch = Watched()
    with watch:
        report = check(module, absorb="never")
    watch.check(report)
    assert [miss.reason for miss in report.misses] == REASONS[kind], str(report)
    assert [miss.by_design for miss in report.misses] == [reason in (NEVER, ONLY_NEW) for reason in REASONS[kind]]


def test_a_whole_layer_whose_latents_are_changed_later():
    report = check(Written())
    assert (report.fused, report.misses) == (FUSED, []), str(report)


@pytest.mark.parametrize(
    ("tokens", "context", "has_tiles", "reason"),
    [
        (9, 9, True, "a prompt of 9 tokens without earlier ones costs less like this"),
        (129, 160, True, "129 tokens are more than the 128 up to which absorbing costs less"),
        (65, 160, False, "65 tokens are more than the 64 up to which absorbing costs less"),
    ],
)
def test_why_a_query_is_not_absorbed(monkeypatch, tokens, context, has_tiles, reason):
    monkeypatch.setattr(costs, "multiplies_tiles", lambda: has_tiles)
    sizes = Sizes(tokens=tokens, context=context)
    report = check(Layer(sizes), arguments(sizes, first=0))
    assert report.fused == {"kv_rmsnorm_rope_cache": 1, "mla_attention": 1}, str(report)
    assert [(miss.pattern, miss.reason, miss.by_design) for miss in report.misses] == [
        ("absorb", UNABSORBED + reason, True)
    ]


def test_a_query_in_float16():
    module = Direct().half()
    given = tree_map_only(torch.Tensor, lambda x: x.half() if x.is_floating_point() else x, arguments_of(module))
    _, report = watched(module, given)
    reason = UNABSORBED + "absorbed, it might leave the range of torch.float16"
    assert [miss.reason for miss in report.misses] == [reason, ONLY_NEW], str(report)
