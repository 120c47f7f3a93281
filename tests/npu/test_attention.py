"""FusedInferAttentionScore as it is simulated, against attention in float64 of the same sequences."""

import re

import pytest
import torch

from npu.cpu_kernels import npu_fused_infer_attention_score_v2 as attention

pytestmark = pytest.mark.usefixtures("any_size")
N, D, DR, SIZE, SCALE = 4, 32, 16, 16, 0.15
LENGTHS = [37, 20]
TABLE = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
LATENT = {
    "num_query_heads": N,
    "num_key_value_heads": 1,
    "input_layout": "BSND",
    "block_size": SIZE,
    "actual_seq_kvlen": LENGTHS,
    "softmax_scale": SCALE,
}
CAUSAL = {"sparse_mode": 3, "atten_mask": TABLE}


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
    whole = torch.cat(rows, 1) if layout == "TND" else torch.stack(rows)
    return whole.transpose(-3, -2).contiguous() if layout != "BNSD" else whole


def joined(rows, ropes):
    return [torch.cat(pair, -1) for pair in zip(rows, ropes, strict=True)]


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize(("layout", "form"), [("BSND", 3), ("BSND", 5), ("BNSD", 4), ("TND", 3), ("TND", 5)])
def test_latent_attention(layout, form, steps):
    torch.manual_seed(0)
    queries, ropes = ([normal(N, steps, width) for _ in LENGTHS] for width in (D, DR))
    latents, key_ropes = ([normal(1, length, width) for length in LENGTHS] for width in (D, DR))
    cache, table = paged(latents, form)
    options = LATENT | {"block_table": table, "key_rope": paged(key_ropes, form)[0], "input_layout": layout}
    options |= {"actual_seq_qlen": [steps, 2 * steps]} if layout == "TND" else {}
    options |= CAUSAL if steps > 1 else {}
    query, rope = laid_out(queries, layout), laid_out(ropes, layout)
    out, _ = attention(query, cache, cache, query_rope=rope, **options)
    oracle = expected(joined(queries, ropes), joined(latents, key_ropes), latents, steps > 1)
    torch.testing.assert_close(out, laid_out(oracle, layout).bfloat16(), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("has_ropes", [False, True])
def test_expanded_attention(has_ropes, is_causal):
    torch.manual_seed(0)
    steps = [5, 20]
    queries, ropes = ([normal(N, step, width) for step in steps] for width in (D, DR))
    keys, values = ([normal(2, length, D) for length in LENGTHS] for _ in range(2))
    key_ropes = [normal(2, length, DR) for length in LENGTHS]
    whole = (joined(queries, ropes), joined(keys, key_ropes)) if has_ropes else (queries, keys)
    given = {"query_rope": laid_out(ropes, "TND"), "key_rope": laid_out(key_ropes, "TND")} if has_ropes else {}
    out, lse = attention(
        *(laid_out(rows, "TND") for rows in (queries, keys, values)),
        actual_seq_qlen=[5, 25],
        actual_seq_kvlen=[37, 57],
        num_query_heads=N,
        num_key_value_heads=2,
        softmax_scale=SCALE,
        input_layout="TND",
        return_softmax_lse=True,
        **given,
        **(CAUSAL if is_causal else {}),
    )
    oracle = expected(*whole, values, is_causal)
    torch.testing.assert_close(out, laid_out(oracle, "TND").bfloat16(), rtol=2e-2, atol=2e-2)
    assert list(lse.shape) == [25, N, 1]


def test_lengths_may_be_free(converted):
    """One graph for a cache that grows: lengths are numbers of the host, and inputs of the graph."""
    torch.manual_seed(0)
    query, rope, latents, key_ropes = normal(N, 1, D), normal(N, 1, DR), normal(1, 37, D), normal(1, 37, DR)
    cache, table = paged([latents], 3)
    rope_cache, _ = paged([key_ropes], 3)

    def attend(query, rope, cache, rope_cache, table, length):
        options = {**LATENT, "actual_seq_kvlen": [length], "block_table": table}
        attention = torch.ops.npu.npu_fused_infer_attention_score_v2
        return attention(query, cache, cache, query_rope=rope, key_rope=rope_cache, **options)[0]

    run = converted.compiled(attend, dynamic=True)
    for length in (35, 36, 37):
        found = run(laid_out([query], "BSND"), laid_out([rope], "BSND"), cache, rope_cache, table, length)
        keys = torch.cat([latents, key_ropes], -1)[:, :length]
        oracle = expected([torch.cat([query, rope], -1)], [keys], [latents[:, :length]], False)
        torch.testing.assert_close(found, laid_out(oracle, "BSND").bfloat16(), rtol=2e-2, atol=2e-2)
    assert len(converted.graphs) == 1
    assert converted.types(converted.graphs[0]) == ["FusedInferAttentionScore", "NetOutput"]


@pytest.mark.parametrize(
    ("sentence", "steps", "options"),
    [
        ("sparse_mode is 0 for 3 queries; it must be 3", 3, {}),
        ("sparse_mode is 3 for 1 queries; it must be 0", 1, CAUSAL),
        ("a sequence has 17 queries; latent attention takes up to 16", 17, CAUSAL),
        ("atten_mask is given with sparse_mode 0", 1, {"atten_mask": TABLE}),
        ("atten_mask is not given; sparse_mode 3 needs", 3, {"sparse_mode": 3}),
        ("atten_mask is [3, 37]; with sparse_mode 3 it is 2048 x 2048", 3, CAUSAL | {"atten_mask": TABLE[:3, :37]}),
        ("num_key_value_heads is 2; of latent attention it is 1", 1, {"num_key_value_heads": 2}),
        ("num_heads is 6; of latent attention a power of 2", 1, {"num_query_heads": 6}),
        ("block_size is 32, the cache [8, 16, 32] has blocks of 16", 1, {"block_size": 32}),
        ("block_table is not given; BSND reads pages alone", 1, {"block_table": None}),
        ("input_layout is 'BSH'; the interpreter knows", 1, {"input_layout": "BSH"}),
        ("['dequant_scale_query'] are given; the interpreter knows no", 1, {"dequant_scale_query": torch.ones(1)}),
        ("nothing else has it", 1, {"actual_seq_qlen": [1, 1]}),
    ],
)
def test_what_latent_attention_does_not_allow(sentence, steps, options):
    options = LATENT | {"block_table": torch.arange(8, dtype=torch.int32).view(2, 4)} | options
    query, rope = (normal(2, steps, options["num_query_heads"], width) for width in (D, DR))
    cache = normal(8, SIZE, D)
    with pytest.raises(ValueError, match=re.escape(sentence)):
        attention(query, cache, cache, query_rope=rope, key_rope=normal(8, SIZE, DR), **options)


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
def test_what_paged_heads_do_not_allow(sentence):
    change = {"steps": 1, "table": [[0, 1, 2, 3], [4, 5, 6, 7]], "lengths": LENGTHS, "columns": D} | HEADS[sentence]
    layout, steps = change.get("layout", "BSND"), change["steps"]
    query = normal(2, steps, N, D) if layout == "BSND" else normal(2, N, D)
    keys, values = (normal(8, SIZE, 2 * change["columns"]).to(change.get("dtype", torch.bfloat16)) for _ in range(2))
    options = {**LATENT, "num_key_value_heads": 2, "input_layout": layout, "actual_seq_kvlen": change["lengths"]}
    options |= CAUSAL if steps > 1 else {}
    options |= {"actual_seq_qlen": [1, 2]} if layout == "TND" else {}
    with pytest.raises(ValueError, match=re.escape(sentence)):
        attention(query, keys, values, block_table=torch.tensor(change["table"], dtype=torch.int32), **options)
