"""mla_prolog_quant against a float64 computation, one token and head at a time, that carries its error bounds along.

Every quantity is a value and a slack: by how much a correct evaluation in the operator's arithmetic may miss it. Where
a rounding to 16 bits cannot go two ways, the slack is 0 behind it, so that most results are compared bit by bit.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_fx.ops.common.sample import Sampler
from mla_fx.ops.mla_prolog_quant import samples as _samples
from ops.harness import (
    CATALOGUE,
    by_name,
    cases,
    compiles_once,
    element_at,
    fake_with_free_sizes,
    hints,
    nd_offset,
    result_names,
    same_tensors,
    twin_call,
)

OPERATOR = CATALOGUE["mla_prolog_quant"]
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
CACHES = ("kv_cache", "kr_cache", "k_scale_cache")
MODES = {
    "quantised": {},
    "smooth": {"smooth": (24,)},
    "asymmetric": {"is_symmetry": False},
    "asymmetric, smooth": {"smooth": (1, 24), "is_symmetry": False},
    "unquantised": {"quantised": False},
    "int8 tokens": {"int8_tokens": True},
    "int8 tokens, asymmetric": {"int8_tokens": True, "is_symmetry": False},
    "int8 tokens, unquantised": {"int8_tokens": True, "quantised": False},
}
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
        # From here on the actual codes count: a tie that went the other way is no error behind it.
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
    if slot < 0:
        return
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


@pytest.mark.parametrize(("operator", "args", "kwargs"), cases(DTYPES, ["mla_prolog_quant"]))
def test_sample_against_oracle(operator, args, kwargs):
    dtype = args[0].dtype
    results = functional(args, kwargs)
    codes = torch.int8 if args[3].numel() else dtype
    wanted = (codes, torch.float32, dtype, dtype, codes, dtype, torch.float32)
    assert tuple(result.dtype for result in results.values()) == wanted
    expect(args, kwargs)


def named_sample(dtype=torch.float64, mode="quantised", seed=11, **options):
    """One sample's arguments by name."""
    args, kwargs = _samples.sample(dtype, seed, **MODES[mode], **options)
    return by_name(OPERATOR, args, kwargs)


SKIPS = {
    "slot 0 and skipped": [0, -1, -1, -1, 5, -7],
    "skipped before slot 0": [-1, -1, 0, -1, -1, -1],
    "all skipped": [-1] * 6,
    "none skipped": [0, 1, 2, 7, 8, 14],
    "both sides of a block's edge": [4, 5, -1, 9, 10, 14],
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("skip", SKIPS)
def test_negative_index_is_not_handled_by_the_source_but_skips(skip, mode):
    """The pypto function scatters whatever index it is given; the other operators of the family skip negative ones."""
    arguments = named_sample(torch.bfloat16, mode)
    expect((), arguments | {"cache_index": torch.tensor(SKIPS[skip])})


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("tokens", [0, 1])
def test_no_token_and_one_token(mode, tokens):
    expect((), named_sample(torch.float32, mode, tokens=tokens))


@pytest.mark.parametrize("mode", MODES)
def test_cache_without_blocks(mode):
    arguments = named_sample(torch.float32, mode) | {"cache_index": torch.full((6,), -1)}
    expect((), arguments | {name: arguments[name][:0] for name in CACHES})


@pytest.mark.parametrize("mode", MODES)
def test_hidden_size_may_be_odd(mode):
    """No column of an odd token_x is lost between the two halves."""
    arguments = named_sample(mode=mode)
    odd = {"token_x": arguments["token_x"][:, 1:]} | {name: arguments[name][1:] for name in ("w_dq", "w_dkv_kr")}
    expect((), arguments | odd)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gammas_and_tables_of_another_dtype(dtype):
    arguments = named_sample(torch.bfloat16)
    free = {name: arguments[name].to(dtype) for name in ("gamma_cq", "gamma_ckv", "cos", "sin")}
    same_tensors(functional((), arguments | free).values(), functional((), arguments).values())


def test_caches_may_be_views_of_larger_buffers():
    arguments = named_sample(torch.bfloat16)
    wanted = functional((), arguments)
    buffers = {name: torch.cat([arguments[name]] * 2, -1) for name in CACHES}
    views = {name: buffer[..., : arguments[name].shape[-1]] for name, buffer in buffers.items()}
    OPERATOR.inplace(**(arguments | views))
    for name, buffer in buffers.items():
        same_tensors([buffer], [torch.cat((wanted[name + "_out"], arguments[name]), -1)])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_nan_and_inf_stay_with_their_token(mode, poison):
    """Codes are 0 there, a rotated key is not finite, all else is NaN, scales included; other rows are as they were."""
    arguments = named_sample(torch.bfloat16, mode)
    clean = functional((), arguments)
    spoiled = arguments["token_x"].clone()
    spoiled[2, 7] = poison
    results = functional((), arguments | {"token_x": spoiled})
    slot = int(arguments["cache_index"][2])
    for name, result in results.items():
        if result.numel() == 0 or (name == "k_scale_cache_out" and "unquantised" in mode):
            same_tensors([result], [clean[name]])
            continue
        rows, wanted = (value.flatten(0, 1) if "cache" in name else value for value in (result, clean[name]))
        place = slot if "cache" in name else 2
        lost = rows[place].isfinite().logical_not() if name == "kr_cache_out" else rows[place].isnan()
        assert bool((rows[place] == 0).all() if result.dtype == torch.int8 else lost.all())
        others = [row for row in range(len(rows)) if row != place]
        same_tensors([rows[others]], [wanted[others]])


@pytest.mark.parametrize("skip", [0, 3, 6])
def test_garbage_in_the_caches_and_in_skipped_tokens_reaches_nothing(skip):
    arguments = named_sample(torch.bfloat16, skip=skip)
    garbage = {name: torch.full_like(arguments[name], math.nan) for name in CACHES[1:]}
    spoiled = arguments["token_x"].clone()
    spoiled[:skip] = math.nan
    wanted = functional((), arguments)
    results = functional((), arguments | garbage | {"token_x": spoiled})
    written = arguments["cache_index"][skip:]
    for name, result in results.items():
        if "cache" not in name:
            same_tensors([result[skip:]], [wanted[name][skip:]])
            continue
        same_tensors([result.flatten(0, 1)[written]], [wanted[name].flatten(0, 1)[written]])
        if name != "kv_cache_out":
            assert int(result.isnan().all(-1).sum()) == 15 - len(written)
    same_tensors([results["kv_cache_out"]], [wanted["kv_cache_out"]])


@pytest.mark.parametrize(("mode", "code", "scale"), [("quantised", 0, 0.0), ("asymmetric", 127, 1e-12)])
def test_a_token_of_zeros_is_zeros(mode, code, scale):
    """Nothing guards 127 / 0 in the symmetric form; 1e-12 is the least scale of the other."""
    arguments = named_sample(torch.bfloat16, mode)
    arguments["token_x"][3] = 0
    results = functional((), arguments)
    slot = divmod(int(arguments["cache_index"][3]), 5)
    assert bool((results["q_norm_out"][3] == code).all())
    assert results["q_norm_scale_out"][3].tolist() == torch.tensor([scale]).tolist()
    for name in ("query_nope", "query_rope", *CACHES):
        assert bool((results[name + "_out"][slot if name in CACHES else 3] == 0).all())


def test_asymmetric_codes_of_a_constant_token_still_give_its_value_back():
    """Scale 1e-12 makes an offset of about -1e12, which only an exact product with it survives."""
    arguments = named_sample(torch.float32, "asymmetric")
    arguments["w_dq"] = arguments["w_dq"][:, :1].expand(-1, 24)
    arguments["gamma_cq"] = torch.ones(24)
    results = functional((), arguments)
    wanted = functional((), arguments | {"is_symmetry": True})
    assert bool((results["q_norm_scale_out"] == torch.tensor(1e-12)).all())
    for name in ("query_nope_out", "query_rope_out"):
        torch.testing.assert_close(results[name], wanted[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_compiles_once_for_all_sizes(mode):
    # Without the epsilons: as floats of a closure they would be inputs of the graph, and compile it twice.
    fixed = {name: value for name, value in named_sample(torch.bfloat16, mode).items() if not isinstance(value, float)}
    moving = ("token_x", "cos", "sin", "cache_index", *CACHES)

    def layer(*tensors):
        return torch.ops.mla_fx.mla_prolog_quant(**(fixed | dict(zip(moving, tensors, strict=True))))

    compiles_once(layer, [sized(mode, *sizes) for sizes in ((7, 11, 13), (9, 6, 17), (19, 23, 14))])


def sized(mode, tokens, blocks, block_size, dtype=torch.bfloat16):
    """Those tensors of a sample whose sizes a decoder changes."""
    a = named_sample(dtype, mode, tokens=tokens)
    draw = torch.Generator().manual_seed(tokens)
    a["cache_index"] = torch.randperm(blocks * block_size, generator=draw)[:tokens]
    a["cache_index"][::3] = -1
    caches = [a[name][:1, :1].expand(blocks, block_size, 1, -1).contiguous() for name in CACHES]
    return [a["token_x"], a["cos"], a["sin"], a["cache_index"], *caches]


SIZES = {
    "tokens": st.integers(0, 5),
    "hidden": st.integers(2, 9),
    "compressed": st.integers(1, 9),
    "heads": st.integers(1, 3),
    "nope": st.integers(1, 5),
    "quarter": st.integers(1, 3),
    "half": st.integers(1, 3),
    "blocks": st.integers(1, 4),
    "block_size": st.integers(2, 5),
    "seed": st.integers(0, 99),
}


def drawn(mode, tokens, hidden, compressed, heads, nope, quarter, half, blocks, block_size, seed, dtype=torch.float64):
    """Arguments of the given sizes."""
    draw = Sampler(dtype, seed)
    rank, width, columns = 4 * quarter, 2 * half, heads * (nope + 2 * half)
    options = MODES[mode]
    quantised = options.get("quantised", True)
    int8_tokens = options.get("int8_tokens", False)

    def down(width):
        weight = draw.normal(hidden, width)
        return (40 * weight).round().clamp(-128, 127).to(torch.int8) if int8_tokens else weight

    weight, lead = draw.normal(compressed, columns), (blocks, block_size, 1)
    slots = draw.slots(min(tokens, blocks * block_size), blocks * block_size)
    return {
        "token_x": draw.normal(tokens, hidden),
        "w_dq": down(compressed),
        "w_uq_qr": (40 * weight).round().clamp(-128, 127).to(torch.int8) if quantised else weight,
        "dequant_scale": draw.normal(columns, 1).abs().float() if quantised else torch.empty(0, 1),
        "w_uk": draw.normal(heads, nope, rank),
        "w_dkv_kr": down(rank + width),
        "gamma_cq": draw.gamma(compressed),
        "gamma_ckv": draw.gamma(rank),
        **dict(zip(("cos", "sin"), draw.tables(tokens, width), strict=True)),
        "cache_index": torch.cat((slots, torch.full((tokens - len(slots),), -2))),
        "kv_cache": torch.full((*lead, rank), 3, dtype=torch.int8 if quantised else dtype),
        "kr_cache": draw.normal(*lead, width),
        "k_scale_cache": draw.normal(*lead, 4).float(),
        "smooth_scales_cq": draw.gamma(compressed).float() if "smooth" in options else None,
        "dequant_scale_w_dq": draw.normal(1, compressed).abs().float() if int8_tokens else None,
        "dequant_scale_w_dkv_kr": draw.normal(1, rank + width).abs().float() if int8_tokens else None,
        "is_symmetry": options.get("is_symmetry", True),
    }


@pytest.mark.parametrize("mode", MODES)
@given(sizes=st.fixed_dictionaries(SIZES))
@settings(max_examples=15, deadline=None, derandomize=True)
def test_any_size_agrees_with_the_oracle_and_with_its_fake(mode, sizes):
    arguments = drawn(mode, **sizes)
    expect((), arguments)
    fakes, guards = fake_with_free_sizes(OPERATOR, (), arguments)
    assert guards == []
    for fake, real in zip(fakes, OPERATOR.overload(**arguments), strict=True):
        assert (hints(fake.shape), fake.dtype) == (tuple(real.shape), real.dtype)
        assert real.is_contiguous()
