"""Large prompts on a CUDA device attend in parts of heads and, under a mask, of query rows.

The oracle is the body of the operator in float64, over the same numbers."""

from dataclasses import replace

import pytest
import torch
from lib.kernels import doubled, error
from lib.prompt_calls import BATCH, CALLS, HEADS, KEYS, NOPE, ROPE, STEPS, VALUE, call
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import TorchDispatchMode

from mla_fx.errors import NoMatch
from mla_fx.ops.emitted.attention import heads
from mla_fx.ops.emitted.attention import operator as attention

pytest.importorskip("triton")
from mla_fx.lowering.cuda import attention as lowering
from mla_fx.lowering.cuda import prompts

pytestmark = pytest.mark.usefixtures("no_gradients")

EXPRESSIBLE = {name: a for name, a in CALLS.items() if name not in ("fill", "sinks")}
MORE = {
    "a length before the first row": call(context_lens=torch.tensor([-3, 5])),
    "one length, of more keys than there are": call(context_lens=torch.tensor([10**9])),
    "lengths, filled": call(context_lens=torch.tensor([40, 20]), fill=-3.4e38),
    "filled": replace(CALLS["condition"], fill=-3.4e38),
}


@pytest.fixture
def small(monkeypatch):
    """Parts of two heads and of eight rows, the last ones smaller."""
    monkeypatch.setattr(prompts, "PART", 2 * prompts.bytes_of_head(call(), KEYS))
    monkeypatch.setattr(prompts, "MASK", 8 * KEYS)


@pytest.mark.parametrize("name", [*EXPRESSIBLE, *MORE])
def test_parts_are_the_whole(small, name):
    a = {**EXPRESSIBLE, **MORE}[name]
    exact, off = attention.body(doubled(a))[0], error(attention.body(a)[0], attention.body(doubled(a))[0])
    assert error(prompts.run(a)[0], exact) <= 2 * off + 2**-8
    if name not in ("no mask", "first token"):
        assert bool(prompts.is_tame(a))


def test_pages():
    a = CALLS["lengths"]
    table = torch.tensor([[3, 1], [0, -2]])
    order = table.remainder(4).flatten().argsort()
    pages = (cache.view(4, KEYS // 2, -1)[order] for cache in (a.kv_cache, a.kr_cache))
    paged = replace(a, **dict(zip(("kv_cache", "kr_cache"), pages, strict=True)), block_table=table)
    assert torch.equal(prompts.run_under_mask(paged)[0], prompts.run_under_mask(a)[0])


class Largest(TorchDispatchMode):
    """The elements of the largest tensor of four dimensions that is made."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.dim() == 4:
            self.elements = max(self.elements, out.numel())
        return out


@pytest.mark.parametrize("name", ["no mask", "condition", "lengths"])
def test_no_part_holds_the_keys_of_all_heads(small, name):
    steps, keys = 8, 4096
    a = call(steps=steps, keys=keys)
    a = a if name == "no mask" else replace(a, **{
        "condition": {"mask": torch.arange(keys) <= torch.arange(steps).unsqueeze(-1) + 4000},
        "lengths": {"context_lens": torch.tensor([4000, 20])},
    }[name])  # fmt: skip
    with Largest() as parts:
        prompts.run(a)
    with Largest() as whole:
        heads.tiled(a)
    assert whole.elements == BATCH * HEADS * keys * (NOPE + ROPE)
    assert parts.elements <= keys * (NOPE + ROPE)  # of one head, which is more than a part


@pytest.mark.parametrize("name", [*EXPRESSIBLE, *MORE])
def test_the_host_reads_no_number(small, name):
    """A fake tensor has none."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        a = {**EXPRESSIBLE, **MORE}[name]
        fakes = {field: mode.from_tensor(value) for field, value in vars(a).items() if isinstance(value, torch.Tensor)}
        assert prompts.run(replace(a, **fakes))[0].shape == (BATCH, STEPS, HEADS, VALUE)
        if a.mask is not None:
            with pytest.raises(DataDependentOutputException):
                prompts.run_under_mask(replace(a, **fakes))
    unsafe = torch.Tag.cudagraph_unsafe
    assert unsafe not in torch.ops.mla_fx.mla_attention_in_parts.default.tags
    assert unsafe in torch.ops.mla_fx.mla_attention_in_parts_under_mask.default.tags


@pytest.mark.parametrize("where", ["kv_cache", "kr_cache", "query", "query_rope", "weight_uk"])
@pytest.mark.parametrize("number", [torch.nan, torch.inf, 1e38])
def test_large_numbers_under_a_mask_go_by_tiles(where, number):
    """A row that hides a key of NaN keeps its result."""
    a = CALLS["lengths"]
    changed = getattr(a, where).clone()
    changed[0, -20 if where.startswith("k") else 0] = number
    a = replace(a, **{where: changed})
    assert not bool(prompts.is_tame(a))
    found, wanted = prompts.run_under_mask(a)[0], heads.tiled(a)[0]
    torch.testing.assert_close(found, wanted, equal_nan=True, rtol=0, atol=0)


def test_stale_rows_that_no_query_sees_are_tame():
    a = CALLS["lengths"]
    stale = a.kv_cache.clone()
    stale[1, 20:] = torch.nan
    assert bool(prompts.is_tame(replace(a, kv_cache=stale)))
    assert not bool(prompts.is_tame(replace(a, kv_cache=stale, context_lens=torch.tensor([40, 21]))))


def empty(*shape, dtype=torch.bfloat16):
    return torch.empty(*shape, dtype=dtype, device="cuda")


def prompt(context=8192, tokens=4096, absorbed=0, **options):
    """128 heads: 8192 keys and values take 640 MiB."""
    queries = empty(1, tokens, 128, 128), empty(1, tokens, 128, 64)
    weights = {"weight_uk": empty(128, 128, 512), "weight_uv": empty(128, 128, 512)}
    given = {**weights, "scale": 0.1, "max_absorbed_tokens": absorbed, **options}
    return attention.Arguments(*queries, empty(1, context, 512), empty(1, context, 64), **given)


SERVED = {
    "no mask": ({}, prompts.in_parts),
    "causal": ({"is_causal": True}, prompts.in_parts),
    "lengths": ({"context_lens": torch.tensor([5000])}, prompts.under_mask),
    "mask": ({"mask": torch.ones(1, 8192, dtype=torch.bool)}, prompts.under_mask),
}


@pytest.mark.parametrize("name", SERVED)
def test_large_prompts_are_lowered_to_parts(name, fake):
    options, wanted = SERVED[name]
    assert lowering.lower(prompt(**options)) is wanted
    assert lowering.expanded(prompt(**options)) is wanted


REFUSED = {
    "keys and values of all heads take 83886080 bytes; parts are for more than 268435456": {"context": 1024},
    "sinks are given; the kernel for prompts takes none": {"sinks": torch.zeros(128)},
    "which parts are for, computes something": {"is_causal": True, "scale": -0.1},
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_refused(sentence, fake):
    with pytest.raises(NoMatch, match=sentence):
        lowering.lower(prompt(**REFUSED[sentence]))
    assert lowering.expanded(prompt(**REFUSED[sentence])) is lowering.tiled


def test_other_devices_have_parts_of_their_own():
    with pytest.raises(NoMatch, match="parts are for CUDA devices"):
        lowering.lower(call())


def test_a_size_that_is_a_symbol_is_as_large_as_in_the_current_call(fake):
    """Another one compiles anew, if it is small."""
    for size, wanted in ((8192, prompts.in_parts), (1024, lowering.tiled)):
        env = ShapeEnv()
        symbol = env.create_symbol(size, source=ConstantSource("T"))
        context = env.create_symintnode(symbol, hint=size)
        assert lowering.expanded(prompt(context)) is wanted
        assert bool(env.guards) is (wanted is prompts.in_parts)
