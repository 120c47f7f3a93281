"""Near twins of norms, roundings in the program, and models of several precisions."""

import pytest
import torch
from lib.layers import FUSED, QUIET, Complex, Layer, Sizes, arguments, check, check_no_further, in_type, variant
from torch import nn

pytestmark = [pytest.mark.filterwarnings(line) for line in QUIET]
ATTENTION = "latent_attention"


# --- norms -----------------------------------------------------------------------------------------------------------


class Normed(Layer):
    def __init__(self, normed, sizes=None):
        super().__init__(sizes)
        self.normed = normed

    def rows(self, x):
        latent, k_rope = (x @ self.kv_a.T).split([self.sizes.rank, self.sizes.rope], dim=-1)
        return self.normed(latent, self.kv_gamma).unsqueeze(1), k_rope.unsqueeze(1)


def root(x, dim=-1):
    return torch.rsqrt(x.pow(2).mean(dim, keepdim=True) + 1e-6)


def by_vector_norm(x, factor):
    norm = torch.linalg.vector_norm(factor * x, dim=-1, keepdim=True)
    return x * torch.rsqrt(norm.pow(2) / x.shape[-1] + 1e-6)


NORMS = {
    "gamma along tokens": lambda x, gamma: gamma[:, None] * (x * root(x)),
    "mean along tokens": lambda x, gamma: gamma * (x * root(x, 1)),
    "both along tokens": lambda x, gamma: gamma[:, None] * (x * root(x, 1)),
    "root turned": lambda x, gamma: gamma * (x * root(x).transpose(1, 2)),
    "value turned": lambda x, gamma: gamma * (x.transpose(1, 2) * root(x)),
    "factor in the norm": lambda x, gamma: gamma * by_vector_norm(x, 2),
    "sign in the norm": lambda x, gamma: gamma * by_vector_norm(x, -1),
    "factor outside": lambda x, gamma: 2 * gamma * by_vector_norm(x, 1),
    "factor under the root": lambda x, gamma: gamma * (x * root(2 * x)),
    "factor on both": lambda x, gamma: gamma * (2 * x * root(2 * x)),
    "minus": lambda x, gamma: -gamma * (x * root(x)),
    "minus the value": lambda x, gamma: gamma * (-x * root(x)),
    "other order": lambda x, gamma: gamma * (x / torch.linalg.vector_norm(x, 1, dim=-1, keepdim=True)),
    "variance": lambda x, gamma: gamma * (x * torch.rsqrt(x.var(-1, keepdim=True) + 1e-6)),
    "sum": lambda x, gamma: gamma * (x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6)),
    "fourth power": lambda x, gamma: gamma * (x * torch.rsqrt(x.pow(4).mean(-1, keepdim=True) + 1e-6)),
    "gamma twice": lambda x, gamma: gamma * gamma * (x * root(x)),
    "gamma under the root": lambda x, gamma: gamma * x * root(gamma * x),
    "no epsilon": lambda x, gamma: gamma * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True))),
    "epsilon outside": lambda x, gamma: gamma * (x / (x.pow(2).mean(-1, keepdim=True).sqrt() + 1e-2)),
    "epsilon for each column": lambda x, gamma: gamma * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + gamma)),
    "twice": lambda x, gamma: gamma * (x * root(x)) * root(x),
    "of the flipped": lambda x, gamma: gamma * (x.flip(-1) * root(x)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", NORMS)
def test_norms(name):
    """Tokens, sequences and latent columns have equal numbers."""
    sizes = Sizes(batch=6, tokens=6, rank=6)
    assert check(Normed(NORMS[name], sizes), arguments(sizes)).fused.get(ATTENTION)


# --- roundings -------------------------------------------------------------------------------------------------------


def narrowed(x):
    return x.to(torch.bfloat16).to(torch.float64)


def narrow(name, method):
    """What a method returns is rounded."""

    def rounded(self, *given):
        found = getattr(Layer, method)(self, *given)
        return tuple(map(narrowed, found)) if isinstance(found, tuple) else narrowed(found)

    return variant(name, **{method: rounded})


NarrowKey, NarrowTurnedQuery = narrow("NarrowKey", "rotate_key"), narrow("NarrowTurnedQuery", "rotate")
NarrowContext = narrow("NarrowContext", "store")  # attention reads the caches rounded, the caches are not
NarrowQuery, NarrowKeysAndValues = narrow("NarrowQuery", "query"), narrow("NarrowKeysAndValues", "keys")
NarrowScores, NarrowResult = narrow("NarrowScores", "scores"), narrow("NarrowResult", "combine")
NarrowBeforeNorm = variant("NarrowBeforeNorm", norm=lambda my, x, gamma: Layer.norm(my, narrowed(x), gamma))
NarrowGamma = variant("NarrowGamma", norm=lambda my, x, gamma: Layer.norm(my, x, narrowed(gamma)))
NarrowTables = variant("NarrowTables", rotate=lambda my, x, *tables: Layer.rotate(my, x, *map(narrowed, tables)))


class NarrowLatent(Layer):
    def rows(self, x):
        latent, k_rope = super().rows(x)
        return narrowed(latent), k_rope


class NarrowBeforeGamma(Layer):
    def norm(self, x, gamma):
        return gamma * narrowed(super().norm(x, torch.ones_like(gamma)))


class NarrowMean(Layer):
    def norm(self, x, gamma):
        return gamma * (x * narrowed(torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)))


class NarrowDown(Layer):
    """The low-rank query is rounded before it is projected up."""

    def query(self, x):
        q = narrowed(self.norm(x @ self.q_a.T, self.q_gamma)) @ self.q_b.T
        return q.unflatten(-1, (self.sizes.heads, self.sizes.query)).transpose(1, 2)


class NarrowProbabilities(Layer):
    def combine(self, scores, value):
        return narrowed(scores.softmax(-1)) @ value


class NarrowMask(Layer):
    def mask(self, position):
        bias = 0.3 * torch.arange(self.sizes.context, dtype=torch.float64).cos()
        return narrowed(super().mask(position) + bias)


class WholeNumbers(Layer):
    """A rounding to integers."""

    def rows(self, x):
        latent, k_rope = super().rows(x)
        return (latent * 16).long().double() / 16, k_rope


NARROW = [
    *(NarrowLatent, NarrowKey, NarrowBeforeNorm, NarrowBeforeGamma, NarrowGamma, NarrowMean, NarrowContext),
    *(NarrowQuery, NarrowTurnedQuery, NarrowDown, NarrowTables, NarrowKeysAndValues, NarrowScores),
    *(NarrowProbabilities, NarrowMask, NarrowResult, WholeNumbers),
]


@pytest.mark.slow
@pytest.mark.parametrize("kind", NARROW)
def test_roundings_the_program_asks_for(kind, outcome):
    """Whatever fuses around a rounding, the rounding stays."""
    outcome(check(kind()))


class NarrowFreqs(Complex):
    def turned(self, freqs):
        return torch.view_as_complex(narrowed(torch.view_as_real(freqs)))


def test_rounding_of_complex_tables(outcome):
    outcome(check(NarrowFreqs()))


# --- several precisions in one model ---------------------------------------------------------------------------------


class NarrowCaches(Layer):
    """A float32 model whose caches are bfloat16."""

    def store(self, latent, k_rope, position, kv_cache, kr_cache):
        rows = latent.to(kv_cache.dtype), k_rope.to(kr_cache.dtype)
        return tuple(cache.to(latent.dtype) for cache in super().store(*rows, position, kv_cache, kr_cache))


def wide(dtype):
    return torch.promote_types(dtype, torch.float32)


class WideNorms(Layer):
    """Norms in float32, with float32 weights, in a narrower model."""

    def norm(self, x, gamma):
        return super().norm(x.to(wide(x.dtype)), gamma).to(x.dtype)


class WideGamma(Layer):
    """The norm is rounded before it is multiplied by its float32 weight."""

    def norm(self, x, gamma):
        return (gamma * super().norm(x, torch.ones_like(gamma)).to(x.dtype)).to(x.dtype)


class WideRotation(WideNorms):
    def rotate(self, x, *tables):
        return super().rotate(x.to(wide(x.dtype)), *tables).to(x.dtype)


class WideSoftmax(WideNorms):
    def combine(self, scores, value):
        return scores.softmax(-1, dtype=wide(scores.dtype)).to(value.dtype) @ value


class AllWide(WideRotation, WideSoftmax):
    pass


def wide_gammas(module):
    """The module in bfloat16 with norm weights of float32."""
    kept = {name: value.detach().float() for name, value in module.named_parameters() if name.endswith("gamma")}
    module = module.to(torch.bfloat16)
    for name, value in kept.items():
        setattr(module, name, nn.Parameter(value))
    return module


def with_caches(given, dtype):
    x, tables, position, caches = given
    return x, tables, position, in_type(caches, dtype)


def test_narrow_caches():
    """A prolog that does not fit is refused late; attention still fuses."""
    given = with_caches(in_type(arguments(), torch.float32), torch.bfloat16)
    assert check_no_further(NarrowCaches().float(), given).fused.get(ATTENTION)


def test_narrow_caches_of_a_double_model():
    given = with_caches(arguments(), torch.float32)
    assert check_no_further(NarrowCaches(), given).fused.get(ATTENTION)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [WideNorms, WideGamma, WideRotation, WideSoftmax, AllWide])
def test_wide_parts_of_a_narrow_model(kind):
    given = in_type(arguments(), torch.bfloat16)
    assert check_no_further(wide_gammas(kind()), given).fused.get(ATTENTION)


class Autocast(nn.Module):
    """A float32 model run in bfloat16 where PyTorch's autocast does that; a float64 model unchanged."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.sizes = layer, layer.sizes

    def forward(self, x, *given):
        with torch.autocast("cpu", torch.bfloat16, enabled=x.dtype == torch.float32):
            return self.layer(x, *given)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast(dtype):
    """In caches of the model's dtype, and in those of autocast's."""
    given = with_caches(in_type(arguments(), torch.float32), dtype)
    assert check_no_further(Autocast(NarrowCaches().float()), given).fused.get(ATTENTION)


def test_tables_of_another_type(outcome):
    x, tables, position, caches = in_type(arguments(), torch.bfloat16)
    tables = in_type(arguments()[1], torch.float32)
    outcome(check_no_further(WideRotation().bfloat16(), (x, tables, position, caches)))


def test_one_precision_fuses():
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        torch._dynamo.reset()
        fused = {"kv_rmsnorm_rope_cache": 1, "mla_attention": 1} if dtype == torch.float16 else FUSED  # absorbed inside
        assert check_no_further(Layer().to(dtype), in_type(arguments(), dtype)).fused == fused


class RoundedTables(Layer):
    """Tables that are computed wide and rounded once, as in MiniCPM3; their halves are read separately."""

    def attended(self, x, tables, *rest):
        cos, sin = tables
        return super().attended(x, (cos.cos().to(x.dtype), sin.sin().to(x.dtype)), *rest)


def test_tables_that_are_rounded_to_the_type_of_the_model_fuse():
    x, _, position, caches = in_type(arguments(), torch.bfloat16)
    tables = in_type(arguments()[1], torch.float32)
    assert check_no_further(RoundedTables().bfloat16(), (x, tables, position, caches)).fused == FUSED


def test_what_is_widened_and_rounded_back_is_read_itself():
    """float32 attention in a bfloat16 model, whose result the program rounds after moving it."""
    given = in_type(arguments(), torch.bfloat16)
    report = check_no_further(WideSoftmax().bfloat16(), given, target="reference")
    assert report.fused.get(ATTENTION)
