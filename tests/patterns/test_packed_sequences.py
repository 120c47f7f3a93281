"""Packed sequences that attend to themselves alone: they are one call, and near twins are not."""

import functools

import pytest
import torch
from lib import layers
from lib.layers import QUIET, Rewritten
from torch import nn

import mla_fx
from mla_fx.errors import NoMatch
from mla_fx.ops.emitted.attention import samples

pytestmark = [pytest.mark.usefixtures("no_gradients"), *(pytest.mark.filterwarnings(line) for line in QUIET)]
N, D, DR, DV, R = 3, 8, 4, 6, 16
LENS = [10, 12, 9]
ONE, APART = {"packed_mla_attention": 1}, {"mla_attention": 3}


class Prompts(nn.Module):
    """Tokens of several sequences: queries, latents and rotary keys are operands."""

    has_rope = True

    def __init__(self):
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        ups = (torch.randn(N, D + DV, R, generator=draw, dtype=torch.float64) * R**-0.5 for _ in range(3))
        self.weights = nn.ParameterList(ups)

    def forward(self, query, latent, k_rope, lens):
        parts = zip(*self.parts(query, latent, k_rope, lens), strict=True)
        return self.joined([self.attend(place, *part) for place, part in enumerate(parts)])

    def joined(self, outs):
        return torch.cat(outs)

    def parts(self, query, latent, k_rope, lens):
        return [rows.split(lens) for rows in (query, latent, k_rope)]

    def attend(self, place, query, latent, k_rope):
        query, latent, k_rope = (rows.unsqueeze(0) for rows in (query, latent, k_rope))
        weights = dict(zip(("weight_uk", "weight_uv"), self.weight(place).split([D, DV], 1), strict=True))
        q_rope, k_rope = (query[..., D:], k_rope) if self.has_rope else (None, None)
        operands = query[..., :D], q_rope, latent, k_rope
        return torch.ops.mla_fx.attention(*operands, **weights, **self.options(place, latent))[0].squeeze(0)

    def weight(self, place):
        return self.weights[0]

    def options(self, place, latent):
        return {"mask": None, "scale": 0.3, "is_causal": True}


variant = functools.partial(layers.variant, kind=Prompts)

def with_options(name, options):
    """Options of each call, and which of the sequences has others."""
    return variant(name, options=lambda my, place, latent: {"mask": None, "scale": 0.3} | options(place, latent))


SeeAll = with_options("SeeAll", lambda place, latent: {})
NoRotaryPart = variant("NoRotaryPart", has_rope=False)


Backwards = variant("Backwards", joined=lambda my, outs: torch.cat(outs[::-1]))
InPart = variant("InPart", joined=lambda my, outs: (torch.cat(outs[1:]), outs[0]))
Rounded = variant("Rounded", joined=lambda my, outs: torch.cat([out.bfloat16() for out in outs]))


class Written(Prompts):
    """Results are written into a tensor."""

    def joined(self, outs):
        out, first = outs[0].new_zeros(sum(part.shape[0] for part in outs), N, DV), 0
        for part in outs:
            out[first : first + part.shape[0]] = part
            first = first + part.shape[0]
        return out


class BehindOthers(Prompts):
    """The first and the last rows are of no sequence."""

    def parts(self, query, latent, k_rope, lens):
        first, rows = lens[0] // 2, sum(lens) - lens[0]
        return [value[first : first + rows].split(lens[1:]) for value in (query, latent, k_rope)]


class WrittenBehind(Prompts):
    """Once a sequence was attended to, its latents are overwritten."""

    def forward(self, query, latent, k_rope, lens):
        latent, outs, first = latent.clone(), [], 0
        for place, length in enumerate(lens):
            own = slice(first, first + length)
            outs.append(self.attend(place, query[own], latent[own], k_rope[own]))
            self.write(latent, first, length)
            first = first + length
        return torch.cat(outs)

    def write(self, latent, first, length):
        latent[first : first + length] = 0


class WrittenAhead(WrittenBehind):
    def write(self, latent, first, length):
        latent[first + length :] = latent[first + length :] * 2


class FromTheLast(WrittenBehind):
    """The latents of a sequence depend on the attention of the one before it."""

    def forward(self, query, latent, k_rope, lens):
        outs, extra = [], 0
        parts = zip(*self.parts(query, latent, k_rope, lens), strict=True)
        for place, (own, rows, keys) in enumerate(parts):
            outs.append(self.attend(place, own, rows + extra, keys))
            extra = outs[-1].mean()
        return torch.cat(outs)


OtherWeights = variant("OtherWeights", weight=lambda my, place: my.weights[place])
OneSeesAll = with_options("OneSeesAll", lambda place, latent: {"is_causal": place != 1})
OtherScales = with_options("OtherScales", lambda place, latent: {"scale": 0.3 + place})
UpToLengths = with_options("UpToLengths", lambda place, latent: {"context_lens": torch.tensor([7])})
WithSinks = with_options("WithSinks", lambda place, latent: {"sinks": latent[0, 0, :N]})
Masked = with_options("Masked", lambda place, latent: {"mask": latent[0, :, 0] > 0})


class Swapped(Prompts):
    """The keys of two sequences are swapped."""

    def parts(self, query, latent, k_rope, lens):
        query, *keys = super().parts(query, latent, k_rope, lens)
        return [query, *([second, first, last] for first, second, last in keys)]


class LastFirst(Prompts):
    def parts(self, query, latent, k_rope, lens):
        return [rows[::-1] for rows in super().parts(query, latent, k_rope, lens)]


class WithGaps(Prompts):
    """The first row of each sequence is left out."""

    def parts(self, query, latent, k_rope, lens):
        return [[part[1:] for part in rows] for rows in super().parts(query, latent, k_rope, lens)]


class OtherRotaryKeys(Prompts):
    """The second sequence sees those of one row later."""

    def parts(self, query, latent, k_rope, lens):
        query, latent, (first, _, last) = super().parts(query, latent, k_rope, lens)
        second = k_rope[lens[0] + 1 : lens[0] + lens[1] + 1]
        return [query, latent, [first, second, last]]


class MoreKeys(Prompts):
    """Each sequence also sees the first key of the next one."""

    def parts(self, query, latent, k_rope, lens):
        ends = (sum(lens[: place + 1]) + 1 for place in range(len(lens)))
        cuts = [slice(end - 1 - length, end) for length, end in zip(lens, ends, strict=True)]
        return [query.split(lens), [latent[cut] for cut in cuts], [k_rope[cut] for cut in cuts]]


def given(lens, dtype=torch.float64):
    draw = torch.Generator().manual_seed(1)
    sizes = (sum(lens), N, D + DR), (sum(lens), R), (sum(lens), DR)
    return *(torch.randn(size, generator=draw, dtype=torch.float64).to(dtype) for size in sizes), [*lens]


def fused(kind, *all_lens, dynamic=False, **options):
    torch._dynamo.reset()
    module = kind()
    run = Rewritten(module, dynamic=dynamic, **options)
    for lens in all_lens:
        torch.testing.assert_close(run(*given(lens)), module(*given(lens)), rtol=1e-9, atol=1e-9)
    return run.report.fused


@pytest.mark.parametrize("kind", [Prompts, SeeAll, NoRotaryPart, WrittenBehind, Backwards, InPart, Rounded, Written])
def test_sequences_are_one_call(kind):
    assert fused(kind, LENS) == ONE


def test_rows_of_no_sequence_are_left_out():
    assert fused(BehindOthers, [6, 12, 9]) == ONE


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Prompts, BehindOthers])
def test_lengths_are_symbols(kind):
    assert fused(kind, LENS, [11, 4, 20], dynamic=True) == ONE


TWINS = [OtherWeights, OneSeesAll, OtherScales, UpToLengths, WithSinks, Masked, Swapped, LastFirst, WithGaps]
TWINS += [OtherRotaryKeys, MoreKeys, FromTheLast, WrittenAhead]


@pytest.mark.parametrize("kind", TWINS)
def test_near_twins_are_not(kind):
    assert fused(kind, [10, 10, 10]) == APART


def test_one_sequence_is_not_packed():
    assert fused(Prompts, [12]) == {"mla_attention": 1}


def test_targets_may_refuse(monkeypatch):
    from mla_fx.lowering import reference
    from mla_fx.lowering.ascend.operators.attention import PACKED

    def refuse(*args, **options):
        raise NoMatch(PACKED)

    operator = torch.ops.mla_fx.attention.default
    monkeypatch.setattr(reference.Reference, "runs_operators", False)
    monkeypatch.setattr(reference.Reference, "lowerings", lambda *_, **__: {operator: refuse})
    assert fused(Prompts, LENS) == APART
    with pytest.raises(NoMatch, match="attended to one by one"):
        refuse()


@pytest.mark.parametrize("absorb", ["auto", "always"])
@pytest.mark.parametrize("target", ["reference", "inductor"])
def test_a_users_packed_call_is_not_absorbed(target, absorb):
    args, options = samples.packed(torch.float64, 0, {"scale": 0.3, "is_causal": True}, 3, 1, 5)
    call = torch.ops.mla_fx.attention
    torch._dynamo.reset()
    found = torch.compile(call, backend=mla_fx.get_backend(target=target, absorb=absorb))(*args, **options)
    torch.testing.assert_close(found, call(*args, **options), rtol=1e-12, atol=1e-12)
    assert mla_fx.last_report().fused == {"packed_mla_attention": 1}
