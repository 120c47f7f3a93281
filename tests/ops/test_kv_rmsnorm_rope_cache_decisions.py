"""What kv_rmsnorm_rope_cache decides where sources disagree, one test for each decision, and what it refuses."""

import pytest
import torch
from lib.operators.harness import change, drop, element_at, nz_offset, option, refuses
from lib.operators.kv_oracle import FORMS, MODES, OPERATOR, build, matches_oracle

from mla_fx.ops.emitted.kv_rmsnorm_rope_cache import samples as _samples


def test_blk_index_is_a_slot_here_though_mla_prolog_takes_block_numbers():
    """This operator's page: the offset at which each page starts; mla_prolog's: the number of the block."""
    (kv, gamma, cos, sin, _, k_cache, *rest), kwargs = build("PA_BLK_BNSD", batch=1, steps=3, spare=40)
    index = torch.tensor([32])
    result = OPERATOR.overload(kv, gamma, cos, sin, index, k_cache, *rest, **kwargs)
    assert torch.equal(result[0][1, :3, 0], result[2][0, 0])
    assert torch.equal(result[0][32], k_cache[32])


@pytest.mark.parametrize("mode", ["PA_BLK_BNSD", "PA_BLK_NZ"])
def test_any_slot_of_a_page_names_it_though_the_document_says_its_start(mode):
    """The document: where each page starts; the kernel: any slot, divided by BlockSize."""
    args, kwargs = build(mode, steps=40)
    inside = args[4] + torch.tensor([0, 1, 17, 31])
    moved = OPERATOR.overload(*args[:4], inside, *args[5:], **kwargs)
    torch.testing.assert_close(moved, OPERATOR.overload(*args, **kwargs), rtol=0, atol=0)


@pytest.mark.parametrize("mode", MODES)
def test_negative_index_is_documented_as_invalid_but_skips(mode):
    """The document: indices lie within the cache; the kernel: any below 0 stores nothing; both rows are returned."""
    args, kwargs = build(mode, steps=40)
    index = torch.full_like(args[4], -7)
    results = OPERATOR.overload(*args[:4], index, *args[5:], **kwargs)
    torch.testing.assert_close(results[:2], args[5:7], rtol=0, atol=0)
    torch.testing.assert_close(results[2:], OPERATOR.overload(*args, **kwargs)[2:], rtol=0, atol=0)


def test_offset_is_required_by_the_document_but_optional_with_v():
    """The document: mandatory with scales; the kernel: added if given."""
    args, kwargs = build("PA", heads=2, quantize="kc", offset=False)
    without = OPERATOR.overload(*args, **kwargs)
    offsets = [torch.full_like(scale, 3.0) for scale in args[7:9]]
    added = OPERATOR.overload(*args[:9], *offsets, *args[11:], **kwargs)
    for old, plain, shifted in zip(args[5:7], without, added, strict=False):
        stored = plain != old
        unsaturated = stored & (plain < 124) & (plain > -128) & (shifted != old)
        assert unsaturated.sum() > 100
        # Without ties, and random values have none, an integer offset commutes with rounding.
        assert torch.equal(shifted[unsaturated], plain[unsaturated] + 3)


@pytest.mark.parametrize(("position", "name"), [(9, "k_rope_offset"), (10, "c_kv_offset")])
def test_offset_is_ignored_by_the_kernel_without_v_and_refused(position, name):
    """The document: mandatory with scales; the kernel without v: never read."""
    args, kwargs = build("PA", quantize="kc")
    args = list(args)
    args[position] = torch.ones(args[position - 2].shape)
    refuses(OPERATOR, args, kwargs, f"{name} is given; it must be None without v, where the kernel ignores it")


@pytest.mark.parametrize("quantize", ["k", "c"])
@pytest.mark.parametrize("heads", [0, 2])
def test_scales_are_documented_as_both_or_neither_but_are_independent(quantize, heads):
    """The document: both or none; the kernel takes either, and serving code passes c_kv_scale alone."""
    args, kwargs = build("PA_NZ", quantize=quantize, heads=heads)
    assert (args[5].dtype == torch.int8, args[6].dtype == torch.int8) == (quantize == "k", quantize == "c")
    matches_oracle(args, kwargs)


def test_block_num_is_bounded_by_ceil_though_another_page_says_floor():
    """torch_npu: block_num >= Ceil(S/BlockSize)*B; aclnn: Floor, with which two pages of 40 tokens had one block."""
    args, kwargs = build("PA_BLK_BNSD", batch=1, steps=40, spare=0)
    matches_oracle(args, kwargs)
    with pytest.raises(ValueError, match=r"k_cache has 1 blocks; 'PA_BLK_BNSD' needs B\*Ceil\(S/BlockSize\) = 2"):
        OPERATOR.overload(*args[:4], args[4] % 32, *(cache[:1] for cache in args[5:7]), *args[7:], **kwargs)


def test_v_is_absent_from_the_document_but_taken():
    """The wrapper has v: gamma spans all of kv, its first Dr columns turn, and v goes to ckv_cache as it is."""
    args, kwargs = build("PA", heads=2)
    _, ckv_cache, k_rope, c_kv = OPERATOR.overload(*args, **kwargs)
    assert torch.equal(c_kv, args[11])
    rows = ckv_cache.flatten(0, 1)[args[4]].view(2, 5, 2, 64)
    assert torch.equal(rows.transpose(1, 2), args[11])
    plain = OPERATOR.overload(*args[:2], None, None, *args[4:], **kwargs)[2]
    assert torch.equal(k_rope[..., 16:], plain[..., 16:])
    assert not torch.equal(k_rope[..., :16], plain[..., :16])


def test_results_come_in_the_order_of_v1():
    """v1: caches first; v2_functional: the two rows first."""
    names = [result.name for result in OPERATOR.overload._schema.returns]
    assert names == ["k_cache", "ckv_cache", "k_rope", "c_kv"]
    args, kwargs = build("Norm")
    shapes = [tuple(result.shape) for result in OPERATOR.overload(*args, **kwargs)]
    assert shapes == [(2, 1, 6, 32), (2, 1, 6, 64), (2, 1, 5, 32), (2, 1, 5, 64)]


@pytest.mark.parametrize(("mode", "heads", "quantize"), FORMS)
def test_functional_form_returns_written_copies_though_v2_functional_returns_unwritten_ones(mode, heads, quantize):
    """v2_functional writes the originals and returns the clones that it made before; v1 is functional by schema only.

    Here the functional form writes nothing, and only the twin, whose schema says so, writes the caches.
    """
    args, kwargs = build(mode, heads=heads, quantize=quantize)
    kept = [cache.clone() for cache in args[5:7]]
    results = OPERATOR.overload(*args, **kwargs)
    for cache, old, result in zip(args[5:7], kept, results, strict=False):
        assert torch.equal(cache, old)
        assert not torch.equal(result, old)
    assert not OPERATOR.overload._schema.is_mutable
    OPERATOR.inplace(*args, **kwargs)
    torch.testing.assert_close(args[5:7], results[:2], rtol=0, atol=0)


@pytest.mark.parametrize("mode", ["PA_NZ", "PA_BLK_NZ"])
def test_nz_int8_cache_keeps_its_width_though_the_document_says_a_last_dimension_of_32(mode):
    """32 columns are what one band of a stored page holds; the shape stays [BlockNum, BlockSize, 1, D]."""
    args, kwargs = build(mode, batch=1, steps=1, quantize="c", offset=False, spare=0)
    _, ckv_cache, _, c_kv = OPERATOR.overload(*args, **kwargs)
    assert ckv_cache.shape == (1, 32, 1, 64)
    for d in (0, 31, 32, 63):
        at = nz_offset(int(args[4][0]), d, 32, 64, 1)
        assert abs(int(element_at(ckv_cache, at)) - float(c_kv[0, 0, 0, d] * args[8][d])) <= 0.501
    flat = ckv_cache.contiguous().flatten()
    assert flat[32 * 32 + 32 * int(args[4][0])] == element_at(ckv_cache, nz_offset(int(args[4][0]), 32, 32, 64, 1))


@pytest.mark.parametrize("mode", MODES[1:])
@pytest.mark.parametrize("heads", [0, 2])
def test_is_output_kv_changes_nothing(mode, heads):
    """The document: the last two results exist only with it; here they are always right."""
    args, kwargs = build(mode, heads=heads)
    without, given = (OPERATOR.overload(*args, **kwargs, is_output_kv=wanted) for wanted in (False, True))
    torch.testing.assert_close(without, given, rtol=0, atol=0)
    matches_oracle(args, kwargs, without)


@pytest.mark.parametrize("heads", [0, 2])
def test_is_output_kv_is_ignored_in_norm_and_refused(heads):
    """The document: it takes effect in paged modes only; the kernel sets it to False."""
    args, kwargs = build("Norm", heads=heads)
    message = "is_output_kv is True; it must be False with cache_mode 'Norm', where the kernel ignores it"
    refuses(OPERATOR, args, kwargs | {"is_output_kv": True}, message)


KV, GAMMA, COS, SIN, INDEX, K_CACHE, CKV_CACHE, K_SCALE, C_SCALE, K_OFFSET, C_OFFSET, V = range(12)


def one_step_of_tables(args, _):
    args[COS : SIN + 1] = [table[:, :, :1] for table in args[COS : SIN + 1]]


def ones(*shape, dtype=torch.float32):
    return lambda _: torch.ones(shape, dtype=dtype)


# For each base case (mode, heads, quantised caches) what spoils it, and the sentence that says so.
REFUSALS = {
    ("Norm", 0, ""): [
        (change(KV, lambda kv: kv[:, 0]), r"kv has shape \[2, 5, 96\]; it must be \[B, 1, S, Hckv\+Dr\]"),
        (change(KV, lambda kv: kv.repeat(1, 2, 1, 1)), r"kv has shape \[2, 2, 5, 96\]; it must be .* \[\*, 1, \*, "),
        (change(KV, torch.Tensor.int), "kv has dtype torch.int32; allowed"),
        (change(GAMMA, lambda g: g[None]), r"gamma has shape \[1, 64\]; it must be \[Hckv\]"),
        (change(GAMMA, lambda g: g.repeat(2)), "rope part Dr, -32 here"),
        (change(GAMMA, lambda g: g[1:]), "The rope width Dr is 33; it must be even"),
        (change(GAMMA, torch.Tensor.int), "gamma has dtype torch.int32"),
        (change(COS, drop), "Only sin is given; cos and sin must both"),
        (change(COS, lambda t: t[:, :, :3]), r"cos has shape \[2, 1, 3, 32\]"),
        (change(SIN, lambda t: t[:, :, :1]), r"sin has shape \[2, 1, 1, 32\]"),
        (change(SIN, lambda t: t.to("meta")), "sin is on meta; it must be on cpu"),
        (change(INDEX, torch.Tensor.int), "index has dtype torch.int32; allowed: torch.int64"),
        (change(INDEX, lambda i: i.flatten()), r"index has shape \[10\]; it must be \[B, S\]"),
        (change(INDEX, lambda i: i + 6), "index holds .*; it must be below 6"),
        (change(K_CACHE, torch.Tensor.double), "k_cache has dtype torch.float64; allowed: torch.float32, torch.int8"),
        (change(K_CACHE, lambda c: c[:1]), r"k_cache has shape \[1, 1, 6, 32\]"),
        (change(K_CACHE, lambda c: c.to("meta")), "k_cache is on meta; it must be on cpu"),
        (change(CKV_CACHE, lambda c: c[..., 1:]), r"ckv_cache has shape \[2, 1, 6, 63\]"),
        (change(CKV_CACHE, torch.Tensor.char), "c_kv_scale is None; it must be a tensor with ckv_cache of"),
        (change(K_SCALE, ones(32)), "k_rope_scale is given; it must be None with k_cache of dtype torch.float32"),
        (change(C_OFFSET, ones(64)), "c_kv_offset is given and c_kv_scale is None; an offset needs its scale"),
        (change(V, ones(2, 1, 5, 64)), r"gamma has shape \[64\]; it must be \[Dk\] = \[96\]"),
        (option(cache_mode="BSND"), "cache_mode is 'BSND'; allowed: 'Norm', 'BNSD', 'PA', 'PA_BNSD', 'PA_NZ', "),
        (option(rope_layout="half"), "rope_layout is 'half'; allowed"),
    ],
    ("BNSD", 0, ""): [
        (change(INDEX, ones(2, 5, dtype=torch.int64)), "index is given; it must be None with cache_mode 'BNSD'"),
        (change(K_CACHE, lambda c: c[:, :, 1:]), r"k_cache has shape \[2, 1, 4, 32\]; it must be \[B, 1, S, Dr\] ="),
        (option(is_output_kv=True), "is_output_kv is True; it must be False with cache_mode 'BNSD'"),
    ],
    ("PA", 0, ""): [
        (change(INDEX, drop), "index is None; it must be a tensor with cache_mode 'PA'"),
        (change(INDEX, lambda i: i.view(2, 5)), r"index has shape \[2, 5\]; it must be \[B\*S\]"),
        (change(INDEX, lambda i: i + 96), "index holds .*; it must be below 96, the number of slots"),
        (change(K_CACHE, lambda c: c[1:]), r"ckv_cache has shape \[3, 32, 1, 64\]; it must be .* = \[2, 32, 1, 64\]"),
        (change(K_CACHE, lambda c: c.transpose(1, 2)), r"k_cache has shape \[3, 1, 32, 32\]; it must be \[BlockNum, B"),
    ],
    ("PA_BNSD", 0, "kc"): [
        (one_step_of_tables, r"cos has shape \[2, 1, 1, 32\]; it must be \[B, 1, S, Dr\] = \[2, 1, 5, 32\]"),
        (change(K_SCALE, drop), "k_rope_scale is None; it must be a tensor with k_cache of dtype torch.int8"),
        (change(K_SCALE, lambda s: s[1:]), r"k_rope_scale has shape \[31\]; it must be \[D\] = \[32\]"),
        (change(K_SCALE, lambda s: s.expand(2, -1)), r"k_rope_scale has shape \[2, 32\]; it must be \[1, D\] ="),
        (change(K_SCALE, lambda s: s[None, None]), r"k_rope_scale has shape \[1, 1, 32\]; it must be \[D\] or"),
        (change(C_SCALE, torch.Tensor.double), "c_kv_scale has dtype torch.float64; allowed: torch.float32"),
        (change(C_SCALE, lambda s: s.to("meta")), "c_kv_scale is on meta"),
        (change(CKV_CACHE, torch.Tensor.float), "c_kv_scale is given; it must be None with ckv_cache of"),
        (lambda args, _: args.__setitem__(slice(5, 7), [c[:, :16] for c in args[5:7]]),
         "BlockSize, axis 1 of k_cache, is 16; it must be a multiple of 32 with cache_mode 'PA_BNSD' and caches"),
    ],
    ("PA_NZ", 0, ""): [
        (lambda args, _: args.__setitem__(slice(5, 7), [c[:, :8] for c in args[5:7]]),
         "BlockSize, axis 1 of k_cache, is 8; it must be a multiple of 16 with cache_mode 'PA_NZ'"),
        (one_step_of_tables, r"cos has shape \[2, 1, 1, 32\]; it must be \[B, 1, S, Dr\] = \[2, 1, 5, 32\]"),
        (change(K_CACHE, lambda c: c.repeat(1, 1, 1, 2)[..., ::2]), "k_cache has .* strides .*; only axis 0 may"),
        (change(CKV_CACHE, lambda c: c.repeat(1, 2, 1, 1)[:, ::2]), "ckv_cache has .* strides .*; only axis 0"),
        (change(INDEX, lambda i: i + 96), "index holds .*; it must be below 96"),
    ],
    ("PA_BLK_BNSD", 0, ""): [
        (change(INDEX, lambda i: i.repeat(2)), r"index has shape \[4\]; it must be \[B\*Ceil\(S/BlockSize\)\] = \[2\]"),
        (change(INDEX, lambda i: i + 96), "index holds .*; it must be below 96"),
        (lambda args, _: args.__setitem__(slice(5, 7), [c[:1] for c in args[5:7]]), "k_cache has 1 blocks; .* needs"),
        (one_step_of_tables, r"cos has shape \[2, 1, 1, 32\]; it must be \[B, 1, S, Dr\] = \[2, 1, 5, 32\]"),
    ],
    ("PA_BLK_NZ", 0, "c"): [
        (change(INDEX, lambda i: i[1:]), r"index has shape \[1\]; it must be \[B\*Ceil\(S/BlockSize\)\]"),
        (lambda args, _: args.__setitem__(slice(5, 7), [c[:, :16] for c in args[5:7]]),
         "BlockSize, axis 1 of k_cache, is 16; it must be a multiple of 32 .* torch.float32 and torch.int8"),
        (change(C_SCALE, drop), "c_kv_scale is None; it must be a tensor with ckv_cache of dtype torch.int8"),
    ],
    ("Norm", 2, ""): [
        (option(kc_scale=0.5), "kc_scale is 0.5; it must be 1.0 with v, whose rows are stored as they are"),
        (change(V, lambda v: v[:, :1]), r"v has shape \[2, 1, 5, 64\]; it must be \[B, N, S, Dv\] = \[2, 2, 5, \*\]"),
        (change(V, torch.Tensor.double), "v has dtype torch.float64; it must be torch.float32"),
        (change(V, lambda v: v[0]), r"v has shape \[2, 5, 64\]"),
        (change(V, drop), r"kv has shape \[2, 2, 5, 32\]; it must be \[B, 1, S, Hckv\+Dr\]"),
        (change(KV, lambda kv: kv[:, [0, 0, 1]]), "kv has 3 heads; allowed with v: 1, 2, 4, 8"),
        (change(GAMMA, lambda g: g[:16]), r"gamma has shape \[16\]; it must be \[Dk\] = \[32\]"),
        (change(COS, drop), "Only sin is given"),
        (change(COS, lambda t: t[..., 1:]), r"cos has shape \[2, 1, 5, 15\]"),
        (change(COS, lambda t: t[:, 0]), r"cos has shape \[2, 5, 16\]; it must be \[B, 1, S, Dr\]"),
        (lambda args, _: args.__setitem__(slice(2, 4), [t.repeat(1, 1, 1, 3) for t in args[2:4]]),
         "cos has 48 columns; at most the 32 of kv can be rotated"),
        (change(K_CACHE, lambda c: c[:, :1]), r"k_cache has shape \[2, 1, 6, 32\]; it must be \[B, N, T, Dk\]"),
        (change(K_CACHE, lambda c: c.mT.contiguous().mT), "k_cache has .* strides .*; only axis 0 may be strided"),
    ],
    ("PA", 2, "kc"): [
        (change(K_SCALE, lambda s: s[0]), r"k_rope_scale has shape \[32\]; it must be \[N, D\]"),
        (change(K_SCALE, drop), "k_rope_offset is given and k_rope_scale is None; an offset needs its scale"),
        (change(K_OFFSET, torch.Tensor.half), "k_rope_offset has dtype torch.float16; allowed: torch.float32"),
        (change(C_OFFSET, lambda o: o[:1]), r"c_kv_offset has shape \[1, 64\]; it must be \[N, D\] = \[2, 64\]"),
        (change(CKV_CACHE, lambda c: c[:, :, :1]), r"ckv_cache has shape \[3, 32, 1, 64\]; it must be \[BlockNum,"),
    ],
}  # fmt: skip


def refusals():
    for (mode, heads, quantize), rows in REFUSALS.items():
        for number, (spoil, message) in enumerate(rows):
            label = f"{mode}{', v' if heads else ''}{', int8' if quantize else ''}-{number}"
            yield pytest.param(mode, heads, quantize, spoil, message, id=label)


@pytest.mark.parametrize(("mode", "heads", "quantize", "spoil", "message"), list(refusals()))
def test_refusal_writes_nothing(mode, heads, quantize, spoil, message):
    args, kwargs = build(mode, heads=heads, quantize=quantize)
    args = list(args)
    spoil(args, kwargs)
    refuses(OPERATOR, args, kwargs, message)


@pytest.mark.parametrize("quantize", ["k", "c", "kc"])
@pytest.mark.parametrize("mode", ["Norm", "BNSD"])
def test_norm_takes_int8_though_the_kernel_rejects_it(mode, quantize):
    """The document names no mode; the kernel has no quantised store per batch row. Codes are those of pages."""
    args, kwargs = build(mode, quantize=quantize, block_size=7)
    results = OPERATOR.overload(*args, **kwargs)
    matches_oracle(args, kwargs, results)
    place = torch.arange(5).expand(2, -1) if args[INDEX] is None else args[INDEX]
    slots = (place + torch.tensor([[0], [32]])).flatten()
    pages = [torch.zeros(2, 32, 1, cache.shape[-1], dtype=cache.dtype) for cache in args[K_CACHE : CKV_CACHE + 1]]
    paged = OPERATOR.overload(*args[:4], slots, *pages, *args[7:], cache_mode="PA")
    for mine, theirs in zip(results, paged[:2], strict=False):
        rows = mine[torch.arange(2).unsqueeze(-1), 0, place]
        assert torch.equal(rows.flatten(0, 1), theirs.flatten(0, 2)[slots])


@pytest.mark.parametrize("mode", ["Norm", "BNSD"])
def test_int8_beside_tables_of_one_step(mode):
    args, kwargs = build(mode, quantize="kc")
    one_step_of_tables(args := list(args), kwargs)
    matches_oracle(args, kwargs)


@pytest.mark.parametrize(("dtype", "lanes"), [(torch.bfloat16, 16), (torch.float32, 8), (torch.float64, 4)])
def test_nz_needs_whole_bands(dtype, lanes):
    """A width that is no multiple of 32 bytes has no NZ page."""
    args, kwargs = _samples.sample(dtype, 0, "PA", 3)
    caches = [torch.zeros(2, 16, 1, width, dtype=dtype) for width in (lanes + 2, 2 * lanes)]
    tables = torch.ones(2, 1, 3, lanes + 2, dtype=dtype)
    kv, gamma = torch.ones(2, 1, 3, 3 * lanes + 2, dtype=dtype), torch.ones(2 * lanes, dtype=dtype)
    message = f"The width of k_cache is {lanes + 2}; it must be a multiple of {lanes}, as many {dtype} as are 32 bytes"
    refuses(OPERATOR, (kv, gamma, tables, tables, args[4], *caches), kwargs | {"cache_mode": "PA_NZ"}, message)


def test_plain_pages_may_have_any_size():
    args, kwargs = build("PA", block_size=32)
    caches = [cache.view(32, 3, 1, cache.shape[-1]) for cache in args[5:7]]
    matches_oracle((*args[:5], *caches, *args[7:]), kwargs)
