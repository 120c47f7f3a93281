"""Spellings whose terms double with each level are read in bounded work, counted in calls of the compiler's functions.

They may fuse or be refused; the compiler just has to finish with a graph this deep."""

import logging
import sys
from pathlib import Path

import pytest
import torch

import mla_fx
from mla_fx.cases import DR, HCKV, D, Layer, T, inputs
from mla_fx.graph.torch_private import make_fx
from mla_fx.readings.element import element_of
from mla_fx.readings.integers import integer_sum

pytestmark = [pytest.mark.filterwarnings("ignore::mla_fx.MlaWarning"), pytest.mark.usefixtures("no_gradients")]
DEPTH = 24
CALLS = 300_000  # a plain layer takes some 30,000; those of these that fuse, and are checked, up to 200,000
ROOT = Path(mla_fx.__file__).parents[1]  # where a virtual environment may be, too
SOURCES = tuple(f"{ROOT / folder}/" for folder in ("mla_fx", "patterns", "lowering"))
INF = torch.inf


class EndlessError(BaseException):
    """More calls than allowed; no fence of the compiler may mistake it for a failing pass."""


def calls_of(function, *args):
    """Count calls of the compiler's own functions. Raises EndlessError if there are more than allowed."""
    calls = 0

    def watch(frame, event, _):
        nonlocal calls
        if event == "call" and frame.f_code.co_filename.startswith(SOURCES):
            calls += 1
            if calls > CALLS:
                raise EndlessError

    sys.setprofile(watch)
    try:
        function(*args)
    finally:
        sys.setprofile(None)
    return calls


def nested(step, value, *others):
    for _ in range(DEPTH):
        value = step(value, *others)
    return value


def of_scores(step):
    class OfScores(Layer):
        def attend(self, q_nope, q_rope, latent, k_rope, mask):
            key, value = self.keys(latent, k_rope)
            scores = torch.cat((q_nope, q_rope), dim=-1) @ key.transpose(-1, -2) * (D + DR) ** -0.5
            return nested(step, scores, mask).softmax(-1) @ value

    return OfScores


def of_masks(step):
    class OfMasks(Layer):
        def attend(self, q_nope, q_rope, latent, k_rope, mask):
            return super().attend(q_nope, q_rope, latent, k_rope, nested(step, mask))

    return OfMasks


def of_positions(step):
    class OfPositions(Layer):
        def store(self, latent, k_rope, position):
            return super().store(latent, k_rope, nested(step, position, position))

    return OfPositions


def of_latents(step):
    class OfLatents(Layer):
        def keys(self, latent, k_rope):
            return super().keys(nested(step, latent), k_rope)

    return OfLatents


def of_norms(step):
    class OfNorms(Layer):
        def norm(self, x, gamma):
            return super().norm(nested(step, x), gamma)

    return OfNorms


def of_rotations(step):
    class OfRotations(Layer):
        def rotate(self, x, cos, sin):
            return super().rotate(nested(step, x), cos, sin)

    return OfRotations


def of_tables(step):
    class OfTables(Layer):
        def rotate(self, x, cos, sin):
            return super().rotate(x, nested(step, cos), nested(step, sin))

    return OfTables


def turned(x):
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first + second, second - first), dim=-1)


def joined(x):
    return torch.cat(x.chunk(2, dim=-1), dim=-1)


SPELLINGS = {
    "filled sums": of_scores(lambda s, m: torch.where(m == 0, s + s * 0.01, -INF)),
    "sums that are filled": of_scores(lambda s, m: (s + s).masked_fill(m != 0, -INF)),
    "both ways": of_scores(lambda s, m: torch.where(m == 0, s, s * 0.5)),
    "scores over scores": of_scores(lambda s, m: s * s),
    "products of sums": of_scores(lambda s, m: s * (s + 1.0)),
    "halves": of_scores(lambda s, m: torch.cat((s[..., : T // 2] + s[..., T // 2 :], s[..., T // 2 :]), -1)),
    "less their largest": of_scores(lambda s, m: torch.where(m == 0, s - s.amax(-1, keepdim=True), -INF)),
    "probabilities": of_scores(lambda s, m: s.softmax(-1) + s),
    "sums of masks": of_masks(lambda m: m + m),
    "filled masks": of_masks(lambda m: torch.where(m == 0, m + m, -INF)),
    "conditions": of_masks(lambda m: m.masked_fill((m == 0) & ((m == 0) | (m < 0)), 0)),
    "positions there and back": of_positions(lambda p, own: p + p - p),
    "positions less their own": of_positions(lambda p, own: (p + own) - own * 1),
    "positions twice": of_positions(lambda p, own: p + p),
    "latents": of_latents(lambda c: c + c),
    "stacks": of_latents(lambda c: torch.stack((c, c), -1).select(-1, 0)),
    "cats": of_latents(lambda c: torch.cat((c, c), -1)[..., :HCKV]),
    "columns in turn": of_latents(lambda c: torch.cat((c[..., ::2], c[..., 1::2]), -1)),
    "sums before a norm": of_norms(lambda x: x + x),
    "products before a norm": of_norms(lambda x: x * x),
    "norms": of_norms(lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)),
    "sums before a rotation": of_rotations(turned),
    "joins before a rotation": of_rotations(joined),
    "sums of tables": of_tables(lambda c: joined(c) + c),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SPELLINGS)
def test_deep_graphs_are_read_in_bounded_work(monkeypatch, name):
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "handlers", [])  # pytest listens, so stages were written
    module = torch.export.export(SPELLINGS[name]().eval(), inputs()).run_decompositions().module()
    graph_pass = mla_fx.MlaPass(target="reference")
    assert calls_of(graph_pass, module) <= CALLS
    assert not any("failed" in note for note in graph_pass.report.notes), graph_pass.report.notes


@pytest.mark.parametrize("depth, times", [(3, 8), (30, 2**30), (31, 1), (64, 4)])
def test_what_leaves_64_bits_is_not_counted(depth, times):
    """Doubled 64 times, an integer is zero, and not a multiple of what it was."""

    def doubled(position):
        for _ in range(depth):
            position = position + position
        return position

    graph = make_fx(doubled)(torch.arange(3)).graph
    found = integer_sum(element_of(graph.output_node().args[0]))
    assert [own for _, own in found.elements] == [times]
