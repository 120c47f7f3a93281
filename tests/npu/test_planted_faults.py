"""Faults planted into the lowering, one at a time: each is caught, by the numbers or by the interpreter's refusal."""

import functools

import pytest
import torch
from mla_fx.lowering.ascend import prolog_form
from mla_fx.lowering.ascend.operators import mla_prolog_v3

import mla_fx
from npu import models
from npu.planted import change_attention, change_call

pytestmark = pytest.mark.usefixtures("converted")


def check(family="deepseek_v3", *, batch=1, tokens=1):
    model = models.model(family)
    run = torch.compile(model, backend=mla_fx.get_backend(target="ge", strict=True), dynamic=False)
    prompts = [models.prompt(tokens, batch, seed) for seed in range(2)]
    make_cache = functools.partial(models.static_cache, batch=batch)
    models.check_as_exact_as_eager(model, run, make_cache, prompts)


def caught_by_numbers():
    """The comparison itself catches it, whose message is two lists."""
    return pytest.raises(AssertionError, match=r"^\(\[")


def test_no_fault():
    check()


def test_sin_and_cos_are_swapped(monkeypatch):
    change_call(monkeypatch, mla_prolog_v3, lambda a: {"rope_sin": a.rope_cos, "rope_cos": a.rope_sin})
    with caught_by_numbers():
        check()


def test_rows_go_to_another_page(monkeypatch):
    change_call(monkeypatch, mla_prolog_v3, lambda a: {"cache_index": (a.cache_index + 128) % 256})
    with caught_by_numbers():
        check()


def test_a_weight_stays_in_nd(monkeypatch):
    monkeypatch.setattr(mla_prolog_v3, "in_fractals", lambda surface, weight: weight.contiguous())
    with pytest.raises(ValueError, match="MlaPrologV3 reads weight_dq in FRACTAL_NZ"):
        check()


def test_halves_are_not_reordered(monkeypatch):
    monkeypatch.setattr(prolog_form, "halves_interleaved", lambda weight, width: weight)
    with caught_by_numbers():
        check("minicpm3")


def test_epsilons_are_swapped(monkeypatch):
    change_call(
        monkeypatch,
        mla_prolog_v3,
        lambda a: {"rmsnorm_epsilon_cq": a.rmsnorm_epsilon_ckv, "rmsnorm_epsilon_ckv": a.rmsnorm_epsilon_cq},
    )
    with caught_by_numbers():
        check()


@pytest.mark.parametrize("name", ["rmsnorm_epsilon_cq", "rmsnorm_epsilon_ckv"])
def test_an_epsilon_is_lost(monkeypatch, name):
    change_call(monkeypatch, mla_prolog_v3, lambda a: {name: 1e-5})
    with caught_by_numbers():
        check()


FAULTS = {
    "the scale is lost": {"softmax_scale": lambda scale: 1.0},
    "pages are read in another order": {"block_table": lambda table: table.flip(1)},
    "the last key is hidden": {"actual_seq_kvlen": lambda lengths: lengths - 1},
    "a key too many is seen": {"actual_seq_kvlen": lambda lengths: lengths + 1},
}


@pytest.mark.parametrize("changes", [pytest.param(changes, id=name) for name, changes in FAULTS.items()])
def test_attention(monkeypatch, changes):
    change_attention(monkeypatch, **changes)
    with caught_by_numbers():
        check()


PROMPTS = {"batch": 2, "tokens": 20}


def test_keys_that_no_prompt_sees_are_left_out(monkeypatch):
    change_attention(monkeypatch, actual_seq_qlen=lambda ends: ends[1::2], actual_seq_kvlen=lambda ends: ends[::2])
    with pytest.raises(ValueError, match=r"actual_seq_lengths_kv is .* the last of them 512"):
        check(**PROMPTS)


def test_prompts_see_a_key_too_many(monkeypatch):
    change_attention(monkeypatch, actual_seq_kvlen=lambda ends: ends + (torch.arange(4) + 1) % 2)
    with caught_by_numbers():
        check(**PROMPTS)
