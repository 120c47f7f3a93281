"""Latent attention as people write it (see zoo/__init__.py): what fuses, that results and caches stay the same, and
what is left unfused for which reason."""

import copy
import re
import warnings
from dataclasses import replace

import pytest
import torch
from lib import comparing
from lib.whole import Watched
from lib.zoo import oracle
from lib.zoo.caches import CACHES
from lib.zoo.entries import CLASSICS, COMPOSED, DEFAULT, ENTRIES, MIXED, Entry
from lib.zoo.factors import FACTORS
from lib.zoo.mla import Spelling
from lib.zoo.negatives import (
    NEGATIVES,
    OTHERS,
    RIGHT_WHATEVER_FUSES,
    Negative,
    ScaledByContext,
    expanded_cache,
    other_arguments,
)
from lib.zoo.ropes import ROPES
from lib.zoo.sizes import DECODE, FEW, PREFILL, Step, converted, unequal, weights
from mla_fx.patterns.mla_attention import CACHED_EXPANDED

import mla_fx

pytestmark = pytest.mark.usefixtures("no_gradients")

FLOAT32 = {"rtol": 1e-4, "atol": 1e-5}


def at_every_step(entries, slow=()):
    """The first tier has one step of each entry, every kind of step in turn; the others are slow."""
    each = [
        (entry, step, entry in slow or step != entry.steps[place % len(entry.steps)])
        for place, entry in enumerate(entries)
        for step in entry.steps
    ]
    return [
        pytest.param(entry, step, id=f"{entry.name}-{step.name}", marks=pytest.mark.slow if is_slow else ())
        for entry, step, is_slow in each
    ]


def compiled(module, *, dynamic=None, **options):
    options = {"target": "reference", **options}
    return torch.compile(module, backend=mla_fx.mla_backend, options=options, dynamic=dynamic)


def check_same(module, arguments, *, dynamic=None, **options):
    """Run on copies of the arguments, eagerly and compiled; compare results and caches, and return the report."""
    comparing.check_same(module, arguments, compiled(module, dynamic=dynamic, **options))
    return mla_fx.last_report()


def check_told(entry, step, *, dynamic=None):
    """The same; and whatever is less than whole has its sentence. Returns how much that is, too."""
    with Watched() as seen:
        report = check_same(entry.build(), entry.arguments(step), dynamic=dynamic)
    return report, seen.check(report)


def check_blame(report, left):
    """Where nothing is left, nothing in the program is blamed."""
    assert left or not report.fused or all(miss.by_design for miss in report.misses), str(report)


def check_fused(entry, step, report, *, dynamic=False):
    fused = dict(report.fused)
    if entry.partial:
        fused.pop("kv_rmsnorm_rope_cache", None)
    assert fused == entry.fused(step, dynamic=dynamic), str(report)


# --- the zoo itself --------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("entry, step", at_every_step(ENTRIES))
def test_spelling_means_latent_attention(entry, step):
    spelling, sizes = entry.spelling, entry.spelling.sizes
    cache, rope = CACHES[spelling.cache], ROPES[spelling.rope]
    arguments = entry.arguments(step)
    x, _, positions, _, caches, _ = arguments
    rows = cache.rows(caches, sizes, step)
    is_turned = spelling.layout == "sbhd"
    x = x.transpose(0, 1) if is_turned else x
    given = weights(sizes, low_rank=spelling.query != "direct")
    scale = 1.3 * sizes.query**-0.5
    expected, *new = oracle.latent_attention(
        *(given, sizes, step, x, positions, copy.deepcopy(rows), (rope.read, rope.written), scale),
        FACTORS[spelling.factor],
    )
    out, *rest = entry.build()(*arguments)
    torch.testing.assert_close((out.transpose(0, 1) if is_turned else out).double(), expected, **FLOAT32)
    if spelling.cache.endswith("appended"):
        rows = cache.rows(rest[-len(caches) :], sizes, step)
    elif spelling.cache != "none":
        rows = cache.rows(caches, sizes, step)
    if spelling.cache != "none":
        lines = torch.arange(step.batch).unsqueeze(1)
        for held, made in zip(rows, new, strict=True):
            torch.testing.assert_close(held[lines, positions].double(), made, **FLOAT32)


# --- what fuses ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("entry, step", at_every_step(ENTRIES, slow=COMPOSED))
def test_entry(entry, step):
    with warnings.catch_warnings():
        if not entry.partial:
            warnings.simplefilter("error", mla_fx.MlaWarning)
        report, left = check_told(entry, step)
    check_fused(entry, step, report)
    check_blame(report, left)


@pytest.mark.slow
@pytest.mark.parametrize("entry", [Entry(DEFAULT), *MIXED[:4]], ids=lambda entry: entry.name)
def test_batch_of_one(entry):
    for step in entry.steps:
        torch._dynamo.reset()
        step = replace(step, batch=1)
        check_fused(entry, step, check_same(entry.build(), entry.arguments(step)))


@pytest.mark.slow
@pytest.mark.parametrize("absorb", ["always", "never"])
@pytest.mark.parametrize("step", [PREFILL, DECODE], ids=lambda step: step.name)
def test_absorb_option(absorb, step):
    entry = Entry(DEFAULT)
    report = check_same(entry.build(), entry.arguments(step), absorb=absorb)
    always, never = {"mla_prolog": 1, "latent_attention": 1}, {"kv_rmsnorm_rope_cache": 1, "mla_attention": 1}
    assert report.fused == (always if absorb == "always" else never), str(report)


# --- what does not ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("entry, step", at_every_step([Negative(Spelling(), ScaledByContext)]))
def test_latents_that_are_scaled_when_they_are_read(entry, step):
    """The prolog writes the cache, and attention is over what the program makes of it."""
    check_fused(entry, step, check_same(entry.build(), entry.arguments(step)))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::mla_fx.MlaWarning")
@pytest.mark.parametrize("entry, step", at_every_step(NEGATIVES))
def test_near_miss(entry, step):
    report, left = check_told(entry, step)
    check_fused(entry, step, report)
    check_blame(report, left)
    assert any(re.search(entry.because, miss.reason) for miss in report.misses), str(report)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::mla_fx.MlaWarning")
@pytest.mark.parametrize("entry, step", at_every_step(RIGHT_WHATEVER_FUSES))
def test_right_whatever_fuses(entry, step):
    report = check_same(entry.build(), entry.arguments(step))
    assert report.fused.get("latent_attention"), str(report)


@pytest.mark.filterwarnings("ignore::mla_fx.MlaWarning")
def test_expanded_cache_is_left_alone():
    for step in (DECODE, FEW):
        torch._dynamo.reset()
        report = check_same(*expanded_cache(step))
        assert not report.fused
        assert [miss.reason for miss in report.misses] == [CACHED_EXPANDED], str(report)


def operators(function, arguments):
    """The operators that a compiled function runs, in order."""
    function(*arguments)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        function(*arguments)
    return [event.name for event in profile.events() if event.name.startswith(("aten::", "mla_fx::"))]


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("step", [PREFILL, DECODE], ids=lambda step: step.name)
def test_other_modules_run_as_they_came(name, step):
    module, arguments = OTHERS[name]().eval(), other_arguments(step)
    with warnings.catch_warnings():
        warnings.simplefilter("error", mla_fx.MlaWarning)
        report = check_same(module, arguments)
    assert not report.fused
    torch._dynamo.reset()
    plain = operators(torch.compile(module, backend="aot_eager"), arguments)
    torch._dynamo.reset()
    assert operators(compiled(module), arguments) == plain


# --- other precisions, targets and shapes ----------------------------------------------------------------------------

APPENDED = replace(DEFAULT, norm="gamma_in_float32", cache="appended")
HANDFUL = [Entry(DEFAULT), Entry(APPENDED), *MIXED[2:4], *CLASSICS[:3]]


def distance(found, exact):
    return [(one - other).norm() / other.norm() for one, other in zip(found, exact, strict=True) if other.numel()]


def flat(value):
    return [leaf for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def check_bfloat16(entry, step, **options):
    """Check that the error against a float64 run is at most twice that of eager bfloat16."""
    module, arguments = entry.build().bfloat16(), converted(entry.arguments(step), torch.bfloat16)
    exact, eager, ours = converted(arguments, torch.float64), copy.deepcopy(arguments), copy.deepcopy(arguments)
    expected = flat((copy.deepcopy(module).double()(*exact), exact[4]))
    allowed = distance(flat((module(*eager), eager[4])), expected)
    found = distance(flat((compiled(module, **options)(*ours), ours[4])), expected)
    check_fused(entry, step, mla_fx.last_report())
    assert all(error <= 2 * limit + 1e-6 for error, limit in zip(found, allowed, strict=True)), (found, allowed)


@pytest.mark.slow
@pytest.mark.parametrize("entry, step", at_every_step(HANDFUL))
def test_bfloat16(entry, step):
    check_bfloat16(entry, step)


@pytest.mark.slow
def test_inductor():
    entry = Entry(DEFAULT)
    check_fused(entry, FEW, check_same(entry.build(), entry.arguments(FEW), target="inductor"))


@pytest.mark.campaign
def test_inductor_bfloat16():
    check_bfloat16(Entry(replace(DEFAULT, cache="none", attend="sdpa_causal")), PREFILL, target="inductor")


FAST = ("cache=blocks_embedded", "cache=slots_of_table", "DeepSeekAbsorb")


def with_symbols(entries):
    """Each entry at its last step; most are slow."""
    marks = {entry: () if entry.name in FAST else pytest.mark.campaign for entry in entries}
    return [pytest.param(entry, unequal(entry.steps[-1]), id=entry.name, marks=marks[entry]) for entry in entries]


@pytest.mark.slow
@pytest.mark.parametrize("entry, step", with_symbols(ENTRIES))
def test_entry_dynamic(entry, step):
    """The same fusions with every size a symbol, except those of the weights."""
    report, _ = check_told(entry, step, dynamic=True)
    check_fused(entry, step, report, dynamic=True)


def without_recompiling():
    return torch.compiler.set_stance("fail_on_recompile")


def resized(spelling, batch, tokens, context):
    """Arguments with other sizes than the spelling's."""
    spelling = replace(spelling, sizes=replace(spelling.sizes, context=context))
    return Entry(spelling).arguments(Step("resized", tokens, 6, batch))


SHAPES = ((2, 7, 32), (3, 7, 32), (3, 5, 32), (3, 5, 48), (5, 11, 64))
WRITTEN = {"kv_rmsnorm_rope_cache": 1, "mla_attention": 1}
ALL = {"mla_prolog": 1, "latent_attention": 1}


@pytest.mark.slow
@pytest.mark.parametrize(
    "spelling, fused",
    [
        (DEFAULT, WRITTEN),
        (replace(DEFAULT, cache="appended"), WRITTEN),
        (replace(DEFAULT, cache="none", attend="sdpa_causal"), {"mla_attention": 1}),
        (replace(DEFAULT, query="direct", layout="bshd", rope="complex", attend="eager"), WRITTEN),
        pytest.param(replace(DEFAULT, cache="batched", keys="new_empty"), WRITTEN, marks=pytest.mark.campaign),
        (Spelling(keys="absorbed_einsum", attend="einsum", cache="scattered"), ALL),
    ],
    ids=["transformers", "appended", "none", "bshd", "batched", "absorbed"],
)
def test_dynamic_shapes(spelling, fused):
    """One graph for every batch size, number of tokens and context; the form of attention is chosen at run time."""
    module = Entry(spelling).build()
    run = torch.compile(module, backend=mla_fx.get_backend(target="reference"), dynamic=True, fullgraph=True)
    run(*resized(spelling, *SHAPES[0]))
    report = mla_fx.last_report()
    with without_recompiling():
        for shape in SHAPES:
            theirs = resized(spelling, *shape)
            ours = copy.deepcopy(theirs)
            torch.testing.assert_close((run(*ours), ours), (module(*theirs), theirs), **FLOAT32)
    assert report.fused == fused, str(report)


def marked(arguments):
    """Batch and context are dynamic, the number of tokens is not."""
    x, _, _, mask, caches, _ = arguments
    for tensor in (x, *caches):
        torch._dynamo.mark_dynamic(tensor, 0)
    for tensor, dim in ((mask, 3), *((cache, cache.ndim - 2) for cache in caches)):
        torch._dynamo.mark_dynamic(tensor, dim)
    return arguments


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["index_copy", "appended", "index_put"])
def test_dynamic_decode(cache):
    """One token at a time, batch and context marked dynamic: all of it fuses, once."""
    spelling = replace(DEFAULT, cache=cache)
    module = Entry(spelling).build()
    run = torch.compile(module, backend=mla_fx.get_backend(target="reference"), fullgraph=True)
    run(*marked(resized(spelling, 2, 1, 32)))
    report = mla_fx.last_report()
    with without_recompiling():
        for batch, context in ((3, 32), (4, 48)):
            theirs = resized(spelling, batch, 1, context)
            ours = copy.deepcopy(theirs)
            torch.testing.assert_close((run(*ours), ours), (module(*theirs), theirs), **FLOAT32)
    assert report.fused == {"mla_prolog": 1, "latent_attention": 1}, str(report)


def test_growing_cache():
    """A DynamicCache: the context is one row longer at every step."""
    entry = Entry(replace(DEFAULT, cache="appended"))
    module = entry.build()
    run = torch.compile(module, backend=mla_fx.get_backend(target="reference"), fullgraph=True)
    run(*marked(entry.arguments(DECODE)))
    report = mla_fx.last_report()
    ours = theirs = entry.arguments(DECODE)[4]
    with without_recompiling():
        for start in range(6, 12):
            x, tables, positions, mask, _, place = entry.arguments(Step("growing", 1, start))
            out, *ours = run(x, tables, positions, mask, tuple(ours), place)
            expected, *theirs = module(x, tables, positions, mask, tuple(theirs), place)
            torch.testing.assert_close((out, ours), (expected, theirs), **FLOAT32)
    assert report.fused == {"mla_prolog": 1, "latent_attention": 1}, str(report)
