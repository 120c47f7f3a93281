"""npu_fused_infer_attention_score, converted and run, against attention in float64 of the same sequences."""

import re

import pytest
import torch

pytestmark = pytest.mark.usefixtures("any_size")
N, D, DR, SIZE, SCALE = 4, 32, 16, 16, 0.15
LENGTHS = [37, 20]
TABLE = torch.ones(2048, 2048, dtype=torch.bool).triu(1)


LATENT = {
    "num_heads": N,
    "num_key_value_heads": 1,
    "input_layout": "BSND",
    "sparse_mode": 0,
    "block_size": SIZE,
    "actual_seq_lengths_kv": LENGTHS,
}


def normal(*shape):
    return torch.randn(shape).to(torch.bfloat16)


def expected(queries, keys, values, is_causal):
    """[N, S, D] of each sequence, from [N, S, *], [Nkv, L, *] and [Nkv, L, D]."""
    outputs = []
    for query, key, value in zip(queries, keys, values, strict=True):
        key, value = (x.repeat_interleave(query.shape[0] // x.shape[0], 0).double() for x in (key, value))
        scores = query.double() @ key.mT * SCALE
        steps, length = scores.shape[-2:]
        if is_causal:
            later = torch.arange(length) > torch.arange(steps)[:, None] + length - steps
            scores[:, later] = -torch.inf
        outputs.append(scores.softmax(-1) @ value)
    return outputs


def paged(rows, form):
    """A cache of pages in shuffled order and its block_table, from [1, L, D] of each sequence."""
    counts = [-(-row.shape[1] // SIZE) for row in rows]
    table = torch.full((len(rows), max(counts) + 1), -1, dtype=torch.int32)
    order = torch.tensor([5, 2, 0, 4, 1, 6, 3])[: sum(counts)].int()
    cache = normal(8, SIZE, rows[0].shape[-1]).to(rows[0].dtype)
    for row, number, blocks in zip(rows, range(len(rows)), order.split(counts), strict=True):
        table[number, : len(blocks)] = blocks
        for index, block in enumerate(blocks.tolist()):
            page = row[0, index * SIZE : (index + 1) * SIZE]
            cache[block, : len(page)] = page
    forms = {3: cache, 4: cache.unsqueeze(1), 5: cache.unflatten(-1, (-1, 16)).transpose(1, 2).unsqueeze(1)}
    return forms[form].contiguous(), table


def laid_out(rows, layout):
    """Queries [N, S, D] of each sequence in one tensor."""
    if "T" in layout:
        return torch.cat(rows, 1).permute(["NTD".index(axis) for axis in layout]).contiguous()
    out = torch.stack(rows).permute(["BNSD".index(axis) for axis in layout.replace("H", "ND")]).contiguous()
    return out.flatten(2) if layout.endswith("H") else out


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize(
    ("layout", "form"),
    [
        ("BSH", 3),
        ("BSH", 5),
        ("BSND", 3),
        ("BSND", 5),
        ("BNSD", 3),
        ("BNSD", 4),
        ("BSH_NBSD", 3),
        ("BSND_NBSD", 5),
        ("BNSD_NBSD", 4),
        ("TND", 3),
        ("TND", 4),
        ("TND_NTD", 5),
    ],
)
def test_latent_attention(converted, layout, form, steps):
    torch.manual_seed(0)
    queries, ropes = ([normal(N, steps, width) for _ in LENGTHS] for width in (D, DR))
    latents, key_ropes = ([normal(1, length, width) for length in LENGTHS] for width in (D, DR))
    cache, table = paged(latents, form)
    rope_cache, _ = paged(key_ropes, form)
    given, _, returned = layout.partition("_")
    is_ragged = "T" in layout
    is_causal = steps > 1

    @converted.compiled
    def attend(query, query_rope, cache, rope_cache, table, mask):
        return torch.ops.npu.npu_fused_infer_attention_score(
            query,
            cache,
            cache,
            query_rope=query_rope,
            key_rope=rope_cache,
            block_table=table,
            atten_mask=mask,
            actual_seq_lengths=[steps, 2 * steps] if is_ragged else None,
            actual_seq_lengths_kv=LENGTHS,
            num_heads=N,
            num_key_value_heads=1,
            scale=SCALE,
            input_layout=layout,
            sparse_mode=3 if is_causal else 0,
            block_size=SIZE,
        )

    tensors = [laid_out(rows, given) for rows in (queries, ropes)]
    out, _ = attend(*tensors, cache, rope_cache, table, TABLE if is_causal else None)
    whole = [
        [torch.cat(pair, -1) for pair in zip(*rows, strict=True)] for rows in [(queries, ropes), (latents, key_ropes)]
    ]
    oracle = expected(*whole, latents, is_causal)
    torch.testing.assert_close(out, laid_out(oracle, returned or given).bfloat16(), rtol=2e-2, atol=2e-2)
    assert converted.types(converted.graphs[0]) == ["FusedInferAttentionScore", "NetOutput"]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("layout", ["TND", "NTD_TND"])
def test_expanded_attention(converted, layout, is_causal):
    torch.manual_seed(0)
    steps = [5, 20]
    given, _, returned = layout.partition("_")
    queries, ropes = ([normal(N, step, width) for step in steps] for width in (D, DR))
    keys, values = ([normal(2, length, D) for length in LENGTHS] for _ in range(2))
    key_ropes = [normal(2, length, DR) for length in LENGTHS]

    @converted.compiled
    def attend(query, key, value, query_rope, key_rope, mask):
        return torch.ops.npu.npu_fused_infer_attention_score(
            query,
            key,
            value,
            query_rope=query_rope,
            key_rope=key_rope,
            atten_mask=mask,
            actual_seq_lengths=[5, 25],
            actual_seq_lengths_kv=[37, 57],
            num_heads=N,
            num_key_value_heads=2,
            scale=SCALE,
            input_layout=layout,
            sparse_mode=3 if is_causal else 0,
        )

    tensors = [laid_out(rows, given) for rows in (queries, keys, values, ropes, key_ropes)]
    out, _ = attend(*tensors, TABLE if is_causal else None)
    whole = [
        [torch.cat(pair, -1) for pair in zip(*rows, strict=True)] for rows in [(queries, ropes), (keys, key_ropes)]
    ]
    oracle = expected(*whole, values, is_causal)
    torch.testing.assert_close(out, laid_out(oracle, returned or given).bfloat16(), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("layout", ["BSH", "BSND", "BNSD", "BNSD_BSND", "TND"])
def test_plain_attention(converted, layout):
    """Without ropes: with sparse_mode 0 a mask is anything, and True hides."""
    torch.manual_seed(0)
    queries, keys, values = ([normal(heads, 9, D) for _ in range(2)] for heads in (N, 2, 2))
    given, _, returned = layout.partition("_")
    is_ragged = "T" in layout
    mask = None if is_ragged else torch.ones(9, 9, dtype=torch.bool).triu(1)
    ends = {name: [9, 18] for name in ("actual_seq_lengths", "actual_seq_lengths_kv")} if is_ragged else {}
    options = {"num_heads": N, "num_key_value_heads": 2, "input_layout": layout, "scale": SCALE, **ends}

    @converted.compiled
    def attend(query, key, value, mask):
        attention = torch.ops.npu.npu_fused_infer_attention_score
        return attention(query, key, value, atten_mask=mask, softmax_lse_flag=True, **options)

    out, lse = attend(*(laid_out(rows, given) for rows in (queries, keys, values)), mask)
    oracle = expected(queries, keys, values, mask is not None)
    torch.testing.assert_close(out, laid_out(oracle, returned or given).bfloat16(), rtol=2e-2, atol=2e-2)
    assert list(lse.shape) == ([18, N, 1] if is_ragged else [2, N, 9, 1])


def test_lengths_may_be_free(converted):
    """One graph for a cache that grows: lengths are numbers of the host, and inputs of the graph."""
    torch.manual_seed(0)
    query, rope, latents, key_ropes = normal(N, 1, D), normal(N, 1, DR), normal(1, 37, D), normal(1, 37, DR)
    cache, table = paged([latents], 3)
    rope_cache, _ = paged([key_ropes], 3)

    def attend(query, rope, cache, rope_cache, table, length):
        options = {**LATENT, "actual_seq_lengths_kv": [length], "scale": SCALE, "block_table": table}
        attention = torch.ops.npu.npu_fused_infer_attention_score
        return attention(query, cache, cache, query_rope=rope, key_rope=rope_cache, **options)[0]

    run = converted.compiled(attend, dynamic=True)
    for length in (35, 36, 37):
        found = run(laid_out([query], "BSND"), laid_out([rope], "BSND"), cache, rope_cache, table, length)
        keys = torch.cat([latents, key_ropes], -1)[:, :length]
        oracle = expected([torch.cat([query, rope], -1)], [keys], [latents[:, :length]], False)
        torch.testing.assert_close(found, laid_out(oracle, "BSND").bfloat16(), rtol=2e-2, atol=2e-2)
    assert len(converted.graphs) == 1


def test_int8_latent_attention(converted):
    """The rope scores are inside the scales, so that query_rope comes divided by them."""
    torch.manual_seed(0)
    queries, latents = (
        [torch.randint(-127, 128, (heads, n, D)).to(torch.int8) for n in lengths]
        for heads, lengths in ((N, (1, 1)), (1, LENGTHS))
    )
    ropes, key_ropes = [normal(N, 1, DR) for _ in LENGTHS], [normal(1, length, DR) for length in LENGTHS]
    scales, key_scale = 0.01 + 0.01 * torch.rand(2, 1, N), torch.tensor([0.02])
    cache, table = paged(latents, 3)
    cache = cache.unflatten(-1, (-1, 32)).transpose(1, 2).unsqueeze(1).contiguous()
    rope_cache, _ = paged(key_ropes, 5)

    @converted.compiled
    def attend(query, query_rope, cache, rope_cache, table, scales, key_scale):
        return torch.ops.npu.npu_fused_infer_attention_score_v2(
            query,
            cache,
            cache,
            query_rope=query_rope,
            key_rope=rope_cache,
            block_table=table,
            actual_seq_kvlen=LENGTHS,
            dequant_scale_query=scales,
            dequant_scale_key=key_scale,
            dequant_scale_value=key_scale,
            num_query_heads=N,
            num_key_value_heads=1,
            softmax_scale=SCALE,
            input_layout="BSND",
            block_size=SIZE,
            query_quant_mode=3,
        )

    out, _ = attend(laid_out(queries, "BSND"), laid_out(ropes, "BSND"), cache, rope_cache, table, scales, key_scale)
    by_head = scales.transpose(1, 2).unsqueeze(-1)
    query = [torch.cat([q * s, rope * s * key_scale], -1) for q, rope, s in zip(queries, ropes, by_head, strict=True)]
    value = [latent * key_scale for latent in latents]
    key = [torch.cat(pair, -1) for pair in zip(value, key_ropes, strict=True)]
    oracle = laid_out(expected(query, key, value, False), "BSND").bfloat16()
    torch.testing.assert_close(out, oracle, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    ("sentence", "steps", "mask", "options"),
    [
        ("sparse_mode is 0 for 3 queries; it must be 3", 3, None, {}),
        ("sparse_mode is 3 for 1 queries; it must be 0", 1, TABLE, {"sparse_mode": 3}),
        ("a sequence has 17 queries; latent attention takes up to 16", 17, TABLE, {"sparse_mode": 3}),
        ("atten_mask is given with sparse_mode 0", 1, TABLE, {}),
        ("atten_mask is not given; sparse_mode 3 needs", 3, None, {"sparse_mode": 3}),
        ("atten_mask is [3, 37]; with sparse_mode 3 it is 2048 x 2048", 3, TABLE[:3, :37], {"sparse_mode": 3}),
        ("num_key_value_heads is 2; of latent attention it is 1", 1, None, {"num_key_value_heads": 2}),
        ("num_heads is 6; of latent attention a power of 2", 1, None, {"num_heads": 6}),
        ("block_size is 32, the cache [8, 16, 32] has blocks of 16", 1, None, {"block_size": 32}),
    ],
)
def test_what_latent_attention_does_not_allow(converted, sentence, steps, mask, options):
    options = {**LATENT, **options}
    heads = options["num_heads"]
    query, rope = normal(2, steps, heads, D), normal(2, steps, heads, DR)
    table = torch.arange(8, dtype=torch.int32).view(2, 4)

    @converted.compiled
    def attend(query, rope, cache, rope_cache, table, mask):
        ropes = {"query_rope": rope, "key_rope": rope_cache}
        attention = torch.ops.npu.npu_fused_infer_attention_score
        return attention(query, cache, cache, **ropes, block_table=table, atten_mask=mask, **options)

    with pytest.raises(ValueError, match=re.escape(sentence)):
        attend(query, rope, normal(8, SIZE, D), normal(8, SIZE, DR), table, mask)


def test_latent_attention_reads_pages_alone(converted):
    query, rope, keys, key_rope = normal(2, 1, N, D), normal(2, 1, N, DR), normal(2, 9, 1, D), normal(2, 9, 1, DR)

    @converted.compiled
    def attend(query, rope, keys, key_rope):
        options = {"num_heads": N, "num_key_value_heads": 1, "input_layout": "BSND"}
        attention = torch.ops.npu.npu_fused_infer_attention_score
        return attention(query, keys, keys, query_rope=rope, key_rope=key_rope, **options)

    with pytest.raises(ValueError, match="block_table is not given; latent attention reads pages alone"):
        attend(query, rope, keys, key_rope)


HEADS = {
    "block_size is 16 for 3 queries; 128, 2 * 128 to 512": {"steps": 3},
    "block_table has [-1] for sequence 0; blocks are 0 to 7": {"table": [[0, 1, -1, 3], [4, 5, 6, 7]]},
    "block_table has [8] for sequence 1; blocks are 0 to 7": {"table": [[0, 1, 2, 3], [4, 8, 6, 7]]},
    "sequence 1 has 65 keys, and block_table 4 blocks": {"lengths": [37, 65]},
    "query has 32 columns a head, key 16": {"columns": 16},
    "input_layout is 'TND'; TND reads no pages here": {"layout": "TND"},
    "they are all bfloat16, or all float16": {"dtype": torch.float16},
}


@pytest.mark.parametrize("sentence", HEADS)
def test_what_paged_heads_do_not_allow(converted, sentence):
    change = {"steps": 1, "table": [[0, 1, 2, 3], [4, 5, 6, 7]], "lengths": LENGTHS, "columns": D} | HEADS[sentence]
    layout, steps = change.get("layout", "BSND"), change["steps"]
    query = normal(2, steps, N, D) if layout == "BSND" else normal(2, N, D)
    keys, values = (normal(8, SIZE, 2 * change["columns"]).to(change.get("dtype", torch.bfloat16)) for _ in range(2))
    options = {**LATENT, "num_key_value_heads": 2, "input_layout": layout, "actual_seq_lengths_kv": change["lengths"]}
    options |= {"sparse_mode": 3} if steps > 1 else {}
    options |= {"actual_seq_lengths": [1, 2]} if layout == "TND" else {}

    @converted.compiled
    def attend(query, keys, values, table, mask):
        attention = torch.ops.npu.npu_fused_infer_attention_score
        return attention(query, keys, values, block_table=table, atten_mask=mask, **options)

    mask = TABLE if steps > 1 else None
    with pytest.raises(ValueError, match=re.escape(sentence)):
        attend(query, keys, values, torch.tensor(change["table"], dtype=torch.int32), mask)
