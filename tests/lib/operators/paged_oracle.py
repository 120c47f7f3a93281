"""paged_attention again, one query row and head at a time in float64, from its formulas and cache addresses.

All arguments are by name in `a`; L is a context, t a row of query, r its place among the q of its sequence.
"""

import math
from types import SimpleNamespace

import numpy as np
import torch

from lib.operators.harness import CATALOGUE, first_of, nd_offset, nz_offset

# Half the distance of neighbouring numbers, relative to them.
ROUNDOFF = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24, torch.float64: 2.0**-53}


def numbers(tensor):
    return tensor.double().numpy() if tensor.is_floating_point() else tensor.numpy()


def pages_of(a, cache, width, heads, entry, head, length):
    """The rows [L, width] of one key head, read at the addresses of the cache's format."""
    nz = cache.shape[-1] == 16 and a.query.shape[2] != 16
    block_size = cache.shape[2] if nz or a.input_layout == "type_bnsd" else cache.shape[1]
    position = np.arange(length)
    block = a.block_tables.numpy()[entry][position // block_size].astype(np.int64)
    slot, column = (block * block_size + position % block_size)[:, None], np.arange(width)[None, :]
    if nz:  # as in 16-bit caches, whose bands of 32 bytes hold 16 elements
        element = nz_offset(slot, head * width + column, block_size, heads * width, 2) // 2
    elif a.input_layout == "type_bnsd":
        row = (block * heads + head)[:, None] * block_size + (position % block_size)[:, None]
        element = nd_offset(row, column, block_size, width, 1)
    else:
        element = nd_offset(slot, head * width + column, block_size, heads * width, 1)
    return cache.contiguous().flatten()[torch.from_numpy(element)]


def descale_values(scale):
    """float32 scales, which int64 ones carry as bits."""
    raw = scale.numpy()
    return raw if raw.dtype == np.float32 else (raw & 0xFFFFFFFF).astype(np.uint32).view(np.float32)


def dequantized(a, rows, scale, offset, head):
    """int8 rows of key head `head` in the dtype of query."""
    width = rows.shape[1]
    columns = slice(head * width, (head + 1) * width)
    shift = np.float32(0) if offset is None else offset.numpy()[columns].astype(np.float32)
    values = (rows.numpy().astype(np.float32) + shift) * descale_values(scale)[columns]
    return numbers(torch.from_numpy(values).to(a.query.dtype))


def mask_row(a, b, h, t, r, q, length):
    """What is added to the scores of keys 0..L-1."""
    mask, place = numbers(a.mask), length - q + r
    nz = mask.ndim == 4 and mask.shape[3] == 16 and mask.shape[2] > 1
    if nz and a.mask_type == "mask_type_norm":
        row = nz_row(mask[b % len(mask)], 0)
    elif nz and a.mask_type == "mask_type_alibi":
        row = nz_row(mask[(b * a.query.shape[1] + h) % len(mask)], 0)
    elif nz and a.mask_type == "mask_type_spec":
        row = nz_row(mask[0], t)
    elif a.mask_type == "mask_type_norm":
        row = mask[b, 0] if mask.ndim == 3 else mask[0 if mask.shape[0] == 1 else place]
    elif a.mask_type == "mask_type_alibi":
        row = mask[h, 0] if mask.ndim == 3 else mask[b, min(h, mask.shape[1] - 1), 0]
    elif a.mask_type == "mask_type_spec":
        inverted = a.mla_v_head_size and a.mask.dtype == torch.bfloat16
        row = mask[t] * -3e38 if inverted else mask[t]
    elif a.mask_type == "mask_type_mask_free":
        row = np.array([free_entry(mask, r, j - (length - q)) for j in range(length)])
    else:
        start = max(0, length - 2048)
        table_row = nz_row(mask[0], place - start) if nz else mask.reshape(2048, 2048)[place - start]
        row = np.concatenate([np.zeros(start), table_row])
    return row[:length]


def nz_row(matrix, row):
    """A row of a matrix that is stored in bands of 16 columns, [C/16, R, 16]."""
    return np.concatenate([band[row] for band in matrix])


def free_entry(mask, row, column):
    """Repeats one 128 x 128 table along the diagonal; everything is visible left of it and nothing right of it."""
    if column // 128 < row // 128:
        return 0.0
    if column // 128 > row // 128:
        return -math.inf
    return mask[0, column % 128 // 16, row % 128, column % 16]


def attend(scores, values):
    """The result of one row, and the mean of |value| under its weights."""
    weights = np.exp(scores - scores.max())
    return weights @ values / weights.sum(), weights @ np.abs(values) / weights.sum()


def attend_int8(a, h, scores, values):
    """The result of one row whose weights become int8 tile by tile, and how far a weight close to a tie may move it."""
    total, slack, weight, largest = 0.0, 0.0, 0.0, -math.inf
    for start in range(0, len(scores), 128):
        tile, rows = scores[start : start + 128], values[start : start + 128]
        new = max(largest, tile.max())
        weights, decay = np.exp(tile - new), math.exp(largest - new)
        online = a.quant_type == "type_quant_qkv_online"
        unit = math.exp(tile.max() - new) / 127 if online else 1 / float(a.p_scale[h])
        exact = weights / unit
        rounded = np.rint(exact.astype(np.float16).astype(np.float64)).clip(-128, 127)
        factor = float(descale_values(a.v_descale)[h]) * (unit if online else 1)
        total = total * decay + rounded @ rows * factor
        slack = slack * decay + near_tie(exact) @ np.abs(rows) * factor
        weight, largest = weight * decay + weights.sum(), new
    return total / weight, slack / weight


def near_tie(exact):
    """Says if float32 error could change the int8 number: slightly more or less, and it rounds differently."""
    low, high = ((exact * (1 + sign * 1e-5)).astype(np.float16).astype(np.float64) for sign in (-1, 1))
    return np.rint(low) != np.rint(high)


def key_rows(a, entry, kv, length):
    """The keys and values [L, *] that key head `kv` sees, entry being the row of block_tables."""
    width, kv_heads = a.query.shape[2], a.kv_head_num or a.query.shape[1]
    shared, head = (1, 0) if a.compress_type != "compress_type_undefined" else (kv_heads, kv)
    keys = pages_of(a, a.key_cache, width, shared, entry, head, length)
    values_width = value_columns(a)
    if a.mla_v_head_size:
        values = keys[:, :values_width]
    else:
        values = pages_of(a, a.value_cache, values_width, shared, entry, head, length)
    if a.quant_type == "type_dequant_fusion":
        keys = dequantized(a, keys, a.k_descale, a.k_offset, kv)
        return keys, dequantized(a, values, a.v_descale, a.v_offset, kv)
    return numbers(keys).astype(np.float64), numbers(values).astype(np.float64)


def value_columns(a):
    nz = a.key_cache.shape[-1] == 16 and a.query.shape[2] != 16
    return a.mla_v_head_size or (a.query.shape[2] if nz else a.value_cache.shape[3])


def scores_of(a, keys, row, b, entry, h, t, r, q):
    """The scores of one query row and head."""
    scores, length = keys @ row, len(keys)
    if a.quant_type.startswith("type_quant_qkv"):
        scores = scores * float(descale_values(a.k_descale)[h])
    if a.razor_offset is not None:
        size, blocks = a.key_cache.shape[1], a.block_tables[entry].tolist()
        scores = scores + [float(a.razor_offset[blocks[j // size], j % size]) for j in range(length)]
    scores = scores * a.qk_scale * (1 if a.log_n is None else float(a.log_n[b]))
    return scores if a.mask is None else scores + mask_row(a, b, h, t, r, q, length)


def oracle(arguments):
    """attn_out with NaN in rows that are not produced, and the tolerance of a correct result."""
    a = SimpleNamespace(**arguments)
    tokens, heads, _ = a.query.shape
    kv_heads = a.kv_head_num or heads
    group, per = heads // kv_heads, 1 if a.compress_type == "compress_type_undefined" else kv_heads
    unit = ROUNDOFF[a.out_data_type or a.query.dtype]
    scaled = a.query if a.q_scale in (0, 1) else (a.query.double() * a.q_scale).to(a.query.dtype)
    query = numbers(scaled).astype(np.float64)
    out = np.full((tokens, heads, value_columns(a)), np.nan)
    error = np.zeros_like(out)
    contexts = a.context_lens.tolist()
    first = 0
    for b in range(len(contexts) // per):
        if not any(contexts[b * per : (b + 1) * per]):
            continue
        q = 1 if a.q_seq_lens is None else int(a.q_seq_lens[b])
        for h in range(heads):
            entry = b if per == 1 else b * per + h // group
            if contexts[entry] == 0:
                continue
            keys, values = key_rows(a, entry, h // group, contexts[entry])
            for r, t in enumerate(range(first, first + q)):
                scores = scores_of(a, keys, query[t, h], b, entry, h, t, r, q)
                if a.quant_type.startswith("type_quant_qkv"):
                    out[t, h], slack = attend_int8(a, h, scores, values)
                    error[t, h] = slack * 1.01 + unit * abs(out[t, h])
                else:
                    out[t, h], spread = attend(scores, values)
                    # The weights are rounded, each by a relative `unit`, and so is the result.
                    error[t, h] = unit * (abs(out[t, h]) + spread) * 1.02
        first += q
    return out, error


def close_to_oracle(actual, arguments):
    wanted, error = oracle(arguments)
    made = ~np.isnan(wanted)
    # Sums of float32 or float64 and their exponentials, and subnormal float16 weights.
    double = arguments["query"].dtype == torch.float64
    floor = 1e-12 if double else 4e-6 + (2e-5 if arguments["query"].dtype == torch.float16 else 0)
    difference = np.abs(numbers(actual) - wanted)[made]
    worst = (difference - error[made]).max(initial=0)
    assert worst <= floor, f"{worst} more than rounding explains"
    return made


OPERATOR = CATALOGUE["paged_attention"]


def case(mode, dtype=torch.float32, **changes):
    """The arguments by name of the first sample of a mode."""
    return first_of(mode, OPERATOR.name, dtype) | changes


def run(arguments):
    return OPERATOR.overload(**arguments)


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)
