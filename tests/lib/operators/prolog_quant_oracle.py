"""mla_prolog_quant in float64, one token and head at a time, with the error bounds of every quantity.

Every quantity is a value and a slack: by how much a correct evaluation in the operator's arithmetic may miss it. Where
a rounding to 16 bits cannot go two ways, the slack is 0 behind it, so that most results are compared bit by bit.
"""

import math

import torch

from lib.operators.harness import CATALOGUE, by_name, element_at, nd_offset, result_names, same_tensors, twin_call

OPERATOR = CATALOGUE["mla_prolog_quant"]
CACHES = ("kv_cache", "kr_cache", "k_scale_cache")
ORACLE_EPSILON = {torch.float64: 2.0**-46}  # of the magnitudes that enter a sum of at most 64 terms
FLOAT32_EPSILON = 2.0**-20


class Bounded:
    """A float64 value and the slack of one evaluation of it in the arithmetic of `dtype`."""

    def __init__(self, value, slack, dtype):
        self.value, self.slack, self.dtype = value, slack, dtype
        self.epsilon = ORACLE_EPSILON.get(dtype, FLOAT32_EPSILON)

    def also(self, value, slack):
        """Another value, whose slack is `slack` and one more rounding."""
        return Bounded(value, slack + self.epsilon * value.abs(), self.dtype)

    def rounded(self):
        """Rounded to 16 bits if `dtype` has 16: exact again wherever the slack leaves one answer."""
        if self.dtype.itemsize > 2:
            return self
        low, value, high = ((self.value + step).to(self.dtype).double() for step in (-self.slack, 0, self.slack))
        return Bounded(value, torch.maximum(high - value, value - low), self.dtype)

    def __getitem__(self, index):
        return Bounded(self.value[index], self.slack[index], self.dtype)

    def times(self, factor):
        return self.also(self.value * factor, self.slack * abs(factor))

    def matmul(self, weight):
        magnitude = self.value.abs() @ weight.abs()
        return Bounded(self.value @ weight, self.slack @ weight.abs() + self.epsilon * magnitude, self.dtype)

    def rms_norm(self, gamma, epsilon):
        power = float(sum(x * x for x in self.value)) + len(self.value) * epsilon
        root = math.sqrt(power / len(self.value))
        value = gamma * self.value / root
        drift = float(self.value.abs() @ self.slack) / power + self.epsilon
        return self.also(value, (gamma / root).abs() * self.slack + value.abs() * drift)

    def rope(self, cos, sin):
        half = len(cos) // 2
        value, slack = torch.empty_like(cos), torch.empty_like(cos)
        for i in range(half):
            first, second = self[2 * i], self[2 * i + 1]
            for place, one, other, sign in ((i, first, second, -1), (half + i, second, first, 1)):
                terms = one.value * cos[place], sign * other.value * sin[place]
                value[place] = sum(terms)
                slack[place] = one.slack * abs(cos[place]) + other.slack * abs(sin[place])
                slack[place] += self.epsilon * (abs(terms[0]) + abs(terms[1]))
        return Bounded(value, slack, self.dtype)

    def symmetric_codes(self):
        """Codes before rounding, and their scale."""
        largest, drift = self.value.abs().max(), self.slack.max()
        codes = self.value * 127 / largest
        slack = self.slack * 127 / largest + codes.abs() * (drift / largest + self.epsilon)
        return self.also(codes, slack), self.also(largest / 127, drift / 127), None

    def asymmetric_codes(self):
        """Codes before rounding, their scale and their offset."""
        largest, smallest, drift = self.value.max(), self.value.min(), self.slack.max()
        s = max((largest - smallest) / 255, torch.tensor(1e-12))
        scale = self.also(s, 2 * drift / 255)
        loss = scale.slack / s + self.epsilon
        offset = self.also(127 - largest / s, drift / s + largest.abs() / s * loss)
        codes = self.value / s + offset.value
        return self.also(codes, self.slack / s + (self.value / s).abs() * loss + offset.slack), scale, offset

    def as_codes(self):
        """Codes after rounding: exact wherever the slack leaves one answer."""
        low, value, high = ((self.value + step).round() for step in (-self.slack, 0, self.slack))
        return Bounded(value, torch.maximum(high - value, value - low), self.dtype)

    def dequantised(self, scale, columns):
        """An integer product times the scale of its row, itself bounded, and those of its columns."""
        factors = columns * scale.value
        drift = self.value.abs() * columns * scale.slack
        return self.also(self.value * factors, self.slack * factors + drift)

    def check(self, actual):
        """`actual` is a rounding to its own dtype of something within the slack."""
        low, high = (to_dtype(self.value + step, actual.dtype) for step in (-self.slack, self.slack))
        assert bool(((low <= actual) & (actual <= high)).all()), (actual, self.value, self.slack)


def to_dtype(value, dtype):
    return value.round().clamp(-128, 127).to(dtype) if dtype == torch.int8 else value.to(dtype)


def check_against_oracle(args, kwargs, results, before):
    """`results` by name are right, and caches differ from `before` in the named slots only."""
    a = by_name(OPERATOR, args, kwargs)
    dtype = a["token_x"].dtype
    a = {name: value.double() if torch.is_tensor(value) else value for name, value in a.items()}
    for token in range(len(a["token_x"])):
        row = Bounded(a["token_x"][token], torch.zeros(a["token_x"].shape[1]).double(), dtype)
        check_query(a, row, token, results)
        if a["cache_index"][token] >= 0:
            check_key(a, row, token, results)
    written = {int(slot) for slot in a["cache_index"] if slot >= 0}
    for name in CACHES:
        kept = [slot for slot in range(before[name].shape[0] * before[name].shape[1]) if slot not in written]
        same_tensors([results[name + "_out"].flatten(0, 1)[kept]], [before[name].flatten(0, 1)[kept]])


def projected(a, row, name):
    """A row of token_x through w_dq or w_dkv_kr."""
    if a[f"dequant_scale_{name}"] is None:
        return row.matmul(a[name]).rounded()
    codes, scale, _ = row.symmetric_codes()
    return codes.as_codes().matmul(a[name]).dequantised(scale, a[f"dequant_scale_{name}"][0]).rounded()


def check_query(a, row, token, results):
    norm = projected(a, row, "w_dq").rms_norm(a["gamma_cq"], a["epsilon_cq"]).rounded()
    actual = results["q_norm_out"][token]
    if actual.dtype != torch.int8:
        norm.check(actual)
        assert results["q_norm_scale_out"].shape == (0,)
        up = Bounded(actual.double(), torch.zeros_like(norm.value), row.dtype).matmul(a["w_uq_qr"])
    else:
        smooth = a["smooth_scales_cq"]
        z = norm if smooth is None else norm.times(smooth.flatten())
        codes, scale, offset = z.symmetric_codes() if a["is_symmetry"] else z.asymmetric_codes()
        codes.check(actual)
        scale.check(results["q_norm_scale_out"][token, 0])
        # From here on the actual codes count: a tie that was rounded the other way is not an error.
        shifted = actual.double() if offset is None else actual.double() - offset.value
        slack = torch.zeros_like(shifted) if offset is None else offset.slack.expand_as(shifted)
        up = Bounded(shifted, slack, row.dtype).matmul(a["w_uq_qr"]).dequantised(scale, a["dequant_scale"][:, 0])
    up = up.rounded()
    heads, nope, _ = a["w_uk"].shape
    for head in range(heads):
        part = up[head * (len(up.value) // heads) :][: len(up.value) // heads]
        part[:nope].matmul(a["w_uk"][head]).check(results["query_nope_out"][token, head])
        part[nope:].rope(a["cos"][token], a["sin"][token]).check(results["query_rope_out"][token, head])


def check_key(a, row, token, results):
    slot = int(a["cache_index"][token])
    key = projected(a, row, "w_dkv_kr")
    rank = len(a["gamma_ckv"])
    latent = key[:rank].rms_norm(a["gamma_ckv"], a["epsilon_ckv"]).rounded()
    stored = {name: cache_row(results[name + "_out"], slot) for name in CACHES}
    key[rank:].rope(a["cos"][token], a["sin"][token]).check(stored["kr_cache"])
    if stored["kv_cache"].dtype != torch.int8:
        latent.check(stored["kv_cache"])
        return
    for tile in range(4):
        columns = slice(tile * rank // 4, (tile + 1) * rank // 4)
        codes, scale, _ = latent[columns].symmetric_codes()
        codes.check(stored["kv_cache"][columns])
        scale.check(stored["k_scale_cache"][tile])


def cache_row(cache, slot):
    """A row of a cache [BlockNum, BlockSize, 1, width] by the bytes of its elements."""
    width = cache.shape[-1]
    offsets = [nd_offset(slot, column, cache.shape[1], width, cache.element_size()) for column in range(width)]
    return torch.stack([element_at(cache, offset) for offset in offsets])


def functional(args, kwargs):
    return dict(zip(result_names(OPERATOR.overload), OPERATOR.overload(*args, **kwargs), strict=True))


def expect(args, kwargs):
    """Both forms agree with the oracle."""
    arguments = by_name(OPERATOR, args, kwargs)
    before = {name: arguments[name].clone() for name in CACHES}
    check_against_oracle(args, kwargs, functional(args, kwargs), before)
    returned, after = twin_call(OPERATOR, args, kwargs)
    check_against_oracle(args, kwargs, returned | {name + "_out": after[name] for name in CACHES}, before)
