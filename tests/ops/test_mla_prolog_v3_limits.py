"""Where mla_prolog_v3 ends: edges of sizes and values, strided caches, one compilation for all sizes."""

import pytest
import torch
from lib.operators.harness import compiles_once, refuses, same_tensors, twin_call
from lib.operators.prolog_oracle import CACHES, MODES, PAGED, V3, call, expect, results, unpacked

QUANTISATIONS = sorted({mode[:2] for mode in MODES})


# Edges of sizes


@pytest.mark.parametrize(("weights", "caches", "cache_mode"), MODES)
@pytest.mark.parametrize("tokens", [(0, 3), (2, 0), (0, 0)])
def test_no_token_no_result_and_no_write(weights, caches, cache_mode, tokens):
    a = call(weights, caches, cache_mode, tokens)
    found = results(a)
    assert found["query"].numel() == found["query_norm"].numel() == found["norm_scale"].numel() == 0
    assert found["query"].shape[:-2] == a["token_x"].shape[:-1]
    same_tensors([found[name] for name in CACHES], [a[name] for name in CACHES])
    _, written = twin_call(V3, (), a)
    same_tensors([written[name] for name in CACHES], [a[name] for name in CACHES])


@pytest.mark.parametrize("lengths", [(), (0, 0)])
@pytest.mark.parametrize("cache_mode", ["PA_BLK_BSND", "PA_BLK_NZ"])
def test_no_token_in_any_sequence(lengths, cache_mode):
    a = call(1, 2, cache_mode, (0,), lengths=lengths)
    a["actual_seq_len"] = torch.tensor(lengths, dtype=torch.int32)
    found = results(a)
    same_tensors([found[name] for name in CACHES], [a[name] for name in CACHES])


@pytest.mark.parametrize(("weights", "caches", "cache_mode"), [mode for mode in MODES if mode[2] in PAGED])
def test_without_blocks_only_the_query_is_computed(weights, caches, cache_mode):
    a = call(weights, caches, cache_mode, (2, 17))
    found = results(a)
    a |= {name: a[name][:0] for name in CACHES}
    empty = results(a)
    expect(a, tuple(empty.values()))
    same_tensors(
        [empty[name] for name in found if name not in CACHES], [found[name] for name in found if name not in CACHES]
    )
    same_tensors(V3.inplace(**a), list(empty.values())[:5])


@pytest.mark.parametrize(("weights", "caches", "cache_mode"), MODES)
def test_one_token(weights, caches, cache_mode):
    a = call(weights, caches, cache_mode, (1, 1))
    expect(a, V3.overload(**a))


@pytest.mark.parametrize("cache_mode", ["PA_BLK_BSND", "PA_BLK_NZ"])
@pytest.mark.parametrize("steps", [15, 16, 17, 32])
def test_sequences_end_at_and_around_the_edge_of_a_block(cache_mode, steps):
    a = call(1, 2, cache_mode, (2, steps))
    expect(a, V3.overload(**a))
    a = call(1, 2, cache_mode, (steps + 16,), lengths=(16, 0, steps))
    expect(a, V3.overload(**a))


@pytest.mark.parametrize("block_size", [16, 48, 1024])
@pytest.mark.parametrize("cache_mode", PAGED)
def test_pages_of_other_sizes(cache_mode, block_size):
    a = call(1, 2, cache_mode, (2, 17))
    for name in CACHES:
        a[name] = torch.zeros(4, block_size, *a[name].shape[2:], dtype=torch.int8)
    if "BLK" in cache_mode:
        a["cache_index"] = torch.tensor([[3, 0], [1, 2]])[:, : -(-17 // block_size)]
    expect(a, V3.overload(**a))


@pytest.mark.parametrize(("weights", "caches", "cache_mode"), [mode for mode in MODES if mode[2] in PAGED])
def test_only_axis_0_of_a_cache_may_have_gaps(weights, caches, cache_mode):
    a = call(weights, caches, cache_mode, (2, 17))
    wanted = results(a)
    buffers = {name: torch.stack((a[name], torch.full_like(a[name], 77)), 1) for name in CACHES if a[name].numel()}
    a |= {name: buffer[:, 0] for name, buffer in buffers.items()}
    same_tensors(results(a).values(), wanted.values())
    V3.inplace(**a)
    for name, buffer in buffers.items():
        same_tensors((buffer[:, 0], buffer[:, 1]), (wanted[name], torch.full_like(wanted[name], 77)))
    wide = torch.cat((a["kv_cache"], a["kv_cache"]), -1)[..., : a["kv_cache"].shape[-1]]
    refuses(V3, (), a | {"kv_cache": wide}, "kv_cache has shape .* and strides .*; only axis 0")


# Edges of values

SKIPS = {
    "slot 0 and skipped": [[0, -1, -1], [-1, 5, -7]],
    "skipped before slot 0": [[-1, -1, 0], [-1, -1, -1]],
    "all skipped": [[-1, -1, -1], [-1, -1, -1]],
    "none skipped": [[0, 1, 2], [5, 4, 63]],
}


@pytest.mark.parametrize("skip", SKIPS)
@pytest.mark.parametrize(
    ("weights", "caches", "cache_mode"), [mode for mode in MODES if mode[2] in ("PA_BSND", "PA_NZ")]
)
def test_negative_index_is_documented_as_invalid_but_skips(weights, caches, cache_mode, skip):
    """8: the pages want indices from 0, unchecked; the kernel stores nothing for a negative one."""
    a = call(weights, caches, cache_mode)
    query = results(a)["query"]
    a["cache_index"] = torch.tensor(SKIPS[skip])
    found = V3.overload(**a)
    expect(a, found)
    assert torch.equal(found[0], query)


@pytest.mark.parametrize("blocks", [[[-1, 2], [0, -3]], [[-1, -1], [-1, -1]], [[0, 1], [2, 3]], [[3, -1], [-1, -1]]])
@pytest.mark.parametrize("cache_mode", ["PA_BLK_BSND", "PA_BLK_NZ"])
def test_negative_block_is_documented_as_invalid_but_skips(cache_mode, blocks):
    """8, for indices that count blocks."""
    a = call(2, 1, cache_mode, (2, 20)) | {"cache_index": torch.tensor(blocks)}
    expect(a, V3.overload(**a))
    a = call(2, 1, cache_mode, (40,), lengths=(20, 20)) | {"cache_index": torch.tensor(blocks).flatten()}
    expect(a, V3.overload(**a))


def test_blocked_index_counts_blocks():
    """7: kv_rmsnorm_rope_cache counts tokens in its blocked modes, this operator blocks."""
    a = call(0, 0, "PA_BLK_BSND", (1, 16)) | {"cache_index": torch.tensor([[3]])}
    cache = results(a)["kv_cache"]
    assert torch.equal(cache[:3], a["kv_cache"][:3])
    assert (cache[3] != a["kv_cache"][3]).any(-1).all()


@pytest.mark.parametrize(
    ("weights", "caches", "cache_mode"), [mode for mode in MODES if mode[:2] in ((0, 0), (1, 0), (2, 0))]
)
def test_garbage_in_a_cache_stays_where_it_is(weights, caches, cache_mode):
    a = call(weights, caches, cache_mode, (2, 17), skip=1)
    a |= {name: torch.full_like(a[name], torch.nan) for name in CACHES}
    found = V3.overload(**a)
    expect(a, found)
    assert not any(result.isnan().any() for result in found[:5])


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize(("weights", "caches"), QUANTISATIONS)
def test_a_token_that_is_not_finite_spoils_no_other(weights, caches, value):
    """Its own floating-point results are infinite or NaN, its int8 results 0."""
    a = call(weights, caches)
    clean = results(a)
    spoilt = "dequant_scale_x" if weights == 2 else "token_x"
    a[spoilt] = a[spoilt].clone()
    a[spoilt].view(6, -1)[2] = value
    found = results(a)
    for name, result in found.items():
        if name in CACHES or not result.numel():
            continue
        rows, wanted = (
            tensor.flatten(0, -3 if tensor.dim() == 4 else -2).view(6, -1) for tensor in (result, clean[name])
        )
        others = torch.arange(6) != 2
        assert torch.equal(rows[others], wanted[others])
        assert (rows[2] == 0).all() if result.dtype == torch.int8 else not rows[2].isfinite().any()
    slot = int(a["cache_index"].flatten()[2])
    for name in CACHES:
        if not found[name].numel():
            continue
        rows, wanted = (cache.flatten(0, 2) for cache in (found[name], clean[name]))
        others = torch.arange(len(rows)) != slot
        assert torch.equal(rows[others], wanted[others])
        stored = rows[slot, :256] if caches == 3 else rows[slot]  # the packed scales and rope values are NaN
        assert (stored == 0).all() if rows.dtype == torch.int8 else not stored.isfinite().any()


@pytest.mark.parametrize(("weights", "caches"), [mode for mode in QUANTISATIONS if mode[0]])
def test_a_token_of_zeros_is_stored_as_zeros(weights, caches):
    """Its scales are 0. The kernel guards nothing: an int8 query of zeros has a query_rope that is not finite."""
    a = call(weights, caches)
    a["token_x"].view(6, -1)[2] = 0
    found = results(a)
    assert float(found["norm_scale"][2]) == 0
    assert not found["query_norm"].view(6, -1)[2].any()
    assert not found["query"].flatten(0, 1)[2].any()
    slot = int(a["cache_index"].flatten()[2])
    if caches == 3:
        parts = unpacked(found["kv_cache"].flatten(0, 2)[slot : slot + 1], 256, 8, torch.bfloat16)
        assert not any(part.any() for part in parts)
    else:
        assert not any(found[name].flatten(0, 2)[slot].any() for name in CACHES)
    rope = found["query_rope"].flatten(0, 1)
    if caches == 1:
        assert not found["query_scale"].view(6, 3)[2].any()
        assert not rope[2].isfinite().any()
    else:
        assert not rope[2].any()
    assert rope[torch.arange(6) != 2].isfinite().all()


def test_a_factor_next_to_one_is_one():
    """The kernel multiplies by neither factor when it is nearer to 1 than float32 resolves."""
    a = call(0, 0, dtype=torch.float32)
    same = a | {"qc_qr_scale": 1 + 6e-8, "kc_scale": 1 - 1.1e-7}
    same_tensors(results(same).values(), results(a).values())
    other = results(a | {"qc_qr_scale": 1 + 3e-7, "kc_scale": 1 - 3e-7})
    assert not torch.equal(other["query_norm"], results(a)["query_norm"])
    assert not torch.equal(other["kv_cache"], results(a)["kv_cache"])


@pytest.mark.parametrize("cache_mode", ["PA_BLK_BSND", "PA_BLK_NZ"])
def test_lengths_as_a_list_or_of_either_dtype(cache_mode):
    a = call(2, 1, cache_mode, (20,), lengths=(3, 0, 17))
    wanted = results(a).values()
    for ends in (a["actual_seq_len"].tolist(), a["actual_seq_len"].long()):
        arguments = a | {"actual_seq_len": ends}
        same_tensors(torch.ops.mla_fx.mla_prolog_v3(**arguments), wanted)
        caches = {name: a[name].clone() for name in CACHES}
        torch.ops.mla_fx.mla_prolog_v3_(**(arguments | caches))
        same_tensors(caches.values(), list(wanted)[5:])


# Free sizes

VARYING = ("token_x", "rope_sin", "rope_cos", "cache_index", "dequant_scale_x", "actual_seq_len")
# B, S and BlockNum; the first differ from all other axes, which would otherwise be mistaken for the same.
SIZES = ((2, 50, 9), (3, 17, 7), (5, 20, 11))


def compiled_call(first, names):
    """A layer with the tensors `names`; everything else is as in `first`, because Dynamo would turn floats into
    inputs."""
    rest = {name: value for name, value in first.items() if not isinstance(value, float)}

    def layer(*tensors):
        return torch.ops.mla_fx.mla_prolog_v3(**(rest | dict(zip(names, tensors, strict=True))))

    return layer


@pytest.mark.slow
@pytest.mark.parametrize(("weights", "caches", "cache_mode"), {mode[:2]: mode for mode in MODES}.values())
def test_compiles_once_for_all_sizes(weights, caches, cache_mode):
    """One mode of each quantisation; that sizes need no guard is checked in all of them, by the fake kernel."""
    calls = [call(weights, caches, cache_mode, sizes[:2], blocks=blocks) for *sizes, blocks in SIZES]
    names = [name for name in (*VARYING, *CACHES) if calls[0][name] is not None and calls[0][name].numel()]
    compiles_once(compiled_call(calls[0], names), [[a[name] for name in names] for a in calls])


@pytest.mark.parametrize("cache_mode", ["PA_BLK_BSND", "PA_BLK_NZ"])
def test_sequences_of_any_lengths_compile_once(cache_mode):
    lengths = ((17, 20, 40, 1, 2), (3, 17), (16, 0, 20))
    calls = [call(1, 2, cache_mode, (sum(each),), lengths=each, blocks=10 + len(each)) for each in lengths]
    names = [name for name in (*VARYING, *CACHES) if calls[0][name] is not None]
    compiles_once(compiled_call(calls[0], names), [[a[name] for name in names] for a in calls])
