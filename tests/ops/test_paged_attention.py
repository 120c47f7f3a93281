"""paged_attention against a float64 oracle, one query row and head at a time, and its kernels' roundings."""

import numpy as np
import pytest
import torch
from lib.operators.harness import by_name, cases, same_tensors, twin_call
from lib.operators.paged_oracle import OPERATOR, case, close_to_oracle, numbers, run

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@pytest.mark.slow
@pytest.mark.parametrize(("operator", "args", "kwargs"), cases(DTYPES, ["paged_attention"]))
def test_sample_against_oracle(operator, args, kwargs):
    """Both forms; the tensors that are read keep their bytes, and so do rows that the in-place form does not
    produce."""
    arguments = by_name(operator, args, kwargs)
    before = [value.clone() if torch.is_tensor(value) else value for value in arguments.values()]
    actual = operator.overload(**arguments)
    made = close_to_oracle(actual, arguments)
    assert made.all() or (numbers(actual)[~made] == 0).all()
    _, written = twin_call(operator, args, kwargs)
    close_to_oracle(written["attn_out"], arguments)
    assert (numbers(written["attn_out"])[~made] == 77).all()
    same_tensors(arguments.values(), before)


@pytest.mark.parametrize(("operator", "args", "kwargs"), cases((torch.float64,), ["paged_attention"]))
def test_what_no_context_reaches_is_not_read(operator, args, kwargs):
    """NaN in every slot behind a context and in every unused block, and blocks that do not exist behind a context."""
    arguments = by_name(operator, args, kwargs)
    wanted = operator.overload(**arguments)
    dirty = dict(arguments)
    caches = [arguments["key_cache"], *([] if arguments["value_cache"] is None else [arguments["value_cache"]])]
    for name, cache in zip(("key_cache", "value_cache"), caches, strict=False):
        poison = torch.nan if cache.is_floating_point() else 127
        dirty[name] = torch.where(used_slots(arguments, cache), cache, torch.full_like(cache, poison))
    dirty["block_tables"] = arguments["block_tables"].masked_fill(arguments["block_tables"] < 0, 2**31 - 1)
    if arguments["razor_offset"] is not None:
        used = used_slots(arguments, arguments["razor_offset"][..., None, None])[..., 0, 0]
        dirty["razor_offset"] = arguments["razor_offset"].masked_fill(~used, torch.nan)
    torch.testing.assert_close(operator.overload(**dirty), wanted, rtol=0, atol=0)


def used_slots(arguments, cache):
    """Which elements of a cache lie within a context, as a mask that broadcasts over it."""
    nz = cache.shape[-1] == 16 and arguments["query"].shape[2] != 16
    paged = nz or arguments["input_layout"] == "type_bnsd"
    block_size = cache.shape[2] if paged else cache.shape[1]
    used = torch.zeros(cache.shape[0], block_size, dtype=torch.bool)
    for table, length in zip(arguments["block_tables"].tolist(), arguments["context_lens"].tolist(), strict=True):
        for j in range(length):
            used[table[j // block_size], j % block_size] = True
    return used[:, None, :, None] if paged else used[:, :, None, None]


# Roundings, bit by bit.


def decode(scores, values, dtype=torch.bfloat16, **options):
    """The result of one query over keys whose scores are `scores` [L], and over `values` [L, 32]."""
    length = len(scores)
    blocks = -(-length // 16)
    keys, rows = (torch.zeros(blocks * 16, 32, dtype=dtype) for _ in range(2))
    keys[:length, 0] = torch.as_tensor(scores).to(dtype)
    rows[:length] = values.to(dtype)
    query = torch.zeros(1, 1, 32, dtype=dtype)
    query[0, 0, 0] = 1
    table = torch.arange(blocks, dtype=torch.int32)[None]
    key_cache, value_cache = keys.view(blocks, 16, 1, 32), rows.view(blocks, 16, 1, 32)
    return OPERATOR.overload(query, key_cache, value_cache, table, torch.tensor([length]), **options)[0, 0]


def test_weights_are_rounded_before_they_are_normalised():
    """P = bf16(exp(s - m)); the sum that divides is one of unrounded weights; the quotient is rounded once."""
    random = np.random.default_rng(0)
    differs = False
    for _ in range(40):
        scores = torch.tensor([0.0, *-random.uniform(0, 3, 2)]).bfloat16()
        weights = scores.float().exp()
        wanted = (weights.bfloat16().float() / weights.sum()).bfloat16()
        assert torch.equal(decode(scores, torch.eye(3, 32))[:3], wanted)
        differs |= not torch.equal(wanted, (weights / weights.sum()).bfloat16())
    assert differs


def test_weights_refer_to_the_running_maximum_of_their_tile():
    """A first tile whose scores are lower is rounded at its own maximum, and decays in float32 afterwards."""
    random = np.random.default_rng(1)
    differs = False
    for _ in range(40):
        scores = torch.full((129,), -200.0)
        scores[:2] = torch.from_numpy(-random.uniform(1, 3, 2))
        scores[128] = 0.0
        values = torch.zeros(129, 32)
        values[:2, :2] = torch.eye(2)
        low = scores[:2].bfloat16().float()
        top = low.max()
        weights = (low - top).exp()
        total = weights.sum() * top.exp() + 1
        wanted = (weights.bfloat16().float() * top.exp() / total).bfloat16()
        assert torch.equal(decode(scores, values)[:2], wanted)
        differs |= not torch.equal(wanted, (low.exp().bfloat16().float() / total).bfloat16())
    assert differs


def dequant_case(offset, descale, dtype, length=1):
    """The first `length` values, [L, 64], and the result of a query of zeros, which is their mean."""
    draw = torch.Generator().manual_seed(1)
    keys, values = (torch.randint(-128, 128, (1, 16, 2, 32), generator=draw, dtype=torch.int8) for _ in range(2))
    query = torch.zeros(1, 2, 32, dtype=dtype)
    arguments = {"k_descale": descale, "v_descale": descale, "quant_type": "type_dequant_fusion"}
    if offset is not None:
        arguments |= {"k_offset": offset, "v_offset": offset, "has_quant_offset": True}
    table = torch.zeros(1, 1, dtype=torch.int32)
    result = OPERATOR.overload(query, keys, values, table, torch.tensor([length]), **arguments)
    return values[0, :length].flatten(1), result.flatten()


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_offsets_are_added_before_the_scale_and_each_value_is_rounded(dtype):
    offset = torch.arange(-32, 32, dtype=torch.int32)
    descale = torch.linspace(0.01, 0.03, 64)
    values, result = dequant_case(offset, descale, dtype, length=2)
    shifted = values.numpy().astype(np.float32) + offset.numpy().astype(np.float32)
    exact = torch.from_numpy(shifted * descale.numpy())
    assert torch.equal(result, (exact.to(dtype).float().sum(0) / 2).to(dtype))
    assert not torch.equal(result, (exact.sum(0) / 2).to(dtype))


def test_int64_scales_are_float32_bits_in_the_low_half():
    descale = torch.linspace(0.01, 0.03, 64)
    low = torch.from_numpy(descale.numpy().view(np.uint32).astype(np.int64))
    _, wanted = dequant_case(None, descale, torch.float16)
    for high in (0, 1, -1, 0x7FFF0000):
        _, result = dequant_case(None, low + (high << 32), torch.float16)
        assert torch.equal(result, wanted)


@pytest.mark.parametrize("quant_type", ("type_quant_qkv_online", "type_quant_qkv_offline"))
def test_full_quantisation_takes_the_bits_of_its_scales_too(quant_type):
    """The document says int64 or float32, the code takes float32; int64 means here what it means in dequantisation."""
    arguments = case(quant_type, torch.float16)
    bits = {}
    for name, high in (("k_descale", 1), ("v_descale", -1)):
        low = arguments[name].numpy().view(np.uint32).astype(np.int64)
        bits[name] = torch.from_numpy(low) + (high << 32)
    assert torch.equal(run(arguments | bits), run(arguments))


def int8_case(scores, values, **scales):
    """One query head over keys whose scores are small integers, int8 values [L] in the first column."""
    length = len(scores)
    keys, rows = (torch.zeros(-(-length // 16) * 16, 32, dtype=torch.int8) for _ in range(2))
    keys[:length, 0], rows[:length, 0] = torch.tensor(scores), torch.tensor(values)
    query = torch.zeros(1, 1, 32, dtype=torch.int8)
    query[0, 0, 0] = 1
    table = torch.arange(len(keys) // 16, dtype=torch.int32)[None]
    key_cache, value_cache = keys.view(-1, 16, 1, 32), rows.view(-1, 16, 1, 32)
    scales = {"out_data_type": torch.float16} | scales
    return float(OPERATOR.overload(query, key_cache, value_cache, table, torch.tensor([length]), **scales)[0, 0, 0])


def float32_scores(scores, descale):
    return np.array(scores, np.float32) * np.float32(descale)


def test_online_weights_are_quantised_by_the_maximum_of_their_tile():
    """P8 = rint(fp16(p / r)), r = max(p) / 127: an all but uniform tile keeps its small differences."""
    scores, values = [0, 1, -30, 17], [100, -50, 25, 7]
    options = {"k_descale": torch.tensor([0.1]), "v_descale": torch.tensor([0.5])}
    result = int8_case(scores, values, quant_type="type_quant_qkv_online", **options)
    s = float32_scores(scores, 0.1)
    p = np.exp(s - s.max())
    r = np.float32(1) / np.float32(127)
    p8 = np.rint((p / r).astype(np.float16).astype(np.float32))
    wanted = np.float32(p8 @ np.array(values, np.float32)) * (np.float32(0.5) * r) / p.sum()
    assert result == float(np.float16(wanted))


def test_offline_weights_are_multiplied_by_p_scale():
    """P8 = rint(fp16(p * p_scale)), saturated; v_descale carries the inverse."""
    scores, values = [0, 1, -30, 17], [100, -50, 25, 7]
    options = {"k_descale": torch.tensor([0.1]), "v_descale": torch.tensor([0.5]), "p_scale": torch.tensor([140.0])}
    result = int8_case(scores, values, quant_type="type_quant_qkv_offline", **options)
    s = float32_scores(scores, 0.1)
    p = np.exp(s - s.max())
    p8 = np.rint((p * np.float32(140)).astype(np.float16).astype(np.float32)).clip(-128, 127)
    wanted = np.float32(p8 @ np.array(values, np.float32)) * np.float32(0.5) / p.sum()
    assert p8.max() == 127
    assert result == float(np.float16(wanted))


def test_the_query_is_rounded_after_q_scale():
    arguments = case("base", torch.bfloat16, q_scale=0.3)
    scaled = (arguments["query"].float() * 0.3).bfloat16()
    wanted = OPERATOR.overload(**(arguments | {"query": scaled, "q_scale": 1.0}))
    assert torch.equal(OPERATOR.overload(**arguments), wanted)
    assert torch.equal(
        OPERATOR.overload(**(arguments | {"q_scale": 0.0})), OPERATOR.overload(**(arguments | {"q_scale": 1.0}))
    )


def test_a_float16_log_n_scales_in_float16():
    """On the chip with NZ caches qk_scale * log_n is a float16 number."""
    arguments = case("NZ", scale_type="logn", qk_scale=0.17)
    log_n = torch.tensor([1.003, 0.7, 1.9, 1.0], dtype=torch.float16)
    half = np.float16(0.17) * log_n.numpy()
    wanted = OPERATOR.overload(**(arguments | {"qk_scale": 1.0, "log_n": torch.from_numpy(half.astype(np.float32))}))
    assert torch.equal(OPERATOR.overload(**(arguments | {"log_n": log_n})), wanted)
