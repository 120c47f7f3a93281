"""paged_attention: one compilation for many sizes, any sizes at all, and a large batch."""

import hypothesis
import pytest
import torch
from hypothesis import strategies
from lib.operators.harness import by_name, compiles_once, samples
from lib.operators.paged_oracle import OPERATOR, case, close_to_oracle, int32, run

PAGED_ATTENTION = torch.ops.mla_fx.paged_attention

MODES = [sample.mode for dtype in (torch.float32, torch.float16) for sample in samples(OPERATOR.name, dtype)]
MODES = list(dict.fromkeys(MODES))


def repeated(arguments, times, more_blocks, more_columns):
    """The same batch `times` times over, with unused blocks and columns of the table behind."""
    changed = dict(arguments)
    for name in ("query", "context_lens", "batch_run_status", "q_seq_lens", "log_n"):
        if arguments[name] is not None:
            changed[name] = torch.cat([arguments[name]] * times)
    tables = torch.cat([arguments["block_tables"]] * times)
    changed["block_tables"] = torch.nn.functional.pad(tables, (0, more_columns), value=-1)
    for name in ("key_cache", "value_cache", "razor_offset"):
        if arguments[name] is not None:
            unused = torch.zeros(more_blocks, *arguments[name].shape[1:], dtype=arguments[name].dtype)
            changed[name] = torch.cat([arguments[name], unused])
    axis = repeated_mask_axis(arguments)
    if axis is not None:
        changed["mask"] = torch.cat([arguments["mask"]] * times, axis)
    return changed


def repeated_mask_axis(arguments):
    """The axis along which a mask has a part for each sequence or token, if it has one."""
    mask, sequences = arguments["mask"], len(arguments["context_lens"])
    if arguments["mask_type"] == "mask_type_spec":
        return 2 if mask.dim() == 4 else 0
    per_sequence = {
        "mask_type_norm": mask is not None and mask.dim() >= 3 and len(mask) > 1,
        "mask_type_alibi": mask is not None and mask.dim() == 4 and len(mask) in (sequences, sequences * 4),
    }
    return 0 if per_sequence.get(arguments["mask_type"]) else None


def tensors_of(arguments):
    return {name: value for name, value in arguments.items() if torch.is_tensor(value)}


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_one_graph_serves_every_batch_and_number_of_blocks(mode):
    dtype = torch.float16 if "qkv" in mode else torch.float32
    inputs = [tensors_of(repeated(case(mode, dtype), *sizes)) for sizes in ((7, 60, 20), (3, 12, 5), (5, 33, 0))]
    options = {name: value for name, value in case(mode, dtype).items() if not torch.is_tensor(value)}
    names = tuple(inputs[0])

    def layer(*tensors):
        return PAGED_ATTENTION(**dict(zip(names, tensors, strict=True)), **options)

    # A float from outside costs a second trace, whatever reads it.
    with torch._dynamo.config.patch(specialize_float=True):
        compiles_once(layer, [tuple(tensors.values()) for tensors in inputs])


@pytest.mark.parametrize("mode", MODES)
def test_sequences_do_not_see_each_other(mode):
    arguments = case(mode, torch.float16 if "qkv" in mode else torch.float64)
    once, thrice = run(arguments), run(repeated(arguments, 3, 2, 1))
    torch.testing.assert_close(thrice, torch.cat([once] * 3), rtol=1e-3 if "qkv" in mode else 1e-12, atol=1e-12)


@hypothesis.settings(max_examples=15, deadline=None, derandomize=True)
@hypothesis.given(
    contexts=strategies.lists(strategies.integers(0, 300), min_size=1, max_size=4),
    heads=strategies.sampled_from(((1, 1), (4, 1), (6, 2), (3, 3))),
    sizes=strategies.sampled_from(((16, 8), (8, 24), (40, 40))),
    block_size=strategies.sampled_from((16, 48, 128)),
    seed=strategies.integers(0, 99),
)
def test_decoding_of_any_size_equals_the_oracle(contexts, heads, sizes, block_size, seed):
    draw = torch.Generator().manual_seed(seed)
    pages = [-(-length // block_size) for length in contexts]
    order = torch.randperm(sum(pages) + 1, generator=draw).tolist()
    tables = torch.tensor([[order.pop() for _ in range(count)] + [-1] * (max(pages) - count) for count in pages])
    caches = [
        torch.randn(sum(pages) + 1, block_size, heads[1], size, generator=draw, dtype=torch.float64) for size in sizes
    ]
    tokens = sum(length > 0 for length in contexts)
    query = torch.randn(tokens, heads[0], sizes[0], generator=draw, dtype=torch.float64)
    tables = tables.view(len(contexts), -1).to(torch.int32)
    given = (query, *caches, tables, int32(*contexts))
    arguments = by_name(OPERATOR, given, {"kv_head_num": heads[1]})
    close_to_oracle(run(arguments), arguments)


@hypothesis.settings(max_examples=15, deadline=None, derandomize=True)
@hypothesis.given(
    steps=strategies.lists(strategies.integers(1, 5), min_size=1, max_size=4),
    behind=strategies.integers(0, 140),
    mode=strategies.sampled_from(("calc_type_spec, mask_type_spec", "mla_v_head_size, calc_type_spec")),
    seed=strategies.integers(0, 99),
)
def test_parallel_decoding_of_any_size_equals_the_oracle(steps, behind, mode, seed):
    draw = torch.Generator().manual_seed(seed)
    arguments = case(mode, torch.float64)
    contexts = [int(length) for length in torch.randint(0, behind + 2, (len(steps),), generator=draw)]
    tokens = sum(step for step, length in zip(steps, contexts, strict=True) if length)
    blocks = arguments["key_cache"].shape[0]
    arguments |= {
        "query": torch.randn(tokens, 4, 32, generator=draw, dtype=torch.float64),
        "mask": torch.randn(tokens, behind + 1, generator=draw, dtype=torch.float64),
        "block_tables": torch.randint(0, blocks, (len(steps), 9), generator=draw, dtype=torch.int32),
        "context_lens": int32(*contexts),
        "q_seq_lens": int32(*steps),
    }
    close_to_oracle(run(arguments), arguments)


@pytest.mark.campaign
def test_a_large_decode_batch():
    """64 sequences of 4096 tokens, 128 heads of 128 over 8 key heads, in bfloat16: a few rows against float64."""
    draw = torch.Generator().manual_seed(0)
    batch, heads, kv_heads, size, length, block_size = 64, 128, 8, 128, 4096, 128
    blocks = batch * length // block_size
    caches = [torch.randn(blocks, block_size, kv_heads, size, generator=draw).bfloat16() for _ in range(2)]
    tables = torch.randperm(blocks, generator=draw).view(batch, -1).to(torch.int32)
    query = torch.randn(batch, heads, size, generator=draw).bfloat16()
    given = (query, caches[0], tables, int32(*[length] * batch), caches[1])
    out = PAGED_ATTENTION(*given, kv_head_num=kv_heads, qk_scale=size**-0.5)
    for token, head in ((0, 0), (31, 17), (63, 127)):
        keys, values = (cache[tables[token].long(), :, head // 16].flatten(0, 1).double() for cache in caches)
        weights = (keys @ query[token, head].double() * size**-0.5).softmax(0)
        error = 2.0**-8 * ((weights @ values).abs() + weights @ values.abs()) + 1e-5
        assert ((out[token, head].double() - weights @ values).abs() <= error).all()
