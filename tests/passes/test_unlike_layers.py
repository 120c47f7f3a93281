"""Layers that compute the same, but differ in who else reads a value, in its layout, or in what it shares memory with:
a rewrite that was found in the first is right in the second, too."""

import pytest
import torch
from lib.layers import QUIET, Layer, Sizes, arguments, check
from torch import nn

pytestmark = [pytest.mark.filterwarnings(mark) for mark in (*QUIET, "ignore::mla_fx.MlaWarning")]

SIZES = Sizes(tokens=4)


class Watched(Layer):
    """A layer in which one more reader may look at the value at some `place`; what it finds is an output."""

    def __init__(self, place=None, use=None):
        super().__init__(SIZES)
        self.place, self.use, self.found = place, use, ()

    def seen(self, place, value):
        if place == self.place:
            self.found = self.use(value)
        return value

    def norm(self, x, gamma):
        return self.seen("query latent" if gamma is self.q_gamma else "latent", super().norm(x, gamma))

    def query(self, x):
        return self.seen("query", super().query(self.seen("hidden states", x)))

    def rows(self, x):
        latent, k_rope = super().rows(x)
        return self.seen("latent row", latent), self.seen("rotary row", k_rope)

    def rotate_key(self, x, *tables):
        return self.seen("rotated row", self.rotate(x, *tables))

    def store(self, latent, k_rope, position, kv_cache, kr_cache):
        self.seen("old cache", kv_cache)
        written = kv_cache.index_copy(2, position, latent), kr_cache.index_copy(2, position, k_rope)
        kv_cache.copy_(self.seen("written latents", written[0]))
        kr_cache.copy_(self.seen("written keys", written[1]))
        return written

    def attend(self, q_nope, q_rope, latent, k_rope, mask):
        return self.seen("attended", super().attend(q_nope, self.seen("rotated query", q_rope), latent, k_rope, mask))

    def scores(self, query, key):
        return self.seen("scores", super().scores(query, key))

    def combine(self, scores, value):
        return self.seen("probabilities", scores.softmax(-1)) @ value


class InHalves(Watched):
    """One cache for both, whose columns are written in two parts."""

    def store(self, latent, k_rope, position, cache, _):
        rank = self.sizes.rank
        latents = self.seen("written latents", cache[..., :rank].index_copy(2, position, latent))
        keys = self.seen("written keys", cache[..., rank:].index_copy(2, position, k_rope))
        cache.copy_(cache.slice_scatter(latents, -1, 0, rank).slice_scatter(keys, -1, rank, rank + keys.shape[-1]))
        self.seen("written cache", cache)
        return cache.split([rank, keys.shape[-1]], dim=-1)


class AbsorbedHere(Watched):
    """The program absorbs the weights, so the query that enters the operator is a value of its own."""

    def attend(self, q_nope, q_rope, latent, k_rope, mask):
        z = self.sizes
        weight = self.kv_b.unflatten(0, (z.heads, -1))
        query = self.seen("absorbed query", torch.einsum("bnsd,ndc->bnsc", q_nope, weight[:, : z.nope]))
        q_rope = self.seen("rotated query", q_rope)
        latent, k_rope = latent.squeeze(1), k_rope.squeeze(1)
        scores = torch.einsum("bnsc,btc->bnst", query, latent) + torch.einsum("bnsr,btr->bnst", q_rope, k_rope)
        probabilities = self.seen("probabilities", (scores * z.query**-0.5 + mask).softmax(-1))
        out = self.seen("attended", torch.einsum("bnst,btc->bnsc", probabilities, latent))
        return torch.einsum("bnsc,nvc->bnsv", out, weight[:, z.nope :])


class Model(nn.Module):
    """Layers, each with its own caches; returns what the extra readers found, too."""

    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x, tables, position, caches):
        x = x.tanh()
        for layer, own in zip(self.layers, caches, strict=True):
            x = x + layer(x, tables, position, own)
        return x, [layer.found for layer in self.layers]


def as_one_row(value):
    """A view that no other layout allows."""
    slowest_first = sorted(range(value.ndim), key=lambda dim: -value.stride(dim))
    dense = value.permute(slowest_first)
    return dense.view(-1) * 2 if dense.is_contiguous() else dense.flatten() * 2


USES = {"strides": lambda value: value.as_strided((3, 4), (29, 1), 2) * 2, "one row": as_one_row}

PLACES = {
    Watched: [
        "query latent", "rotary row", "old cache", "written latents", "written keys", "rotated query", "attended",
    ],
    InHalves: ["written latents", "written keys", "written cache"],
    AbsorbedHere: ["absorbed query", "attended", "probabilities"],
}  # fmt: skip

CASES = [(kind, place) for kind, places in PLACES.items() for place in places]


def given(kinds):
    x, tables, position, _ = arguments(SIZES)
    caches = []
    for number, kind in enumerate(kinds):
        latents, keys = (cache + number for cache in arguments(SIZES)[3])
        caches.append((torch.cat((latents, keys), -1), keys) if kind is InHalves else (latents, keys))
    return x, tables, position, caches


@pytest.mark.slow
@pytest.mark.parametrize("order", ["plain first", "odd first"])
@pytest.mark.parametrize("kind, place", CASES, ids=lambda value: getattr(value, "__name__", value))
def test_one_more_reader(kind, place, order):
    """Before a layer without one, and after it."""
    one, other = (kind(place, use) for use in USES.values())
    layers = [kind(), one, other] if order == "plain first" else [one, kind(), other]
    check(Model(*layers), given([kind] * len(layers)))


def one_buffer(caches):
    """Both caches are columns of one tensor."""
    latents, keys = caches
    return torch.cat((latents, keys), -1).split([latents.shape[-1], keys.shape[-1]], -1)


def in_layout(order):
    def laid_out(caches):
        back = [order.index(dim) for dim in range(len(order))]
        return tuple(cache.permute(order).contiguous().permute(back) for cache in caches)

    return laid_out


def beside_others(dim, first):
    """Each cache is a part of a tensor whose other half holds other numbers."""

    def laid_out(caches):
        halves = [torch.cat((cache, 1 - cache)[:: 1 if first else -1], dim).chunk(2, dim) for cache in caches]
        return tuple(half[0 if first else 1] for half in halves)

    return laid_out


LAYOUTS = {
    "both caches in one buffer": one_buffer,
    "behind other sequences": beside_others(0, first=False),
    "behind other slots": beside_others(2, first=False),
    "a wider row": beside_others(-1, first=True),
    "columns before slots": in_layout((0, 1, 3, 2)),
    "slots before sequences": in_layout((2, 0, 1, 3)),
}


@pytest.mark.slow
@pytest.mark.parametrize("order", ["first", "second"])
@pytest.mark.parametrize(
    "kind", [Watched, InHalves, lambda: Watched("written latents", USES["strides"])], ids=["plain", "halves", "strides"]
)
def test_caches_in_other_layouts(kind, order):
    """Layers that differ only in how their caches are stored, and what shares memory with these."""
    numbers = range(1 + len(LAYOUTS))
    x, tables, position, plain = given([kind for _ in numbers])
    caches = [plain[0], *(lay_out(pair) for lay_out, pair in zip(LAYOUTS.values(), plain[1:], strict=True))]
    model = Model(*(kind() for _ in numbers))
    check(model, (x, tables, position, caches if order == "second" else caches[::-1]))


def transposed(layer):
    for name, weight in list(layer.named_parameters()):
        if weight.ndim == 2:
            setattr(layer, name, nn.Parameter(weight.detach().T.contiguous().T))


def in_one_storage(layer):
    rank = SIZES.query_rank
    whole = torch.cat((layer.q_a.detach(), layer.kv_a.detach()))
    layer.q_a, layer.kv_a = nn.Parameter(whole[:rank]), nn.Parameter(whole[rank:])


WEIGHTS = [transposed, in_one_storage]


@pytest.mark.slow
@pytest.mark.parametrize("order", ["first", "second"])
def test_weights_in_other_layouts(order):
    layers = [Watched(), *(Watched() for _ in WEIGHTS)]
    for lay_out, layer in zip(WEIGHTS, layers[1:], strict=True):
        lay_out(layer)
    check(Model(*(layers if order == "second" else layers[::-1])), given([Watched] * len(layers)))


def test_layers_that_share_caches():
    """The second layer overwrites what the first has written; the third has its own caches."""
    x, tables, position, caches = given([Watched] * 3)
    caches[1] = caches[0]
    check(Model(Watched(), Watched(), Watched()), (x, tables, position, caches))
