"""Keys and values are projected by a weight that the graph computes: unpacked, looked up, or of anything else.

What computes it is not read, so every packing is right that the program has right, and no list of them is kept."""

import copy

import pytest
import torch
from lib import packed_weights
from lib.comparing import ALL, EXACT
from lib.packed_weights import OTHERS, SPELLINGS, multiplied
from lib.quantised import Quantised, report_of
from lib.quantised_models import check_as_exact
from lib.quantised_prologs import Compiled

import mla_fx
from mla_fx.cases import DV, B, D, Layer, N, T, inputs

pytestmark = [pytest.mark.usefixtures("no_gradients"), pytest.mark.filterwarnings("ignore::mla_fx.MlaWarning")]
packings = pytest.mark.parametrize("unpacked", SPELLINGS, ids=lambda spelling: spelling.__name__)


class Absorbed(Quantised):
    """The weight is multiplied into the query, and into the result."""

    def attend(self, q_nope, q_rope, latent, k_rope, mask):
        parts = (getattr(self, f"kv_b_{part}") for part in ("codes", "scales", "zeros"))
        weight = self.multiply(packed_weights.Stored(*parts), latent.dtype).unflatten(0, (N, D + DV))
        query = torch.einsum("bnsd,ndc->bnsc", q_nope, weight[:, :D])
        scores = query @ latent.transpose(-1, -2) + q_rope @ k_rope.transpose(-1, -2)
        weights = torch.softmax(scores * 0.3 + mask, -1)
        return torch.einsum("bnsc,nvc->bnsv", weights @ latent, weight[:, D:]).transpose(1, 2)


@packings
def test_attention_is_over_latents(unpacked):
    report = report_of(Quantised(multiplied(unpacked), SPELLINGS[unpacked], "kv_b"), prove="required")
    assert report.fused == ALL and not report.unchecked, str(report)


@pytest.mark.slow
@packings
def test_absorbed(unpacked):
    report = report_of(Absorbed(unpacked, SPELLINGS[unpacked], "kv_b"), prove="required")
    assert report.fused == ALL and not report.unchecked, str(report)


@pytest.mark.slow
@packings
def test_as_exact_in_bfloat16_as_eager_mode(unpacked):
    check_as_exact(Quantised(multiplied(unpacked), SPELLINGS[unpacked], "kv_b"))
    assert mla_fx.last_report().fused == ALL


@pytest.mark.parametrize("unpacked", OTHERS, ids=lambda spelling: spelling.__name__)
def test_what_is_unpacked_otherwise_is_another_weight(unpacked):
    """A code in the wrong place, a sign, a zero point of another group: as in eager mode."""
    report = report_of(Quantised(multiplied(unpacked), OTHERS[unpacked], "kv_b"), prove="required")
    assert report.fused == ALL, str(report)


@pytest.mark.parametrize("unpacked", [packed_weights.by_writes, packed_weights.looked_up])
def test_a_target_that_keeps_copies_unpacks_once(unpacked):
    """The copies follow what they are made of, and the report counts them."""
    layer = Quantised(multiplied(unpacked), SPELLINGS[unpacked], "kv_b")
    ours, theirs = Compiled(layer), copy.deepcopy(layer)
    for part in ("codes", "scales", "zeros", "codes"):
        torch.testing.assert_close(ours.run(*inputs()), theirs(*inputs()), **EXACT)
        for one in (layer, theirs):
            stored = getattr(one, f"kv_b_{part}")
            stored.copy_(stored.flip(0))
    torch.testing.assert_close(ours.run(*inputs()), theirs(*inputs()), **EXACT)
    assert any(note.startswith("5 weights laid out once") for note in ours.report.notes), ours.report.notes


# --- weights that depend on more than parameters ----------------------------------------------------------------------


class OfSequences(Layer):
    """A weight for each sequence, chosen from several: the index is that of a table, but of tokens."""

    def __init__(self):
        super().__init__()
        self.register_buffer("several", torch.stack([self.kv_b, self.kv_b * 0.5 + 0.01, -self.kv_b]).detach())

    def forward(self, x, cos, sin, position, chosen):
        self.chosen = chosen
        return super().forward(x, cos, sin, position)

    def keys(self, latent, k_rope):
        return self.parted(torch.bmm(latent.squeeze(1), self.several[self.chosen].transpose(1, 2)), k_rope)

    def parted(self, expanded, k_rope):
        k_nope, value = expanded.view(B, T, N, D + DV).transpose(1, 2).split([D, DV], dim=-1)
        return torch.cat((k_nope, k_rope.expand(-1, N, -1, -1)), dim=-1), value


def test_a_weight_for_each_sequence_is_refused():
    report = report_of(OfSequences(), *inputs(), torch.tensor([0, 2]), prove="required")
    assert not report.fused
    assert [miss.reason for miss in report.misses] == ["weight_uk depends on more than its own dimensions"]


class Depending(OfSequences):
    """The weight is multiplied by a number that depends on the tokens."""

    def __init__(self, number):
        super().__init__()
        self.number = number

    def forward(self, x, cos, sin, position):
        self.x, self.before = x, self.kv_cache.clone()
        return super().forward(x, cos, sin, position, None)

    def keys(self, latent, k_rope):
        weight = self.kv_b * (1 + self.number(self, latent).mean())
        return self.parted(latent.squeeze(1) @ weight.t(), k_rope)


KEY_SIDE = {"kv_rmsnorm_rope_cache": 1, "latent_attention": 1}
DEPENDING = {
    "hidden states": (lambda layer, _: layer.x, ALL),
    "the cache before": (lambda layer, _: layer.before, ALL),
    "the cache after": (lambda _, latent: latent, KEY_SIDE),  # the prolog writes what its own weight is computed from
}


@pytest.mark.parametrize("name", DEPENDING)
def test_a_weight_that_depends_on_tokens_is_what_the_program_computes(name):
    number, fused = DEPENDING[name]
    report = report_of(Depending(number), prove="required")
    assert report.fused == fused, str(report)
    assert [miss.reason for miss in report.misses] == ["the operator would need a value that it computes itself"] * (
        fused == KEY_SIDE
    )
