"""Near twins of latent attention: other axes of equal size, a factor, a sign, one more cast. Results stay eager's."""

import pytest
import torch
from lib.layers import FUSED, QUIET, Absorbed, Complex, Layer, Sizes, arguments, check, variant

pytestmark = [pytest.mark.filterwarnings(line) for line in QUIET]

ATTENTION = "latent_attention"


@pytest.mark.parametrize("kind", [Layer, Complex, Absorbed])
def test_what_the_twins_vary_fuses(kind):
    assert check(kind()).fused == FUSED


# --- axes taken apart and put together: nothing changes, all of it fuses ---------------------------------------------


def regrouped(x, dim, *groups):
    """`x` itself: a dimension in groups, the groups reversed, flattened, and all the way back."""
    dim %= x.ndim
    count = len(groups)
    turned = [*range(dim), *reversed(range(dim, dim + count)), *range(dim + count, x.ndim + count - 1)]
    other = x.unflatten(dim, groups).permute(turned).flatten(dim, dim + count - 1)
    return other.unflatten(dim, groups[::-1]).permute(turned).flatten(dim, dim + count - 1)


EIGHT = Sizes(heads=8, tokens=8)
GROUPS = [((2, 4),), ((4, 2),), ((2, 2, 2),), ((2, 4), (4, 2)), ((4, 2), (2, 4))]


class Regrouped(Layer):
    """Heads, or tokens, of the queries; then again in other groups."""

    def __init__(self, dim, groupings):
        super().__init__(EIGHT)
        self.dim, self.groupings = dim, groupings

    def query(self, x):
        q = super().query(x)
        for groups in self.groupings:
            q = regrouped(q, self.dim, *groups)
        return q


class RegroupedResult(Regrouped):
    def query(self, x):
        return Layer.query(self, x)

    def combine(self, scores, value):
        out = super().combine(scores, value)
        for groups in self.groupings:
            out = regrouped(out, self.dim, *groups)
        return out


class RegroupedValues(Regrouped):
    """The last grouping is on the values: queries and values read different parts of one axis."""

    def query(self, x):
        return regrouped(Layer.query(self, x), 1, *self.groupings[0])

    def combine(self, scores, value):
        return super().combine(scores, regrouped(value, 1, *self.groupings[-1]))


@pytest.mark.slow
@pytest.mark.parametrize("groupings", GROUPS, ids=str)
@pytest.mark.parametrize("dim", [1, 2], ids=["heads", "tokens"])
@pytest.mark.parametrize("kind", [Regrouped, RegroupedResult])
def test_identity_views(kind, dim, groupings):
    assert check(kind(dim, groupings)).fused == FUSED


@pytest.mark.parametrize("groupings", GROUPS, ids=str)
def test_identity_views_of_values(groupings):
    assert check(RegroupedValues(1, groupings)).fused == FUSED


class HeldByGroups(Layer):
    """The columns of the query's weight are in groups; the views that read them put heads in order."""

    def query(self, x):
        z = self.sizes
        q = self.norm(x @ self.q_a.T, self.q_gamma) @ self.q_b.T
        return q.unflatten(-1, (2, 4, z.query)).transpose(-3, -2).flatten(-3, -2).transpose(1, 2)


class HeldInThree(Layer):
    def query(self, x):
        q = self.norm(x @ self.q_a.T, self.q_gamma) @ self.q_b.T
        return q.unflatten(-1, (2, 2, 2, self.sizes.query)).permute(0, 1, 3, 4, 2, 5).flatten(2, 4).transpose(1, 2)


@pytest.mark.parametrize("kind", [HeldByGroups, HeldInThree])
def test_heads_in_another_order(kind):
    assert check(kind(EIGHT)).fused.get(ATTENTION)


@pytest.mark.parametrize("reads", [((2, 4), (4, 2)), ((4, 2), (2, 4))], ids=str)
def test_order_of_reading_does_not_matter(reads):
    """Two groupings of the same heads, that of the queries read first or last: one result, one fusion."""
    assert check(RegroupedValues(1, reads)).fused == FUSED


# --- axes of equal size exchanged ------------------------------------------------------------------------------------

SQUARE = Sizes(batch=3, tokens=3)


def exchanged(name, method, dims=(0, 2)):
    """Two axes of what a method returns are swapped."""
    return variant(name, **{method: lambda my, *given: getattr(Layer, method)(my, *given).transpose(*dims)})


def by_probabilities(name, *dims):
    return variant(name, combine=lambda my, scores, value: scores.softmax(-1).transpose(*dims) @ value)


class QueryRopeExchanged(Layer):
    def rotate(self, x, cos, sin):
        turned = super().rotate(x, cos, sin)
        return turned.transpose(0, 2) if x.shape[1] > 1 else turned


class LatentExchanged(Layer):
    def rows(self, x):
        latent, k_rope = super().rows(x)
        return latent.transpose(0, 2), k_rope


class KeyExchanged(Layer):
    def rows(self, x):
        latent, k_rope = super().rows(x)
        return latent, k_rope.transpose(0, 2)


class BothExchanged(Layer):
    def store(self, latent, k_rope, position, *caches):
        return super().store(latent.transpose(0, 2), k_rope.transpose(0, 2), position, *caches)


class KeyTurnedBySequence(Layer):
    """The query is rotated by its token's angle, the key by that of its number in the batch."""

    def rotate_key(self, x, cos, sin):
        return super().rotate_key(x, cos[:, None, None], sin[:, None, None])


ProbabilitiesExchanged = by_probabilities("ProbabilitiesExchanged", 0, 2)
QueryExchanged = exchanged("QueryExchanged", "query")
RotaryKeyExchanged = exchanged("RotaryKeyExchanged", "rotate_key")
ResultExchanged = exchanged("ResultExchanged", "combine")
MaskedBySequence = variant("MaskedBySequence", mask=lambda my, position: Layer.mask(my, position)[:, None, None])
EXCHANGED = [
    *(ProbabilitiesExchanged, QueryExchanged, QueryRopeExchanged, LatentExchanged, KeyExchanged, RotaryKeyExchanged),
    *(BothExchanged, KeyTurnedBySequence, MaskedBySequence, ResultExchanged),
]


@pytest.mark.parametrize("kind", EXCHANGED)
def test_batch_and_tokens_exchanged(kind, outcome):
    outcome(check(kind(SQUARE)))


HeadsAsTokens = exchanged("HeadsAsTokens", "query", (1, 2))
ProbabilitiesOfHeads = by_probabilities("ProbabilitiesOfHeads", 1, 2)


@pytest.mark.parametrize("kind", [HeadsAsTokens, ProbabilitiesOfHeads])
def test_heads_and_tokens_exchanged(kind, outcome):
    outcome(check(kind(Sizes(tokens=4, heads=4))))


ScoresTurned = exchanged("ScoresTurned", "scores", (-1, -2))  # no product of queries with all keys
SummedOverTokens = by_probabilities("SummedOverTokens", -1, -2)


class SoftmaxOverTokens(Layer):
    def combine(self, scores, value):
        return scores.nan_to_num(neginf=-1e3).softmax(-2) @ value


@pytest.mark.parametrize("kind", [ScoresTurned, SummedOverTokens, SoftmaxOverTokens])
def test_tokens_and_context_exchanged(kind, outcome):
    given = arguments(Sizes(tokens=6, context=6), first=0)
    outcome(check(kind(Sizes(tokens=6, context=6)), given))


# --- latent columns in different orders ------------------------------------------------------------------------------


def plain(x):
    return x


def there_and_back(x):
    """The columns in order, read in two parts."""
    return regrouped(x, -1, 2, x.shape[-1] // 2)


def paired(x):
    """Columns (2, R / 2) as (R / 2, 2)."""
    return x.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)


def split_in_pairs(x):
    """Columns (R / 2, 2) as (2, R / 2)."""
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


def flipped(x):
    return x.flip(-1)


class ColumnsApart(Layer):
    """Keys and values are projected from the latents separately, each from columns in its own order."""

    def __init__(self, sizes, *orders):
        super().__init__(sizes)
        self.keys_order, self.values_order, self.uk_order, self.uv_order = (*orders, plain, plain)[:4]

    def keys(self, latent, k_rope):
        z = self.sizes
        weight_uk, weight_uv = self.kv_b.unflatten(0, (z.heads, -1)).split([z.nope, z.value], dim=1)
        k_nope = self.keys_order(latent) @ self.uk_order(weight_uk).mT
        value = self.values_order(latent) @ self.uv_order(weight_uv).mT
        return torch.cat((k_nope, k_rope.expand(-1, z.heads, -1, -1)), -1), value


def named(orders):
    return ", ".join(order.__name__ for order in orders)


SAME_COLUMNS = [
    (plain, plain),
    (there_and_back, there_and_back),
    (plain, there_and_back),
    (there_and_back, plain),
    (paired, paired, paired, paired),
]
OTHER_COLUMNS = [
    (plain, paired),
    (paired, plain),
    (paired, paired),
    (there_and_back, paired),
    (paired, there_and_back),
    (split_in_pairs, paired),
    (paired, split_in_pairs),
    (plain, flipped),
    (flipped, flipped),
    (plain, plain, plain, paired),
    (plain, plain, there_and_back, paired),
    (plain, paired, plain, paired),
    (there_and_back, paired, plain, paired),
    (paired, paired, plain, paired),
]


@pytest.mark.parametrize("orders", SAME_COLUMNS, ids=named)
def test_columns_of_the_latent_in_one_order(orders):
    assert check(ColumnsApart(Sizes(), *orders)).fused == FUSED


@pytest.mark.slow
@pytest.mark.parametrize("rank", [4, 20])
@pytest.mark.parametrize("orders", OTHER_COLUMNS, ids=named)
def test_columns_of_the_latent_in_other_orders(orders, rank, outcome):
    outcome(check(ColumnsApart(Sizes(rank=rank), *orders)))


class AbsorbedFlipped(Absorbed):
    def over_latents(self, query, key, latent, mask):
        return super().over_latents(query, key, paired(latent), mask)


def test_columns_of_the_absorbed_latent(outcome):
    outcome(check(AbsorbedFlipped(Sizes(rank=4))))
