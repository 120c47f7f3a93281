"""The option verify on compiled layers that quantise tokens or choose keys: what rounding may flip, and what not."""

import pytest
import torch
from lib.plants import plant_in_runs
from lib.quantised_prologs import DOWN, divided, layer_of

import mla_fx
from mla_fx.cases import HCQ, HE, B, D, Layer, N, inputs

pytestmark = [pytest.mark.usefixtures("no_gradients", "own_temporary_folder"), pytest.mark.filterwarnings("ignore")]
aten = torch.ops.aten
TAKEN = 6
FLIPPED = "differ by no more than choices that rounding may flip"


@pytest.fixture
def draws(request):
    return range(50 if request.config.getoption("--campaign") else 10)


class Verified:
    """A compiled layer, whose choices in the first row are changed by `change` if there is one."""

    def __init__(self, patch, layer, operator, fused, **options):
        self.layer, self.fused, self.change = layer, fused, None
        plant_in_runs(patch, operator, lambda value: self.change(value) if self.change else value)
        options = {"target": "reference", "verify": "always", **options}
        self.run = torch.compile(layer, backend="mla", options=options)

    def is_found(self, change, *given):
        """Says if verify finds the change. If not, it must have seen one."""
        self.change = change
        try:
            self.run(*given)
        except mla_fx.VerificationError as error:
            assert "of the compiled graph" in str(error)
            return True
        report = mla_fx.last_report()
        assert report.fused == self.fused, str(report)
        assert FLIPPED in report.verified[-1]
        return False


def drawn(seed):
    generator = torch.Generator().manual_seed(seed)
    _, *rest = inputs()
    return torch.randn(B, rest[-1].numel(), HE, generator=generator), *rest


# --- codes -----------------------------------------------------------------------------------------------------------


def moved(place, by):
    def change(codes):
        if codes.shape[-1] == HE or place < HCQ == codes.shape[-1]:
            codes = codes.clone()
            row = codes.view(-1, codes.shape[-1])[0]
            row[place] += by if (row[place] + by).abs() <= 127 else -by  # the largest code would be cut off
        return codes

    return change


def with_open_code_of_tokens(layer, seed):
    """Hidden states with a code in the first row that rounding may flip, its place, and how far off the other is."""
    x, *rest = drawn(seed)
    row, place = x[0, 0], seed % HE
    row[(place + 1) % HE] = 4.0
    row[place] = (seed + 0.5) * row.abs().amax() / 127
    return (x, *rest), place, 1 if divided(row)[0][place] == seed else -1


def with_open_code_of_query(layer, seed):
    """The same for the codes of the query's latent, by a weight of the norm."""
    given, gamma = drawn(seed), layer.q_gamma
    gamma.copy_(torch.linspace(0.7, 1.3, HCQ))

    def codes():
        latent = layer.norm(layer.project(given[0], "q_a"), gamma)[0, 0]
        return latent * 127 / latent.abs().amax(), divided(latent)[0]

    steps, _ = codes()
    place = (steps.abs().argmax().item() + 1 + seed % (HCQ - 1)) % HCQ
    half = steps[place].floor() + 0.5
    gamma[place] *= half / steps[place]
    return given, place, 1 if codes()[1][place] < half else -1


PROLOG, KEYS = ({name: 1, "latent_attention": 1} for name in ("mla_prolog_v3", "kv_rmsnorm_rope_cache"))
CODES = {
    "tokens": (DOWN, with_open_code_of_tokens, PROLOG, {}),
    "query": (("q_b",), with_open_code_of_query, KEYS, {"disable": ("mla_prolog",)}),
}


@pytest.mark.slow
@pytest.mark.parametrize(("names", "opened", "fused", "options"), CODES.values(), ids=CODES)
def test_codes(monkeypatch, draws, names, opened, fused, options):
    layer = layer_of(divided, *names)
    verified = Verified(monkeypatch, layer, aten.round.default, fused, **options)
    for seed in draws:
        given, place, other = opened(layer, seed)
        assert not verified.is_found(moved(place, other), *given), seed
        assert verified.is_found(moved(place, 2 * other if seed % 2 else -2 * other), *given), seed
        assert verified.is_found(moved((place + 2) % HCQ, other), *given), seed


# --- keys ------------------------------------------------------------------------------------------------------------


class Chosen(Layer):
    """Each token attends to the keys whose rotary parts are the nearest to that of its query."""

    def attend(self, q_nope, q_rope, latent, k_rope, mask):
        scores = q_rope.sum(1) @ k_rope.squeeze(1).transpose(-1, -2) + mask
        best = scores.topk(TAKEN, dim=-1).indices
        chosen = torch.full_like(scores, -torch.inf).scatter(-1, best, 0.0)
        return super().attend(q_nope, q_rope, latent, k_rope, (mask + chosen).unsqueeze(1))


def ranks(layer, x, cos, sin, position):
    """The keys that the first token sees, the best first."""
    query = layer.query(x).view(*x.shape[:2], N, -1).transpose(1, 2)[..., D:]
    scores = layer.kr_cache[0, 0, : position[0] + 1] @ layer.rotate(query, cos, sin).sum(1)[0, 0]
    return scores.argsort(descending=True).tolist()


def with_tied_keys(layer, seed):
    """The last key that is taken and the first one that is left are the same, and one is far behind them."""
    given, generator = drawn(seed), torch.Generator().manual_seed(seed)
    for cache in (layer.kv_cache, layer.kr_cache):
        cache.copy_(torch.randn(cache.shape, generator=generator))
    layer(*given)
    best, own = ranks(layer, *given), given[-1][0]
    kept, other = sorted(best[TAKEN - 1 : TAKEN + 1], key=lambda key: key != own)
    layer.kr_cache[0, 0, other] = layer.kr_cache[0, 0, kept]
    return given, best[0], (kept, other), best[TAKEN + 2]


def exchanged(tied, old=None, new=None):
    """The key `old` against `new`; else the one that was taken of two that are tied, against the other."""

    def change(best):
        values, places = best
        places = places.clone()
        row = places.view(-1, TAKEN)[0]
        taken, left = sorted(tied, key=lambda key: key not in row)
        row[row == (taken if old is None else old)] = left if new is None else new
        return values, places

    return change


@pytest.mark.slow
def test_keys(monkeypatch, draws):
    layer = Chosen()
    verified = Verified(monkeypatch, layer, aten.topk.default, {"mla_prolog": 1, "latent_attention": 1})
    for seed in draws:
        given, first, tied, far = with_tied_keys(layer, seed)
        assert not verified.is_found(exchanged(tied), *given), seed
        assert verified.is_found(exchanged(tied, new=far), *given), seed
        assert verified.is_found(exchanged(tied, old=first, new=None if seed % 2 else far), *given), seed
