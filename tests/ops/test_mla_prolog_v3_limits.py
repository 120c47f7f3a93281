"""Where mla_prolog_v3 ends: refusals, edges of sizes and values, strided caches, one compilation for all sizes."""

import pytest
import torch

from ops.harness import compiles_once, refuses, same_tensors, twin_call
from ops.prolog_oracle import CACHES, MODES, PAGED, V3, call, expect, results, unpacked

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
    V3.inplace(**a)


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


# Refusals


def replaced(name, edit):
    return lambda a: {name: edit(a[name])}


def options(**values):
    return lambda a: values


def dropped(name):
    return options(**{name: None})


FIRST, PARTLY, FULLY, PACKED = (0, 0, "PA_BSND"), (1, 2, "PA_NZ"), (2, 1, "PA_BSND"), (1, 3, "PA_BSND")
BLOCKED, RAGGED, PLAIN = (1, 2, "PA_BLK_NZ"), (2, 1, "PA_BLK_BSND", (20,)), (2, 1, "BSND")
SEVEN = torch.ones(7)


def tail(tensor):
    return tensor[1:]


def columns(tensor):
    return tensor[..., 1:]


def pages(size):
    return lambda a: {name: torch.zeros(4, size, *a[name].shape[2:]).bfloat16() for name in CACHES}


TENSORS = [
    (FIRST, replaced("token_x", lambda x: x[0, 0]), r"token_x has shape \[40\]; it must be \[B, S, He\] or \[T, He\]"),
    (FIRST, options(cache_mode="TND"), r"token_x has shape \[2, 3, 40\]; it must be \[T, He\]"),
    (FIRST, replaced("token_x", torch.Tensor.half), "token_x has dtype torch.float16; it must be torch.bfloat16"),
    (FIRST, replaced("token_x", torch.Tensor.char), "token_x has dtype torch.int8; it must be torch.bfloat16"),
    (FIRST, replaced("weight_dq", tail), r"weight_dq has shape \[39, 24\]; it must be \[He, Hcq\] = \[40, \*\]"),
    (FIRST, replaced("weight_uq_qr", columns), r"weight_uq_qr has shape \[24, 119\]"),
    (FIRST, replaced("weight_uq_qr", torch.Tensor.char), "weight_uq_qr has dtype torch.int8; it must be torch.bfl"),
    (
        PARTLY,
        replaced("weight_uq_qr", torch.Tensor.float),
        "weight_uq_qr has dtype torch.float32; it must be torch.int8",
    ),
    (PARTLY, replaced("token_x", torch.Tensor.char), "token_x has dtype torch.int8; it must be torch.bfloat16"),
    (FULLY, replaced("token_x", torch.Tensor.bfloat16), "token_x has dtype torch.bfloat16; it must be torch.int8"),
    (
        FULLY,
        replaced("weight_dkv_kr", torch.Tensor.half),
        "weight_dkv_kr has dtype torch.float16; it must be torch.int8",
    ),
    (FIRST, replaced("weight_uk", lambda w: w[0]), r"weight_uk has shape \[8, 64\]; it must be \[N, D, Hckv\]"),
    (FIRST, replaced("weight_uk", torch.Tensor.char), "weight_uk has dtype torch.int8; allowed"),
    (PACKED, replaced("weight_uk", torch.Tensor.float), "float32; allowed: torch.bfloat16, torch.float16"),
    (FIRST, replaced("weight_dkv_kr", lambda w: w[:, :64]), "rope width Dr, .* is 0; it must be even and at least 2"),
    (FIRST, replaced("weight_dkv_kr", lambda w: w[:, :69]), "rope width Dr, .* is 5; it must be even"),
    (FIRST, replaced("rmsnorm_gamma_cq", tail), r"rmsnorm_gamma_cq has shape \[23\]"),
    (FIRST, replaced("rmsnorm_gamma_ckv", tail), r"rmsnorm_gamma_ckv has shape \[63\]"),
    (FIRST, replaced("rmsnorm_gamma_ckv", torch.Tensor.char), "rmsnorm_gamma_ckv has dtype torch.int8"),
    (FIRST, replaced("rope_sin", tail), r"rope_sin has shape \[1, 3, 32\]; it must be \[B, S, Dr\]"),
    (FIRST, replaced("rope_cos", lambda t: t[0]), r"rope_cos has shape \[3, 32\]; it must be \[B, S, Dr\]"),
    (FIRST, replaced("rope_cos", lambda t: t.to("meta")), "rope_cos is on meta; it must be on cpu"),
]
STORES = [
    (FIRST, replaced("kv_cache", columns), r"kv_cache has shape \[4, 16, 1, 63\]"),
    (FIRST, replaced("kv_cache", lambda c: c[:, 0]), r"kv_cache has shape \[4, 1, 64\]; it must be \[BlockNum, "),
    (FIRST, replaced("kr_cache", tail), r"kr_cache has shape \[3, 16, 1, 32\]"),
    (FIRST, replaced("kv_cache", torch.Tensor.char), "kv_cache has dtype torch.int8; it must be .* dtype of weight_uk"),
    (PARTLY, replaced("kr_cache", torch.Tensor.half), "kr_cache has dtype torch.float16; it must be torch.int8"),
    (FULLY, replaced("kr_cache", torch.Tensor.char), "kr_cache has dtype torch.int8; it must be torch.bfloat16"),
    (PACKED, replaced("kv_cache", columns), r"kv_cache has shape \[4, 16, 1, 279\]; it must be .* 280\]"),
    (PACKED, options(kr_cache=torch.zeros(4, 16, 1, 8)), r"kr_cache has shape \[4, 16, 1, 8\]; it must be \[0\]"),
    (PLAIN, replaced("kv_cache", lambda c: c[:, 1:]), r"kv_cache has shape \[2, 2, 1, 64\]; it must be \[B, S, 1, "),
    (FIRST, pages(8), "BlockSize, axis 1 of kv_cache, is 8; it must be a multiple of 16 from 16 to 1024"),
    (FIRST, pages(1040), "BlockSize, axis 1 of kv_cache, is 1040; it must be a multiple of 16 from 16 to 1024"),
]
SCALES = [
    (
        PARTLY,
        dropped("dequant_scale_w_uq_qr"),
        "dequant_scale_w_uq_qr is None; it must be a tensor with weight_quant_mode 1",
    ),
    (FULLY, dropped("dequant_scale_x"), "dequant_scale_x is None; it must be a tensor with weight_quant_mode 2"),
    (FULLY, dropped("dequant_scale_w_dq"), "dequant_scale_w_dq is None"),
    (FULLY, dropped("dequant_scale_w_dkv_kr"), "dequant_scale_w_dkv_kr is None"),
    (FULLY, dropped("quant_scale_ckv"), "quant_scale_ckv is None; .* kv_cache_quant_mode 1"),
    (PARTLY, dropped("quant_scale_ckr"), "quant_scale_ckr is None; .* kv_cache_quant_mode 2"),
    (PACKED, dropped("k_nope_clip_alpha"), "k_nope_clip_alpha is None; .* kv_cache_quant_mode 3"),
    (FIRST, options(smooth_scales_cq=SEVEN), "smooth_scales_cq is given; it must be None with weight_quant_mode 0"),
    (FIRST, options(dequant_scale_w_uq_qr=SEVEN), "dequant_scale_w_uq_qr is given; it must be None"),
    (PARTLY, options(dequant_scale_x=SEVEN), "dequant_scale_x is given; it must be None with weight_quant_mode 1"),
    (FULLY, options(quant_scale_ckr=SEVEN), "quant_scale_ckr is given; .* kv_cache_quant_mode 1"),
    (FULLY, options(k_nope_clip_alpha=SEVEN), "k_nope_clip_alpha is given"),
    (
        FULLY,
        replaced("dequant_scale_x", lambda s: s.T),
        r"dequant_scale_x has shape \[1, 6\]; .* \[B\*S, 1\] = \[6, 1\]",
    ),
    (
        FULLY,
        replaced("dequant_scale_x", torch.Tensor.half),
        "dequant_scale_x has dtype torch.float16; .* torch.float32",
    ),
    (FULLY, options(quant_scale_ckv=torch.ones(1, 64)), r"quant_scale_ckv has shape \[1, 64\]; it must be \[1\]"),
    (PARTLY, options(quant_scale_ckv=torch.ones(1)), r"quant_scale_ckv has shape \[1\]; it must be \[1, Hckv\]"),
    (PARTLY, options(dequant_scale_w_uq_qr=torch.ones(6, 1)), r"w_uq_qr has shape \[6, 1\]; it must be \[1, N\*"),
    (PARTLY, options(smooth_scales_cq=SEVEN), r"smooth_scales_cq has shape \[7\]; it must be \[1, Hcq\]"),
]
OPTIONS = [
    *[(FIRST, options(weight_quant_mode=mode), f"weight_quant_mode is {mode}, float8 of newer chips; allowed: 0, 1, 2")
      for mode in (3, 4, 5)],
    (FIRST, options(weight_quant_mode=-1), "weight_quant_mode is -1; allowed: 0, 1, 2"),
    *[(FIRST, options(kv_cache_quant_mode=mode), f"mode is {mode}; allowed with weight_quant_mode 0: 0")
      for mode in (1, 2, 3)],
    (PARTLY, options(kv_cache_quant_mode=1), "kv_cache_quant_mode is 1; allowed with weight_quant_mode 1: 0, 2, 3"),
    (FULLY, options(kv_cache_quant_mode=2), "kv_cache_quant_mode is 2; allowed with weight_quant_mode 2: 0, 1, 3"),
    (FULLY, options(query_quant_mode=0), "query_quant_mode is 0; allowed with kv_cache_quant_mode 1: 1"),
    (PARTLY, options(query_quant_mode=1), "query_quant_mode is 1; allowed with kv_cache_quant_mode 2: 0"),
    (PACKED, options(ckvkr_repo_mode=0), "ckvkr_repo_mode is 0; allowed with kv_cache_quant_mode 3: 1"),
    (FIRST, options(ckvkr_repo_mode=1), "ckvkr_repo_mode is 1; allowed with kv_cache_quant_mode 0: 0"),
    (PACKED, options(quant_scale_repo_mode=0), "quant_scale_repo_mode is 0; allowed with kv_cache_quant_mode 3: 1"),
    (PACKED, options(tile_size=64), "tile_size is 64; allowed with any mode: 128"),
    (FIRST, options(cache_mode="Norm"), "cache_mode is 'Norm'; allowed: 'PA_BSND', 'PA_NZ', 'PA_BLK_BSND'"),
    *[(PACKED, options(cache_mode=mode), f"'{mode}'; allowed with kv_cache_quant_mode 3: 'PA_BSND', 'BSND', 'TND'")
      for mode in PAGED[1:]],
]  # fmt: skip
PLACES = [
    (FIRST, dropped("cache_index"), "cache_index is None; it must be a tensor with cache_mode 'PA_BSND'"),
    (PLAIN, options(cache_index=SEVEN), "cache_index is given; it must be None with cache_mode 'BSND'"),
    (FIRST, replaced("cache_index", torch.Tensor.int), "cache_index has dtype torch.int32; allowed: torch.int64"),
    (FIRST, replaced("cache_index", tail), r"cache_index has shape \[1, 3\]; it must be \[B, S\]"),
    (
        PARTLY,
        replaced("cache_index", lambda i: i + 64),
        "cache_index holds .*; it must be below 64, the number of slots",
    ),
    (
        BLOCKED,
        replaced("cache_index", lambda i: i + 4),
        "cache_index holds .*; it must be below 4, the number of blocks",
    ),
    (
        BLOCKED,
        replaced("cache_index", tail),
        r"cache_index has shape \[1, 1\]; .* \[B, ceil\(S/BlockSize\)\] = \[2, 1\]",
    ),
    (BLOCKED, options(actual_seq_len=SEVEN), "actual_seq_len is given; it must be None with .* rank 3"),
    (FIRST, options(actual_seq_len=SEVEN), "actual_seq_len is given; it must be None with cache_mode 'PA_BSND'"),
    (RAGGED, dropped("actual_seq_len"), "actual_seq_len is None; it must be a tensor with cache_mode 'PA_BLK_BSND'"),
    (RAGGED, options(actual_seq_len=torch.tensor([3, 19])), r"actual_seq_len is \[3, 19\]; .* 20, the number of tok"),
    (RAGGED, options(actual_seq_len=torch.tensor([21, 20])), r"actual_seq_len is \[21, 20\]; .* not decreasing"),
    (RAGGED, options(actual_seq_len=torch.tensor([-1, 20])), r"actual_seq_len is \[-1, 20\]"),
    (RAGGED, options(actual_seq_len=SEVEN), "actual_seq_len has dtype torch.float32; allowed: torch.int32"),
    (RAGGED, replaced("cache_index", tail), r"cache_index has shape \[2\]; it must be .* = \[3\]"),
]


@pytest.mark.parametrize(("mode", "change", "message"), [*TENSORS, *STORES, *SCALES, *OPTIONS, *PLACES])
def test_refusal_writes_nothing(mode, change, message):
    a = call(*mode, **({"lengths": (3, 17)} if mode == RAGGED else {}))
    refuses(V3, (), a | change(a), message)


@pytest.mark.parametrize(("weights", "caches", "fractal"), [(0, 0, 16), (1, 2, 32)])
@pytest.mark.parametrize("name", CACHES)
def test_nz_pages_hold_whole_fractals(weights, caches, fractal, name):
    a = call(weights, caches, "PA_NZ")
    rank, width = (40, 32) if name == "kv_cache" else (64, 8)
    a |= {
        "weight_dkv_kr": a["weight_dkv_kr"][:, : rank + width],
        "weight_uk": a["weight_uk"][..., :rank].contiguous(),
        "weight_uq_qr": a["weight_uq_qr"][:, : 3 * (8 + width)],
        "rmsnorm_gamma_ckv": a["rmsnorm_gamma_ckv"][:rank],
        "kv_cache": a["kv_cache"][..., :rank].contiguous(),
        "kr_cache": a["kr_cache"][..., :width].contiguous(),
        **{table: a[table][..., :width].contiguous() for table in ("rope_sin", "rope_cos")},
    }
    if caches:
        a["quant_scale_ckv"], a["quant_scale_ckr"] = a["quant_scale_ckv"][:, :rank], a["quant_scale_ckr"][:, :width]
        a["dequant_scale_w_uq_qr"] = a["dequant_scale_w_uq_qr"][:, : 3 * (8 + width)]
    refuses(V3, (), a, f"The width of {name} is {a[name].shape[-1]}; it must be a multiple of {fractal}")
    expect(a | {"cache_mode": "PA_BSND"}, V3.overload(**(a | {"cache_mode": "PA_BSND"})))


def test_packed_tiles_are_whole():
    a = call(1, 3)
    a["weight_uk"] = a["weight_uk"][..., :200]
    a["rmsnorm_gamma_ckv"] = a["rmsnorm_gamma_ckv"][:200]
    a["weight_dkv_kr"] = a["weight_dkv_kr"][:, :208]
    refuses(V3, (), a, "Hckv, .* is 200; it must be a multiple of 128")


# Free sizes

VARYING = ("token_x", "rope_sin", "rope_cos", "cache_index", "dequant_scale_x", "actual_seq_len")
# Of B, S and BlockNum; the first are those of no other axis, which would then be taken for the same.
SIZES = ((2, 50, 9), (3, 17, 7), (5, 20, 11))


def compiled_call(first, names):
    """A layer of the tensors `names`, all else as in `first` but floats, which Dynamo would make inputs."""
    rest = {name: value for name, value in first.items() if not isinstance(value, float)}

    def layer(*tensors):
        return torch.ops.mla_fx.mla_prolog_v3(**(rest | dict(zip(names, tensors, strict=True))))

    return layer


@pytest.mark.parametrize(("weights", "caches", "cache_mode"), MODES)
def test_compiles_once_for_all_sizes(weights, caches, cache_mode):
    calls = [call(weights, caches, cache_mode, sizes[:2], blocks=blocks) for *sizes, blocks in SIZES]
    names = [name for name in (*VARYING, *CACHES) if calls[0][name] is not None and calls[0][name].numel()]
    compiles_once(compiled_call(calls[0], names), [[a[name] for name in names] for a in calls])


@pytest.mark.parametrize("cache_mode", ["PA_BLK_BSND", "PA_BLK_NZ"])
def test_sequences_of_any_lengths_compile_once(cache_mode):
    lengths = ((17, 20, 40, 1, 2), (3, 17), (16, 0, 20))
    calls = [call(1, 2, cache_mode, (sum(each),), lengths=each, blocks=10 + len(each)) for each in lengths]
    names = [name for name in (*VARYING, *CACHES) if calls[0][name] is not None]
    compiles_once(compiled_call(calls[0], names), [[a[name] for name in names] for a in calls])
