"""Operators without quantisation in float64: what each writes and returns, by its document."""

import itertools
import math

import torch

from lib.operators.harness import (
    TOLERANCE,
    as_tuple,
    double,
    mapped,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
LAYOUTS = ("interleave_half", "half_half", "interleave_interleave")


# The oracle: one token at a time, float64, from the formulas in the operators' docstrings.


def oracle_norm(row, gamma, epsilon):
    return row / math.sqrt(float(sum(value * value for value in row)) / len(row) + epsilon) * gamma


def oracle_rope(row, cos, sin, layout):
    if cos is None:
        return row
    half = len(row) // 2
    out = torch.empty_like(row)
    for i in range(half):
        first, second = (row[2 * i], row[2 * i + 1]) if layout.startswith("interleave") else (row[i], row[half + i])
        at_first, at_second = (i, half + i) if layout.endswith("_half") else (2 * i, 2 * i + 1)
        out[at_first] = first * cos[i] - second * sin[i]
        out[at_second] = second * cos[half + i] + first * sin[half + i]
    return out


def oracle_store(cache, batch, index, row, mode):
    if index < 0:
        return
    if mode == "Norm":
        cache[batch, 0, index] = row
    elif mode == "NZ":
        for column, value in enumerate(row):
            band, lane = divmod(column, cache.shape[3])
            cache[index // cache.shape[2], band, index % cache.shape[2], lane] = value
    else:
        cache[index // cache.shape[1], index % cache.shape[1], 0] = row


def table_row(table, b, s):
    """A row of a table [B or 1, S, Dr]; None stays None."""
    return None if table is None else table[min(b, table.shape[0] - 1), s]


def oracle_prolog(
    x, w_dq, w_uq, w_uk, w_dkv, gamma_cq, gamma_ckv, sin, cos, index, kv_cache, kr_cache, *,
    rmsnorm_epsilon_cq=1e-5, rmsnorm_epsilon_ckv=1e-5, cache_mode="PA_BSND", rope_layout="interleave_half",
    gamma_after_cast=False, qc_qr_scale=1.0, kc_scale=1.0,
):  # fmt: skip
    lead = x.shape[:-1]
    if x.dim() == 2:
        x = x[None]
        sin, cos, index = (None if value is None else value[None] for value in (sin, cos, index))
    batch, steps, _ = x.shape
    heads, nope, rank = w_uk.shape
    width = w_dkv.shape[1] - rank
    query = torch.empty(batch, steps, heads, rank).double()
    query_rope = torch.empty(batch, steps, heads, width).double()
    kv_cache, kr_cache = kv_cache.clone(), kr_cache.clone()
    for b in range(batch):
        for s in range(steps):
            angles = table_row(cos, b, s), table_row(sin, b, s)
            row = x[b, s] if w_dq is None else oracle_norm(x[b, s] @ w_dq, gamma_cq, rmsnorm_epsilon_cq)
            for n, head in enumerate((qc_qr_scale * row @ w_uq).split(nope + width)):
                query[b, s, n] = head[:nope] @ w_uk[n]
                query_rope[b, s, n] = oracle_rope(head[nope:], *angles, rope_layout)
            key = x[b, s] @ w_dkv
            latent = oracle_norm(key[:rank], gamma_ckv, rmsnorm_epsilon_ckv) * kc_scale
            key_rope = oracle_rope(key[rank:], *angles, rope_layout)
            if index is None:
                kv_cache.view(batch, steps, rank)[b, s] = latent
                kr_cache.view(batch, steps, width)[b, s] = key_rope
                continue
            slot = int(index[min(b, index.shape[0] - 1), s])
            oracle_store(kv_cache, b, slot, latent, cache_mode)
            oracle_store(kr_cache, b, slot, key_rope, cache_mode)
    return query.view(*lead, heads, rank), query_rope.view(*lead, heads, width), kv_cache, kr_cache


def oracle_softmax(scores, mask, is_causal, fill, sink=-math.inf):
    """One row of probabilities from T scores beside a sink, zeros where every score is minus infinity; and the
    logarithm of their sum."""
    if mask is not None:
        masked = -math.inf if fill is None else fill
        scores = scores.masked_fill(~mask, masked) if mask.dtype == torch.bool else scores + mask
    if is_causal is not None:
        scores = scores.masked_fill(torch.arange(len(scores)) > is_causal, -math.inf)
    highest = max(*scores.tolist(), sink)
    if highest == -math.inf:
        return torch.zeros_like(scores), -math.inf
    weights = torch.tensor([math.exp(value - highest) for value in scores.tolist()], dtype=torch.float64)
    total = weights.sum() + math.exp(sink - highest)
    return weights / total, highest + math.log(total)


def oracle_attention(
    query, query_rope, kv_cache, kr_cache, mask=None, context_lens=None, sinks=None, block_table=None, kv_scales=None,
    kr_scales=None, indices=None, weight_uk=None, weight_uv=None, lens=None, *, scale, is_causal=False, fill=None,
    return_lse=False, max_absorbed_tokens=0
):  # fmt: skip
    q, q_rope, (batch, steps, heads, width) = query, query_rope, query.shape
    same = torch.eye(width).double().expand(heads, -1, -1)  # heads without weights have the latents themselves
    w_uk, w_uv = (same, same) if weight_uk is None else (weight_uk, weight_uv)
    kv, kr = oracle_numbers(kv_cache, kv_scales), oracle_numbers(kr_cache, kr_scales)
    kv, kr = oracle_context(kv, block_table), oracle_context(kr, block_table)
    if q_rope is None:
        q_rope, kr = q.new_zeros(batch, steps, heads, 1), kv.new_zeros(batch, kv.shape[1], 1)
    if context_lens is not None:
        mask = oracle_visible(context_lens.expand(batch), steps, kv.shape[1])
    if lens is not None:
        owner = torch.tensor([number for number, length in enumerate(lens) for _ in range(length)])
        mask = owner == owner.unsqueeze(-1)
    out, sums = torch.empty(batch, steps, heads, w_uv.shape[1]).double(), torch.empty(batch, steps, heads).double()
    sizes = batch, heads, steps, kv.shape[1]
    mask = mask if indices is None else oracle_chosen(indices, mask, sizes)
    mask = None if mask is None else mask.expand(sizes)
    for b in range(batch):
        for n in range(heads):
            keys, values = kv[b] @ w_uk[n].T, kv[b] @ w_uv[n].T
            for s in range(steps):
                scores = (keys @ q[b, s, n] + kr[b] @ q_rope[b, s, n]) * scale
                row = None if mask is None else mask[b, n, s]
                sink = -math.inf if sinks is None else float(sinks[n])
                weights, sums[b, s, n] = oracle_softmax(scores, row, s if is_causal else None, fill, sink)
                out[b, s, n] = weights @ values
    return out, sums if return_lse else sums.new_empty(0)


def oracle_visible(lens, steps, context):
    """[B, 1, S, T]: the last row attends to as many keys as the length says, each row before it to one less."""
    visible = torch.zeros(len(lens), 1, steps, context).bool()
    for b, length in enumerate(lens.tolist()):
        for s in range(steps):
            for t in range(context):
                visible[b, 0, s, t] = t < length - (steps - 1 - s)
    return visible


def oracle_context(cache, table):
    """[B, T, width]: the rows of the blocks that a table names."""
    if table is None:
        return cache
    if cache.dim() == 4:
        cache = torch.stack([torch.stack([page[:, row].flatten() for row in range(page.shape[1])]) for page in cache])
    return torch.stack([torch.cat([cache[int(block)] for block in sequence]) for sequence in table])


def oracle_numbers(codes, scales):
    """Each code times the scale of its row and tile of columns."""
    if scales is None:
        return codes
    pages, rows, columns = codes.shape
    numbers, tile = torch.empty(codes.shape).double(), columns // scales.shape[2]
    for p, r, c in itertools.product(range(pages), range(rows), range(columns)):
        by = scales[min(p, scales.shape[0] - 1), min(r, scales.shape[1] - 1), c // tile]
        numbers[p, r, c] = float(codes[p, r, c]) * float(by)
    return numbers


def oracle_chosen(indices, mask, sizes):
    """A mask [B, N, S, T] under which the chosen keys alone are visible, as far as they are under another one."""
    chosen = torch.zeros(sizes).bool()
    for b, s in itertools.product(range(sizes[0]), range(sizes[2])):
        for key in indices[b, s, 0].tolist():
            chosen[b, :, s, key] |= key >= 0
    if mask is None:
        return chosen
    return chosen & mask if mask.dtype == torch.bool else mask.masked_fill(~chosen, -math.inf)


def oracle_index(
    query, key, weights, mask=None, lens=None, table=None, key_scale=None, *, sparse_count, scale=1.0, fill=None
):
    """Keys in the order of their scores, one score at a time."""
    batch, steps, heads, _ = query.shape
    keys, hidden = oracle_context(key, table), -math.inf if fill is None else fill
    factors = torch.ones_like(key[..., :1]) if key_scale is None else key_scale.unsqueeze(-1)
    factors = oracle_context(factors, table)
    context = keys.shape[1]
    if lens is not None:
        mask = oracle_visible(lens.expand(batch), steps, context)
    mask = None if mask is None else mask.expand(batch, 1, steps, context)
    indices = torch.full((batch, steps, 1, sparse_count), -1)
    values = torch.full(indices.shape, -math.inf, dtype=torch.float64)
    for b, s in itertools.product(range(batch), range(steps)):
        scores = []
        for t in range(context):
            products = [max(float(query[b, s, n] @ keys[b, t]), 0.0) for n in range(heads)]
            score = scale * sum(float(weights[b, s, n]) * product for n, product in enumerate(products))
            score *= float(factors[b, t, 0])
            if mask is not None:
                said = mask[b, 0, s, t]
                score = (score if said else hidden) if mask.dtype == torch.bool else score + float(said)
            scores.append(score)
        best = sorted(zip(scores, range(context), strict=True), reverse=True)[:sparse_count]
        values[b, s, 0, : len(best)] = torch.tensor([score for score, _ in best], dtype=torch.float64)
        indices[b, s, 0, : len(best)] = torch.tensor([key for _, key in best])
    return indices.int(), values


def oracle_rows(x, gamma, *, epsilon, gamma_after_cast=False):
    return (torch.stack([oracle_norm(row, gamma, epsilon) for row in x.reshape(-1, len(gamma))]).view(x.shape),)


def oracle_heads(x, cos, sin, *, rope_layout="interleave_half"):
    out = torch.empty_like(x)
    for b, s, n in itertools.product(*map(range, x.shape[:3])):
        out[b, s, n] = oracle_rope(x[b, s, n], table_row(cos, b, s), table_row(sin, b, s), rope_layout)
    return (out,)


def oracle_merge(outs, lses):
    """Row by row."""
    out, whole = torch.zeros_like(outs[0]), torch.full_like(lses[0], -math.inf)
    for row in itertools.product(*map(range, lses[0].shape)):
        weights = [math.exp(float(lse[row])) for lse in lses]
        if (total := sum(weights)) > 0:
            seen = [(part[row], weight) for part, weight in zip(outs, weights, strict=True) if weight > 0]
            out[row], whole[row] = sum(part * (weight / total) for part, weight in seen), math.log(total)
    return out, whole


ORACLES = {
    "merge_attention": oracle_merge,
    "mla_prolog": oracle_prolog,
    "attention": oracle_attention,
    "rms_norm": oracle_rows,
    "rope": oracle_heads,
    "lightning_index": oracle_index,
}
# For each result that is an updated cache, the argument that holds the old one.
CACHES = {"mla_prolog": {2: 10, 3: 11}}


def expect(operator, args, kwargs):
    """Both forms agree with the oracle; inputs stay unchanged, except the in-place form's caches."""
    name, (first, *_) = operator.name, (*args, *kwargs.values())
    dtype = (first[0] if isinstance(first, list) else first).dtype
    wide = dict(zip(kwargs, double(kwargs.values()), strict=True))
    wanted = ORACLES[name](*double(args), **wide)
    rtol, atol = TOLERANCE[dtype]
    before = mapped(torch.clone, args)
    results = as_tuple(operator.overload(*args, **kwargs))
    torch.testing.assert_close(mapped(torch.clone, args), before, rtol=0, atol=0)
    for place, (result, want) in enumerate(zip(results, wanted, strict=True)):
        is_sum = name.endswith("attention") and place == 1
        floating = torch.promote_types(dtype, torch.float32) if is_sum else dtype
        assert result.dtype == (floating if want.is_floating_point() else want.dtype)
        torch.testing.assert_close(result.double(), want.double(), rtol=rtol, atol=atol)
    if operator.inplace is None:
        return
    kept = as_tuple(operator.inplace(*before, **kwargs))
    caches = CACHES[name]
    torch.testing.assert_close(
        list(kept), [value for i, value in enumerate(results) if i not in caches], rtol=0, atol=0
    )
    for position, value in enumerate(before):
        output = next((results[i] for i, argument in caches.items() if argument == position), args[position])
        torch.testing.assert_close(value, output, rtol=0, atol=0)
