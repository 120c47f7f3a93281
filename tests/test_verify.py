"""The option verify: what it finds, what it lets pass, and how often it runs the unfused graph."""

from __future__ import annotations

import pytest
import torch
from stepping import check_same, compiled
from zoo.entries import DEFAULT, Entry
from zoo.sizes import DECODE, PREFILL

import mla_fx
from mla_fx.verify import verified

pytestmark = pytest.mark.usefixtures("no_gradients")


@pytest.mark.parametrize("verify", ["first", "always"])
@pytest.mark.parametrize("step", [PREFILL, DECODE], ids=lambda step: step.name)
def test_verify_takes_a_good_graph(verify, step):
    entry = Entry(DEFAULT)
    module = entry.build()
    run = compiled(module, verify=verify)
    for _ in range(2):
        check_same(module, entry.arguments(step), run)
    assert mla_fx.last_report().fused


def wrong_query(q_nope, weight_uk):
    return torch.einsum("bsnd,ndc->bsnc", q_nope, weight_uk) * 1.1


def wrong_norm(_):
    return {"rmsnorm_epsilon_ckv": 1.0, "rmsnorm_epsilon_cq": 1e-5, "rope_layout": "interleave_half"}


@pytest.mark.parametrize(
    "sabotaged, wrong",
    [("mla_fx.absorb.absorb_query", wrong_query), ("mla_fx.patterns.mla_prolog._options", wrong_norm)],
    ids=["query", "norm"],
)
def test_verify_finds_a_wrong_rewrite(decode, monkeypatch, sabotaged, wrong):
    module, arguments = decode
    monkeypatch.setattr(sabotaged, wrong)
    with pytest.raises(mla_fx.VerificationError, match=r"put \d+ of the fused graph is .* away from the unfused one"):
        compiled(module, verify="first")(*arguments)


def scaled(factor):
    def function(value):
        value.mul_(factor)
        return (value + 1,)

    return function


def test_verify_finds_a_wrong_cache():
    def wrong(value):
        value.mul_(2).view(-1)[3] += 1
        return (torch.ones(5) * 2 + 1,)

    with pytest.raises(mla_fx.VerificationError, match="input 0 of the fused graph"):
        verified(wrong, scaled(2), once=False)(torch.ones(5))


def test_verify_finds_nan():
    with pytest.raises(mla_fx.VerificationError, match="output 0"):
        verified(lambda value: (value * float("nan"),), lambda value: (value,), once=False)(torch.ones(5))


@pytest.mark.parametrize("once, runs", [(True, 1), (False, 3)])
def test_how_often_verify_runs_the_unfused_graph(once, runs):
    calls = []

    def original(value):
        calls.append(value)
        return (value,)

    run = verified(lambda value: (value,), original, once=once)
    for _ in range(3):
        run(torch.ones(5))
    assert len(calls) == runs
