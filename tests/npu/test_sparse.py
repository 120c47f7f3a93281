"""Index scores and attention to chosen keys, as the vendor's kernels and as the operators in float64."""

import dataclasses

import pytest
import torch
from lib.ascend_calls import module_of
from lib.operators.harness import double
from mla_fx.lowering.ascend import toolchain
from mla_fx.lowering.ascend.operators import lightning_index as index_lowering
from mla_fx.lowering.ascend.operators.attention import sparse_flash_attention as attention_lowering

import mla_fx
from mla_fx.errors import NoMatch
from mla_fx.ops import catalogue
from mla_fx.ops.common.sample import Sampler
from npu import user_calls
from npu.lowered import A2, Call
from npu.planted import caught

BF16 = torch.bfloat16
BATCH, HEADS, CONTEXT, PAGE, CHOSEN, RANK, ROPE, WIDTH = 2, 4, 64, 16, 12, 512, 64, 128
TABLE = torch.tensor([[3, 0, -2, 5], [6, 1, 2, 4]])  # of eight pages
LENGTHS = {"all keys": None, "lengths": torch.tensor([40, 63]), "one length": torch.tensor([21])}
FORMS = ("pages", "contiguous")


def cache(draw, form, width):
    return draw.normal(8, PAGE, width) if form == "pages" else draw.normal(BATCH, CONTEXT, width)


def index_call(steps=1, form="contiguous", lengths="lengths"):
    draw = Sampler(BF16, seed=5)
    heads = 4 * HEADS  # so many that no key has no positive product
    query, weights = draw.normal(BATCH, steps, heads, WIDTH), draw.normal(BATCH, steps, heads).float()
    key, table = cache(draw, form, WIDTH), TABLE if form == "pages" else None
    return [query, key, weights, None, LENGTHS[lengths], table], {"sparse_count": CHOSEN, "scale": 0.3}


def attention_call(steps=1, form="contiguous", lengths="lengths", has_rope=True):
    draw = Sampler(BF16, seed=7)
    query, query_rope = draw.normal(BATCH, steps, HEADS, RANK), draw.normal(BATCH, steps, HEADS, ROPE)
    latents, keys = cache(draw, form, RANK), cache(draw, form, ROPE)
    chooses = torch.Generator().manual_seed(1)
    indices = torch.rand(BATCH, steps, 1, CONTEXT, generator=chooses).argsort(-1)[..., :CHOSEN].to(torch.int32)
    indices[0, ..., 0], indices[1, ..., 0], indices[1, ..., 1] = 39, 62, 63  # the last that the last row sees
    indices[0, :, :, CHOSEN - 3 :] = -1
    indices[1, 0] = CONTEXT - 1 if steps > 1 else -1  # a row that sees none of its keys, if it has a length
    rope = (query_rope, keys) if has_rope else (None, None)
    table = TABLE if form == "pages" else None
    args = [query, rope[0], latents, rope[1], None, LENGTHS[lengths], None, table, None, None, indices]
    return args, {"scale": 0.05}


def compare_indices(how, *form):
    """Keys alone: which of equal scores is chosen is not defined, and hidden keys are any."""
    args, options = index_call(*form)
    found, _ = how(Call("lightning_index", args, options))
    wanted, values = catalogue()["lightning_index"].body(*double(args), **options)
    seen = values.isfinite()
    torch.testing.assert_close(found.masked_fill(~seen, 0), wanted.masked_fill(~seen, 0), rtol=0, atol=0)
    assert ((found >= 0) & (found < CONTEXT)).all()


def compare_attention(how, *form):
    args, options = attention_call(*form)
    found, _ = how(Call("attention", args, options))
    user_calls.check_exact(found, catalogue()["attention"].body(*double(args), **options)[0])


@pytest.mark.parametrize("is_bool", [True, False])
def test_a_mask_that_is_declared_causal_gives_lengths(converted, is_bool):
    """A sequence whose mask is another one gives NaN."""
    args, options = attention_call(3)
    seen = torch.arange(CONTEXT) < LENGTHS["lengths"].view(-1, 1, 1, 1) - 2 + torch.arange(3).view(1, 1, -1, 1)
    mask = seen if is_bool else torch.zeros(seen.shape, dtype=BF16).masked_fill(~seen, -torch.inf)
    wanted, _ = catalogue()["attention"].body(*double(args), **options)
    args[4], args[5] = mask, None
    declared = dataclasses.replace(A2, trusts_masks=True)
    found, _ = Call("attention", args, options, declared).on_npu(converted)
    user_calls.check_exact(found, wanted)
    other = mask.clone()
    other[1, 0, 0, 5] = mask[1, 0, 0, CONTEXT - 1]
    args[4] = other
    found, _ = Call("attention", args, options, declared).on_npu(converted)
    assert found[1].isnan().all()
    user_calls.check_exact(found[:1], wanted[:1])


KERNELS = {"LightningIndexer": compare_indices, "SparseFlashAttention": compare_attention}


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_results(converted, kernel, form, lengths):
    """Several rows run in graphs that torchair converts, one by the kernels."""
    KERNELS[kernel](lambda call: call.on_npu(converted), 3, form, lengths)
    assert kernel in converted.types(converted.graphs[0])
    KERNELS[kernel](Call.by_kernels, 1, form, lengths)


def test_attention_without_a_rotary_part(converted):
    compare_attention(lambda call: call.on_npu(converted), 1, "contiguous", "lengths", False)


def change(monkeypatch, lowering, name, changed):
    whole = getattr(lowering, name)
    monkeypatch.setattr(lowering, name, lambda *args: changed(whole(*args)))


FAULTS = {
    "a key more": ("key_lengths", lambda found: (found[0] + 1, found[1])),
    "a key less": ("key_lengths", lambda found: (found[0] - 1, found[1])),
    "rows see alike": ("key_lengths", lambda found: (found[0], 0)),
    "the first page": ("keys_of", lambda found: (found[0], None if found[1] is None else found[1] * 0)),
    "keys of another sign": ("keys_of", lambda found: (-found[0], found[1])),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(
    ("lowering", "compare"), [(index_lowering, compare_indices), (attention_lowering, compare_attention)]
)
def test_faults(monkeypatch, lowering, compare, fault):
    change(monkeypatch, lowering, *FAULTS[fault])
    with caught():
        compare(Call.by_kernels, 3, "pages", "lengths")


def test_rows_without_keys_are_not_averages(monkeypatch):
    monkeypatch.setattr(attention_lowering, "sees_some", lambda a: torch.ones_like(a.indices[..., 0], dtype=torch.bool))
    with caught():
        compare_attention(Call.by_kernels, 3, "contiguous", "lengths")


def spoiled(call, place, value):
    args, options = call()
    args[place] = value(args[place])
    return args, options


REFUSED = {
    "a mask": ("lightning_index", spoiled(index_call, 3, lambda _: torch.ones(1, CONTEXT).bool()), "mask is a tensor"),
    "a width": ("lightning_index", spoiled(index_call, 0, lambda q: q[..., 1:]), "query has D = 127; "),
    "float32": ("lightning_index", spoiled(index_call, 0, torch.Tensor.float), "query has dtype torch.float32"),
    "many keys": ("lightning_index", (index_call()[0], {"sparse_count": 65}), "sparse_count is 65, of 64 keys"),
    "a count": ("lightning_index", (index_call()[0], {"sparse_count": 2049}), "2049; .* a number up to"),
    "a sign": ("lightning_index", (index_call()[0], {"sparse_count": 4, "scale": -1.0}), "scale is -1; "),
    "scaled keys": (
        "lightning_index",
        (index_call()[0], {"sparse_count": 4, "key_scale": torch.ones(BATCH, CONTEXT)}),
        "key_scale is a tensor; ",
    ),
    "heads": (
        "attention",
        spoiled(attention_call, 0, lambda q: q[:, :, :3]),
        "query has N = 3; SparseFlashAttention takes 1, 2, 4",
    ),
    "sinks": ("attention", spoiled(attention_call, 6, lambda _: torch.zeros(HEADS)), "sinks are given"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name):
    operator, (args, options), sentence = REFUSED[name]
    with pytest.raises(NoMatch, match=sentence):
        toolchain.lowered(module_of(operator), A2, *args, **options)


@pytest.mark.parametrize("chip", ["Ascend950", "Ascend310P3"])
def test_chips(chip):
    for operator, (args, options) in (("lightning_index", index_call()), ("attention", attention_call())):
        with pytest.raises(NoMatch, match=f"the chip is {chip}"):
            toolchain.lowered(module_of(operator), dataclasses.replace(A2, chip=chip), *args, **options)


class Step(torch.nn.Module):
    """Index scores, and attention to the keys that they choose, of one token in a cache whose length is an input."""

    def forward(self, index_query, keys, weights, query, query_rope, latents, rotated, lengths):
        indices, _ = torch.ops.mla_fx.lightning_index(
            index_query, keys, weights, None, lengths, sparse_count=CHOSEN, scale=0.3
        )
        return torch.ops.mla_fx.attention(
            query, query_rope, latents, rotated, None, lengths, indices=indices, scale=0.05
        )[0]


def test_captured_lengths_are_read_at_each_replay(captured):
    (index_query, keys, weights, *_), (query, query_rope, latents, rotated, *_) = index_call()[0], attention_call()[0]
    tensors, step = [index_query, keys, weights, query, query_rope, latents, rotated], Step()
    compiled = torch.compile(step, backend=mla_fx.get_backend(target="aclgraph", soc="Ascend910B3"), dynamic=False)
    for lengths in ([40, 64], [13, 20]):
        given = torch.tensor(lengths)
        user_calls.check_exact(compiled(*tensors, given), step(*(x.double() for x in tensors), given))
    (graph,) = captured.graphs
    assert graph.calls("npu.npu_lightning_indexer.default", "npu.npu_sparse_flash_attention.default") == [1, 1]
    assert len(graph.recordings) == 1, "the second step replays the first"


def test_a_context_that_grows_from_fewer_keys_than_may_be_chosen(captured):
    """In graphs of GE, torchair has no minimum of sizes."""
    (query, keys, weights, *_), step = index_call()[0], torch.ops.mla_fx.lightning_index

    def choose(query, keys, weights):
        return step(query, keys, weights, sparse_count=min(CHOSEN, keys.shape[1]))[0]

    compiled = torch.compile(choose, backend=mla_fx.get_backend(target="aclgraph", soc="Ascend910B3"), dynamic=True)
    for count in (40, CHOSEN, 7):
        given = query, keys[:, :count].contiguous(), weights
        torch.testing.assert_close(compiled(*given), choose(*given), rtol=0, atol=0)
    kernels = [graph.calls("npu.npu_lightning_indexer.default") for graph in captured.graphs]
    assert kernels == [[1]] * len(kernels)
