"""multi_latent_attention: one compilation for many sizes, any sizes at all, and a large batch."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lib.operators import mla_oracle
from lib.operators.harness import as_tuple, by_name, compiles_once, mapped
from lib.operators.mla_oracle import CACHES, FLOATING, RING, drawn, operator, run

from mla_fx.ops.called.multi_latent_attention.samples import corner_mask

COMPILED = [
    {"cache_mode": cache, **options}
    for cache in CACHES
    for options in ({}, {"calc_type": RING}, {"steps": 2}, {"steps": 2, "heads": 128})
]
COMPILED += [
    {"cache_mode": cache, "steps": 3, "mask_type": mask_type}
    for cache in FLOATING
    for mask_type in ("mask_type_spec", "mask_type_free")
]


def sized(options, size):
    """The arguments of a mode with `size` sequences, whose contexts, blocks and rows follow from that."""
    contexts = [130 * size - 17 * place for place in range(size)]
    steps = [options["steps"]] * size if "steps" in options else None
    return drawn(contexts=contexts, **(options | {"steps": steps}))


def compiles(sets, call):
    """`call(given, rest)`, tensors and other arguments by name, compiles once for all `sets` of arguments.

    The scale is written out: as a variable it would be a symbol at first, and the graph be compiled again for it.
    Sizes that happen to be equal in the first set get symbols of their own.
    """
    tensors = [name for name, value in sets[0].items() if torch.is_tensor(value)]
    rest = {name: value for name, value in sets[0].items() if name not in (*tensors, "qk_scale")}

    def layer(*inputs):
        return call(**dict(zip(tensors, inputs, strict=True)), **rest, qk_scale=0.08)

    with torch.fx.experimental._config.patch(use_duck_shape=False):
        compiles_once(layer, [[a[name] for name in tensors] for a in sets])


@pytest.mark.slow
@pytest.mark.parametrize("options", COMPILED, ids=lambda options: "-".join(map(str, options.values())))
def test_compiles_once_for_all_sizes(options):
    compiles([sized(options, size) for size in (2, 3, 5)], torch.ops.mla_fx.multi_latent_attention)


@pytest.mark.parametrize("cache_mode", CACHES)
def test_the_twin_compiles_once_for_all_sizes(cache_mode):
    def call(q_nope, **rest):
        rows, heads, _ = q_nope.shape
        out = torch.zeros(rows, heads, 512, dtype=torch.float16)
        lse = torch.zeros(rows, heads, 1, dtype=torch.float32 if cache_mode == "int8_nzcache" else torch.float16)
        torch.ops.mla_fx.multi_latent_attention_(q_nope, **rest, atten_out=out, lse=lse)
        return out + 1, lse

    compiles([sized({"cache_mode": cache_mode, "calc_type": RING}, size) for size in (2, 3, 5)], call)


def test_lists_of_lengths_compile():
    a = sized({"cache_mode": "krope_ctkv", "steps": 2}, 3)
    lists = {name: a[name].tolist() for name in ("context_lens", "q_seqlen")}
    compiles([a | lists], torch.ops.mla_fx.multi_latent_attention.host)
    listed = torch.ops.mla_fx.multi_latent_attention.host(**(a | lists))
    torch.testing.assert_close(listed, run(a), rtol=0, atol=0)


@st.composite
def calls(draw):
    """A mode with any number of sequences and any contexts up to three blocks."""
    cache_mode = draw(st.sampled_from(CACHES))
    contexts = draw(st.lists(st.integers(0, 300) | st.sampled_from([127, 128, 129, 256]), min_size=1, max_size=4))
    options = {"seed": draw(st.integers(0, 99)), "heads": draw(st.sampled_from([8, 16, 128]))}
    causal = cache_mode == "int8_nzcache" or options["heads"] == 128
    masks = ["undefined"] if causal else ["undefined", "mask_type_spec"]
    if draw(st.booleans()):
        options["steps"] = draw(st.lists(st.integers(1, 4), min_size=len(contexts), max_size=len(contexts)))
        options["mask_type"] = draw(st.sampled_from(masks))
    else:
        options["calc_type"] = draw(st.sampled_from(["calc_type_undefined", RING]))
    return drawn(
        cache_mode, contexts, dtype=torch.float16 if cache_mode == "int8_nzcache" else torch.float32, **options
    )


@settings(max_examples=15, deadline=None, derandomize=True)
@given(calls())
def test_any_sizes(a):
    out, lse = run(a)
    mla_oracle.compare(a, out, lse if a["calc_type"] == RING else None, heads=range(0, out.shape[1], 7))
    with torch._subclasses.FakeTensorMode() as mode:
        arguments = dict(zip(a, mapped(mode.from_tensor, a.values()), strict=True))
        fakes = as_tuple(operator.overload(**arguments))
    for fake, result in zip(fakes, (out, lse), strict=True):
        assert (fake.shape, fake.stride(), fake.dtype) == (result.shape, result.stride(), result.dtype)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(steps=st.integers(1, 4), extra=st.lists(st.integers(0, 260), min_size=1, max_size=4))
def test_any_contexts_under_the_corner_mask(steps, extra):
    contexts = [steps + more for more in extra]
    a = drawn("krope_ctkv", contexts, dtype=torch.float64, steps=[steps] * len(contexts))
    corner = corner_mask(steps, steps).double()
    out, _ = run(a, mask=corner, mask_type="mask_type_free")
    spec = torch.zeros(len(out), max(contexts), dtype=torch.float64)
    for row in mla_oracle.each_row(a):
        spec[row.token, row.context - row.steps + row.step + 1 :] = -math.inf
    torch.testing.assert_close(out, run(a, mask=spec, mask_type="mask_type_spec")[0])


@pytest.mark.campaign
def test_a_large_decode_batch():
    """64 sequences of 4096 keys and 128 heads in bfloat16: a few rows against float64."""
    batch, heads, columns = 64, 128, 32
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.bfloat16)

    a = by_name(
        operator,
        (),
        {
            "q_nope": normal(batch, heads, 512),
            "q_rope": normal(batch, heads, 64),
            "ctkv": normal(batch * columns, 128, 1, 512),
            "k_rope": normal(batch * columns, 128, 1, 64),
            "block_tables": torch.randperm(batch * columns, generator=generator).int().view(batch, columns),
            "context_lens": torch.full((batch,), 128 * columns, dtype=torch.int32),
            "qk_scale": 0.04,
            "calc_type": RING,
        },
    )
    rows = [row for row in mla_oracle.each_row(a) if row.token in (0, 31, 63)]
    mla_oracle.compare(a, *run(a), rows=rows, heads=(0, 77, 127))
