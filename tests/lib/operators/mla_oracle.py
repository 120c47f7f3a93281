"""multi_latent_attention again, one row and one head at a time in float64, from its formulas and byte addresses."""

import math
from typing import NamedTuple

import numpy as np
import torch

from lib.operators.harness import by_name, nd_offset, nz_offset
from mla_fx.ops.called.multi_latent_attention.operator import operator
from mla_fx.ops.called.multi_latent_attention.samples import sample

BLOCK = 128
FLOATING = ("krope_ctkv", "nzcache", "kvcache")
CACHES = (*FLOATING, "int8_nzcache")
RING = "calc_type_ring"


def drawn(cache_mode, contexts=(130, 2), dtype=torch.float16, seed=21, heads=8, **options):
    """The arguments of a sample by name."""
    _, args, kwargs = sample(dtype, seed, cache_mode, heads=heads, contexts=contexts, **options)
    return by_name(operator, args, kwargs)


def run(a, **changes):
    return operator.overload(**(a | changes))


class Row(NamedTuple):
    """A query row: its number in the query, its sequence and number there, and that sequence's rows and keys."""

    token: int
    sequence: int
    step: int
    steps: int
    context: int


class Answer(NamedTuple):
    """One row and head: the result, the mean of |values|, the tolerance for undecided int8 roundings, the logarithm."""

    out: np.ndarray
    spread: np.ndarray
    slack: np.ndarray
    lse: float


def each_row(a):
    token = 0
    for sequence, context in enumerate(a["context_lens"].tolist()):
        steps = 1 if a["q_seqlen"] is None else int(a["q_seqlen"][sequence])
        for step in range(steps):
            yield Row(token, sequence, step, steps, context)
            token += 1


def cache_row(cache, slot, cache_mode):
    """The row of one slot as float64: each element from its address, in elements of the contiguous cache."""
    width = cache.numel() // (cache.shape[0] * BLOCK)
    columns = np.arange(width)
    if cache_mode in ("nzcache", "int8_nzcache"):
        # Rows of 32 bytes of int8 or 16-bit elements; wider dtypes keep the 16 elements a row.
        size = 1 if cache.dtype == torch.int8 else 2
        offset = nz_offset(slot, columns, BLOCK, width, size) // size
    else:
        offset = nd_offset(slot, columns, BLOCK, width, 1)
    return cache.flatten()[torch.from_numpy(offset)].double().numpy()


def visible(a, row):
    """The number of keys that a row sees."""
    causal = a["q_nope"].dtype == torch.int8 or a["q_nope"].shape[1] == 128
    return row.context - row.steps + row.step + 1 if causal and a["mask_type"] == "undefined" else row.context


def mask_term(a, row, position):
    """What the mask adds to the score of one key."""
    if a["mask_type"] == "undefined":
        return 0.0
    if a["mask_type"] == "mask_type_spec":
        return float(a["mask"][row.token, position])
    mask = a["mask"] if a["mask"].dim() == 2 else a["mask"][row.sequence]
    last = (row.context - 1) // BLOCK
    tail = row.context - BLOCK * last
    tile, column = divmod(position, BLOCK)
    if tile == last:
        line = tail - 1 + row.step
        return float(mask[line, column]) if line < len(mask) else 0.0
    if tile == last - 1 and tail < row.steps - 1:
        return float(mask[tail + 127 + row.step, column])
    return 0.0


def keys_of(a, row, count):
    """The first `count` keys of the row's sequence: latents and rope parts."""
    slots = [int(a["block_tables"][row.sequence, at // BLOCK]) * BLOCK + at % BLOCK for at in range(count)]
    latent = np.array([cache_row(a["ctkv"], slot, a["cache_mode"]) for slot in slots])
    if a["k_rope"] is None:
        return latent, None
    return latent, np.array([cache_row(a["k_rope"], slot, a["cache_mode"]) for slot in slots])


def scores_of(a, row, head, latent, key_rope, added):
    query = a["q_nope"][row.token, head].double().numpy()
    scores = latent @ query
    if a["qk_descale"] is not None:
        scores = scores * float(a["qk_descale"][head])
    if key_rope is not None:
        scores = scores + key_rope @ a["q_rope"][row.token, head].double().numpy()
    return scores * a["qk_scale"] + added


def answer(scores, values, pv_descale):
    if not len(scores):
        return Answer(np.zeros(512), np.zeros(512), np.zeros(512), -math.inf)
    largest = scores.max()
    weights = np.exp(scores - largest)
    total = weights.sum()
    lse = math.log(total) + largest
    spread = weights @ abs(values) / total
    if pv_descale is None:
        return Answer(weights @ values / total, spread, np.zeros(512), lse)
    out, slack = int8_answer(scores, values)
    scale = float(pv_descale)
    return Answer(scale * out / total, scale * spread, scale * slack / total, lse)


def int8_answer(scores, values):
    """The weighted sum with int8 weights, not divided yet, and how far undecided roundings may move it."""
    final, largest, out, slack = scores.max(), -math.inf, 0.0, 0.0
    for start in range(0, len(scores), BLOCK):
        tile, held = scores[start : start + BLOCK], values[start : start + BLOCK]
        largest = max(largest, tile.max())
        scale = math.exp(tile.max() - largest) / 127
        ratio = np.exp(tile - largest) / scale
        # float32 scores and exponentials are off by less than 1e-5 of the ratio.
        p8, lower, upper = (as_int8(ratio * factor) for factor in (1, 1 - 1e-5, 1 + 1e-5))
        final_scale = scale * math.exp(largest - final)
        out = out + p8 @ held * final_scale
        slack = slack + (upper - lower) @ abs(held) * final_scale
    return out, slack


def as_int8(ratio):
    """To float16, then to an integer, ties to even."""
    return np.rint(ratio.astype(np.float16).astype(np.float64)).clip(-128, 127)


def answers(a, row, heads):
    """One answer for each of the heads."""
    latent, key_rope = keys_of(a, row, max(visible(a, row), 0))
    added = [mask_term(a, row, position) for position in range(len(latent))]
    for head in heads:
        pv_descale = None if a["pv_descale"] is None else a["pv_descale"][head]
        scores = scores_of(a, row, head, latent, key_rope, added) if len(latent) else []
        yield answer(scores, latent[..., :512], pv_descale)


def compare(a, out, lse=None, rows=None, heads=None):
    """The results of the operator for arguments `a` by name, of all rows or some.

    A weight is rounded to the dtype before it is multiplied by its value, and so is the result: each moves it by one
    roundoff, of the mean of |values| for the weights, of itself for the result. Weights below float16's normal range
    lose up
    to 2^-25 each. Sums in the accumulation dtype add a little: for float32 and float64 that is all.
    """
    roundoff = torch.finfo(out.dtype).eps / 2
    sums = {torch.float64: 1e-14}.get(out.dtype, 4e-6)
    lost = 2**-25 * float(a["ctkv"].abs().max()) if out.dtype == torch.float16 else 0.0
    for row in each_row(a) if rows is None else rows:
        each_head = range(out.shape[1]) if heads is None else heads
        for head, wanted in zip(each_head, answers(a, row, each_head), strict=True):
            actual = out[row.token, head].double().numpy()
            rounded = abs(wanted.out) if a["pv_descale"] is not None else abs(wanted.out) + wanted.spread
            allowed = wanted.slack + roundoff * rounded + sums * (wanted.spread + abs(wanted.out))
            assert (abs(actual - wanted.out) <= allowed + row.context * lost).all(), (row, head)
            if lse is not None:
                limit = torch.finfo(lse.dtype).eps / 2 * abs(wanted.lse) + sums
                actual = float(lse[row.token, head, 0])
                assert actual == wanted.lse or abs(actual - wanted.lse) <= limit, (row, head)
