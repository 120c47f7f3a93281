"""RMSNorm in every spelling against an independent oracle."""

import pytest
import torch
from lib.traced import B, D, S, Traced, agree, dense, refused
from torch.nn import functional as F  # noqa: N812

from mla_fx.readings.element import element_of, resolve
from mla_fx.readings.rms_norm import rms_norm
from mla_fx.readings.views import fresh_index

EPSILON = 1e-3


def hugging_face(x, g):
    wide = x.float()
    return g * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPSILON)).to(x.dtype)


def meta(x, g):
    return (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + EPSILON)).type_as(x) * g


def length(x):
    return x.square().sum(-1, True).sqrt()


def by_lengths(x, g, one, other):
    return x * torch.rsqrt(one * other / D + EPSILON) * g


NORMS = {
    "Hugging Face": hugging_face,
    "Meta": meta,
    "torch": lambda x, g: F.rms_norm(x, (D,), g, EPSILON),
    "root below": lambda x, g: x / torch.sqrt((x * x).mean(-1, keepdim=True) + EPSILON) * g,
    "sum over length": lambda x, g: x * torch.rsqrt((x * x).sum(-1, keepdim=True) / D + EPSILON) * g,
    "power": lambda x, g: x * (x.square().mean(-1, keepdim=True) + EPSILON) ** -0.5 * g,
    "reciprocal": lambda x, g: x * (x.square().mean(-1, True) + EPSILON).sqrt().reciprocal() * g,
    "no keepdim": lambda x, g: x * torch.rsqrt((x**2).mean(-1) + EPSILON)[..., None] * g,
    "einsum": lambda x, g: x * torch.rsqrt(torch.einsum("bsd,bsd->bs", x, x)[..., None] / D + EPSILON) * g,
    "one plus gamma": lambda x, g: x * torch.rsqrt(x.square().mean(-1, True) + EPSILON) * (1 + (g - 1)),
    "flattened": lambda x, g: NORMS["power"](x.view(-1, D), g).view(x.shape),
    "of a multiple": lambda x, g: NORMS["power"](x * 3, g),
    "of a product": lambda x, g: NORMS["power"](x * x.sigmoid(), g),
    "of a product squared by hand": lambda x, g: NORMS["root below"](x * x.sigmoid(), g),
    "twice": lambda x, g: 2 * NORMS["power"](x, g),
    "a sum": lambda x, g: x * torch.rsqrt(x.square().sum(-1, True) + EPSILON * D) * g,
    "length times itself": lambda x, g: by_lengths(x, g, *[length(x)] * 2),
}


def assert_norm_reads_right(traced, found, index):
    value, gamma = traced.read(found.value, *index), traced.read(found.gamma, *index)
    normed = value * torch.rsqrt(value.square().mean(-1, True) + found.epsilon)
    agree(found.factor * normed * gamma, traced.values[traced.out])


@pytest.mark.parametrize("name", NORMS)
def test_a_norm_is_read(name):
    traced = Traced(NORMS[name], dense(B, S, D), dense(D))
    index = fresh_index(traced.out)
    found = rms_norm(resolve(traced.out, index))
    assert_norm_reads_right(traced, found, index)
    assert found.epsilon == pytest.approx(EPSILON / 9 if name == "of a multiple" else EPSILON)


@pytest.mark.parametrize(
    ("norm", "gamma_type", "expected"),
    [
        (hugging_face, torch.bfloat16, True),
        (hugging_face, torch.float32, False),
        (meta, torch.bfloat16, True),
        (NORMS["torch"], torch.bfloat16, False),
    ],
)
def test_where_a_norm_rounds(norm, gamma_type, expected):
    traced = Traced(norm, dense(B, S, D, dtype=torch.bfloat16), dense(D, dtype=gamma_type))
    assert rms_norm(element_of(traced.out)).gamma_after_cast is expected


def normed(x, g, by):
    return x * torch.rsqrt(by.square().mean(-1, True) + EPSILON) * g


def weighted_within(x, g):
    y = x * g
    return normed(y, 1.0, y)


@pytest.mark.parametrize("name", ["Hugging Face", "root below", "power", "no keepdim", "one plus gamma", "twice"])
def test_a_norm_of_one_column_is_read(name):
    traced = Traced(NORMS[name], dense(B, S, 1), dense(1))
    index = fresh_index(traced.out)
    assert_norm_reads_right(traced, rms_norm(resolve(traced.out, index)), index)


def root_of(x, radicand):
    return x * torch.rsqrt(radicand + EPSILON)


def twice(x):
    return x[:, None].expand(B, 2, S, D)


NEGATIVE = "the norm is multiplied by a negative number"
NOT_ITS_OWN = "is not the value whose mean square"
NO_NORMS = {
    "of the negative": (lambda x, g: -NORMS["power"](x, g), NEGATIVE),
    "of a negative multiple": (lambda x, g: NORMS["power"](x * -3, g), NEGATIVE),
    "negative gamma": (lambda x, g: NORMS["power"](x, -g), NEGATIVE),
    "of an absolute value": (lambda x, g: normed((x**2) ** 0.5, g, x), NOT_ITS_OWN),
    "a layer norm": (lambda x, g: F.layer_norm(x, (D,), g), "expected|LayerNorm"),
    "no gamma": (lambda x, g: normed(x, 1.0, x), "an RMSNorm is multiplied by one weight, found nothing"),
    "two gammas": (lambda x, g: normed(x, g, x) * g, "multiplied by one weight"),
    "a scalar gamma": (lambda x, g: normed(x, g[:1], x), "is not along the normalised dimension"),
    "a gamma per token": (lambda x, g: normed(x, g[:S, None], x), "is not along the normalised dimension"),
    "another value's mean": (lambda x, g: normed(x, g, x + 1), NOT_ITS_OWN),
    "another product's mean": (lambda x, g: normed(x * x.tanh(), g, x * x.exp()), NOT_ITS_OWN),
    "a weighted product's mean": (lambda x, g: normed(x, g, x * g), NOT_ITS_OWN),
    "its own weight within": (weighted_within, "found nothing"),
    "another token's mean": (lambda x, g: normed(x, g, x.flip(1)), NOT_ITS_OWN),
    "half of the mean": (lambda x, g: normed(x, g, x[..., : D // 2]), NOT_ITS_OWN),
    "a rotated value": (lambda x, g: normed(torch.cat([x[..., 1:], x[..., :1]], -1), g, x), "is not the value"),
    "times a tensor": (lambda x, g: 2 * normed(x, g, x) * x[..., :1], "multiplied by one weight"),
    "a mean of cubes": (lambda x, g: x * torch.rsqrt((x**3).mean(-1, True) + 9) * g, "one value squared"),
    "a mean of sums": (lambda x, g: x * torch.rsqrt(x.sum(1).mean(-1, True)[:, None] + EPSILON) * g, "one value"),
    "a clamp": (lambda x, g: x * torch.rsqrt(x.square().mean(-1, True).clamp(min=1e-3)) * g, "found clamp"),
    "a tensor epsilon": (lambda x, g: x * torch.rsqrt(x.square().mean(-1, True) + g[0]) * g, "compile-time"),
    "two lengths": (lambda x, g: by_lengths(x, g, length(x), length(x.flip(1))), "found mul"),
    "a length": (lambda x, g: x * torch.rsqrt(length(x) / D + EPSILON) * g, "found"),
    "no length": (lambda x, g: by_lengths(x, g, *[(-x.square().sum(-1, True)).sqrt()] * 2), "is not a number"),
    "no norm": (lambda x, g: x * g, "expected an RMSNorm, found mul"),
    "a negative epsilon": (lambda x, g: g * x * torch.rsqrt(x.square().mean(-1, True) - EPSILON), "compile-time"),
    "negative squares": (lambda x, g: g * root_of(x, -x.square().mean(-1, True)), "root are multiplied by -"),
    "the token before": (lambda x, g: normed(x[:, 1:], g, x[:, :-1]), NOT_ITS_OWN),
    "the other half": (lambda x, g: normed(x[..., 4:], g[:4], x[..., :4]), NOT_ITS_OWN),
    "every other": (lambda x, g: normed(x[..., ::2], g[:4], x[..., :4]), NOT_ITS_OWN),
    "first instead of every other": (lambda x, g: normed(x[..., :4], g[:4], x[..., ::2]), "is not the value"),
    "rounded": (lambda x, g: normed(x.bfloat16().float(), g, x), NOT_ITS_OWN),
    "times nothing": (lambda x, g: normed(x, g, x) * 1e-200 * 1e-200, "the norm is multiplied by a number, 0"),
    "repeated": (lambda x, g: g * root_of(x, twice(x).square().mean((1, -1))[..., None]), "is not the value"),
    "the diagonal": (lambda x, g: normed(x, g, x.diagonal(0, 1, 2)[:, None]), "is not the value|expected"),
}


@pytest.mark.parametrize(("function", "reason"), NO_NORMS.values(), ids=NO_NORMS)
def test_what_is_no_norm_is_refused_with_a_reason(function, reason):
    with refused(reason):
        rms_norm(element_of(Traced(function, dense(B, S, D), dense(D)).out))


def test_a_gamma_for_each_token_and_column():
    with refused("is not along"):
        rms_norm(element_of(Traced(lambda x, g: normed(x, g, x), dense(B, S, D), dense(S, D)).out))


@pytest.mark.parametrize(("order", "power"), [(3, 2), (2, 1)])
def test_a_norm_of_another_order_or_power(order, power):
    def function(x, g):
        return g * root_of(x, torch.linalg.vector_norm(x, order, -1, True) ** power / D)

    with refused("expected the square of a Euclidean norm under the root"):
        rms_norm(element_of(Traced(function, dense(B, S, D), dense(D), decompose=False).out))


@pytest.mark.parametrize(
    ("squares", "reason"),
    [
        (lambda x: x.square().sum(-1, True), "the norm is over a dimension of unknown size"),
        (lambda x: x.square().mean(-1, True), "the mean is over a dimension of unknown size"),
    ],
)
def test_a_norm_of_unknown_width(squares, reason):
    traced = Traced(lambda x, g: g * root_of(x, squares(x)), dense(S, D), dense(D), dynamic=True)
    with refused(reason):
        rms_norm(element_of(traced.out))


def test_a_norm_of_what_is_parted_in_another_way():
    def function(x, g):
        firsts = x.view(2, 6)[:, :1].expand(2, 6).reshape(12)
        mean = x.view(3, 4).square().mean(-1, True).expand(3, 4).reshape(12)
        return g * firsts * torch.rsqrt(mean + EPSILON)

    with refused("is not the value whose mean square"):
        rms_norm(element_of(Traced(function, dense(12), dense(12)).out))


def test_a_norm_that_is_divided_last():
    traced = Traced(lambda x, g: x * g / torch.sqrt(x.square().mean(-1, True) + EPSILON), dense(S, D), dense(D))
    assert not rms_norm(element_of(traced.out)).gamma_after_cast
