"""Caches written in place, and left unchanged if something still reads the old content."""

import copy

import pytest
import torch
from lib.layers import Rewritten
from torch import nn

import mla_fx
from mla_fx import cases
from mla_fx.cases import DR, HCKV, B, D, Layer, N, S, T

pytestmark = pytest.mark.usefixtures("no_gradients")


class Functional(Layer):
    """Caches updated out of place and copied back at the end; `late` reads old and new ones."""

    def late(self, new):
        return ()

    def forward(self, x, cos, sin, position):
        q_nope, q_rope = self.query(x).view(B, S, N, D + DR).transpose(1, 2).split([D, DR], dim=-1)
        latent, k_rope = self.rows(x)
        new = (
            self.kv_cache.index_copy(2, position, latent),
            self.kr_cache.index_copy(2, position, self.rotate(k_rope, cos, sin)),
        )
        mask = torch.zeros(S, T).masked_fill(torch.arange(T) > position[:, None], -torch.inf)
        out = self.attend(q_nope, self.rotate(q_rope, cos, sin), *new, mask)
        late = self.late(new)
        self.kv_cache.copy_(new[0])
        self.kr_cache.copy_(new[1])
        return (out.transpose(1, 2).reshape(B, S, -1) @ self.o.T, *late)


def late(name, look):
    """`look` reads the old caches, or the new ones, last."""
    return type(name, (Functional,), {"late": look})


class LateSplit(Functional):
    def late(self, new):
        return self.kv_cache.split(4, dim=2)[1].sum((1, 2)), *(part + 1 for part in self.kr_cache.chunk(3, dim=-1))


LateUnbind = late("LateUnbind", lambda my, _: (my.kv_cache.unbind(2)[T - 4].exp(),))
LateUnfold = late("LateUnfold", lambda my, _: (my.kv_cache.unfold(2, 4, 4).amax(-1),))
LateView = late("LateView", lambda my, _: (my.kr_cache.squeeze(1).transpose(1, 2)[:, 1:].cos(),))
LateStrides = late("LateStrides", lambda my, _: (my.kv_cache.as_strided((T, HCKV), (HCKV, 1)) * 3,))
ReturnsOld = late("ReturnsOld", lambda my, _: (my.kv_cache.clone(),))
ReturnsNew = late("ReturnsNew", lambda my, new: (new[0],))
ReturnsViewOfNew = late("ReturnsViewOfNew", lambda my, new: (new[1][:, 0, 3:],))
ComparesBoth = late("ComparesBoth", lambda my, new: ((new[0] - my.kv_cache).abs().sum(),))


class Cloned(Layer):
    """A cache that is cloned, written and copied back."""

    def store(self, latent, k_rope, position):
        caches = self.kv_cache.clone(), self.kr_cache.clone()
        caches[0].index_copy_(2, position, latent)
        caches[1].index_copy_(2, position, k_rope)
        self.kv_cache.copy_(caches[0])
        self.kr_cache.copy_(caches[1])
        return caches


class OneBuffer(Layer):
    """Both caches are pieces of one buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("both", torch.cat((self.kv_cache, self.kr_cache), dim=-1))
        del self.kv_cache, self.kr_cache

    @property
    def caches(self):
        return self.both[..., :HCKV], self.both[..., HCKV:]

    def store(self, latent, k_rope, position):
        for cache, rows in zip(self.caches, (latent, k_rope), strict=True):
            cache.index_copy_(2, position, rows)
        return self.caches


class TwoSteps(Layer):
    """Two steps of one layer over one cache, in one graph."""

    def forward(self, x, cos, sin, position):
        first = super().forward(x, cos, sin, position)
        return super().forward(first, cos, sin, position + 2)


class TwoLayers(nn.Module):
    """Two layers that share their caches."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Layer(), Layer()
        self.second.kv_cache, self.second.kr_cache = self.first.kv_cache, self.first.kr_cache

    def forward(self, x, cos, sin, position):
        return self.second(self.first(x, cos, sin, position), cos, sin, position - 3)


class LongSlice(Layer):
    """The last 32 of 16 slots are all of them."""

    def store(self, *given):
        return tuple(cache[:, :, -2 * T :] for cache in super().store(*given))


class WrittenTwice(Layer):
    def store(self, latent, k_rope, position):
        caches = super().store(latent, k_rope, position)
        self.kv_cache[:, :, 0] = 0
        return caches


class Gaps(Layer):
    """Caches that are slices of longer ones, so the memory of one has gaps."""

    def __init__(self):
        super().__init__()
        self.kv_cache = torch.cat((self.kv_cache, self.kv_cache), dim=0)
        self.kr_cache = torch.cat((self.kr_cache, self.kr_cache), dim=0)

    def store(self, latent, k_rope, position):
        kv_cache, kr_cache = self.kv_cache[:B], self.kr_cache[:B]
        kv_cache.index_copy_(2, position, latent)
        kr_cache.index_copy_(2, position, k_rope)
        return kv_cache, kr_cache


class Roomy(Layer):
    """DeepSeek's inference code: a slice of the batch rows, and in it a slice of the tokens. The rest is read as
    well."""

    def __init__(self):
        super().__init__()
        self.kv_cache, self.kr_cache = (cache.repeat(2, 1, 1, 1) for cache in (self.kv_cache, self.kr_cache))

    def store(self, latent, k_rope, position):
        self.kv_cache[:B, :, 4 : 4 + S] = latent
        self.kr_cache[:B, :, 4 : 4 + S] = k_rope
        return self.kv_cache[:B], self.kr_cache[:B]

    def forward(self, *inputs):
        return super().forward(*inputs), self.kv_cache.sum(-1), self.kr_cache[B:] * 2


class RoomyRestored(Roomy):
    """One row of the batch is restored."""

    def store(self, latent, k_rope, position):
        old = self.kv_cache[:1].clone()
        caches = [cache.clone() for cache in super().store(latent, k_rope, position)]
        self.kv_cache[:1] = old
        return caches


class RoomyHalf(Roomy):
    """A functional update; only part of it is kept."""

    def store(self, latent, k_rope, position):
        new = self.kv_cache[:B].index_copy(2, position, latent), self.kr_cache[:B].index_copy(2, position, k_rope)
        self.kv_cache[:B, :, :8] = new[0][:, :, :8]
        self.kr_cache[:B] = new[1]
        return new


class RoomyReturned(Roomy):
    def forward(self, *inputs):
        return super().forward(*inputs), self.kv_cache


class Transposed(Layer):
    """Caches stored as [B, 1, width, T]."""

    def __init__(self):
        super().__init__()
        self.kv_cache = self.kv_cache.transpose(2, 3).contiguous().transpose(2, 3)
        self.kr_cache = self.kr_cache.transpose(2, 3).contiguous().transpose(2, 3)


KEPT = "does not write its caches in place"
REFUSED = {
    LateSplit: "reads the old kv_cache",
    LateUnbind: "reads the old kv_cache",
    LateUnfold: "reads the old kv_cache",
    LateView: "reads the old kr_cache",
    LateStrides: "reads the old kv_cache",
    ReturnsOld: "reads the old kv_cache",
    ReturnsNew: "the updated kv_cache is an output",
    ReturnsViewOfNew: "the updated kr_cache is an output",
    ComparesBoth: "reads the old kv_cache",
    Cloned: "kv_cache is not a view of a graph input, but computed by clone",
    RoomyRestored: "the updated kv_cache differs from what the graph input becomes",
    RoomyHalf: "the updated kv_cache differs from what the graph input becomes",
    TwoSteps: KEPT,
    TwoLayers: KEPT,
}


def run_both(module, target="reference", **options):
    """The report of a module whose outputs and buffers are eager's."""
    eager = module.eval()
    fused = copy.deepcopy(eager)
    inputs = cases.inputs()
    expected = eager(*copy.deepcopy(inputs))
    run = Rewritten(fused, target=target, **options)
    torch.testing.assert_close(run(*inputs), expected, rtol=1e-4, atol=1e-5)
    for name, buffer in eager.named_buffers():
        torch.testing.assert_close(fused.get_buffer(name), buffer, rtol=1e-4, atol=1e-5)
    return run.report


class Together(cases.Layer):
    """Latents and rotary keys share pages, which the operator does not write: it gives the rows."""

    def __init__(self):
        super().__init__()
        self.pool = torch.nn.Buffer(torch.randn(8, 4, cases.HCKV + cases.DR))
        self.slots = torch.nn.Buffer(torch.tensor([3, 4, 5, 19, 20, 21]))
        self.table = torch.nn.Buffer(torch.arange(8).view(2, 4))

    def store(self, latent, k_rope, position):
        rows = torch.cat((latent, k_rope), -1).flatten(0, 2)
        self.pool.view(-1, rows.shape[-1])[self.slots] = rows
        held = self.pool[self.table].flatten(1, 2).unsqueeze(1)
        return held[..., : cases.HCKV], held[..., cases.HCKV :]


def test_rows_for_a_pool_are_new_memory():
    report = run_both(Together())
    assert "mla_prolog" in report.fused, str(report)
    assert any("kv_cache is not a view of a graph input, but new memory, from which rows" in n for n in report.notes)


# Inductor reinplaces itself, and takes seconds for each.
TARGETS = ["reference", pytest.param("inductor", marks=pytest.mark.campaign)]


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kind", REFUSED, ids=lambda kind: kind.__name__)
def test_what_is_still_needed_is_kept(kind, target):
    report = run_both(kind(), target)
    assert report.fused, report
    notes = [note for note in report.notes if KEPT in note]
    assert bool(notes) == (target == "reference")
    assert all(REFUSED[kind] in note for note in notes), notes


IN_PLACE = [Layer, Functional, Transposed, Gaps, Roomy, RoomyReturned]


@pytest.mark.slow
@pytest.mark.compiled
@pytest.mark.parametrize("kind", IN_PLACE, ids=lambda kind: kind.__name__)
def test_a_cache_that_nobody_needs_is_written_in_place(kind):
    report = run_both(kind(), keep_text=True)
    assert "mla_prolog" in report.fused
    assert report.notes == []
    graphs = report.graphs
    assert "mla_fx.mla_prolog_(" in graphs["reinplace"] and "copy_(" not in graphs["reinplace"]
    assert "mla_fx.mla_prolog(" in graphs["clean up"] and "copy_(" in graphs["clean up"]


def test_a_cache_that_is_written_again_keeps_both_writes():
    run_both(WrittenTwice())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::mla_fx.MlaWarning")
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kind", [OneBuffer, LongSlice], ids=lambda kind: kind.__name__)
def test_caches_that_lie_oddly_keep_their_answers(kind, target):
    run_both(kind(), target)


@pytest.mark.slow
def test_one_refusal_does_not_keep_the_other_layers_from_it():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = LateSplit(), Layer()

        def forward(self, *inputs):
            first, *late = self.first(*inputs)
            return self.second(first, *inputs[1:]), *late

    report = run_both(Two(), keep_text=True)
    assert report.fused == {"mla_prolog": 2, "latent_attention": 2}
    assert len([note for note in report.notes if KEPT in note]) == 1
    assert report.graphs["reinplace"].count("mla_fx.mla_prolog_(") == 1


def test_a_bug_is_no_refusal(monkeypatch):
    """It reaches the fence around all passes, which is an error when strict."""

    def fail(*_):
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("mla_fx.passes.reinplace.resolve", fail)
    with pytest.warns(mla_fx.MlaWarning, match="pass 'reinplace' failed with ZeroDivisionError: a bug"):
        assert run_both(Layer()).fused == {}


def test_inputs_that_share_memory():
    class Peeking(Layer):
        def forward(self, x, cos, sin, position, kv_cache, peek):
            kv_cache.index_copy_(2, position, self.rows(x)[0])
            old = peek * 2
            self.kv_cache = kv_cache
            return old, super().forward(x, cos, sin, position), peek + 1

    def call(run):
        buffer = torch.randn(B, 1, T, HCKV, generator=torch.Generator().manual_seed(3))
        return run(*cases.inputs(), buffer, buffer[:, :, T - 5 :]), buffer

    module = Peeking().eval()
    expected = call(copy.deepcopy(module))
    found = call(torch.compile(module, backend=mla_fx.get_backend(target="reference")))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
