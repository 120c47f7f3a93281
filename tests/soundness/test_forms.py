"""Near twins of attention sinks, of attention without a rotary part, and of one tensor for latents and rotary keys."""

import pytest
import torch
from lib.layers import QUIET, Absorbed, Layer, Sizes, arguments, check, check_no_further, in_type
from torch import nn
from torch.nn import functional as F  # noqa: N812

pytestmark = [pytest.mark.filterwarnings(line) for line in QUIET]
ATTENTION = "latent_attention"


def check_left(module, reason, given=None):
    report = check(module, given)
    assert not report.fused, str(report)
    assert any(reason in miss.reason for miss in report.misses), str(report)


# --- sinks -----------------------------------------------------------------------------------------------------------


class Sink(Layer):
    def __init__(self, twin=None):
        super().__init__()
        self.sinks = nn.Parameter(torch.tensor([0.3, -1.0, 2.0, 5.0], dtype=torch.float64))
        self.twin = twin

    def combine(self, scores, value):
        return self.twin(self, scores, value)

    def column(self, scores, sink=None):
        sink = self.sinks.view(-1, 1, 1) if sink is None else sink
        return sink.expand(*scores.shape[:-1], 1)

    def beside(self, scores, sink=None):
        return torch.cat((scores, self.column(scores, sink)), -1)


def number(value):
    return torch.full((1,), value, dtype=torch.float64)


def less_the_largest(scores):
    return scores - scores.max(-1, keepdim=True).values


def of_tokens(scores):
    return torch.arange(1.0, 1 + scores.shape[-2], dtype=scores.dtype).view(-1, 1)


def of_sequences(scores):
    return torch.arange(1.0, 1 + scores.shape[0], dtype=scores.dtype).view(-1, 1, 1, 1)


FUSED_SINKS = {  # the readings' tests have more spellings
    "last": lambda m, s, v: m.beside(s).softmax(-1)[..., :-1] @ v,
    "less the largest": lambda m, s, v: less_the_largest(m.beside(s)).softmax(-1)[..., :-1] @ v,
    "one for all": lambda m, s, v: m.beside(s, m.sinks[:1]).softmax(-1)[..., :-1] @ v,
    "zero": lambda m, s, v: F.pad(s, (0, 1)).softmax(-1)[..., :-1] @ v,
    "nothing": lambda m, s, v: m.beside(s, number(-torch.inf)).softmax(-1)[..., :-1] @ v,
    "doubled": lambda m, s, v: (m.beside(s) * 2).softmax(-1)[..., :-1] @ v,
    "computed": lambda m, s, v: m.beside(s, m.sinks.exp().view(-1, 1, 1)).softmax(-1)[..., :-1] @ v,
    "tripled": lambda m, s, v: m.beside(s).softmax(-1)[..., :-1] @ v * 3,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FUSED_SINKS)
def test_sink(name):
    assert check(Sink(FUSED_SINKS[name])).fused.get(ATTENTION)


class InParts(Sink):
    """The sink's exponential, less itself, is in the sum before the first part; or nothing is."""

    def __init__(self, *, has_sink):
        super().__init__(lambda m, s, v: m.in_parts(s, v))
        self.has_sink = has_sink

    def in_parts(self, scores, value):
        largest = self.column(scores, None if self.has_sink else number(-torch.inf))
        total, out = torch.full_like(largest, float(self.has_sink)), torch.zeros_like(scores @ value)
        for some in (slice(0, 7), slice(7, None)):
            new = torch.maximum(largest, scores[..., some].amax(-1, keepdim=True))
            shrink, raised = (largest - new).exp(), (scores[..., some] - new).exp()
            out, total = out * shrink + raised @ value[:, :, some], total * shrink + raised.sum(-1, keepdim=True)
            largest = new
        return out / total


def test_sink_beside_parts():
    assert check(InParts(has_sink=True)).fused == {"mla_prolog": 1, ATTENTION: 1}


def test_parts_with_one_query():
    """The prolog of the first part is that of all: nothing was missed."""
    report = check(InParts(has_sink=False))
    assert report.fused == {"mla_prolog": 1, ATTENTION: 2, "merge_attention": 1}, str(report)
    assert not report.misses, str(report)


def test_sink_of_rows_that_see_nothing():
    """Not a limit here: everything goes to the sink, and zeros are right."""

    class Twin(Sink):
        def mask(self, position):
            mask = super().mask(position)
            mask[1] = -torch.inf
            return mask

    assert check(Twin(FUSED_SINKS["last"])).fused.get(ATTENTION)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sink_in_the_type_of_the_model(dtype):
    module = Sink(FUSED_SINKS["less the largest"]).to(dtype)
    assert check_no_further(module, in_type(arguments(), dtype)).fused.get(ATTENTION)


def of_the_column(value):
    return F.pad(value, (16, 0))


NO_NUMBER = (
    "the softmax has one column beside the keys of the context, and its score is no attention sink, one number per head"
)
OTHERS = {
    "of the scores": (lambda m, s, v: m.beside(s, s[..., :1].exp()).softmax(-1)[..., :-1] @ v, NO_NUMBER),
    "of tokens": (lambda m, s, v: m.beside(s, of_tokens(s)).softmax(-1)[..., :-1] @ v, NO_NUMBER),
    "of sequences": (lambda m, s, v: m.beside(s, of_sequences(s)).softmax(-1)[..., :-1] @ v, NO_NUMBER),
    "masked": (lambda m, s, v: (m.beside(s) + of_the_column(of_tokens(s))).softmax(-1)[..., :-1] @ v, NO_NUMBER),
    "filled": (
        lambda m, s, v: (
            m.beside(s).masked_fill(of_the_column(of_tokens(s) == 2), -torch.inf).softmax(-1)[..., :-1] @ v
        ),
        NO_NUMBER,
    ),
    "every other key": (lambda m, s, v: s.softmax(-1)[..., ::2] @ v[:, :, ::2], "only some of the softmax's"),
    "with a value": (
        lambda m, s, v: m.beside(s).softmax(-1) @ torch.cat((v, v[:, :, :1] + 1), 2),
        "go through cat before",
    ),
    "in the place of a key": (lambda m, s, v: m.beside(s).softmax(-1)[..., 1:] @ v, "go through cat before"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_near_twin_of_a_sink(name):
    twin, reason = OTHERS[name]
    check_left(Sink(twin), reason)


# --- no rotary part --------------------------------------------------------------------------------------------------


class Unrotated(Layer):
    def attend(self, q_nope, q_rope, latent, k_rope, mask):
        key, value = self.keys(latent, k_rope)
        return self.combine(self.scores(q_nope, key[..., : self.sizes.nope]) + mask, value)


class UnrotatedAbsorbed(Absorbed):
    def over_latents(self, query, key, latent, mask):
        return super().over_latents(query[..., : self.sizes.rank], latent, latent, mask)


class WithoutNorm(Unrotated):
    def norm(self, x, gamma):
        return x * gamma if x.shape[-1] != self.sizes.rank else x


class HalfOfTheLatents(UnrotatedAbsorbed):
    """Values are the first columns of the latents: the others are like rotary columns."""

    def over_latents(self, query, key, latent, mask):
        key = latent[..., : self.sizes.rank]
        out = self.combine(self.scores(query[..., : self.sizes.rank], key) + mask, latent[..., : self.sizes.rank // 2])
        return torch.cat((out, out), -1)


class Stored(UnrotatedAbsorbed):
    """Reads a context that was written elsewhere, so that nothing shows how latents are computed."""

    def store(self, latent, k_rope, position, kv_cache, kr_cache):
        return kv_cache, kr_cache


@pytest.mark.parametrize(
    "kind, prologs", [(Unrotated, 1), (UnrotatedAbsorbed, 1), (WithoutNorm, 0), (Stored, 0), (HalfOfTheLatents, 0)]
)
def test_no_rotary_part(kind, prologs):
    fused = check(kind()).fused
    assert (fused.get("mla_prolog", 0), fused[ATTENTION]) == (prologs, 1)


class HiddenStates(Unrotated):
    """Multi-head attention that caches what keys and values are computed from."""

    def rows(self, x):
        return self.norm(x, self.kv_gamma).unsqueeze(1), super().rows(x)[1]


class QueryOfLatents(Unrotated):
    """Multi-head attention over hidden states that were projected down."""

    def query(self, x):
        z = self.sizes
        self.made = super().rows(x)
        return (self.made[0].squeeze(1) @ self.q_b.T).unflatten(-1, (z.heads, z.query)).transpose(1, 2)

    def rows(self, x):
        return self.made


class OtherLatents(Unrotated):
    """Values come from other latents than keys."""

    def keys(self, latent, k_rope):
        return super().keys(latent, k_rope)[0], super().keys(latent + 1, k_rope)[1]


NOT_DOWN = "keys and values are not expanded from a down-projected latent"
UNROTATED = {
    "hidden states": (HiddenStates, Sizes(rank=32), NOT_DOWN),
    "projected up": (Unrotated, Sizes(rank=40), NOT_DOWN),
    "as wide as the heads": (Unrotated, Sizes(nope=2, value=2, rank=16), NOT_DOWN),
    "query of the latents": (QueryOfLatents, Sizes(query_rank=20), NOT_DOWN),
    "other latents": (OtherLatents, Sizes(), "kv_cache is not one tensor"),
    "one head": (Unrotated, Sizes(heads=1), "no heads share a latent"),
}


@pytest.mark.parametrize("name", UNROTATED)
def test_near_twin_without_a_rotary_part(name):
    kind, sizes, reason = UNROTATED[name]
    module = kind(sizes)
    check_left(module, reason, arguments(sizes))


# --- one tensor for latents and rotary keys --------------------------------------------------------------------------


class OneKey(Absorbed):
    """The query is one tensor, too; values are columns of the keys from `first` on."""

    def __init__(self, first=0):
        super().__init__()
        self.first = first

    def over_latents(self, query, key, latent, mask):
        key = torch.zeros_like(key).index_copy(2, torch.arange(key.shape[2]), key)
        query = query * of_tokens(query)
        return self.combine(self.scores(query, key) + mask, self.values(key))

    def values(self, key):
        return key[..., self.first : self.first + self.sizes.rank]


class KeysOfHeads(OneKey):
    """Values are columns of the keys, but every head has its own keys."""

    def over_latents(self, query, key, latent, mask):
        return super().over_latents(query, key * self.kv_b[:4, :1].view(1, 4, 1, 1), latent, mask)


class ValuesScaled(OneKey):
    def values(self, key):
        return super().values(key) * self.kv_gamma


@pytest.mark.parametrize("first", [0, 6])
def test_values_are_columns_of_the_keys(first):
    assert check(OneKey(first)).fused == {ATTENTION: 1}


def test_near_twins_of_values_that_are_columns_of_the_keys(outcome):
    check_left(OneKey(3), "the scores are 3 products")
    check_left(ValuesScaled(), "expected a matrix product")
    outcome(check(KeysOfHeads()))


@pytest.mark.slow
@pytest.mark.parametrize("make", [lambda: Sink(FUSED_SINKS["less the largest"]), Unrotated, OneKey])
def test_sizes_known_at_run_time(make):
    fused = check(make(), dynamic=True).fused
    assert fused.get(ATTENTION) or fused.get("mla_attention"), fused
