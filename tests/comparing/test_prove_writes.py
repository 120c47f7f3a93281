"""The option prove, for caches that are written in place: with the conditions of the pass switched off, each wrong
write is found out."""

import functools
import re
from types import SimpleNamespace

import pytest
import torch
from lib.traced import B, S, T, dense
from lib.writes import copied_back, fused, scaled
from torch.fx.experimental.proxy_tensor import make_fx

from mla_fx.comparing import in_place
from mla_fx.debug.report import Report
from mla_fx.options import Options
from mla_fx.passes import prove, reinplace

aten = torch.ops.aten

# --- programs that may write in place --------------------------------------------------------------------------------


def read_afterwards(*given):
    *out, k_rope, c_kv = fused(*given)
    for cache, result in zip(given[-2:], out, strict=True):
        cache.copy_(result)
    return out[0].sum(), out[1].transpose(1, 2) * 2, k_rope, c_kv


def read_before(*given):
    old = given[-2].sum()
    return old, *copied_back(*given)


def written_in_part(*given):
    rows, cache = given[-2][:, :, 1:], given[-2]
    k_cache, ckv_cache = fused(*given[:-2], rows, given[-1][:, :, : T - 1])[:2]
    cache.copy_(aten.slice_scatter(cache, k_cache, 2, 1, T))
    given[-1].copy_(aten.slice_scatter(given[-1], ckv_cache, 2, 0, T - 1))


def turned_around(*given):
    k_cache, ckv_cache = fused(*given[:-2], given[-2].view(B, 1, T, 6), given[-1])[:2]
    given[-2].copy_(k_cache.view(B, 1, T, 6))
    given[-1].copy_(ckv_cache)
    return k_cache.view(B, T, 6) @ k_cache.view(B, T, 6).mT


# --- and those that may not ------------------------------------------------------------------------------------------


def old_is_read(*given):
    k_cache, ckv_cache, *rest = fused(*given)
    late = given[-2] * k_cache
    given[-2].copy_(k_cache)
    given[-1].copy_(ckv_cache)
    return late, *rest


def old_view_is_read(*given):
    rows = given[-1][:, :, 1]
    k_cache, ckv_cache, *rest = fused(*given)
    late = rows + rest[1].sum()
    given[-2].copy_(k_cache)
    given[-1].copy_(ckv_cache)
    return late, *rest


def elsewhere(*given):
    k_cache, ckv_cache = fused(*given[:-2], given[-2][:, :, : T - 1], given[-1][:, :, : T - 1])[:2]
    given[-2].copy_(aten.slice_scatter(given[-2], k_cache, 2, 1, T))
    given[-1].copy_(aten.slice_scatter(given[-1], ckv_cache, 2, 0, T - 1))


def first_rows_alone(*given):
    k_cache, ckv_cache = fused(*given)[:2]
    given[-2].copy_(aten.slice_scatter(given[-2], k_cache[:, :, : T - 1], 2, 0, T - 1))
    given[-1].copy_(ckv_cache)


def from_behind(*given):
    k_cache, ckv_cache = fused(*given)[:2]
    given[-2].copy_(k_cache.flip(2))
    given[-1].copy_(ckv_cache)


def sequences_swapped(*given):
    k_cache, ckv_cache = fused(*given)[:2]
    given[-2].copy_(k_cache)
    given[-1].copy_(ckv_cache.flip(0))


def in_each_others_place(*given):
    k_cache, ckv_cache = fused(*given)[:2]
    given[-2].copy_(ckv_cache[..., :6])
    given[-1].copy_(torch.cat((k_cache, ckv_cache[..., 6:]), -1))


def returned(*given):
    """The result is another tensor than the cache."""
    k_cache, ckv_cache = fused(*given)[:2]
    given[-2].copy_(k_cache)
    given[-1].copy_(ckv_cache)
    return k_cache


RIGHT = copied_back, read_afterwards, read_before, written_in_part, turned_around
WRONG = (
    old_is_read, old_view_is_read, scaled, elsewhere, first_rows_alone, from_behind, sequences_swapped,
    in_each_others_place, returned,
)  # fmt: skip


def written_in_place(function, prove_option="on"):
    """The report of the pass on a traced program."""
    run = SimpleNamespace(options=Options(prove=prove_option), report=Report(), proved={})
    given = dense(B, 1, S, 26), dense(20), dense(B, 1, S, 6), dense(B, 1, S, 6), torch.arange(S).expand(B, S)
    graph = make_fx(function, tracing_mode="fake")(*given, dense(B, 1, T, 6), dense(B, 1, T, 20)).graph
    refusals = reinplace.reinplace(graph, functools.partial(prove.apply, run))
    return run.report, refusals


@pytest.mark.parametrize("function", RIGHT, ids=lambda function: function.__name__)
def test_right_writes_pass(function):
    report, refusals = written_in_place(function)
    assert (report.checked, report.unchecked, report.refuted, dict(refusals)) == (1, [], [], {})


@pytest.fixture
def careless(monkeypatch):
    """The pass takes every cache that a copy writes."""

    def update(node, position, name):
        given = reinplace.named_argument(node, name)
        source = given
        while source.op != "placeholder":
            source = source.all_input_nodes[0]
        [copy] = (user for user in source.users if user.target is aten.copy_.default)
        return reinplace.Update(given, source, tuple(reinplace._results(node, position)), copy)

    monkeypatch.setattr(reinplace, "_update", update)


@pytest.mark.parametrize("function", WRONG, ids=lambda function: function.__name__)
def test_wrong_writes_are_refuted(careless, function):
    report, refusals = written_in_place(function)
    [reason] = report.refuted
    assert re.match(r"writing in place by kv_rmsnorm_rope_cache would change [a-z_0-9 ]+: at ", reason)
    assert dict(refusals) == {f"kv_rmsnorm_rope_cache does not write its caches in place: {reason}": 1}


@pytest.mark.parametrize("function", RIGHT, ids=lambda function: function.__name__)
def test_right_writes_pass_without_the_conditions(careless, function):
    report, _ = written_in_place(function)
    assert (report.checked, report.unchecked, report.refuted) == (1, [], [])


@pytest.mark.parametrize("function", WRONG, ids=lambda function: function.__name__)
def test_the_pass_refuses_them_itself(function):
    report, refusals = written_in_place(function)
    assert (report.checked, sum(refusals.values())) == (0, 1)


def test_a_write_that_cannot_be_checked(careless, monkeypatch):
    def difference(plan):
        raise NotImplementedError("a test")

    monkeypatch.setattr(in_place, "difference", difference)
    report, refusals = written_in_place(copied_back)
    reason = "writing in place by kv_rmsnorm_rope_cache could not be checked: NotImplementedError: a test"
    assert (report.unchecked, dict(refusals)) == ([reason], {})
    report, refusals = written_in_place(copied_back, "required")
    assert (report.unchecked, dict(refusals)) == (
        [], {f"kv_rmsnorm_rope_cache does not write its caches in place: {reason}": 1},
    )  # fmt: skip
