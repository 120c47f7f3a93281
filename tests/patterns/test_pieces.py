"""Single norms and rotations: their near twins, and targets that do not want them."""

import dataclasses

import pytest
import torch
from lib.traced import Traced, dense

from mla_fx.cases import DR, Case, N, WeightedQuery
from mla_fx.driver import discovery
from mla_fx.driver.try_cases import run_case
from mla_fx.errors import NoMatch
from mla_fx.matching.match import NearestMiss

RULES = {rule.name: rule for rule in discovery.rules()}
pytestmark = pytest.mark.usefixtures("no_gradients")

# --- norms -----------------------------------------------------------------------------------------------------------

X, GAMMA = dense(3, 5, 8), 1 + 0.3 * dense(8)


def normed(x, gamma, over=-1, power=2):
    return x * torch.rsqrt(x.pow(power).mean(over, keepdim=True) + 1e-5) * gamma


NORMS = {
    "plain": (lambda x, gamma: normed(x, gamma), None),
    "of what was centred": (lambda x, gamma: normed(x - x.mean(-1, keepdim=True), gamma), None),
    "over another axis": (lambda x, gamma: normed(x, gamma, 1), "is not along the normalised dimension"),
    "over two axes": (lambda x, gamma: normed(x, gamma, (1, 2)), "is not along the normalised dimension"),
    "over an axis in between": (lambda x, gamma: normed(x.mT, gamma[:, None], 1), "not over the columns of a row"),
    "without a weight": (lambda x, gamma: normed(x, 1.0) + gamma, "multiplied by one weight, found nothing"),
    "of another value": (
        lambda x, gamma: gamma.exp() * (x + 1) * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5),
        "not the value whose mean square is computed",
    ),
    "LayerNorm": (
        lambda x, gamma: (x - x.mean(-1, keepdim=True)) * torch.rsqrt(x.var(-1, keepdim=True) + 1e-5) * gamma,
        "expected a mean of squares under the root",
    ),
    "of another power": (lambda x, gamma: normed(x, gamma, power=4), "expected the mean of one value squared"),
}


@pytest.mark.parametrize("name", NORMS)
def test_near_twins_of_a_norm(name):
    function, reason = NORMS[name]
    found = refusal(RULES["rms_norm"], Traced(function, X, GAMMA, decompose=False).graph)
    assert found is None if reason is None else reason in found, found


def refusal(rule, graph):
    """Why a rule does not apply at its only anchor; None if it does."""
    nearest = NearestMiss()
    (anchor,) = rule.anchors(graph)
    for match in rule.bindings(anchor, nearest):
        try:
            rule.rewrite(match.settled())
            return None
        except NoMatch as miss:
            nearest.fail(match, miss)
    return nearest.miss.reason


# --- rotations -------------------------------------------------------------------------------------------------------


class Written(WeightedQuery):
    """Read interleaved, written interleaved."""

    def rotate(self, x, cos, sin):
        first, second = x[..., 0::2], x[..., 1::2]
        cos, sin = cos[..., : DR // 2], sin[..., : DR // 2]
        return torch.stack((first * cos - second * sin, second * cos + first * sin), -1).flatten(-2)


class OwnTables(WeightedQuery):
    """Different tables for the first and the second elements of pairs."""

    def rotate(self, x, cos, sin):
        return super().rotate(x, cos * torch.linspace(0.5, 1.5, DR), sin * torch.linspace(2, 1, DR))


class QueryRotated(WeightedQuery):
    """The query is rotated differently from the key."""

    def rotate_key(self, x, cos, sin):
        return WeightedQuery.rotate(self, x, cos, sin)


class ByHead(QueryRotated):
    """Each head has its own tables."""

    def rotate(self, x, cos, sin):
        angle = torch.arange(1.0, N + 1).view(N, 1, 1)
        return super().rotate(x, cos * angle, sin * angle)


class AlongTokens(QueryRotated):
    """The tokens of a pair are rotated, not its columns."""

    def rotate(self, x, cos, sin):
        return x * cos + torch.cat((-x[:, :, 1:], x[:, :, :1]), dim=2) * sin


class Mirrored(QueryRotated):
    """Pairs are the first column and the last one, and so on."""

    def rotate(self, x, cos, sin):
        return x * cos + x.flip(-1) * sin


class Shifted(QueryRotated):
    def rotate(self, x, cos, sin):
        return super().rotate(x, cos, sin) + 1


ROTATIONS = {Written: 1, OwnTables: 1, ByHead: 0, AlongTokens: 0, Mirrored: 0, Shifted: 0}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ROTATIONS)
def test_near_twins_of_a_rotation(kind):
    """Fused or not, results and caches stay the same."""
    report = run_case(Case(kind.__name__, kind, pieces=True))
    assert report.pieces.get("rope", 0) == ROTATIONS[kind]
    assert report.fused["kv_rmsnorm_rope_cache"] == 1
    assert not {"rope", "rms_norm"} & {miss.pattern for miss in report.misses}


# --- where ---------------------------------------------------------------------------------------------------------


def test_a_target_that_wants_no_pieces_gets_none():
    report = run_case(Case("no pieces", WeightedQuery))
    assert report.fused == {"kv_rmsnorm_rope_cache": 1, "latent_attention": 1}
    assert report.graphs["recognise cache"] == report.graphs["recognise pieces"]


@pytest.mark.filterwarnings("ignore::mla_fx.MlaWarning")
def test_a_graph_in_which_no_attention_fuses_keeps_its_norms():
    case = dataclasses.replace(RULES["mla_attention"].rejects[0], pieces=True)
    report = run_case(case)
    assert report.fused == {}
    assert report.graphs["captured"] == report.graphs["clean up"]
